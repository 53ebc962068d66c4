/* The Python frames of a thread, which it reads itself, without the GIL.
 *
 * They stay as they are while it is in the call. What they are made of is copied when it is seen
 * for the first time, as a code object may be gone when somebody asks for its lines. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

typedef struct Code {           /* a code object as it was when it was seen first */
    const char *object;
    const void *filename, *name, *lines;
    uint32_t version;           /* these tell it from another at its address */
    int32_t first_line;
    char *text[3];              /* file, name, lines: copies */
    uint32_t bytes[3];
    uint8_t width[3];           /* bytes of a character */
} Code;

typedef struct Frame {
    uint32_t code;
    uint32_t instruction;
} Frame;

typedef struct Stack {
    uint32_t count;
    uint32_t told;              /* in which observation it is used, the last of them */
    uint32_t next;              /* of those to be told; and 1, 0: none */
    Frame *frames;
} Stack;

enum { FRAMES = 48, MOST = 1 << 20, NO_INDEX = MOST };

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static Code *codes;
static Stack *stacks;
static uint32_t telling;        /* the observation */
static uint32_t first_new, last_new; /* the stacks to be told; and 1, 0: none */
static uint64_t without_stack;  /* calls whose stack was one too many */

/* Finds entries of an array by their hashes. */
typedef struct Index {
    uint32_t count;             /* of the entries */
    uint32_t capacity;          /* of the array; a power of 2, and half of the places below */
    uint32_t *entries;          /* 0: none, else the index of the entry and 1 */
    uint64_t *hashes;           /* of the entries, in their order */
} Index;

static Index codes_index, stacks_index;

/* Makes room for one more entry. False: there is none. */
static bool make_room(Index *index, void **items, size_t item) {
    if (index->count < index->capacity)
        return true;
    uint32_t capacity = index->capacity ? index->capacity * 2 : 1024;
    if (capacity > MOST)
        return false;
    void *more = realloc(*items, capacity * item);
    if (more)
        *items = more;
    uint64_t *hashes = realloc(index->hashes, capacity * sizeof *hashes);
    if (hashes)
        index->hashes = hashes;
    uint32_t *entries = calloc(capacity * 2, sizeof *entries);
    if (!more || !hashes || !entries) {
        free(entries);
        return false;
    }
    for (uint32_t i = 0; i < index->count; i++) {
        uint32_t place = (uint32_t)(hashes[i] >> 32) & (capacity * 2 - 1);
        while (entries[place])
            place = (place + 1) & (capacity * 2 - 1);
        entries[place] = i + 1;
    }
    free(index->entries);
    index->entries = entries;
    index->capacity = capacity;
    return true;
}

/* The next entry with a hash, from `*place` on, which is UINT32_MAX for the first. */
static uint32_t next_entry(const Index *index, uint64_t hash, uint32_t *place) {
    uint32_t mask = index->capacity * 2 - 1;
    if (!index->capacity)
        return NO_INDEX;
    *place = *place == UINT32_MAX ? (uint32_t)(hash >> 32) & mask : (*place + 1) & mask;
    for (; index->entries[*place]; *place = (*place + 1) & mask) {
        if (index->hashes[index->entries[*place] - 1] == hash)
            return index->entries[*place] - 1;
    }
    return NO_INDEX;
}

static uint32_t append(Index *index, uint64_t hash) {
    uint32_t mask = index->capacity * 2 - 1, place = (uint32_t)(hash >> 32) & mask;
    while (index->entries[place])
        place = (place + 1) & mask;
    index->hashes[index->count] = hash;
    index->entries[place] = index->count + 1;
    return index->count++;
}

static void *copy_of(const void *data, size_t bytes) {
    char *copy = malloc(bytes ? bytes : 1);
    if (copy)
        memcpy(copy, data, bytes);
    return copy;
}

static void copy_text(Code *code, int which, const void *text) {
    uint32_t state = FIELD(uint32_t, text, layout.text_state) >> layout.text_shift;
    uint32_t width = state & 7, compact = state >> 3 & 1, ascii = state >> 4 & 1;
    size_t length = FIELD(size_t, text, layout.text_length);
    if (!compact || (width != 1 && width != 2 && width != 4) || length > 4096)
        return;
    int32_t data = ascii ? layout.text_ascii : layout.text_compact;
    code->text[which] = copy_of((const char *)text + data, length * width);
    code->bytes[which] = code->text[which] ? (uint32_t)(length * width) : 0;
    code->width[which] = (uint8_t)width;
}

/* A code object is told from a later one at its address by its version. Before Python 3.12 there is
 * no version, and generated code differs in its table of lines alone. */
static bool is_code(const Code *code, const Code *other, const char *lines, size_t length) {
    if (code->object != other->object || code->filename != other->filename ||
        code->name != other->name || code->lines != other->lines ||
        code->first_line != other->first_line || code->version != other->version)
        return false;
    return code->version || (code->bytes[2] == length && !memcmp(code->text[2], lines, length));
}

/* NO_INDEX: there are too many. */
static uint32_t find_code(const char *object) {
    Code new = {
        .object = object,
        .filename = FIELD(void *, object, layout.code_filename),
        .name = FIELD(void *, object, layout.code_name),
        .lines = FIELD(void *, object, layout.code_lines),
        .first_line = FIELD(int32_t, object, layout.code_first_line),
        .version = layout.code_version < 0 ? 0 : FIELD(uint32_t, object, layout.code_version),
    };
    const char *lines = (const char *)new.lines + layout.bytes_data;
    size_t length = FIELD(size_t, new.lines, layout.bytes_length);
    uint64_t hash = mixed(mixed((uintptr_t)object, (uintptr_t)new.lines), new.version);
    uint32_t place = UINT32_MAX, which;
    while ((which = next_entry(&codes_index, hash, &place)) != NO_INDEX) {
        if (is_code(&codes[which], &new, lines, length))
            return which;
    }
    if (!make_room(&codes_index, (void **)&codes, sizeof *codes))
        return NO_INDEX;
    copy_text(&new, 0, new.filename);
    copy_text(&new, 1, new.name);
    new.text[2] = copy_of(lines, length);
    new.bytes[2] = new.text[2] ? (uint32_t)length : 0;
    codes[codes_index.count] = new;
    return append(&codes_index, hash);
}

static void tell(uint32_t which) {
    stacks[which].told = telling;
    stacks[which].next = 0;
    if (last_new)
        stacks[last_new - 1].next = which + 1;
    else
        first_new = which + 1;
    last_new = which + 1;
}

/* The frames of the calling thread, the innermost first; -1: it has none, or there are too many. */
int32_t stack_index(void) {
    const char *state = layout.thread_state ? layout.thread_state() : NULL;
    if (!state)
        return -1;
    const char *frame = FIELD(char *, state, layout.state_frame);
    if (frame && layout.indirect_frame >= 0)
        frame = FIELD(char *, frame, layout.indirect_frame);
    Frame frames[FRAMES];
    uint32_t count = 0;
    uint64_t hash = 1;
    pthread_mutex_lock(&stacks_lock);
    for (; frame && count < FRAMES; frame = FIELD(char *, frame, layout.frame_previous)) {
        if (FIELD(uint8_t, frame, layout.frame_owner) >= layout.owner_c_stack)
            continue;
        uintptr_t tagged = FIELD(uintptr_t, frame, layout.frame_code);
        const char *code = (const char *)(tagged & ~(uintptr_t)layout.code_tag);
        if (!code || FIELD(void *, code, offsetof(struct { intptr_t count; void *type; }, type)) !=
                         layout.code_type)
            continue;
        const char *instruction = FIELD(char *, frame, layout.frame_instruction);
        uint32_t which = find_code(code);
        if (which == NO_INDEX)
            continue;
        frames[count].code = which;
        frames[count].instruction = (uint32_t)(instruction - (code + layout.code_instructions));
        hash = mixed(mixed(hash, which), frames[count++].instruction);
    }
    uint32_t place = UINT32_MAX, which = NO_INDEX;
    while (count && (which = next_entry(&stacks_index, hash, &place)) != NO_INDEX) {
        if (stacks[which].count == count &&
            !memcmp(stacks[which].frames, frames, count * sizeof *frames))
            break;
    }
    if (count && which == NO_INDEX) {
        Frame *copy = copy_of(frames, count * sizeof *frames);
        if (copy && make_room(&stacks_index, (void **)&stacks, sizeof *stacks)) {
            stacks[stacks_index.count] = (Stack){.count = count, .frames = copy};
            which = append(&stacks_index, hash);
        } else {
            free(copy);
            without_stack++;
        }
    }
    if (which != NO_INDEX && stacks[which].told != telling)
        tell(which);
    pthread_mutex_unlock(&stacks_lock);
    return which == NO_INDEX ? -1 : (int32_t)which;
}

/* From now on each stack is new. */
void stacks_begin(void) {
    pthread_mutex_lock(&stacks_lock);
    telling++;
    first_new = last_new = 0;
    pthread_mutex_unlock(&stacks_lock);
}

/* The next stack that the observation uses for the first time; -1: none. */
PUBLIC int32_t logger_new_stack(void) {
    pthread_mutex_lock(&stacks_lock);
    int32_t which = (int32_t)first_new - 1;
    if (which >= 0)
        first_new = stacks[which].next;
    if (!first_new)
        last_new = 0;
    pthread_mutex_unlock(&stacks_lock);
    return which;
}

/* How many calls have no stack because there were too many different ones. */
PUBLIC uint64_t logger_without_stack(void) {
    pthread_mutex_lock(&stacks_lock);
    uint64_t count = without_stack;
    pthread_mutex_unlock(&stacks_lock);
    return count;
}

/* What is known of a stack: pairs of a code and the place in it. Returns how many. */
PUBLIC uint32_t logger_stack(int32_t index, uint32_t *out) {
    uint32_t count = 0;
    pthread_mutex_lock(&stacks_lock);
    if (index >= 0 && (uint32_t)index < stacks_index.count) {
        count = stacks[index].count;
        memcpy(out, stacks[index].frames, count * sizeof(Frame));
    }
    pthread_mutex_unlock(&stacks_lock);
    return count;
}

/* Its file (0), name (1) or table of lines (2). What it points to stays. */
PUBLIC const char *logger_code(uint32_t index, int which, uint32_t *bytes, uint32_t *width,
                               int32_t *first_line) {
    pthread_mutex_lock(&stacks_lock);
    const Code *code = &codes[index];
    *bytes = code->bytes[which];
    *width = code->width[which];
    *first_line = code->first_line;
    const char *text = code->text[which];
    pthread_mutex_unlock(&stacks_lock);
    return text;
}

/* The stack of who calls this: to see whether the layout is right. */
PUBLIC int32_t logger_own_stack(void) {
    return stack_index();
}

void stacks_in_child(void) {
    pthread_mutex_init(&stacks_lock, NULL);
    codes = NULL;
    stacks = NULL;
    codes_index = stacks_index = (Index){0};
    first_new = last_new = 0;
}
