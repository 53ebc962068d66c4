/* The Python frames of a thread, which reads them itself without the GIL.
 *
 * Frames do not change during the call. A code object may be gone before its lines are needed: its
 * contents are copied when a thread sees it first. A thread caches the code objects and stacks that
 * it has found, and searches the shared tables for others. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

struct Code {                   /* a code object as it was when it was seen first */
    const char *object;
    const void *filename, *name, *lines;
    uint32_t version;           /* these tell it from another at its address */
    int32_t first_line;
    uint32_t number;
    uint32_t told;              /* the last log that has its definition */
    Part text[3];               /* file, name, table of lines: copies */
};

typedef struct Frame {
    uint32_t code;
    uint32_t instruction;
} Frame;

struct Stack {
    uint32_t count;
    uint32_t number;
    atomic_uint told;
    uint64_t lines;             /* of `reported`, in the log that `told` is */
    Frame frames[];
};

enum { FRAMES = 48, MOST = 1 << 20, NO_CODE = MOST, MOST_TEXT = 4096, MOST_LINES = 48 << 10 };

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint_fast64_t lost;   /* calls whose stack was one too many */
static const Reported *reported;
static uint32_t reported_count;

/* Finds entries by their hashes. */
typedef struct Index {
    uint32_t count;             /* of the entries */
    uint32_t capacity;          /* a power of 2, and half of the places below */
    uint32_t *places;           /* 0: none, else the index of the entry and 1 */
    uint64_t *hashes;           /* of the entries, in their order */
    void **entries;
} Index;

static Index codes, stacks;

/* Makes room for one more entry. False: there is none. */
static bool make_room(Index *index) {
    if (index->count < index->capacity)
        return true;
    uint32_t capacity = index->capacity ? index->capacity * 2 : 1024, mask = capacity * 2 - 1;
    if (capacity > MOST)
        return false;
    void **entries = realloc(index->entries, capacity * sizeof *entries);
    if (entries)
        index->entries = entries;
    uint64_t *hashes = realloc(index->hashes, capacity * sizeof *hashes);
    if (hashes)
        index->hashes = hashes;
    uint32_t *places = calloc(capacity * 2, sizeof *places);
    if (!entries || !hashes || !places) {
        free(places);
        return false;
    }
    for (uint32_t i = 0; i < index->count; i++) {
        uint32_t place = (uint32_t)(hashes[i] >> 32) & mask;
        while (places[place])
            place = (place + 1) & mask;
        places[place] = i + 1;
    }
    free(index->places);
    index->places = places;
    index->capacity = capacity;
    return true;
}

/* The next entry with a hash, from `*place` on, which is UINT32_MAX for the first. NULL: none. */
static void *next_entry(const Index *index, uint64_t hash, uint32_t *place) {
    uint32_t mask = index->capacity * 2 - 1;
    if (!index->capacity)
        return NULL;
    *place = *place == UINT32_MAX ? (uint32_t)(hash >> 32) & mask : (*place + 1) & mask;
    for (; index->places[*place]; *place = (*place + 1) & mask) {
        if (index->hashes[index->places[*place] - 1] == hash)
            return index->entries[index->places[*place] - 1];
    }
    return NULL;
}

static void append(Index *index, uint64_t hash, void *entry) {
    uint32_t mask = index->capacity * 2 - 1, place = (uint32_t)(hash >> 32) & mask;
    while (index->places[place])
        place = (place + 1) & mask;
    index->hashes[index->count] = hash;
    index->entries[index->count] = entry;
    index->places[place] = ++index->count;
}

static Part copy_of(const void *data, size_t bytes) {
    char *copy = malloc(bytes ? bytes : 1);
    if (!copy)
        return (Part){NULL, 0};
    memcpy(copy, data, bytes);
    return (Part){copy, (uint32_t)bytes};
}

/* Returns how many bytes a character takes in UTF-8; surrogates are encoded like all others. */
static size_t encode(uint32_t character, char *out) {
    if (character < 0x80) {
        out[0] = (char)character;
        return 1;
    }
    size_t more = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    out[0] = (char)(0xFF00 >> (more + 1) | character >> 6 * more);
    for (size_t i = 1; i <= more; i++)
        out[i] = (char)(0x80 | (character >> 6 * (more - i) & 0x3F));
    return more + 1;
}

static Part utf8_of(const void *text) {
    const Layout *at = &python.layout;
    char out[4 * MOST_TEXT];
    uint32_t state = FIELD(uint32_t, text, at->text_state) >> at->text_shift;
    uint32_t width = state & 7;
    bool is_compact = state >> 3 & 1, is_ascii = state >> 4 & 1;
    size_t length = FIELD(size_t, text, at->text_length), size = 0;
    if (!is_compact || (width != 1 && width != 2 && width != 4) || length > MOST_TEXT)
        return (Part){NULL, 0};
    const char *data = (const char *)text + (is_ascii ? at->text_ascii : at->text_compact);
    for (size_t i = 0; i < length; i++) {
        uint32_t character = width == 1   ? FIELD(uint8_t, data, i)
                             : width == 2 ? FIELD(uint16_t, data, 2 * i)
                                          : FIELD(uint32_t, data, 4 * i);
        size += encode(character, out + size);
    }
    return copy_of(out, size);
}

static Part lines_of(const void *lines) {
    size_t length = FIELD(size_t, lines, python.layout.bytes_length);
    return copy_of((const char *)lines + python.layout.bytes_data,
                   length < MOST_LINES ? length : MOST_LINES);
}

/* A code object is told from a later one at its address by its version. Before Python 3.12 there is
 * no version, and generated code differs in its table of lines alone. */
static bool is_code(const Code *code, const Code *other) {
    if (code->object != other->object || code->filename != other->filename ||
        code->name != other->name || code->lines != other->lines ||
        code->first_line != other->first_line || code->version != other->version)
        return false;
    if (code->version)
        return true;
    size_t length = FIELD(size_t, other->lines, python.layout.bytes_length);
    return code->text[2].bytes == (length < MOST_LINES ? length : MOST_LINES) &&
           !memcmp(code->text[2].data, (const char *)other->lines + python.layout.bytes_data,
                   code->text[2].bytes);
}

/* NULL: there are too many. */
static const Code *find_code(const Code *wanted) {
    uint64_t hash = mixed(mixed((uintptr_t)wanted->object, (uintptr_t)wanted->lines),
                          wanted->version);
    uint32_t place = UINT32_MAX;
    Code *code;
    pthread_mutex_lock(&stacks_lock);
    while ((code = next_entry(&codes, hash, &place)) && !is_code(code, wanted))
        continue;
    if (!code && make_room(&codes) && (code = malloc(sizeof *code))) {
        *code = *wanted;
        code->number = codes.count;
        code->text[0] = utf8_of(code->filename);
        code->text[1] = utf8_of(code->name);
        code->text[2] = lines_of(code->lines);
        append(&codes, hash, code);
    }
    pthread_mutex_unlock(&stacks_lock);
    return code;
}

/* Returns the number of a code object. NO_CODE: there are too many. A version alone tells it from
 * another one at its address: its other members, in other lines of the cache, are not read then. */
static uint32_t code_number(StackCache *cache, const char *object) {
    const Layout *at = &python.layout;
    uint32_t version = at->code_version < 0 ? 0 : FIELD(uint32_t, object, at->code_version);
    size_t place = (mixed(1, (uintptr_t)object) >> 32) % CODES_KEPT;
    if (cache->codes[place].object == object && version && cache->codes[place].version == version)
        return cache->codes[place].number;
    Code wanted = {
        .object = object,
        .filename = FIELD(void *, object, at->code_filename),
        .name = FIELD(void *, object, at->code_name),
        .lines = FIELD(void *, object, at->code_lines),
        .first_line = FIELD(int32_t, object, at->code_first_line),
        .version = version,
    };
    const Code *code = cache->codes[place].code;
    if (!code || !is_code(code, &wanted))
        code = find_code(&wanted);
    cache->codes[place].object = object;
    cache->codes[place].code = code;
    cache->codes[place].version = code ? version : 0;
    cache->codes[place].number = code ? code->number : NO_CODE;
    return cache->codes[place].number;
}

/* A number of a table of locations: six bits a byte, the lowest first. */
static uint32_t read_number(const uint8_t **at, const uint8_t *end) {
    uint32_t value = 0;
    for (unsigned shift = 0; *at < end; shift += 6) {
        uint8_t byte = *(*at)++;
        value |= shift < 32 ? (uint32_t)(byte & 63) << shift : 0;
        if (!(byte & 64))
            break;
    }
    return value;
}

/* The line of a place in a code (PEP 626 and 657). 0: it is not known. */
static uint32_t line_at(const Code *code, uint32_t place) {
    enum { LINE_ONLY = 13, LONG = 14, NOWHERE = 15, SHORT = 10 };
    const uint8_t *at = (const uint8_t *)code->text[2].data, *end = at + code->text[2].bytes;
    uint32_t line = (uint32_t)code->first_line, until = 0;
    while (at < end) {
        unsigned kind = *at >> 3 & 15;
        until += 2 * ((*at++ & 7) + 1);
        if (kind == LINE_ONLY || kind == LONG) {
            uint32_t number = read_number(&at, end);
            line += number & 1 ? 0 - (number >> 1) : number >> 1;
            for (int i = 0; kind == LONG && i < 3; i++)
                read_number(&at, end);
        } else if (kind != NOWHERE) {
            line += kind >= SHORT ? kind - SHORT : 0;
            at += kind >= SHORT ? 2 : 1;
        }
        if (place < until)
            return kind == NOWHERE ? 0 : line;
    }
    return 0;
}

/* Under the lock. */
static uint64_t lines_on(const Stack *stack) {
    uint64_t found = 0;
    for (uint32_t i = 0; i < stack->count; i++) {
        const Code *code = codes.entries[stack->frames[i].code];
        const Part *file = &code->text[0];
        for (uint32_t j = 0; j < 2 * reported_count; j++) {
            const char *name = reported[j / 2].file[j % 2];
            uint32_t line = reported[j / 2].line[j % 2];
            if (line && strlen(name) == file->bytes && !memcmp(name, file->data, file->bytes) &&
                line_at(code, stack->frames[i].instruction) == line)
                found |= 1ull << j;
        }
    }
    return found;
}

/* Under the lock. Defines a stack, and the codes in it, before a record refers to it. */
static void tell(Thread *me, Stack *stack, uint32_t log) {
    stack->lines = lines_on(stack);
    for (uint32_t i = 0; i < stack->count; i++) {
        Code *code = codes.entries[stack->frames[i].code];
        uint64_t words[] = {code->number, (uint64_t)(int64_t)code->first_line};
        Record record = {.type = CODE, .words = 2, .stack = -1};
        if (code->told != log && log_write(me, record, words, code->text, 3))
            code->told = log;
    }
    uint64_t words[] = {stack->number};
    Part frames = {stack->frames, stack->count * (uint32_t)sizeof(Frame)};
    if (log_write(me, (Record){.type = STACK, .words = 1, .stack = -1}, words, &frames, 1))
        atomic_store_explicit(&stack->told, log, memory_order_release);
}

static bool is_stack(const Stack *stack, const Frame *frames, uint32_t count) {
    return stack->count == count && !memcmp(stack->frames, frames, count * sizeof *frames);
}

/* NULL: there are too many. */
static Stack *find_stack(Thread *me, uint64_t hash, const Frame *frames, uint32_t count) {
    uint32_t place = UINT32_MAX, log = atomic_load(&log_current);
    Stack *stack;
    pthread_mutex_lock(&stacks_lock);
    while ((stack = next_entry(&stacks, hash, &place)) && !is_stack(stack, frames, count))
        continue;
    if (!stack && make_room(&stacks) &&
        (stack = calloc(1, sizeof *stack + count * sizeof *frames))) {
        stack->count = count;
        stack->number = stacks.count;
        memcpy(stack->frames, frames, count * sizeof *frames);
        append(&stacks, hash, stack);
    }
    if (stack && atomic_load(&stack->told) != log)
        tell(me, stack, log);
    pthread_mutex_unlock(&stacks_lock);
    if (!stack)
        atomic_fetch_add(&lost, 1);
    return stack;
}

/* The frames of the calling thread, the innermost first. Returns how many. */
static uint32_t walk(StackCache *cache, Frame *frames, uint64_t *hash) {
    const Layout *at = &python.layout;
    uint32_t count = 0;
    *hash = 1;
    for (const char *frame = python_frame(); frame && count < FRAMES;
         frame = FIELD(char *, frame, at->frame_previous)) {
        if (FIELD(uint8_t, frame, at->frame_owner) >= at->owner_c_stack)
            continue;
        uintptr_t tagged = FIELD(uintptr_t, frame, at->frame_code);
        const char *object = (const char *)(tagged & ~(uintptr_t)at->code_tag);
        if (!object || TYPE_OF(object) != python.code_type)
            continue;
        const char *instruction = FIELD(char *, frame, at->frame_instruction);
        uint32_t number = code_number(cache, object);
        if (number == NO_CODE)
            continue;
        frames[count].code = number;
        frames[count].instruction = (uint32_t)(instruction - (object + at->code_instructions));
        *hash = mixed(*hash, (uint64_t)frames[count].code << 32 | frames[count].instruction);
        count++;
    }
    return count;
}

/* -1: it has none, or there are too many. */
int32_t stack_index(Thread *me) {
    Frame frames[FRAMES];
    uint64_t hash;
    uint32_t count = walk(&me->stacks, frames, &hash);
    if (!count)
        return -1;
    Stack **kept = &me->stacks.stacks[(hash >> 32) % STACKS_KEPT];
    if (!*kept || !is_stack(*kept, frames, count) ||
        atomic_load_explicit(&(*kept)->told, memory_order_acquire) != atomic_load(&log_current))
        *kept = find_stack(me, hash, frames, count);
    return *kept ? (int32_t)(*kept)->number : -1;
}

void stacks_look_for(const Reported *pairs, uint32_t count) {
    pthread_mutex_lock(&stacks_lock);
    reported = pairs;
    reported_count = count;
    pthread_mutex_unlock(&stacks_lock);
}

uint64_t stack_lines(int32_t index) {
    uint64_t lines = 0;
    pthread_mutex_lock(&stacks_lock);
    if (reported_count && index >= 0 && (uint32_t)index < stacks.count)
        lines = ((const Stack *)stacks.entries[index])->lines;
    pthread_mutex_unlock(&stacks_lock);
    return lines;
}

uint64_t stacks_lost(void) {
    return atomic_load(&lost);
}

void stacks_in_child(void) {
    pthread_mutex_init(&stacks_lock, NULL);
    reported_count = 0;
    codes = stacks = (Index){0};
}
