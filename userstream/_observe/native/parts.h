/* Declarations that the files of the recorder share. */
#ifndef USERSTREAM_PARTS_H
#define USERSTREAM_PARTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

enum { ENTER = 0, LEAVE = 1 };
enum { NO_WORD = 255, MAX_FUNCTIONS = 4096 };

/* ---- the records that are no calls ---------------------------------------------------------- */

/* `judge/log.py` has the same names and numbers: `recorder_numbers` exports them, and a test
 * compares. */
#define OWN_RECORDS(RECORD) \
    RECORD(HEADER, 0xFF00) \
    RECORD(FUNCTION, 0xFF01) \
    RECORD(THREAD, 0xFF02) \
    RECORD(THREAD_ENDS, 0xFF03) \
    RECORD(CODE, 0xFF04) \
    RECORD(STACK, 0xFF05) \
    RECORD(CONTEXT, 0xFF06) \
    RECORD(SEEN_STREAM, 0xFF07) \
    RECORD(SEEN_MEMORY, 0xFF08) \
    RECORD(SEEN_KERNEL, 0xFF09) \
    RECORD(LEARNED, 0xFF0A) \
    RECORD(SOURCE_CHANGED, 0xFF0B) \
    RECORD(NOT_COMPARED, 0xFF0C) \
    RECORD(LOST, 0xFF0D) \
    RECORD(HELD, 0xFF0E) \
    RECORD(MARKED, 0xFF0F) \
    RECORD(DECLARED, 0xFF10) \
    RECORD(DECLARED_NO_MORE, 0xFF11) \
    RECORD(NAMES, 0xFF12) \
    RECORD(BLOCK, 0xFF13) \
    RECORD(BLOCKS, 0xFF14) \
    RECORD(UNSEEN, 0xFF15) \
    RECORD(QUESTION, 0xFF16) \
    RECORD(END, 0xFF17) \
    RECORD(HOST_WAITS, 0xFF18) \
    RECORD(NO_STALLS, 0xFF19) \
    RECORD(STALLS_ALLOWED, 0xFF1A) \
    RECORD(RELEASED, 0xFF1B) \
    RECORD(TIMED_OUT, 0xFF1C) \
    RECORD(BLOCK_FREED, 0xFF1D) \
    RECORD(NOT_HELD, 0xFF1E)

#define AS_ENUMERATOR(name, number) name = number,
enum { OWN_RECORDS(AS_ENUMERATOR) FIRST_OWN = HEADER };

/* ---- rules.c, made from `judge/functions.py`: what is recorded of each function ------------- */

enum { FETCHES = 4 };
enum { MEMORY = 1, KERNELS = 2, STRANGERS = 4 };
/* What a call is for `holds.c`: an operation that can be held, one that keeps the host waiting
 * while a stream is held, or the end of a context. */
enum { HELD_BACK = 1, BLOCKS_HOST = 2, ENDS_CONTEXT = 3 };

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
    uint8_t placed;             /* the word `allocates` is the address itself */
    uint8_t source_size;        /* the word with the size of addresses[1], the source of a copy */
    uint8_t orders_host;        /* the host knows more after it */
    uint8_t ends_context;       /* namely that all work of the context is over */
    uint8_t records;            /* the word with the event that is recorded on the stream */
    uint8_t event;              /* the word with the event that the host knows of, and the next */
    uint8_t events;             /* ones, so many */
    uint8_t failures;           /* are recorded as well */
    uint8_t forgets;            /* bits: MEMORY, KERNELS; at the end STRANGERS */
    uint8_t holds;              /* HELD_BACK, BLOCKS_HOST or ENDS_CONTEXT; 0: none of them */
    uint8_t kernel;             /* the word with the kernel; its parameters are the next ones: */
    uint8_t parameters;
    uint8_t extra;
    uint8_t configuration;      /* the word that points to a CUlaunchConfig, which has the stream */
    uint8_t node;               /* the word that points to the parameters of a node of a graph: a */
    uint8_t node_is_any;        /* CUDA_KERNEL_NODE_PARAMS_v2, or a CUgraphNodeParams of any type */
    uint8_t value;              /* the word with the address of a value in memory that a stream
                                 * writes or waits for; of a batch, of the array of operations */
    uint8_t value_bytes;
    uint8_t value_count;        /* the word with the count of operations of a batch */
    uint8_t awaits;             /* the host may write the value for which the stream waits */
    uint8_t batch;              /* the word with the count of copies; words 0 to 2 point to their
                                 * destinations, sources and sizes */
    Address addresses[2];       /* destination and source */
    Fetch fetches[FETCHES];
} Rule;

typedef struct NamedRule {
    const char *name;
    const char *signature;      /* bytes of each argument, as CUPTI's structures have them */
    Rule rule;
} NamedRule;

extern const char recorder_version[];
extern const NamedRule named_rules[];       /* sorted by name */
extern const size_t named_rule_count;
extern const char *const not_followed[];    /* sorted: calls are counted */
extern const size_t not_followed_count;

/* ---- makers.c: the driver, and who tells of its calls --------------------------------------- */

/* Functions of the driver that wait for nothing. An old driver lacks some. */
#define DRIVER_FUNCTIONS(FUNCTION) \
    FUNCTION(pointer_attributes, cuPointerGetAttributes, \
             (unsigned, const int *, void **, uint64_t)) \
    FUNCTION(stream_flags, cuStreamGetFlags, (uint64_t, unsigned *)) \
    FUNCTION(stream_context, cuStreamGetCtx, (uint64_t, void **)) \
    FUNCTION(stream_green, cuStreamGetGreenCtx, (uint64_t, void **)) \
    FUNCTION(stream_priority, cuStreamGetPriority, (uint64_t, int *)) \
    FUNCTION(stream_status, cuStreamIsCapturing, (uint64_t, int *)) \
    FUNCTION(stream_query, cuStreamQuery, (uint64_t)) \
    FUNCTION(function_parameter, cuFuncGetParamInfo, (uint64_t, size_t, size_t *, size_t *)) \
    FUNCTION(kernel_parameter, cuKernelGetParamInfo, (uint64_t, size_t, size_t *, size_t *)) \
    FUNCTION(function_name, cuFuncGetName, (const char **, uint64_t)) \
    FUNCTION(kernel_name, cuKernelGetName, (const char **, uint64_t)) \
    FUNCTION(copy_out, cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, uint64_t)) \
    FUNCTION(copy_in, cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, uint64_t)) \
    FUNCTION(fill, cuMemsetD8Async, (uint64_t, unsigned char, size_t, uint64_t)) \
    FUNCTION(write_value, cuStreamWriteValue32_v2, (uint64_t, uint64_t, uint32_t, unsigned)) \
    FUNCTION(wait_value, cuStreamWaitValue32_v2, (uint64_t, uint64_t, uint32_t, unsigned)) \
    FUNCTION(event_create, cuEventCreate, (uint64_t *, unsigned)) \
    FUNCTION(event_record, cuEventRecord, (uint64_t, uint64_t)) \
    FUNCTION(wait_event, cuStreamWaitEvent, (uint64_t, uint64_t, unsigned)) \
    FUNCTION(memory_allocate, cuMemAlloc_v2, (uint64_t *, size_t)) \
    FUNCTION(host_register, cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    FUNCTION(capture_mode, cuThreadExchangeStreamCaptureMode, (int *)) \
    FUNCTION(context_push, cuCtxPushCurrent_v2, (void *)) \
    FUNCTION(context_pop, cuCtxPopCurrent_v2, (void **)) \
    FUNCTION(context_device, cuCtxGetDevice, (int *)) \
    FUNCTION(primary_retain, cuDevicePrimaryCtxRetain, (void **, int)) \
    FUNCTION(primary_release, cuDevicePrimaryCtxRelease_v2, (int)) \
    FUNCTION(version, cuDriverGetVersion, (int *))

#define AS_MEMBER(member, symbol, arguments) int(*member) arguments;
typedef struct Driver {
    DRIVER_FUNCTIONS(AS_MEMBER)
} Driver;

extern Driver driver;

/* Begins to be told of calls, by CUPTI in a file, or by the simulated driver if there is one.
 * Returns NULL, or what was wrong. */
const char *makers_begin(const char *cupti);
void makers_end(void);
/* Writes down what is recorded, by the numbers of the functions. */
void makers_define(void);
bool maker_is_simulated(void);
void makers_in_child(void);

/* ---- python.c: CPython's structures --------------------------------------------------------- */

typedef struct Layout {
    int32_t state_frame;        /* the frame, or the structure that has it */
    int32_t indirect_frame;     /* -1: not indirect */
    int32_t frame_code, frame_previous, frame_instruction, frame_owner, owner_c_stack;
    int32_t code_tag;           /* bits of the pointer to the code that are none of its own */
    int32_t code_filename, code_name, code_first_line, code_lines, code_instructions;
    int32_t code_version;       /* a number that no other code object ever has; -1: there is none */
    int32_t text_length, text_state, text_ascii, text_compact, text_shift;
    int32_t bytes_length, bytes_data;
} Layout;

typedef struct Python {
    void *(*thread_state)(void);
    int (*is_finalizing)(void);
    const char *(*version)(void);
    const void *code_type, *text_type, *bytes_type;
    Layout layout;
} Python;

extern Python python;

void python_find(void);
/* The innermost frame of the calling thread; NULL: none, or they cannot be read. */
const char *python_frame(void);
bool python_has_stacks(void);

#define FIELD(type, object, offset) (*(type const *)((const char *)(object) + (offset)))
#define TYPE_OF(object) FIELD(void *, object, sizeof(void *))

/* ---- shared by all -------------------------------------------------------------------------- */

uint64_t now(void);

/* One step of a hash. */
static inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

/* A counter that all threads read and few write: nothing else lies in its line of the cache. */
typedef struct Generation {
    _Alignas(64) atomic_uint count;
} Generation;

static inline unsigned generation_of(Generation *generation) {
    return atomic_load_explicit(&generation->count, memory_order_acquire);
}

/* What threads remember of a table is no longer true. */
static inline void generation_ends(Generation *generation) {
    atomic_fetch_add(&generation->count, 1);
}

/* After a fork each file makes its locks anew and drops its tables without freeing them: another
 * thread of the parent may have held the lock, halfway through a change. */

typedef struct Thread Thread;
typedef struct Call Call;

/* ---- pool.c: the chunks that threads write to ----------------------------------------------- */

enum { CHUNK = 1 << 16, CHUNK_HEAD = 64, CHUNK_DATA = CHUNK - CHUNK_HEAD };

typedef struct Chunk {
    uint32_t log;               /* of which its records are */
    _Atomic uint32_t used;      /* bytes: up to here, records are whole */
    _Atomic(struct Chunk *) next;   /* to which its thread writes after this one */
    struct Chunk *next_free;
    /* Of the pump. */
    uint32_t waiting;           /* records that are in its window */
    bool is_complete;           /* it has taken all others, and no more will come */
    _Alignas(CHUNK_HEAD) char data[CHUNK_DATA];
} Chunk;

_Static_assert(sizeof(Chunk) == CHUNK, "a pool of so many bytes has so many chunks");

bool pool_open(uint64_t bytes, uint32_t log);   /* false: there is no memory */
void pool_close(bool unmap);
/* NULL: there is none. Those for definitions may be the last ones. */
Chunk *chunk_take(bool for_definitions);
void chunk_free(Chunk *chunk);
bool pool_is_low(void);
void pool_in_child(void);

/* ---- log.c: what is written down ------------------------------------------------------------ */

#define LOG_MAGIC "uslog\r\n\2"     /* the last byte is the major version */
enum { LOG_MINOR = 0 };

typedef struct Record {
    uint32_t size;              /* with all that follows, a multiple of 8 */
    uint16_t type;              /* the number of a function, or one of OWN_RECORDS */
    uint8_t site;
    uint8_t account;            /* on which the thread calls: of the program, a future, or ours */
    uint64_t number;
    uint32_t thread;
    int32_t stack;              /* -1: none */
    uint64_t began;
    uint64_t ended;
    uint64_t context;
    int32_t result;
    uint16_t words;
    uint16_t unused;
} Record;

_Static_assert(sizeof(Record) == 56, "judge/log.py reads it");

typedef struct Part {           /* bytes that follow the words: their length, and they themselves */
    const void *data;
    uint32_t bytes;
} Part;

typedef struct Written {        /* by one thread */
    uint32_t log;               /* in which it writes */
    bool is_known;              /* that has its definition */
    Chunk *chunk;               /* that it writes */
    uint64_t dropped;           /* records that its own ones say are missing */
    _Atomic(Chunk *) first;
    /* Of the pump: where it goes on. */
    Chunk *reading;
    uint32_t read;
} Written;

extern atomic_uint log_current;     /* changes when a log begins */

void log_begin(void);
/* Returns the number of the record, 0 if there was no room. */
uint64_t log_write(Thread *me, Record record, const uint64_t *words, const Part *parts,
                   size_t count);
uint64_t log_own(Thread *me, unsigned type, const uint64_t *words, size_t count);
uint64_t log_newest(void);      /* later records have larger numbers */
void log_thread_ends(Thread *me);

/* ---- pump.c: the thread that puts the records in order, and sends them on ------------------- */

/* Descriptors of the file of the log and of the socket of a judge, or -1. Without the latter, the
 * judge may be a thread of this process. */
void pump_open(int file, int judge, bool judges_here);
const char *pump_begin(void);
void pump_wake(void);           /* a chunk was taken */
void pump_hurry(void);          /* somebody waits for an answer of the judge */
int pump_log_error(void);
void pump_end(uint64_t patience);   /* nothing comes any more; for how long a judge may take it */
bool pump_has_ended(void);      /* everything was sent on */
void pump_close(void);
void pump_in_child(void);
bool log_is_read(const Written *written);

/* ---- mailbox.c: what the pump gives a thread of this process --------------------------------- */

void mailbox_open(void);
size_t mailbox_put(const char *data, size_t size);
void mailbox_wait(unsigned milliseconds);
PUBLIC void recorder_hang_up(void);
PUBLIC void recorder_ring(void);
void mailbox_in_child(void);

/* ---- stacks.c: the frames of the calling thread --------------------------------------------- */

typedef struct Code Code;
typedef struct Stack Stack;

enum { CODES_KEPT = 1024, STACKS_KEPT = 4096 };

typedef struct StackCache {
    struct {
        const char *object;
        const Code *code;
        uint32_t version, number;       /* of the code */
    } codes[CODES_KEPT];
    Stack *stacks[STACKS_KEPT];
} StackCache;

typedef struct Reported {       /* a pair of lines that race, by an earlier report */
    const char *file[2];        /* of the first, and of the second */
    uint32_t line[2];           /* 0: the second is a write of the host */
} Reported;

enum { MOST_REPORTED = 32 };

int32_t stack_index(Thread *me);
/* Which of the pairs lie on stacks of the log that begins. They stay until the next log. */
void stacks_look_for(const Reported *pairs, uint32_t count);
/* Returns the lines that are on a stack, a bit each: 2 * i and 2 * i + 1 are those of pair i. */
uint64_t stack_lines(int32_t index);
uint64_t stacks_lost(void);     /* calls without one, because there were too many */
void stacks_in_child(void);

/* ---- ranges.c: what was seen ----------------------------------------------------------------- */

typedef struct Range {
    uint64_t begin, end;
    bool pinned;
    uint32_t added;             /* how many had been added to the table by then */
} Range;

typedef struct Ranges {
    pthread_mutex_t lock;
    Range *items;
    size_t count, capacity;
    uint32_t added;
} Ranges;

#define NO_RANGES {PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0, 0}

bool ranges_find(Ranges *ranges, uint64_t at, Range *found);
bool ranges_add(Ranges *ranges, Range range);   /* false: there is one already */
/* Forgets all but the newest, half as many as `most`, once there are more. */
void ranges_limit(Ranges *ranges, size_t most);
void ranges_forget(Ranges *ranges, uint64_t begin, uint64_t end);

/* Held from the question whether a stream or memory is known until its record is written: another
 * thread that finds it writes its own records after that one, and nothing is defined twice. */
extern pthread_mutex_t seeing_lock;

/* ---- streams.c ------------------------------------------------------------------------------ */

enum { STREAMS_KEPT = 64 };

typedef struct StreamCache {    /* streams that have a record; default ones by their context */
    struct {
        uint64_t handle;
        unsigned generation;
    } known[STREAMS_KEPT];
    uint64_t context;           /* that was current, and has a record */
    unsigned generation;
} StreamCache;

/* `context` is the current one. */
void see_context(Thread *me, uint64_t context);
void see_stream(Thread *me, uint64_t handle, uint64_t context);
void forget_stream(uint64_t handle);
bool stream_is_seen(uint64_t handle);   /* false as well: it was destroyed */
void contexts_forget(void);
void streams_clear(void);
void streams_in_child(void);

/* ---- memory.c ------------------------------------------------------------------------------- */

enum { RANGES_KEPT = 512, STRANGERS_KEPT = 4096, WORDS_KEPT = 4096 };
enum { MOST_WORDS = 64, BLOCK_WORDS = 8 };

typedef struct Pointer {        /* a parameter that points to memory */
    uint64_t offset, value;
} Pointer;

typedef struct Parameters {     /* of a kernel: words that are looked up together */
    uint32_t count;
    uint32_t offsets[MOST_WORDS];
    uint64_t values[MOST_WORDS];
} Parameters;

typedef struct KnownWords {
    uint64_t hash;              /* of the words, and of the state of all memory */
    uint64_t are_addresses;     /* a bit each */
} KnownWords;

typedef struct MemoryCache {
    struct {
        Range range;
        uint64_t generation;
    } known[RANGES_KEPT];
    struct {                    /* a word that is no address: the driver is not asked again */
        uint64_t word;
        uint64_t generation;
    } strangers[STRANGERS_KEPT];
    KnownWords words[WORDS_KEPT];
} MemoryCache;

bool memory_was_freed(uint64_t address);        /* in stream order: a kernel may still get it */
void memory_forget(uint64_t begin, uint64_t end);
bool see_memory(Thread *me, uint64_t address, Range *found);    /* false: it is none */
bool memory_known(Thread *me, uint64_t address, Range *found);  /* false: it was not seen */
/* Takes the words; returns how many are addresses. */
uint32_t find_addresses(Thread *me, Parameters *words, Pointer *pointers);
bool memory_is_there(uint64_t address, uint64_t bytes);     /* asks the driver each time */
void memory_gone(uint64_t begin, uint64_t end);
void memory_gone_at(uint64_t address, bool in_stream_order);
void strangers_forget(void);
void memory_clear(void);
void memory_in_child(void);

/* ---- sources.c: pinned memory that copies have to read, or streams wait for ------------------ */

typedef struct Source {
    uint64_t address, size, hash;
    uint64_t stream, context;   /* of the copy or the wait */
    uint64_t number;            /* of its record; 0: a free place */
    int32_t intact;             /* the stack of the last call before which it had not changed */
} Source;

bool host_read(uint64_t address, void *to, uint64_t bytes);     /* false: it cannot be read */
bool source_read(Source *source);               /* computes the hash; false: it cannot be read */
void sources_compare(Thread *me, uint64_t begin, uint64_t end);
void source_remember(Thread *me, Source source);
uint64_t sources_until_now(void);
/* The host knows more than when the call began, at `since`; whether the program hears of it. */
void sources_ended(Thread *me, const Rule *rule, const uint64_t *words, uint64_t context,
                   uint64_t since, bool is_heard);
void sources_event_recorded(const Rule *rule, const uint64_t *words, uint64_t context,
                            uint64_t since);
void sources_forget(uint64_t begin, uint64_t end);
void sources_clear(void);
void sources_in_child(void);

/* ---- kernels.c ------------------------------------------------------------------------------ */

typedef struct Kernel {
    uint64_t handle;
    uint32_t count, bytes;      /* of its parameters */
    bool is_collective;         /* other processes wait for it */
    atomic_bool was_launched;
    uint32_t *offsets, *sizes;
    uint8_t *looks;             /* for each word of them: how often somebody looked what it does */
    struct Kernel *next;        /* of those that are to be freed */
} Kernel;

enum { KERNELS_KEPT = 512 };

typedef struct KernelCache {
    struct {
        Kernel *kernel;
        uint64_t handle;
        unsigned generation;
    } known[KERNELS_KEPT];
} KernelCache;

extern pthread_mutex_t kernels_lock;

void kernels_prepare(void);     /* finds what makes names readable */
/* Returns a kernel, which stays until the thread leaves the recorder. NULL: there are too many. */
Kernel *kernel_of(Thread *me, uint64_t handle);
Kernel *kernel_known(uint64_t handle);  /* under the lock; NULL: it is not */
/* Returns whether the driver may load a kernel when it is launched now. */
bool kernel_may_load(Kernel *kernel);
void kernels_forget(void);
void kernels_free(void);        /* forgotten ones that no thread uses any more */
void kernels_in_child(void);

/* ---- learning.c: whether a kernel writes what a parameter points to ------------------------- */

typedef struct Looking Looking;

void look_at_results(Thread *me);
/* Returns the look at this launch; NULL: there is none. */
Looking *look_before(Thread *me, const Kernel *kernel, uint64_t stream, const Pointer *pointers,
                     uint32_t count);
void look_after(Looking *mine, uint64_t stream, int result);
void look_abandon(Looking *mine);       /* the end of the launch will not be seen */
void looks_abandon(void);               /* of an earlier observation */
void learning_in_child(void);

/* ---- holds.c: makes suspected races happen -------------------------------------------------- */

/* The most holds of the observation and of a pair, and the pairs to hold from the first time on. */
void holds_begin(uint32_t count, uint32_t of_pair, const Reported *pairs, uint32_t pair_count);
void holds_end(void);
bool holds_are_on(void);
bool holds_wanted(void);        /* calls are to be shown to: */
void holds_enter(Thread *me, const Rule *rule, const Call *call, const uint64_t *words,
                 uint64_t context);
bool holds_one(void);           /* a stream, and ends of calls are to be shown to: */
void holds_leave(Thread *me, const Rule *rule, const uint64_t *words, uint64_t context);
void holds_context_leaves(void); /* after a call that may have ended one */
void holds_stream_ends(Thread *me, uint64_t stream);
void holds_see_collective(uint64_t stream);
void holds_before_fork(void);
void holds_in_child(void);

/* ---- launches.c ----------------------------------------------------------------------------- */

enum { MAX_POINTERS = 4096 };       /* more than a record has room for: such a launch is lost */

typedef struct Launch {         /* or a node of a graph that is to launch */
    Looking *looking;
    uint64_t kernel;            /* of a node; 0: it launches none */
    bool may_load;              /* the driver may load its kernel now */
    bool is_collective;
    uint32_t pointer_count;
    Pointer pointers[MAX_POINTERS + MOST_WORDS];
} Launch;

uint64_t launch_stream(const Rule *rule, const uint64_t *words);
void launch_enter(Thread *me, const Rule *rule, const uint64_t *words, Launch *launch);
void node_enter(Thread *me, const Rule *rule, const uint64_t *words, Launch *launch);

/* ---- calls.c: from a call to its records ---------------------------------------------------- */

/* One call, when it begins and when it ends: its arguments in the order of C, each extended to 64
 * bits. `result` counts at the end. */
PUBLIC void recorder_call(int site, unsigned function, const uint64_t *words, size_t count,
                          int result, const void *context);

extern Rule rules[MAX_FUNCTIONS];

bool is_recording(void);
uint64_t operand_of(const Address *address, const uint64_t *words);
bool is_guarding(void);         /* calls are looked at, if only for what they free */
void calls_begin(unsigned char *(*account_of_thread)(void), bool alone);
bool calls_end(void);
void calls_in_child(void);

/* ---- threads.c: what each thread has for itself --------------------------------------------- */

enum { NESTED = 2, MOST_SOURCES = 64, MOST_VALUES = 64 };

typedef struct Value {          /* in memory, before a stream writes it or waits for it */
    uint64_t is_known;
    uint64_t value;
} Value;

struct Call {                   /* what the begin of a call leaves for its end */
    uint32_t epoch;             /* in which it began */
    uint32_t function;
    uint64_t began;
    uint64_t since;             /* sources_until_now() */
    uint32_t value_count;
    Value values[MOST_VALUES];
    uint32_t source_count;
    Source sources[MOST_SOURCES];
    Launch launch;
};

struct Thread {
    Thread *next;               /* of all */
    uint32_t number;            /* which no other thread of this process ever has */
    uint32_t system_number;
    bool busy;                  /* what these files call is not recorded */
    atomic_bool inside;         /* the recorder: what it may use is not taken away */
    atomic_bool ended;
    bool left;                  /* the recorder since a question of the pump */
    const unsigned char *account;   /* on which it calls; NULL: not asked yet */
    Written written;
    /* Calls in progress, the outermost first. Those of an earlier observation do not count, as
     * their ends were not seen. */
    uint32_t call_count;
    Call calls[NESTED];
    StackCache stacks;
    StreamCache streams;
    MemoryCache memory;
    KernelCache kernels;
};

extern pthread_mutex_t threads_lock;
extern Thread *threads;         /* under the lock */

Thread *thread_me(void);        /* NULL: there is no memory for it */
/* Enters the recorder, unless the thread is in it. Returns the thread if it may go on. */
Thread *thread_enter(void);
void thread_leave(Thread *me);
/* Waits, not without end, until no thread is inside. Returns whether none is. */
bool threads_wait(void);
/* Returns whether each thread was outside at some time since this returned true. */
bool threads_have_left(void);
void threads_free_ended(void);
unsigned threads_seen(void);    /* how many there were */
void threads_in_child(void);

#endif
