/* What the files of the logger share. */
#ifndef USERSTREAM_PARTS_H
#define USERSTREAM_PARTS_H

#include "logger.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { FETCHES = 3 };
enum { MEMORY = 1, KERNELS = 2 };

/* Records with function numbers that no driver has. `records.py` has the same names and numbers:
 * `logger_numbers` exports them, and a test compares. */
#define OWN_RECORDS(RECORD) \
    RECORD(SEEN_MEMORY, 0xFFFE) \
    RECORD(SEEN_STREAM, 0xFFFD) \
    RECORD(SOURCE_CHANGED, 0xFFFC) \
    RECORD(SEEN_KERNEL, 0xFFFB) \
    RECORD(LEARNED, 0xFFFA) \
    RECORD(LOST, 0xFFF7) \
    RECORD(NOT_COMPARED, 0xFFF6)

#define AS_ENUMERATOR(name, number) name = number,
enum { OWN_RECORDS(AS_ENUMERATOR) };

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
    uint8_t freed;              /* the word with its size; else all that lies around the address */
    uint8_t allocates;          /* the word that points to the address of new memory */
    uint8_t allocated;          /* the word with its size */
    uint8_t source_size;        /* the word with the size of addresses[1], the source of a copy */
    uint8_t orders_host;        /* the host knows more after it */
    uint8_t failures;           /* are logged as well */
    uint8_t forgets;            /* bits: MEMORY, KERNELS */
    uint8_t kernel;             /* the word with the kernel; its parameters are the next ones: */
    uint8_t parameters;
    uint8_t extra;
    uint8_t configuration;      /* the word that points to a CUlaunchConfig, which has the stream */
    uint8_t written;            /* the word with the address of a value that is written */
    uint8_t written_bytes;
    uint8_t batch;              /* the word with the count of copies; words 0 to 2 point to their
                                 * destinations, sources and sizes */
    Address addresses[2];       /* destination and source */
    Fetch fetches[FETCHES];
} Rule;

typedef struct Driver {         /* functions that wait for nothing */
    int (*pointer_attributes)(unsigned, const int *, void **, uint64_t);
    int (*stream_flags)(uint64_t, unsigned *);
    int (*stream_context)(uint64_t, void **);
    int (*stream_status)(uint64_t, int *);
    int (*stream_query)(uint64_t);
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
    int32_t code_version;       /* a number that no other code object ever has; -1: there is none */
    int32_t text_length, text_state, text_ascii, text_compact, text_shift;
    int32_t bytes_length, bytes_data;
} Layout;

extern Driver driver;
extern Layout layout;

bool is_logging(void);

#define FIELD(type, object, offset) (*(type const *)((const char *)(object) + (offset)))

/* One step of a hash. */
static inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

/* After a fork each file makes its locks anew and drops its tables without freeing them: another
 * thread of the parent may have held the lock, halfway through a change. */

/* ---- log.c: what was written down ----------------------------------------------------------- */

typedef struct Record {
    uint32_t size;
    uint16_t function;
    uint8_t site;
    uint8_t words;
    int16_t result;
    uint8_t account;            /* on which the thread calls: of the program, a future, or ours */
    uint8_t unused;
    int32_t stack;
    uint64_t thread;
    uint64_t began;
    uint64_t ended;
    uint64_t context;
    uint64_t number;
} Record;

typedef struct Part {
    const void *data;
    uint32_t bytes;
} Part;

/* Returns the number of the record, 0 if there was no room. */
uint64_t log_write(Record record, const uint64_t *words, const Part *parts, size_t count);
void log_own(unsigned what, const uint64_t *words, size_t count);    /* without a stack */
void log_clear(void);
void log_in_child(void);

/* ---- stacks.c: the frames of the calling thread --------------------------------------------- */

int32_t stack_index(void);
void stacks_begin(void);
void stacks_in_child(void);

/* ---- ranges.c: what was seen ----------------------------------------------------------------- */

typedef struct Range {
    uint64_t begin, end;
    bool pinned;
} Range;

typedef struct Ranges {
    pthread_mutex_t lock;
    Range *items;
    size_t count, capacity;
} Ranges;

#define NO_RANGES {PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0}

bool ranges_find(Ranges *ranges, uint64_t at, Range *found);
bool ranges_add(Ranges *ranges, Range range);   /* false: there is one already */
void ranges_replace(Ranges *ranges, Range range);
void ranges_forget(Ranges *ranges, uint64_t begin, uint64_t end);

/* Held from the question whether a stream or memory is known until its record is written: another
 * thread that finds it writes its own records after that one, and nothing is defined twice. */
extern pthread_mutex_t seeing_lock;

/* ---- streams.c ------------------------------------------------------------------------------ */

void see_stream(uint64_t handle, uint64_t context);    /* the context that is current */
void forget_stream(uint64_t handle);
void streams_clear(void);
void streams_in_child(void);

/* ---- memory.c ------------------------------------------------------------------------------- */

bool memory_known(uint64_t address, Range *found);
void memory_forget(uint64_t begin, uint64_t end);
bool see_memory(uint64_t address);
bool memory_is_there(uint64_t address, uint64_t bytes);     /* asks the driver each time */
void memory_gone(uint64_t begin, uint64_t end);
void memory_gone_at(uint64_t address);
void memory_clear(void);
void memory_in_child(void);

/* ---- sources.c: pinned memory that copies still have to read -------------------------------- */

typedef struct Source {
    uint64_t address, size, hash;
    uint64_t number;            /* of the record of the copy; 0: a free place */
} Source;

bool host_read(uint64_t address, void *to, uint64_t bytes);     /* false: it cannot be read */
bool source_read(Source *source);               /* computes the hash; false: it cannot be read */
void compare_sources(uint64_t begin, uint64_t end);
void remember_source(Source source);
void forget_sources(uint64_t begin, uint64_t end);
void sources_clear(void);
void sources_in_child(void);

/* ---- kernels.c ------------------------------------------------------------------------------ */

typedef struct Kernel {
    uint64_t handle;
    atomic_uint references;     /* of the table, and of each thread that is in a launch */
    uint32_t count, bytes;      /* of its parameters */
    uint32_t *offsets, *sizes;
    uint8_t *looks;             /* for each word of them: how often somebody looked what it does */
} Kernel;

typedef struct Pointer {        /* a parameter that points to memory */
    uint64_t offset, value;
} Pointer;

extern pthread_mutex_t kernels_lock;

Kernel *kernel_acquire(uint64_t handle);        /* NULL: there are too many */
void kernel_release(Kernel *kernel);
Kernel *kernel_known(uint64_t handle);  /* under the lock; NULL: it is not */
void kernels_forget(void);
void strangers_forget(void);
bool is_memory(uint64_t word, Range *found);
void kernels_in_child(void);

/* ---- learning.c: whether a kernel writes what a parameter points to ------------------------- */

typedef struct Looking Looking;

void look_at_results(void);
/* Returns the look at this launch; NULL: there is none. */
Looking *look_before(const Kernel *kernel, uint64_t stream, const Pointer *pointers,
                     const Range *memory, uint32_t count);
void look_after(Looking *mine, uint64_t stream, int result);
void look_abandon(Looking *mine);       /* the end of the launch will not be seen */
void looks_abandon(void);               /* of an earlier observation */
void learning_in_child(void);

/* ---- launches.c ----------------------------------------------------------------------------- */

enum { MAX_POINTERS = 128 };

typedef struct Launch {
    Looking *looking;
    uint32_t pointer_count;
    Pointer pointers[MAX_POINTERS];
} Launch;

uint64_t launch_stream(const Rule *rule, const uint64_t *words);
void launch_enter(const Rule *rule, const uint64_t *words, Launch *launch);

#endif
