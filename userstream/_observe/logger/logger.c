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

#include "logger.h"

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

enum { FETCHES = 3, MAX_FETCHED = 16384 };
enum { FRAMES = 48 };

/* What is told with functions that no driver has. */
enum {
    SEEN_MEMORY = 0xFFFE,
    SEEN_STREAM = 0xFFFD,
    SOURCE_CHANGED = 0xFFFC,
    SEEN_KERNEL = 0xFFFB,
    LEARNED = 0xFFFA,
};

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
    uint8_t forgets;            /* all memory that was known, and all kernels */
    uint8_t kernel;             /* the word with the kernel; its parameters are the next ones: */
    uint8_t parameters;
    uint8_t extra;
    uint8_t configuration;      /* the word that points to a CUlaunchConfig, which has the stream */
    uint8_t unused;
    Address addresses[2];       /* destination and source */
    Fetch fetches[FETCHES];
} Rule;

typedef struct Driver {         /* functions that wait for nothing */
    int (*pointer_attributes)(unsigned, const int *, void **, uint64_t);
    int (*stream_flags)(uint64_t, unsigned *);
    int (*stream_context)(uint64_t, void **);
    int (*stream_status)(uint64_t, int *);
    int (*function_parameter)(uint64_t, size_t, size_t *, size_t *);
    int (*kernel_parameter)(uint64_t, size_t, size_t *, size_t *);
    int (*function_name)(const char **, uint64_t);
    int (*kernel_name)(const char **, uint64_t);
    int (*copy_out)(void *, uint64_t, size_t, uint64_t);
    int (*write_value)(uint64_t, uint64_t, uint32_t, unsigned);
    int (*host_register)(void *, size_t, unsigned);
    int (*capture_mode)(int *);
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
        if (FIELD(uint8_t, frame, layout.frame_owner) >= layout.owner_c_stack)
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

static bool memory_known(uint64_t address, Memory *found) {
    pthread_mutex_lock(&facts_lock);
    size_t place = memory_place(address);
    bool known = place < memory_count && memories[place].begin <= address;
    *found = known ? memories[place] : (Memory){0, 0, false};
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
    Memory known;
    if (!address || memory_known(address, &known))
        return address && known.pinned;
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
    bool pinned = type == HOST && !managed[0];
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

/* ---- kernels ------------------------------------------------------------------------------- */

enum { MAX_KERNELS = 1 << 13, MAX_POINTERS = 128 };

typedef struct Kernel {
    uint64_t handle;
    uint32_t count, bytes;      /* of its parameters */
    uint32_t *offsets, *sizes;
    uint8_t *looks;             /* for each word of them: how often somebody looked what it does */
} Kernel;

typedef struct Pointer {        /* a parameter that points to memory */
    uint64_t offset, value;
} Pointer;

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels[MAX_KERNELS];
static size_t kernel_count;

/* What the runtime passes for a function may be a CUkernel. */
static bool parameter(uint64_t handle, size_t index, size_t *offset, size_t *size) {
    return (driver.function_parameter &&
            !driver.function_parameter(handle, index, offset, size)) ||
           (driver.kernel_parameter && !driver.kernel_parameter(handle, index, offset, size));
}

static Kernel *kernel_ask(uint64_t handle) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    size_t offset, size;
    uint32_t room = 0;
    kernel->handle = handle;
    while (kernel->count < 4096 && parameter(handle, kernel->count, &offset, &size)) {
        if (kernel->count == room) {
            room = room ? room * 2 : 16;
            kernel->offsets = realloc(kernel->offsets, room * sizeof *kernel->offsets);
            kernel->sizes = realloc(kernel->sizes, room * sizeof *kernel->sizes);
        }
        kernel->offsets[kernel->count] = (uint32_t)offset;
        kernel->sizes[kernel->count++] = (uint32_t)size;
        if (offset + size > kernel->bytes)
            kernel->bytes = (uint32_t)(offset + size);
    }
    kernel->looks = calloc(kernel->bytes / 8 + 1, 1);
    const char *name = NULL;
    if (!(driver.function_name && !driver.function_name(&name, handle)) && driver.kernel_name)
        driver.kernel_name(&name, handle);
    Part part = {name, name ? (uint32_t)strlen(name) : 0};
    log_write((Record){.function = SEEN_KERNEL, .words = 1, .stack = -1}, &handle, &part, 1);
    return kernel;
}

/* Under the lock: where it is, or where it would be. */
static size_t kernel_place(uint64_t handle) {
    size_t place = (size_t)(mixed(1, handle) >> 32) % MAX_KERNELS;
    while (kernels[place] && kernels[place]->handle != handle)
        place = (place + 1) % MAX_KERNELS;
    return place;
}

/* What is known of a kernel, asked for once. NULL: there are too many. */
static Kernel *kernel_find(uint64_t handle) {
    pthread_mutex_lock(&kernels_lock);
    Kernel *kernel = kernels[kernel_place(handle)];
    bool room = kernel_count < MAX_KERNELS / 2;
    pthread_mutex_unlock(&kernels_lock);
    if (kernel || !room)
        return kernel;
    kernel = kernel_ask(handle);
    pthread_mutex_lock(&kernels_lock);
    size_t place = kernel_place(handle);
    if (!kernels[place]) {      /* else another thread was faster, and this one leaks */
        kernels[place] = kernel;
        kernel_count++;
    }
    kernel = kernels[place];
    pthread_mutex_unlock(&kernels_lock);
    return kernel;
}

/* Others may be in the middle of a launch: what they hold is leaked. */
static void kernels_forget(void) {
    pthread_mutex_lock(&kernels_lock);
    memset(kernels, 0, sizeof kernels);
    kernel_count = 0;
    pthread_mutex_unlock(&kernels_lock);
}

/* Words that are no addresses, so that the driver is not asked at each launch. */
enum { STRANGERS = 4096 };

static _Atomic uint64_t strangers[STRANGERS];

static void strangers_forget(void) {
    for (size_t i = 0; i < STRANGERS; i++)
        atomic_store_explicit(&strangers[i], 0, memory_order_relaxed);
}

static bool is_memory(uint64_t word, Memory *found) {
    if (word < 1 << 16 || word >> 57)
        return false;
    if (memory_known(word, found))
        return true;
    _Atomic uint64_t *stranger = &strangers[mixed(1, word) % STRANGERS];
    if (atomic_load_explicit(stranger, memory_order_relaxed) == word)
        return false;
    see_memory(word);
    if (memory_known(word, found))
        return true;
    atomic_store_explicit(stranger, word, memory_order_relaxed);
    return false;
}

/* ---- whether a kernel writes what a parameter points to ------------------------------------- */

/* The first bytes there are copied before and after a launch, on its stream, into pinned memory, and
 * compared when the stream has got there: nobody waits for it. What writes the value that was there
 * looks like a reader, hence several looks. */
enum { LOOKS = 3, LOOKED_AT = 16, LOOK_BYTES = 512, LOOKINGS = 32 };

typedef struct Looking {        /* one launch */
    uint32_t *done;             /* the stream writes `turn` there; it lies in pinned memory */
    char *before, *after;
    uint32_t turn;
    uint32_t count;
    bool taken, queued, ok;
    uint64_t kernel;
    uint32_t offsets[LOOKED_AT];
    uint32_t sizes[LOOKED_AT];
    uint64_t addresses[LOOKED_AT];
} Looking;

static Looking lookings[LOOKINGS];
static atomic_int looking;      /* how many are taken */
static char *look_memory;
static atomic_int look_state;   /* 0: not pinned yet; 1: somebody does; 2: pinned; 3: impossible */
static __thread Looking *my_looking;

static bool looks_possible(void) {
    enum { SIZE = LOOKINGS * (2 * LOOKED_AT * LOOK_BYTES + 64), PORTABLE = 1, DEVICEMAP = 2 };
    enum { RELAXED = 2 };
    int state = 0;
    if (!driver.copy_out || !driver.write_value || !driver.host_register || !driver.capture_mode)
        return false;
    if (!atomic_compare_exchange_strong(&look_state, &state, 1))
        return state == 2;
    int mode = RELAXED;         /* to pin memory breaks the captures of other threads */
    char *memory = aligned_alloc(4096, (SIZE + 4095) / 4096 * 4096);
    bool pinned = false;
    if (memory && !driver.capture_mode(&mode)) {
        pinned = !driver.host_register(memory, (SIZE + 4095) / 4096 * 4096, PORTABLE | DEVICEMAP);
        driver.capture_mode(&mode);
    }
    for (size_t i = 0; pinned && i < LOOKINGS; i++) {
        char *mine = memory + i * (2 * LOOKED_AT * LOOK_BYTES + 64);
        lookings[i] = (Looking){.done = (uint32_t *)mine, .before = mine + 64};
        lookings[i].after = lookings[i].before + LOOKED_AT * LOOK_BYTES;
        *lookings[i].done = 0;
    }
    look_memory = memory;
    atomic_store(&look_state, pinned ? 2 : 3);
    return pinned;
}

/* Compares what has been copied; forgets what it was for. */
static void look_at_results(void) {
    if (!atomic_load_explicit(&looking, memory_order_relaxed))
        return;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < LOOKINGS; i++) {
        Looking *each = &lookings[i];
        if (!each->taken || !each->queued ||
            __atomic_load_n(each->done, __ATOMIC_ACQUIRE) != each->turn)
            continue;
        Kernel *kernel = kernels[kernel_place(each->kernel)];
        for (uint32_t k = 0; kernel && each->ok && k < each->count; k++) {
            bool wrote = memcmp(each->before + k * LOOK_BYTES, each->after + k * LOOK_BYTES,
                                each->sizes[k]);
            uint8_t *looks = &kernel->looks[each->offsets[k] / 8];
            *looks = wrote ? LOOKS : (uint8_t)(*looks < LOOKS ? *looks + 1 : LOOKS);
            uint64_t words[] = {each->kernel, each->offsets[k], wrote, *looks >= LOOKS};
            log_write((Record){.function = LEARNED, .words = 4, .stack = -1}, words, NULL, 0);
        }
        each->taken = false;
        atomic_fetch_sub(&looking, 1);
    }
    pthread_mutex_unlock(&kernels_lock);
}

/* A stream that is captured is left alone, and so are the default streams, of which that cannot be
 * asked without harm. */
static bool may_look(uint64_t stream) {
    int status = 0;
    return stream > 2 && !driver.stream_status(stream, &status) && !status && looks_possible();
}

static void look_before(const Kernel *kernel, uint64_t stream, const Pointer *pointers,
                        const Memory *memory, uint32_t count) {
    bool wanted = false;
    for (uint32_t i = 0; i < count; i++)
        wanted |= kernel->looks[pointers[i].offset / 8] < LOOKS && !memory[i].pinned;
    if (!wanted || !may_look(stream))
        return;
    Looking *mine = NULL;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < LOOKINGS && !mine; i++) {
        if (!lookings[i].taken)
            mine = &lookings[i];
    }
    if (mine) {
        mine->taken = true;
        mine->queued = false;
        atomic_fetch_add(&looking, 1);
    }
    pthread_mutex_unlock(&kernels_lock);
    if (!mine)
        return;
    mine->kernel = kernel->handle;
    mine->count = 0;
    mine->ok = true;
    mine->turn++;
    for (uint32_t i = 0; i < count && mine->count < LOOKED_AT; i++) {
        if (kernel->looks[pointers[i].offset / 8] >= LOOKS || memory[i].pinned)
            continue;
        uint64_t left = memory[i].end - pointers[i].value;
        uint32_t k = mine->count++;
        mine->offsets[k] = (uint32_t)pointers[i].offset;
        mine->sizes[k] = (uint32_t)(left < LOOK_BYTES ? left : LOOK_BYTES);
        mine->addresses[k] = pointers[i].value;
        mine->ok &= !driver.copy_out(mine->before + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    }
    my_looking = mine;
}

static void look_after(uint64_t stream, int result) {
    Looking *mine = my_looking;
    my_looking = NULL;
    if (!mine)
        return;
    mine->ok &= !result;
    for (uint32_t k = 0; mine->ok && k < mine->count; k++)
        mine->ok &= !driver.copy_out(mine->after + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    /* Should this fail, what was queued may still write there: it is not used again. */
    if (driver.write_value(stream, (uint64_t)(uintptr_t)mine->done, mine->turn, 0))
        return;
    pthread_mutex_lock(&kernels_lock);
    mine->queued = true;
    pthread_mutex_unlock(&kernels_lock);
}

/* ---- launches ------------------------------------------------------------------------------- */

static __thread Pointer pointers[MAX_POINTERS];
static __thread uint32_t pointer_count;

static uint64_t launch_stream(const Rule *rule, const uint64_t *words) {
    if (rule->configuration == NO_WORD)
        return words[rule->stream];
    const char *configuration = (const char *)(uintptr_t)words[rule->configuration];
    return configuration ? FIELD(uint64_t, configuration, 32) : 0;
}

static const char *launch_buffer(void **extra, size_t *size) {
    enum { END, BUFFER_POINTER, BUFFER_SIZE };
    const char *buffer = NULL;
    for (; extra && (uintptr_t)extra[0] != END; extra += 2) {
        if ((uintptr_t)extra[0] == BUFFER_POINTER)
            buffer = extra[1];
        else if ((uintptr_t)extra[0] == BUFFER_SIZE)
            *size = *(const size_t *)extra[1];
    }
    return buffer;
}

/* Finds what the parameters point to: each word of 8 bytes that is an address. */
static void launch_enter(const Rule *rule, const uint64_t *words) {
    pointer_count = 0;
    look_at_results();
    Kernel *kernel = kernel_find(words[rule->kernel]);
    if (!kernel)
        return;
    void **parameters = (void **)(uintptr_t)words[rule->parameters];
    void **extra = rule->extra == NO_WORD ? NULL : (void **)(uintptr_t)words[rule->extra];
    size_t size = 0;
    const char *buffer = parameters ? NULL : launch_buffer(extra, &size);
    Memory memory[MAX_POINTERS];
    for (uint32_t i = 0; i < kernel->count; i++) {
        uint32_t offset = kernel->offsets[i], bytes = kernel->sizes[i];
        const char *data = parameters ? parameters[i] : NULL;
        if (!parameters && buffer && offset + bytes <= size)
            data = buffer + offset;
        for (uint32_t at = 0; data && at + 8 <= bytes && pointer_count < MAX_POINTERS; at += 8) {
            uint64_t word;
            memcpy(&word, data + at, sizeof word);
            if (is_memory(word, &memory[pointer_count]))
                pointers[pointer_count++] = (Pointer){offset + at, word};
        }
    }
    look_before(kernel, launch_stream(rule, words), pointers, memory, pointer_count);
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
    Part parts[1 + FETCHES];
    size_t count = 0;
    if (rule->kernel != NO_WORD)
        parts[count++] = (Part){pointers, pointer_count * (uint32_t)sizeof *pointers};
    for (size_t i = 0; i < FETCHES && rule->fetches[i].bytes; i++) {
        const Fetch *fetch = &rule->fetches[i];
        uint64_t bytes = fetch->bytes;
        if (fetch->count_word != NO_WORD)
            bytes *= words[fetch->count_word];
        const void *data = (const void *)(uintptr_t)words[fetch->word];
        bool there = data && (fetch->sites >> site & 1) && bytes <= MAX_FETCHED;
        parts[count++] = (Part){data, there ? (uint32_t)bytes : 0};
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
    else if (rule->configuration != NO_WORD)
        see_stream(launch_stream(rule, words));
    if (rule->kernel != NO_WORD)
        launch_enter(rule, words);
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
        kernels_forget();
    }
}

static void leave(const Rule *rule, unsigned function, const uint64_t *words, int result,
                  const void *context) {
    if (rule->kernel != NO_WORD)
        look_after(launch_stream(rule, words), result);
    if (result && !rule->failures)
        return;
    if (!result && rule->orders_host)
        compare_sources(0, UINT64_MAX);
    if (!result && rule->allocates != NO_WORD && words[rule->allocates]) {
        uint64_t begin = *(const uint64_t *)(uintptr_t)words[rule->allocates];
        memory_forget(begin, begin + (rule->allocated == NO_WORD ? 1 : words[rule->allocated]));
        strangers_forget();
    }
    if (!(rule->sites >> LEAVE & 1))
        return;
    uint64_t number = write_call(rule, LEAVE, function, words, result, context);
    if (!result && number && source_pinned)
        remember_source(operand(&rule->addresses[1], words), words[rule->source_size], source_hash,
                        number);
}

void logger_call(int site, unsigned function, const uint64_t *words, size_t count, int result,
                 const void *context) {
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

PUBLIC void logger_no_rules(void) {
    memset(rules, 0, sizeof rules);
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
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MAX_KERNELS; i++) {      /* no launch is under way that would hold one */
        if (kernels[i]) {
            free(kernels[i]->offsets);
            free(kernels[i]->sizes);
            free(kernels[i]->looks);
            free(kernels[i]);
        }
    }
    pthread_mutex_unlock(&kernels_lock);
    kernels_forget();
    strangers_forget();
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
    pthread_mutex_init(&kernels_lock, NULL);
    atomic_store(&look_state, 3);
    thread_id = 0;
}

__attribute__((constructor)) static void initialize(void) {
    pthread_atfork(NULL, NULL, in_child);
}
