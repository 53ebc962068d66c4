/* The simulated CUDA driver: its objects, and what its files offer each other.
 *
 * A stream is a queue that a worker thread of its own runs in order: when it likes, or, under a
 * schedule, when it has the turn. Device memory is host memory, kept in a table. One lock guards
 * all state; `progress` is broadcast whenever anything may have changed for somebody who waits.
 * Host functions and copies run without the lock.
 *
 * Only the driver's functions (DRIVER_FUNCTION) and the side door's take the lock; all other
 * functions run under it. No cuda.h is needed: names and layouts are declared here. */
#ifndef USERSTREAM_DRIVER_H
#define USERSTREAM_DRIVER_H

#include "base.h"

#include <semaphore.h>

/* ---- schedule.c ------------------------------------------------------------------------------ */

/* Who takes turns under a schedule: a stream, or a thread of the program. */
typedef struct Actor {
    Stream *stream;             /* NULL: a thread */
    unsigned number;            /* among the streams, or the threads, of the schedule */
    uint64_t schedule;          /* the one that the actor takes part in */
    uint64_t priority;
    bool asks;                  /* for the turn; a stream, in the middle of an operation */
    bool queries;               /* `awaited` */
    bool has_queried;           /* the same, and does not wait for it */
    bool polls;                 /* found something unfinished, and looks again */
    bool is_blocked;            /* until the point is reached or, without one, the next change */
    bool stands;                /* without a schedule: waits in the middle of an operation */
    uint64_t since;             /* the steps, failures or changes that there were then */
    uint64_t asked;             /* the decision by which the actor last got the turn */
    unsigned passes;            /* decisions for others in which it could have gone on */
    unsigned most_passes;       /* with so many it is overdue */
    bool has_slept;             /* since it last called the driver */
    bool sleep_fails;           /* that the thread is about to begin */
    bool has_limit;             /* of time, to wait for the semaphore */
    bool has_long_limit;
    bool is_interrupted;        /* by a signal */
    bool is_late;               /* a time limit has ended what the thread waited for */
    Point *awaited;
    sem_t *semaphore;           /* that the thread waits for, outside of CUDA */
    Thread *thread;             /* that acts: its own, the worker, or the one that runs a kernel */
    bool is_outside;            /* of CUDA, without the turn: `thread` does not run */
    pthread_cond_t *granted;
    struct Actor *next;
} Actor;

bool schedule_is_active(void);
/* Around a driver function: a thread of the program gets the turn, and gives way once it has
 * queued something. */
void schedule_enter(void);
void schedule_leave(void);
/* Around a query of a point; NULL is one that was reached. */
void schedule_before_query(Point *point);
void schedule_after_query(Point *point);
/* An event was recorded there; it was reached; no event is there any more. */
void schedule_recorded(Point *point);
void schedule_reached(Point *point);
void schedule_forget(Point *point);
/* What the calling thread waits for; NULL: not any more. */
void schedule_awaits(Point *point);
/* Gives way until something has changed; with `polls` until another actor has done something.
 * False: the calling thread takes no part. It waits otherwise, and calls `schedule_resumes`
 * afterwards. */
bool schedule_waits(bool polls);
void schedule_resumes(bool polls);
void schedule_note_progress(void);
void schedule_note_failure(void);
void schedule_queued(Stream *stream, Operation *operation);
/* The memory of an operation that runs under a schedule. */
typedef void (*Touch)(CUdeviceptr address, size_t size, bool writes);
void copy_touches(const Operation *operation, Touch touch);
void fill_touches(const Operation *operation, Touch touch);
void batch_touches(const Operation *operation, Touch touch);
/* The memory that a kernel uses through a texture or surface object, if a number is one. */
void texture_touches(uint64_t number, Touch touch);
/* The first operation of a stream begins, or has ended. */
void schedule_operation_begins(Stream *stream);
void schedule_operation_ends(Stream *stream);
/* On a worker. */
bool schedule_grants(const Stream *stream);
void schedule_wait_for_work(Stream *stream);
void schedule_step_begins(Stream *stream);
void schedule_step_ends(Stream *stream);
void schedule_node_begins(Stream *stream, const Operation *operation, bool is_first);
/* Of what ends. */
void schedule_stream_ends(Stream *stream);
void schedule_thread_ends(Thread *thread);
void schedule_stop(void);
void schedule_forked(void);

/* Outside of CUDA, called without the lock. The results of sem_clockwait, or TAKES_NO_PART; without
 * a time limit if `until` is NULL. */
enum { TAKES_NO_PART = 1 };

const struct timespec *schedule_shortens(clockid_t clock, const struct timespec *until,
                                         struct timespec *sooner);
int schedule_waits_for_semaphore(sem_t *semaphore, clockid_t clock, const struct timespec *until);
/* False: the thread takes no part, or need not wait for the file. */
bool schedule_gives_turn_up(bool (*is_ready)(int file), int file);
void schedule_takes_turn_back(bool is_late);
/* False: nobody can end the loop that sleeps. */
bool schedule_sleeps(bool begins);
/* That the calling thread is about to start; NULL: one that takes no part. */
Thread *schedule_new_thread(void);
void schedule_thread_begins(Thread *thread);

/* ---- account.c of userstream's core ---------------------------------------------------------- */

/* Whether the calling thread calls for userstream's own sake, so that no schedule concerns it. */
bool is_housekeeping(void);

/* ---- outside.c ------------------------------------------------------------------------------- */

void outside_replace(void);
void outside_open(Thread *thread);
void outside_close(Thread *thread);
bool outside_is_asleep(const Thread *thread);
bool outside_are_all_asleep(void);

/* ---- contexts.c and current.c --------------------------------------------------------------- */

enum { LIMITS = 9 };     /* CUlimit: the number that a GPU supports, and one that it does not */

struct Context {
    Handle handle;
    CUdevice device;
    bool primary;
    bool active;                /* a primary context is active while it is retained */
    int references;
    unsigned flags;
    uint64_t id;
    CUresult error;             /* sticky: once set, every use of the context answers it */
    const struct Explanation *explanation;  /* of the error, if a kernel has one */
    CUresult last_error;        /* remembered when the error is reset */
    unsigned errors;            /* how many there were: tells work queued before from work after */
    Stream *streams;            /* all of them, the default streams too */
    Stream *legacy;
    Stream *collector;          /* internal: where cuCtxRecordEvent gathers the other streams */
    Stream *gate;               /* internal: what all work queued from now on waits for */
    bool host_function_running;
    unsigned frees;             /* how many are waiting for its streams */
    size_t limits[LIMITS];
    int cache;                  /* CUfunc_cache */
    int banks;                  /* CUsharedconfig: of four bytes, H100 */
    unsigned peers;             /* bit d: access to device d is enabled */
    GreenContext *green;        /* the handle that stands for it: all else is the primary's */
    Context *next;
};

/* What the driver keeps for each thread. */
struct Thread {
    uint64_t id;
    Context *contexts[MAX_PUSHED_CONTEXTS];
    int depth;
    int capture_mode;
    bool in_host_function;
    bool runs_kernel;           /* as Python; it must not wait for what waits for it */
    bool listed;                /* among those that may be on the way back to Python */
    bool inside;                /* the driver */
    double left;                /* that, in seconds */
    struct Thread *next;
    const struct Explanation *explanation;  /* of what its last call answered */
    Actor actor;                /* of a thread of the program */
    Actor *acts_for;            /* that one; on a worker its stream's; else NULL */
    pthread_cond_t granted;     /* the turn */
    sem_t woken;                /* the same, while the thread waits for a semaphore */
    bool has_queued;            /* something, in the call that it is in */
    bool in_observer;
    bool serves;                /* launches of kernels */
    bool sleeps;                /* by a function that ends by itself */
    bool is_main;
    int stat;                   /* what the kernel says of it; -1: not opened yet */
    atomic_ulong gil_waits;     /* odd: waits for the GIL */
    bool is_in_background;      /* userstream's own */
    bool watches;               /* such a thread: points that decisions wait for it to see */
    atomic_bool looks_again;    /* the same, in a second at most */
    atomic_ulong looks;         /* how often it has gone to sleep */
    unsigned long looks_before; /* decisions wait for its looks */
    struct Thread *next_in_background;
};

Thread *this_thread(void);
Thread *this_thread_or_null(void);
Thread *thread_new(void);
void thread_becomes(Thread *thread);    /* what this_thread() returns */
void thread_end(void *thread);
CUresult thread_push(Context *context);
void thread_ended(Thread *thread);
void thread_unlist(Thread *thread);

/* Of a green context that is current, the primary one that it is a part of. */
Context *context_current(void);
/* What is current itself. */
Context *context_on_top(void);
CUresult context_primary_retain(CUdevice device, Context **out);
void context_primary_release(CUdevice device);
Context *context_new(CUdevice device, unsigned flags);
void context_forget(Context *context);
Context *context_first(void);
CUresult context_usable(const Context *context);    /* else INVALID_CONTEXT, or its error */
CUresult context_synchronize(Context *context);     /* of a green one, its streams alone */
CUresult context_synchronize_to_free(Context *context);
CUresult context_usable_after_frees(const Context *context);
void context_fail(Context *context, CUresult error);

CUresult device_check(CUdevice device);
enum { UUID_TEXT = 41 };        /* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
void device_print_uuid(char text[UUID_TEXT], CUdevice in_machine);
/* Lets CUDA_VISIBLE_DEVICES choose among them. */
void devices_make_visible(void);
enum { NAMED_TWICE = -1 };      /* as the number of devices, of which one is in the list twice */

/* ---- injected_library.c --------------------------------------------------------------------- */

/* Gives up the lock meanwhile. Only the first call does something. */
void injected_library_load(void);

/* ---- green_contexts.c and resources.c ------------------------------------------------------- */

/* A part of the multiprocessors of a device. */
typedef struct Multiprocessors {
    CUdevice device;
    unsigned count;
    uint64_t split;             /* the call that they come from; 0: the whole device */
} Multiprocessors;

enum { MULTIPROCESSORS = 132 };

/* Its streams are streams of the primary context; only what is asked of the green context itself
 * concerns them alone. */
struct GreenContext {
    Handle handle;
    uint64_t id;
    Context *primary;
    Context *view;              /* the handle of a context that stands for it */
    Multiprocessors part;
    Stream *default_stream;     /* NULL: it was made without */
    Stream *collector;          /* as of a context */
    Stream *gate;
    GreenContext *next;
};

/* NULL: the context is no view of a green one. */
GreenContext *context_green(const Context *context);
void green_contexts_of_context_end(Context *context);
/* Whether a stream is in a part of its context; all are in the whole. */
bool stream_is_in(const Stream *stream, const GreenContext *green);
bool stream_is_default_of_green(const Stream *stream);

/* ---- queues.c and streams.c ----------------------------------------------------------------- */

enum { NULL_STREAM = 0, LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };     /* handles */
enum { STREAM_NON_BLOCKING = 1 };
enum { LOWEST_PRIORITY = 0, HIGHEST_PRIORITY = -5 };

typedef struct NodeSet {
    Node **nodes;
    size_t count;
    size_t capacity;
} NodeSet;

typedef union StreamAttribute { /* CUstreamAttrValue */
    int number;
    unsigned char bytes[64];
} StreamAttribute;

struct Stream {
    Handle handle;
    Context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t thread;            /* of a per-thread default stream: its thread; else 0 */
    bool internal;              /* takes no part in what the user sees */
    GreenContext *green;        /* that it was made in; NULL for the whole device */
    bool detached;              /* its green context was destroyed */
    bool destroyed;             /* goes when its queue is empty */
    bool has_worker;
    bool is_running;            /* its first operation */
    Actor actor;
    pthread_cond_t work;
    Operation *first;
    Operation **last;
    Point *tail;                /* of the operation queued last */
    Capture *capture;
    NodeSet dependencies;       /* in a capture: what the next node comes after */
    StreamAttribute attributes[4];
    Stream *next;               /* in its context */
};

Stream *stream_new(Context *context, unsigned flags, int priority);
Stream *stream_new_internal(Context *context);
void stream_destroy(Stream *stream);
void stream_attributes_initialize(Stream *stream);
CUresult stream_find(Stream *handle, Stream **stream);
CUresult stream_find_after_frees(Stream *handle, Stream **stream);
bool stream_is_blocking(const Stream *stream);
bool stream_is_user_made(const Stream *stream);

/* Queues an operation, or adds it to the capture. Owns it from here on, also when it fails. */
CUresult stream_submit(Stream *stream, Operation *operation);
/* Makes later work on `stream` wait for the point. */
CUresult stream_wait_for(Stream *stream, Point *point);
/* A host wait for what is queued now. */
CUresult stream_synchronize(Stream *stream);
/* Whether an error has ended the first operation. */
bool stream_work_is_lost(const Stream *stream);
/* Whether the first operation would not wait. */
bool stream_can_go_on(const Stream *stream);
/* Runs the first operation, which is one that does not wait. */
void stream_pass_first(Stream *stream);
/* NULL: an operation that waits for no point. */
const Point *operation_awaits(const Operation *operation);

/* ---- operations.c --------------------------------------------------------------------------- */

typedef enum NodeType {         /* CUgraphNodeType */
    NODE_KERNEL = 0,
    NODE_MEMCPY = 1,
    NODE_MEMSET = 2,
    NODE_HOST = 3,
    NODE_GRAPH = 4,
    NODE_EMPTY = 5,
    NODE_WAIT_EVENT = 6,
    NODE_EVENT_RECORD = 7,
    NODE_MEM_ALLOC = 10,
    NODE_MEM_FREE = 11,
    NODE_BATCH_MEM_OP = 12,
    NODE_CONDITIONAL = 13,
} NodeType;

/* Runs on the stream's worker, under the lock; an error becomes the sticky error of the context. */
typedef CUresult (*Run)(Operation *operation, Stream *stream);

struct Operation {
    Run run;
    NodeType type;
    bool runs_after_error;
    bool takes_no_turn;         /* in a schedule */
    bool (*is_ready)(const Operation *operation);   /* NULL: always */
    int references;             /* a queue's, a graph's, those of executable graphs */
    Operation *next;            /* in a queue, like the next two */
    Point *point;
    unsigned errors;            /* of its context, when it was queued */
    void (*dispose)(Operation *operation);
    union {
        Point *awaited;
        struct {
            Event *handle;
            uint64_t id;        /* as another event may have the handle by then */
        } event;
        struct {
            SharedEvent *event;
            uint64_t number;    /* of the record */
        } shared_event;
        Graph *child;
        struct Conditional *conditional;
        GraphMemory *graph_memory;
        struct GraphLaunch *graph_launch;
        int failure;
        uint64_t memory_id;
        struct {
            uint64_t memory_id;
            CUdeviceptr address;
            size_t size;
        } discarded;
        struct Copy *copy;
        struct Fill *fill;
        struct Batch *batch;
        struct Launch *launch;
        struct {
            HostFunction function;
            void *argument;
        } host;
        struct {
            void (*function)(Stream *handle, CUresult result, void *argument);
            Stream *handle;
            void *argument;
        } callback;
    };
};

Operation *operation_new(Run run, NodeType type);
Operation *operation_retain(Operation *operation);
void operation_release(Operation *operation);
Operation *operation_nothing(NodeType type);

/* ---- host_functions.c ----------------------------------------------------------------------- */

/* Calls a function of the user without the lock; one at a time in each context. */
void call_user(Context *context, HostFunction function, void *argument);
Operation *host_function_operation(HostFunction function, void *argument);

/* ---- events.c ------------------------------------------------------------------------------- */

struct Event {
    Handle handle;
    uint64_t id;
    Context *context;
    unsigned flags;
    Point *point;               /* of the last record; none before the first */
    uint64_t capture;           /* last recorded in this capture; else 0 */
    NodeSet captured;           /* what came before the record there */
    SharedEvent *shared;        /* of an event that other processes may have; else NULL */
    Event *next;                /* in the list of all events */
};

void events_of_context_free(Context *context);
void event_set_point(Event *event, Point *point);
/* In a graph: to record the event, and to wait for it, anew at each launch. */
Operation *event_record_operation(Event *event);
Operation *event_wait_operation(Event *event);

/* ---- shared_events.c ------------------------------------------------------------------------ */

SharedEvent *shared_event_new(void);        /* NULL: there can be none, like the next */
SharedEvent *shared_event_open(int process, int file, uint64_t inode);
int shared_event_file(const SharedEvent *shared);
void shared_event_release(SharedEvent *shared);
bool shared_event_pending(const SharedEvent *shared);
/* Counts as recorded from now on, and as reached when the operation runs. */
Operation *shared_event_record(SharedEvent *shared);
/* Wait for what was recorded until now. */
Operation *shared_event_wait(SharedEvent *shared);
CUresult shared_event_synchronize(SharedEvent *shared, const Context *context);
Event *event_new(Context *context, unsigned flags);

/* ---- memory.c ------------------------------------------------------------------------------- */

typedef enum MemoryKind {
    MEMORY_DEVICE = 1,
    MEMORY_MANAGED = 2,
    MEMORY_PINNED = 4,
    MEMORY_REGISTERED = 8,
} MemoryKind;

struct Memory {
    CUdeviceptr address;
    size_t size;
    MemoryKind kind;
    CUdevice device;
    Context *context;           /* none for memory of a pool */
    Pool *pool;
    GraphMemory *node;          /* of the graph that allocated it */
    size_t offset;              /* in the pool; two may have the same after a free */
    unsigned flags;
    uint64_t id;
    int file;                   /* that other processes may have; or NO_FILE */
    size_t file_offset;
    bool is_imported;           /* from another process */
    bool is_mapping;            /* of cuMemMap: only the devices with `access` reach it */
    unsigned char access[MAX_DEVICES];
    struct Advice *advice;      /* of each page of managed memory; NULL: none was given */
    bool free_is_queued;        /* by cuMemFreeAsync or by a graph */
    int users;                  /* copies under way: they run without the lock */
    bool freed;                 /* goes with its last user */
    Memory *next;
};

enum { NO_FILE = -1 };

Memory *memory_find(CUdeviceptr address);
Memory *memory_add_imported(CUdeviceptr address, size_t size, Pool *pool, MemoryKind kind,
                            CUdevice device);
Memory *memory_with_id(uint64_t id);
CUresult memory_new(size_t size, MemoryKind kind, CUdevice device, Pool *pool, unsigned flags,
                    CUdeviceptr *address);
void memory_free(Memory *memory);
void memory_free_is_queued(Memory *memory);
void memory_of_context_free(Context *context);
/* Memory up to an end, of as many mappings as it is of, is in use by one more copy or fill. */
void memory_use(Memory *memory, CUdeviceptr end);
void memory_unuse(Memory *memory, CUdeviceptr end);
size_t memory_count(void);
/* Whether the process has memory there, of whatever kind. */
bool host_has(CUdeviceptr address, size_t size);
/* Whether all of it lies in one allocation. Memory that the driver does not know is the host's. */
bool memory_contains(CUdeviceptr address, size_t size);
/* The same of what memory_find() has found at the address. */
bool memory_has(const Memory *memory, CUdeviceptr address, size_t size);
/* Whether all of it is memory for a copy or a fill. Ranges mapped side by side are one (H200). */
bool memory_spans(const Memory *memory, CUdeviceptr address, size_t size);
/* The next part of such memory up to an end; NULL: there is none. */
Memory *memory_behind(const Memory *memory, CUdeviceptr end);
/* Whether a kernel that runs in the context reaches the memory. */
bool memory_is_accessible(const Memory *memory, const Context *context);
/* The same of all memory up to an end. */
bool memory_is_accessible_to(const Memory *memory, CUdeviceptr end, const Context *context);

/* ---- pools.c -------------------------------------------------------------------------------- */

typedef struct Location {       /* CUmemLocation */
    int type;
    int id;
} Location;

enum {                          /* CUmemLocationType */
    LOCATION_NONE = 0,
    LOCATION_DEVICE = 1,
    LOCATION_HOST = 2,
    LOCATION_HOST_NUMA = 3,
    LOCATION_HOST_NUMA_CURRENT = 4,
};

struct Pool {
    Handle handle;
    Location location;
    int allocation_type;
    MemoryKind kind;
    CUdevice device;
    size_t max_size;            /* 0: as much as there is */
    int handle_types;           /* for other processes */
    int file;                   /* that they have; or NO_FILE */
    size_t file_size;
    bool is_imported;           /* from another process */
    bool is_default;
    bool destroyed;             /* goes with its last allocation */
    uint64_t release_threshold;
    size_t allocations;
    uint64_t used;
    uint64_t used_high;
    int reuse[3];
    unsigned access[MAX_DEVICES];
};

void pools_initialize(void);
void pool_account(Pool *pool, size_t size);
void pool_unaccount(Pool *pool, size_t size);
bool pool_is_accessible(const Pool *pool, CUdevice device);
/* Room in the file of a pool. 0: there is none. */
CUdeviceptr pool_reserve(Pool *pool, size_t size, size_t *offset);

/* ---- virtual_memory.c ----------------------------------------------------------------------- */

typedef struct PhysicalProperties {     /* CUmemAllocationProp */
    int type;
    int handle_types;
    Location location;
    void *metadata;
    unsigned char flags[8];
} PhysicalProperties;

struct Physical {               /* CUmemGenericAllocationHandle, as a number */
    Handle handle;
    PhysicalProperties properties;
    size_t size;
    int file;
    int references;             /* of handles, and of mappings */
    bool is_imported;
};

/* Whether cuMemAddressReserve has given away any of these addresses. */
bool is_reserved(CUdeviceptr address, size_t size);
/* A number that stands for an address: the same for all addresses of the same physical memory. */
uint64_t physical_place(CUdeviceptr address);
/* Keeps the addresses of a mapping reserved. */
void memory_unmap(CUdeviceptr address, size_t size);

/* ---- capture.c and capture_rules.c ---------------------------------------------------------- */

typedef enum CaptureMode { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED } CaptureMode;

struct Capture {
    uint64_t id;
    CaptureMode mode;
    bool invalidated;
    Graph *graph;
    bool graph_is_callers;      /* cuStreamBeginCaptureToGraph */
    Stream *origin;
    uint64_t thread;
    NodeSet left;               /* what streams did last that were destroyed since */
    Capture *next;
};

Capture *capture_first(void);
Capture *capture_find(uint64_t id);
size_t capture_count(void);
CUresult capture_add(Stream *stream, Operation *operation);
CUresult capture_join(Stream *stream, Event *event);
/* What calls meet because something is being captured. */
CUresult capture_forbids_unsafe_call(void);
CUresult capture_forbids_use_of_context(const Context *context, const GreenContext *green);
CUresult capture_forbids_events_of_context(const Context *context, const GreenContext *green);
CUresult capture_forbids_use_of_legacy(const Context *context);
CUresult capture_forbids_use_of_stream(Stream *stream);
CUresult capture_forbids_use_of_event(const Event *event);
/* Into the graph, or into one inside of it. */
bool capture_is_into(const Graph *graph);
CUresult capture_would_forbid_legacy(const Context *context);
void capture_leave(Stream *stream);

/* ---- graph_memory.c ------------------------------------------------------------------------- */

/* What an allocation in a graph has in every launch: its address. Each launch makes the memory
 * anew; that lives until it is freed, by a graph or otherwise, whatever becomes of the graph. */
struct GraphMemory {
    CUdeviceptr address;
    size_t size;
    MemoryKind kind;
    CUdevice device;
    int references;             /* of operations, and of the memory that launches made */
    Memory *live;               /* what the newest launch made, until its free is queued */
    bool is_mapped;             /* counted as used by graphs */
    enum { UNTOUCHED, MADE, FREED } checked;    /* by what comes before in a launch */
    GraphMemory *next;
};

CUresult graph_memory_allocation(size_t size, MemoryKind kind, CUdevice device,
                                 Operation **operation);
CUresult graph_memory_free(CUdeviceptr address, const Graph *graph, Operation **operation);
bool graph_memory_contains(CUdeviceptr address, size_t size);
GraphMemory *graph_memory_retain(GraphMemory *memory);
void graph_memory_release(GraphMemory *memory);

/* What a launch does to memory, in the order of its allocations and frees. */
typedef struct MemoryEffect {
    uint64_t id;                /* of the memory that is made or freed */
    uint64_t before;            /* of what an earlier launch left, freed when this one makes it */
} MemoryEffect;

CUresult graph_memory_check(Operation *const *operations, size_t count, bool frees_what_is_left);
void graph_memory_take(Operation *const *operations, size_t count, MemoryEffect *effects);
void graph_memory_run(const Operation *operation, const MemoryEffect *effect);
void graph_memory_map(Operation *const *operations, size_t count);

/* For graph_memory.c alone. */
Memory *memory_of_graph(GraphMemory *node);
bool memory_is_there(CUdevice device, size_t size);
void memory_fill_anew(Memory *memory);
CUdeviceptr memory_reserve(size_t size);
void memory_unreserve(CUdeviceptr address, size_t size);

/* ---- conditional_nodes.c -------------------------------------------------------------------- */

/* A value that chooses what a conditional node does. */
typedef struct Condition {
    uint64_t handle;
    const Context *context;
    bool has_default;           /* each launch begins with it; else with what the last one left */
    unsigned default_value;
    unsigned value;             /* in a plan */
    bool is_used;               /* by a node */
} Condition;

typedef struct ConditionSet {
    Condition *conditions;
    size_t count;
} ConditionSet;

Condition *condition_find(const ConditionSet *set, uint64_t handle);
void conditions_append(ConditionSet *set, Condition condition);
void conditions_clear(ConditionSet *set);

typedef enum ConditionalType {  /* CUgraphConditionalNodeType */
    CONDITIONAL_IF,
    CONDITIONAL_WHILE,
    CONDITIONAL_SWITCH,
} ConditionalType;

/* One node. */
typedef struct Conditional {
    uint64_t condition;
    const Context *context;
    ConditionalType type;
    unsigned count;
    Graph **bodies;             /* programs get this array */
    struct Steps *steps;        /* in a plan, of each body */
} Conditional;

Operation *conditional_copy(const Operation *operation);

/* ---- plans.c -------------------------------------------------------------------------------- */

/* What is done one after the other, in an order that respects the dependencies. */
typedef struct Steps {
    Operation **operations;     /* the plan's own */
    size_t count;
} Steps;

/* What a launch does. Updates of an executable graph give it another plan. */
typedef struct Plan {
    int references;             /* of an executable graph, and of launches under way */
    Graph *graph;               /* a copy of what was instantiated */
    Steps steps;
    size_t memory_operations;
    ConditionSet conditions;
} Plan;

typedef enum PlanResult {       /* CUgraphInstantiateResult */
    PLAN_SUCCESS = 0,
    PLAN_ERROR = 1,
    PLAN_INVALID_STRUCTURE = 2,
    PLAN_CONDITION_UNUSED = 5,
} PlanResult;

PlanResult plan_new(Plan **out, const Graph *graph);
Plan *plan_retain(Plan *plan);
void plan_release(Plan *plan);
CUresult plan_run(Plan *plan, const MemoryEffect *effects, Stream *stream);
/* Of the plan that the stream runs now. NULL: that is none, or it has no such condition. */
Condition *condition_of_running_plan(const Stream *stream, uint64_t handle);

/* ---- graphs.c, executable_graphs.c, user_objects.c ------------------------------------------ */

struct Node {
    Handle handle;
    uint64_t id;
    uint64_t original;          /* in a copy of a graph: the id of the node that this is one of */
    Graph *graph;
    Operation *operation;
    NodeSet dependencies;
    size_t index;               /* in its graph */
    bool is_disabled;           /* in an executable graph */
    struct KernelAttributes *attributes;    /* of a kernel; NULL: all are the default */
    uint64_t mark;              /* of the last search that came here */
};

struct Graph {
    Handle handle;
    uint64_t id;
    Graph *parent;              /* has the node that this one belongs to, and ends with */
    NodeSet nodes;
    ConditionSet conditions;
    struct Retained *retained;  /* user objects */
    GraphExec *instance;        /* of a graph that allocates memory, the newest one */
    uint64_t instance_id;       /* as another one may have the handle by now */
};

struct GraphExec {
    Handle handle;
    uint64_t id;
    uint64_t flags;
    Plan *plan;
    Point *last;                /* of its newest launch */
};

struct UserObject {
    Handle handle;
    unsigned references;
    void *object;
    HostFunction destroy;
};

/* User objects that a graph, or an executable graph, keeps. */
void retained_add(struct Retained **retained, UserObject *object, unsigned count);
void retained_add_all(struct Retained **retained, struct Retained *from);
void retained_release(struct Retained *retained);
bool user_objects_are_due(void);
/* Calls their destructors; not to be called under the lock. */
void user_objects_destroy(void);

Graph *graph_new(void);
Graph *graph_copy(const Graph *graph);
/* Whether the nodes, their order and their dependencies are the same, also in graphs inside of it,
 * and what cannot be changed is. */
bool graph_can_become(const Graph *old, const Graph *new);
bool graph_has_conditionals(const Graph *graph);
/* Nodes that allocate or free memory, also in graphs inside of it. */
bool graph_has_memory(const Graph *graph);
void graph_free(Graph *graph);
/* Adds a node for a function of the driver that does. Owns the operation, also when it fails. */
CUresult graph_add_checked(Node **out, Graph *graph, Node **dependencies, size_t count,
                           Operation *operation);
Operation *child_operation(Graph *child);
/* The graphs inside an operation: a child, or the bodies of a conditional node. */
size_t operation_graphs(const Operation *operation, Graph *const **graphs);
/* What a node does, from the structure that describes one of its type. */
bool copy_is_line(const Operation *operation);      /* or no copy */
CUresult kernel_node_operation(const void *parameters, Operation **operation);
CUresult kernel_node_check_context(const void *parameters);
CUresult copy_node_operation(const void *parameters, const Context *context,
                             Operation **operation);
CUresult fill_node_operation(const void *parameters, const Context *context,
                             Operation **operation);
CUresult conditional_node_operation(const Graph *graph, void *parameters, Operation **operation);
CUresult node_operation_of(NodeType type, const Graph *graph, void *parameters,
                           Operation **operation);
CUresult batch_node_operation(const void *parameters, Operation **operation);
void conditional_describe(const Operation *operation, void *parameters);
/* Let a node do something else: in a graph, and in an executable one. Own the operation. */
CUresult node_set(Node *node, Operation *operation);
CUresult node_set_instantiated(GraphExec *exec, const Node *node, Operation *operation);
/* NULL: it is no node, or one of another type. */
Operation *node_operation(const Node *node, NodeType type);
Node *graph_add(Graph *graph, Operation *operation, const NodeSet *dependencies);
void graph_remove(Node *node);
/* The attributes of a kernel go with its node. */
void kernel_attributes_copy(Node *to, const Node *from);
bool nodes_are_in(Node *const *nodes, size_t count, const Graph *graph);
/* Marks the nodes and all that comes before them: gives the mark. */
uint64_t nodes_mark_back(const NodeSet *set);

void nodes_append(NodeSet *set, Node *node);
void nodes_add(NodeSet *set, Node *node);   /* unless it is in it */
void nodes_set(NodeSet *set, const NodeSet *from);
bool nodes_contain(const NodeSet *set, const Node *node);
void nodes_clear(NodeSet *set);
void nodes_remove(NodeSet *set, const Node *node);

/* ---- modules.c and explanations.c ------------------------------------------------------------ */

void modules_of_context_free(const Context *context);

/* What the name and the text of a result say beyond the driver's words. They stay. */
typedef struct Explanation {
    CUresult result;
    char *name;
    char *text;
    struct Explanation *next;
} Explanation;

const Explanation *explanation_new(CUresult result, const char *text);
/* Of this thread's last call, or of a context that has failed. Takes the lock. */
const Explanation *explanation_of(CUresult result);
void kernels_reset(void);

/* ---- side_door.c ---------------------------------------------------------------------------- */

/* The result that is injected into this call, or CUDA_SUCCESS. */
CUresult fault_for(Function *function);

extern long waiting_for_values;     /* cuStreamWaitValue operations not yet satisfied */

#endif
