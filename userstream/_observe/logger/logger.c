/* Writes down the driver calls of all threads, for the thread of Python that works out what they
 * mean.
 *
 * It is called by the driver (or by CUPTI) on whatever thread calls the driver, with or without the
 * GIL: it never takes it, and never waits for anybody who could have it. It calls no driver function
 * that waits. A lock is held for as long as it takes to copy a few hundred bytes.
 *
 * A thread reads its own Python frames, which stay as they are while it is in the call: what they
 * are made of is copied when it is seen for the first time, as a code object may be gone when
 * somebody asks for its lines. */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

enum { ENTER = 0, LEAVE = 1 };
enum { NO_WORD = 255, FETCHES = 3, MAX_FUNCTIONS = 4096, MAX_FETCHED = 16384 };
enum { FRAMES = 48 };

/* What is told with functions that no driver has. */
enum { SEEN_MEMORY = 0xFFFE, SEEN_STREAM = 0xFFFD, SOURCE_CHANGED = 0xFFFC };

/* ---- what is logged: Python fills these in -------------------------------------------------- */

typedef struct Fetch {          /* what a word points to is copied */
    uint32_t bytes;
    uint8_t word;
    uint8_t count_word;         /* times this one, if there is any */
    uint8_t sites;
    uint8_t unused;
} Fetch;

typedef struct Address {        /* an operand: a word, or in the structure that a word points to */
    uint8_t word;
    uint8_t within;             /* a structure, at this offset */
    uint16_t offset;
} Address;

typedef struct Rule {
    uint8_t sites;              /* bits: 1 << ENTER, 1 << LEAVE */
    uint8_t words;
    uint8_t stream;             /* the word with a stream */
    uint8_t ends_stream;
    uint8_t frees;              /* the word with the address of memory that goes */
    uint8_t allocates;          /* the word that points to the address of new memory */
    uint8_t allocated;          /* the word with its size */
    uint8_t source_size;        /* the word with the size of addresses[1], the source of a copy */
    uint8_t orders_host;        /* the host knows more after it */
    uint8_t failures;           /* are logged as well */
    uint8_t forgets;            /* all memory that was known */
    uint8_t unused;
    Address addresses[2];       /* destination and source */
    Fetch fetches[FETCHES];
} Rule;

typedef struct Driver {         /* functions that wait for nothing */
    int (*pointer_attributes)(unsigned, const int *, void **, uint64_t);
    int (*stream_flags)(uint64_t, unsigned *);
    int (*stream_context)(uint64_t, void **);
    int (*stream_status)(uint64_t, int *);
} Driver;

typedef struct Layout {         /* of CPython's structures; -1 for `thread_state`: no stacks */
    void *(*thread_state)(void);
    const void *code_type;
    int32_t state_frame;        /* the frame, or the structure that has it */
    int32_t indirect_frame;     /* -1: not indirect */
    int32_t frame_code, frame_previous, frame_instruction, frame_owner, owner_c_stack;
    int32_t code_tag;           /* bits of the pointer to the code that are none of its own */
    int32_t code_filename, code_name, code_first_line, code_lines, code_instructions;
    int32_t text_length, text_state, text_ascii, text_compact, text_shift;
    int32_t bytes_length, bytes_data;
} Layout;

static Rule rules[MAX_FUNCTIONS];
static Driver driver;
static Layout layout;

/* ---- state ---------------------------------------------------------------------------------- */

static atomic_bool logging;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t facts_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread bool busy;      /* what this file calls is not logged */
static __thread uint64_t began;
static __thread uint64_t thread_id;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- the log: chunks, so that who reads it never holds up who writes ------------------------ */

enum { CHUNK = 1 << 18, MAX_CHUNKS = 512 };

typedef struct Chunk {
    struct Chunk *next;
    size_t used;
    char data[CHUNK];
} Chunk;

typedef struct Record {
    uint32_t size;
    uint16_t function;
    uint8_t site;
    uint8_t words;
    int32_t result;
    int32_t stack;
    uint64_t thread;
    uint64_t began;
    uint64_t ended;
    uint64_t context;
    uint64_t number;
} Record;

static Chunk *oldest, *newest, *spare;
static int chunks;
static uint64_t records, lost;

/* Under the lock. NULL: whoever reads is too far behind. */
static char *log_room(size_t size) {
    if (!newest || newest->used + size > CHUNK) {
        Chunk *chunk = spare;
        if (chunk)
            spare = chunk->next;
        else if (size > CHUNK || chunks == MAX_CHUNKS || !(chunk = malloc(sizeof *chunk)))
            return NULL;
        else
            chunks++;
        chunk->next = NULL;
        chunk->used = 0;
        if (newest)
            newest->next = chunk;
        else
            oldest = chunk;
        newest = chunk;
    }
    char *room = newest->data + newest->used;
    newest->used += size;
    return room;
}

static size_t padded(size_t bytes) {
    return (bytes + 7) & ~(size_t)7;
}

typedef struct Part {
    const void *data;
    uint32_t bytes;
} Part;

/* Returns the number of the record, 0 if there was no room. */
static uint64_t log_write(Record record, const uint64_t *words, const Part *parts, size_t count) {
    size_t size = sizeof record + record.words * sizeof *words;
    for (size_t i = 0; i < count; i++)
        size += 8 + padded(parts[i].bytes);
    if (!thread_id)
        thread_id = (uint64_t)syscall(SYS_gettid);
    record.thread = thread_id;
    record.size = (uint32_t)size;
    pthread_mutex_lock(&log_lock);
    char *room = log_room(size);
    if (room) {
        record.number = ++records;
        memcpy(room, &record, sizeof record);
        room += sizeof record;
        memcpy(room, words, record.words * sizeof *words);
        room += record.words * sizeof *words;
        for (size_t i = 0; i < count; i++) {
            memcpy(room, &(uint64_t){parts[i].bytes}, 8);
            memcpy(room + 8, parts[i].data, parts[i].bytes);
            room += 8 + padded(parts[i].bytes);
        }
    } else {
        lost++;
        record.number = 0;
    }
    pthread_mutex_unlock(&log_lock);
    return record.number;
}

/* Copies the oldest chunk. Returns its bytes, 0 if there is nothing. */
PUBLIC size_t logger_read(char *out, size_t capacity, uint64_t *lost_until_now) {
    pthread_mutex_lock(&log_lock);
    *lost_until_now = lost;
    Chunk *chunk = oldest;
    if (chunk) {
        oldest = chunk->next;
        if (chunk == newest)
            newest = NULL;
    }
    pthread_mutex_unlock(&log_lock);
    if (!chunk)
        return 0;
    size_t used = chunk->used < capacity ? chunk->used : capacity;
    memcpy(out, chunk->data, used);
    pthread_mutex_lock(&log_lock);
    chunk->next = spare;
    spare = chunk;
    pthread_mutex_unlock(&log_lock);
    return used;
}

/* ---- stacks --------------------------------------------------------------------------------- */

typedef struct Code {           /* a code object as it was when it was seen first */
    const char *object;
    const void *filename, *name, *lines;    /* what tells it from another at its address */
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
    uint64_t hash;
    uint32_t count;
    Frame *frames;
} Stack;

enum { MAX_CODES = 1 << 14, MAX_STACKS = 1 << 16 };

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static Code codes[MAX_CODES];
static uint32_t code_count;
static uint32_t code_at[MAX_CODES * 2];         /* by hash; 0: none, else the index and 1 */
static Stack stacks[MAX_STACKS];
static uint32_t stack_count;
static uint32_t stack_at[MAX_STACKS * 2];

#define FIELD(type, object, offset) (*(type const *)((const char *)(object) + (offset)))

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

static uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

/* MAX_CODES: there are too many. */
static uint32_t code_index(const char *object) {
    const void *filename = FIELD(void *, object, layout.code_filename);
    const void *name = FIELD(void *, object, layout.code_name);
    const void *lines = FIELD(void *, object, layout.code_lines);
    int32_t first_line = FIELD(int32_t, object, layout.code_first_line);
    uint64_t hash = mixed(mixed((uintptr_t)object, (uintptr_t)lines), (uint64_t)first_line);
    uint32_t place = (uint32_t)(hash >> 32) % (MAX_CODES * 2);
    for (; code_at[place]; place = (place + 1) % (MAX_CODES * 2)) {
        const Code *code = &codes[code_at[place] - 1];
        if (code->object == object && code->filename == filename && code->name == name &&
            code->lines == lines && code->first_line == first_line)
            return code_at[place] - 1;
    }
    if (code_count == MAX_CODES)
        return MAX_CODES;
    Code *code = &codes[code_count];
    *code = (Code){object, filename, name, lines, first_line, {0}, {0}, {0}};
    copy_text(code, 0, filename);
    copy_text(code, 1, name);
    size_t length = FIELD(size_t, lines, layout.bytes_length);
    code->text[2] = copy_of((const char *)lines + layout.bytes_data, length);
    code->bytes[2] = code->text[2] ? (uint32_t)length : 0;
    code_at[place] = ++code_count;
    return code_count - 1;
}

/* The frames of the calling thread, the innermost first; -1: it has none, or there are too many. */
static int32_t stack_index(void) {
    const char *state = layout.thread_state ? layout.thread_state() : NULL;
    if (!state)
        return -1;
    const char *frame = FIELD(char *, state, layout.state_frame);
    if (frame && layout.indirect_frame >= 0)
        frame = FIELD(char *, frame, layout.indirect_frame);
    Frame frames[FRAMES];
    uint32_t count = 0;
    uint64_t hash = 1;
    int32_t index = -1;
    pthread_mutex_lock(&stacks_lock);
    for (; frame && count < FRAMES; frame = FIELD(char *, frame, layout.frame_previous)) {
        if (FIELD(uint8_t, frame, layout.frame_owner) == layout.owner_c_stack)
            continue;
        uintptr_t tagged = FIELD(uintptr_t, frame, layout.frame_code);
        const char *code = (const char *)(tagged & ~(uintptr_t)layout.code_tag);
        if (!code || FIELD(void *, code, offsetof(struct { intptr_t count; void *type; }, type)) !=
                         layout.code_type)
            continue;
        const char *instruction = FIELD(char *, frame, layout.frame_instruction);
        uint32_t which = code_index(code);
        if (which == MAX_CODES)
            continue;
        frames[count].code = which;
        frames[count].instruction = (uint32_t)(instruction - (code + layout.code_instructions));
        hash = mixed(mixed(hash, which), frames[count++].instruction);
    }
    if (!count)
        goto done;
    uint32_t place = (uint32_t)(hash >> 32) % (MAX_STACKS * 2);
    for (; stack_at[place]; place = (place + 1) % (MAX_STACKS * 2)) {
        const Stack *stack = &stacks[stack_at[place] - 1];
        if (stack->hash == hash && stack->count == count) {
            index = (int32_t)stack_at[place] - 1;
            goto done;
        }
    }
    if (stack_count == MAX_STACKS)
        goto done;
    stacks[stack_count] = (Stack){hash, count, copy_of(frames, count * sizeof *frames)};
    if (!stacks[stack_count].frames)
        goto done;
    index = (int32_t)stack_count;
    stack_at[place] = ++stack_count;
done:
    pthread_mutex_unlock(&stacks_lock);
    return index;
}

/* What is known of a stack: pairs of a code and the place in it. Returns how many. */
PUBLIC uint32_t logger_stack(int32_t index, uint32_t *out) {
    uint32_t count = 0;
    pthread_mutex_lock(&stacks_lock);
    if (index >= 0 && (uint32_t)index < stack_count) {
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

/* ---- streams that were seen ----------------------------------------------------------------- */

static uint64_t *streams;
static size_t stream_count, stream_capacity;

static size_t stream_place(uint64_t handle) {
    size_t low = 0, high = stream_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (streams[middle] < handle)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Tells of a stream when it is used first: most were made before anybody watched. */
static void see_stream(uint64_t handle) {
    if (handle <= 2)
        return;
    pthread_mutex_lock(&facts_lock);
    size_t place = stream_place(handle);
    bool known = place < stream_count && streams[place] == handle;
    if (!known) {
        if (stream_count == stream_capacity) {
            size_t capacity = stream_capacity ? stream_capacity * 2 : 64;
            uint64_t *more = realloc(streams, capacity * sizeof *streams);
            if (!more) {
                pthread_mutex_unlock(&facts_lock);
                return;
            }
            streams = more;
            stream_capacity = capacity;
        }
        memmove(streams + place + 1, streams + place, (stream_count - place) * sizeof *streams);
        streams[place] = handle;
        stream_count++;
    }
    pthread_mutex_unlock(&facts_lock);
    if (known)
        return;
    unsigned flags = 1;         /* NON_BLOCKING */
    void *context = NULL;
    int status = 0;
    driver.stream_flags(handle, &flags);
    driver.stream_context(handle, &context);
    driver.stream_status(handle, &status);
    uint64_t words[] = {handle, flags, (uint64_t)(uintptr_t)context, (uint64_t)status};
    log_write((Record){.function = SEEN_STREAM, .words = 4, .stack = -1}, words, NULL, 0);
}

static void forget_stream(uint64_t handle) {
    pthread_mutex_lock(&facts_lock);
    size_t place = stream_place(handle);
    if (place < stream_count && streams[place] == handle) {
        stream_count--;
        memmove(streams + place, streams + place + 1, (stream_count - place) * sizeof *streams);
    }
    pthread_mutex_unlock(&facts_lock);
}

/* ---- memory that was seen ------------------------------------------------------------------- */

typedef struct Memory {
    uint64_t begin, end;
    bool pinned;
} Memory;

static Memory *memories;
static size_t memory_count, memory_capacity;

/* The first one that ends behind the address. Under the lock. */
static size_t memory_place(uint64_t address) {
    size_t low = 0, high = memory_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool memory_known(uint64_t address, bool *pinned) {
    pthread_mutex_lock(&facts_lock);
    size_t place = memory_place(address);
    bool known = place < memory_count && memories[place].begin <= address;
    *pinned = known && memories[place].pinned;
    pthread_mutex_unlock(&facts_lock);
    return known;
}

static void memory_forget(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&facts_lock);
    size_t first = memory_place(begin), after = first;
    while (after < memory_count && memories[after].begin < end)
        after++;
    memmove(memories + first, memories + after, (memory_count - after) * sizeof *memories);
    memory_count -= after - first;
    pthread_mutex_unlock(&facts_lock);
}

static void memory_add(uint64_t begin, uint64_t end, bool pinned) {
    memory_forget(begin, end);
    pthread_mutex_lock(&facts_lock);
    if (memory_count == memory_capacity) {
        size_t capacity = memory_capacity ? memory_capacity * 2 : 256;
        Memory *more = realloc(memories, capacity * sizeof *memories);
        if (!more) {
            pthread_mutex_unlock(&facts_lock);
            return;
        }
        memories = more;
        memory_capacity = capacity;
    }
    size_t place = memory_place(begin);
    memmove(memories + place + 1, memories + place, (memory_count - place) * sizeof *memories);
    memories[place] = (Memory){begin, end, pinned};
    memory_count++;
    pthread_mutex_unlock(&facts_lock);
}

/* Tells of memory when it is used first. Returns whether it is pinned: who copies from it must not
 * write it before the copy has run. */
static bool see_memory(uint64_t address) {
    enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
    enum { HOST = 1 };
    bool pinned;
    if (!address || memory_known(address, &pinned))
        return address && pinned;
    const int attributes[] = {MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE};
    unsigned type = 0;
    uint8_t managed[8] = {0};
    int device = -1;
    uint64_t start = 0;
    size_t size = 0;
    void *out[] = {&type, managed, &device, &start, &size};
    if (driver.pointer_attributes(5, attributes, out, address) || !type)
        return false;
    if (!(start <= address && address < start + size)) {    /* an offset: host memory of a pool */
        start = address;
        size = 1;
    }
    pinned = type == HOST && !managed[0];
    memory_add(start, start + size, pinned);
    uint64_t words[] = {start, size, type, managed[0], (uint64_t)(int64_t)device};
    log_write((Record){.function = SEEN_MEMORY, .words = 5, .stack = -1}, words, NULL, 0);
    return pinned;
}

/* ---- pinned memory that copies still have to read ------------------------------------------- */

enum { SOURCES = 64, SAMPLES = 64, SAMPLE = 64 };

typedef struct Source {
    uint64_t address, size, hash;
    uint64_t number;            /* of the record of the copy; 0: a free place */
} Source;

static Source sources[SOURCES];
static size_t next_source;

__attribute__((no_sanitize("thread", "address")))
static uint64_t hash_more(uint64_t hash, const char *bytes, uint64_t count) {
    uint64_t i = 0, word;
    for (; i + sizeof word <= count; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        hash = mixed(hash, word);
    }
    for (; i < count; i++)
        hash = mixed(hash, (unsigned char)bytes[i]);
    return hash;
}

/* The device may write there at this moment: whatever is read then is judged elsewhere. */
__attribute__((no_sanitize("thread", "address")))
static uint64_t hash_of(uint64_t address, uint64_t size) {
    const char *bytes = (const char *)(uintptr_t)address;
    uint64_t step = size <= SAMPLES * SAMPLE ? SAMPLE : size / SAMPLES;
    uint64_t hash = size;
    for (uint64_t at = 0; at < size; at += step)
        hash = hash_more(hash, bytes + at, at + SAMPLE < size ? SAMPLE : size - at);
    return size > SAMPLE ? hash_more(hash, bytes + size - SAMPLE, SAMPLE) : hash;
}

/* Tells of every source that has changed since its copy was queued, and forgets it. Whether it was
 * allowed to is worked out later. */
static void compare_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&facts_lock);
    for (size_t i = 0; i < SOURCES; i++) {
        Source *source = &sources[i];
        if (!source->number || source->address >= end || begin >= source->address + source->size)
            continue;
        if (hash_of(source->address, source->size) == source->hash)
            continue;
        uint64_t words[] = {source->number};
        source->number = 0;
        Record record = {.function = SOURCE_CHANGED, .words = 1, .stack = stack_index()};
        log_write(record, words, NULL, 0);
    }
    pthread_mutex_unlock(&facts_lock);
}

static void remember_source(uint64_t address, uint64_t size, uint64_t hash, uint64_t number) {
    pthread_mutex_lock(&facts_lock);
    size_t place = SOURCES;
    for (size_t i = 0; i < SOURCES && place == SOURCES; i++) {
        if (!sources[i].number || (sources[i].address == address && sources[i].size == size))
            place = i;
    }
    if (place == SOURCES)
        place = next_source++ % SOURCES;
    sources[place] = (Source){address, size, hash, number};
    pthread_mutex_unlock(&facts_lock);
}

static void forget_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&facts_lock);
    for (size_t i = 0; i < SOURCES; i++) {
        if (sources[i].address < end && begin < sources[i].address + sources[i].size)
            sources[i].number = 0;
    }
    pthread_mutex_unlock(&facts_lock);
}

/* ---- one call ------------------------------------------------------------------------------- */

static __thread uint64_t source_hash;
static __thread bool source_pinned;

/* In a CUDA_MEMCPY2D or 3D, the kind of memory comes before its two addresses. */
static uint64_t operand(const Address *address, const uint64_t *words) {
    enum { HOST = 1, ARRAY = 3 };
    if (!address->within || !words[address->word])
        return words[address->word];
    const char *kind = (const char *)(uintptr_t)words[address->word] + address->offset;
    switch (FIELD(int32_t, kind, 0)) {
    case HOST:
        return FIELD(uint64_t, kind, 8);
    case ARRAY:
        return 0;
    default:
        return FIELD(uint64_t, kind, 16);
    }
}

static void forget_memory_at(uint64_t address) {
    pthread_mutex_lock(&facts_lock);
    size_t place = memory_place(address);
    Memory memory = {address, address + 1, false};
    if (place < memory_count && memories[place].begin <= address)
        memory = memories[place];
    pthread_mutex_unlock(&facts_lock);
    forget_sources(memory.begin, memory.end);
    memory_forget(memory.begin, memory.end);
}

static uint64_t write_call(const Rule *rule, int site, unsigned function, const uint64_t *words,
                           int result, const void *context) {
    Part parts[FETCHES];
    size_t count = 0;
    for (; count < FETCHES && rule->fetches[count].bytes; count++) {
        const Fetch *fetch = &rule->fetches[count];
        uint64_t bytes = fetch->bytes;
        if (fetch->count_word != NO_WORD)
            bytes *= words[fetch->count_word];
        const void *data = (const void *)(uintptr_t)words[fetch->word];
        bool there = data && (fetch->sites >> site & 1) && bytes <= MAX_FETCHED;
        parts[count] = (Part){data, there ? (uint32_t)bytes : 0};
    }
    Record record = {
        .function = (uint16_t)function,
        .site = (uint8_t)site,
        .words = rule->words,
        .result = result,
        .stack = stack_index(),
        .began = began,
        .ended = now(),
        .context = (uint64_t)(uintptr_t)context,
    };
    return log_write(record, words, parts, count);
}

static void enter(const Rule *rule, unsigned function, const uint64_t *words, const void *context) {
    began = now();
    if (rule->stream != NO_WORD)
        see_stream(words[rule->stream]);
    source_pinned = false;
    for (int i = 0; i < 2; i++) {
        const Address *address = &rule->addresses[i];
        if (address->word == NO_WORD)
            continue;
        bool pinned = see_memory(operand(address, words));
        if (pinned && i == 1 && rule->source_size != NO_WORD) {
            uint64_t at = operand(address, words), size = words[rule->source_size];
            compare_sources(at, at + size);
            source_hash = hash_of(at, size);
            source_pinned = true;
        }
    }
    if (rule->frees != NO_WORD) {
        see_memory(words[rule->frees]);
        compare_sources(0, UINT64_MAX);
        forget_memory_at(words[rule->frees]);
    }
    if (rule->sites >> ENTER & 1)
        write_call(rule, ENTER, function, words, 0, context);
    if (rule->ends_stream)
        forget_stream(words[rule->stream]);
    if (rule->forgets) {
        forget_sources(0, UINT64_MAX);
        memory_forget(0, UINT64_MAX);
    }
}

static void leave(const Rule *rule, unsigned function, const uint64_t *words, int result,
                  const void *context) {
    if (result && !rule->failures)
        return;
    if (!result && rule->orders_host)
        compare_sources(0, UINT64_MAX);
    if (!result && rule->allocates != NO_WORD && words[rule->allocates]) {
        uint64_t begin = *(const uint64_t *)(uintptr_t)words[rule->allocates];
        memory_forget(begin, begin + (rule->allocated == NO_WORD ? 1 : words[rule->allocated]));
    }
    if (!(rule->sites >> LEAVE & 1))
        return;
    uint64_t number = write_call(rule, LEAVE, function, words, result, context);
    if (!result && number && source_pinned)
        remember_source(operand(&rule->addresses[1], words), words[rule->source_size], source_hash,
                        number);
}

PUBLIC void logger_call(int site, unsigned function, const uint64_t *words, size_t count,
                        int result, const void *context) {
    (void)count;
    if (busy || function >= MAX_FUNCTIONS || !rules[function].sites ||
        !atomic_load_explicit(&logging, memory_order_relaxed))
        return;
    busy = true;
    if (site == ENTER)
        enter(&rules[function], function, words, context);
    else
        leave(&rules[function], function, words, result, context);
    busy = false;
}

/* ---- for Python ----------------------------------------------------------------------------- */

PUBLIC void logger_rule(unsigned function, const Rule *rule) {
    if (function < MAX_FUNCTIONS)
        rules[function] = *rule;
}

PUBLIC void logger_begin(const Driver *functions, const Layout *python) {
    pthread_mutex_lock(&log_lock);
    while (oldest) {            /* of an earlier observation */
        Chunk *chunk = oldest;
        oldest = chunk->next;
        chunk->next = spare;
        spare = chunk;
    }
    newest = NULL;
    lost = 0;
    pthread_mutex_unlock(&log_lock);
    pthread_mutex_lock(&facts_lock);
    stream_count = memory_count = 0;
    memset(sources, 0, sizeof sources);
    pthread_mutex_unlock(&facts_lock);
    driver = *functions;
    layout = *python;
    atomic_store(&logging, true);
}

PUBLIC void logger_end(void) {
    atomic_store(&logging, false);
}

/* The calling thread is one of ours: nothing that it calls is the program's. */
PUBLIC void logger_ignore_this_thread(void) {
    busy = true;
}

/* A child has the one thread that forked: what others held stays held. */
static void in_child(void) {
    atomic_store(&logging, false);
    pthread_mutex_init(&log_lock, NULL);
    pthread_mutex_init(&facts_lock, NULL);
    pthread_mutex_init(&stacks_lock, NULL);
    thread_id = 0;
}

__attribute__((constructor)) static void initialize(void) {
    pthread_atfork(NULL, NULL, in_child);
}
