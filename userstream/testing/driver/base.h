/* What every file stands on: how a driver function is defined, the lock, points and handles. */
#ifndef USERSTREAM_BASE_H
#define USERSTREAM_BASE_H

#define _DEFAULT_SOURCE          /* POSIX, and MAP_ANONYMOUS */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "results.h"

enum { MAX_DEVICES = 16, MAX_PUSHED_CONTEXTS = 64 };

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void (*HostFunction)(void *argument);

typedef struct Array Array;
typedef struct Capture Capture;
typedef struct Context Context;
typedef struct Entry Entry;
typedef struct Event Event;
typedef struct Graph Graph;
typedef struct GraphExec GraphExec;
typedef struct GraphMemory GraphMemory;
typedef struct GreenContext GreenContext;
typedef struct Kernel Kernel;
typedef struct Library Library;
typedef struct Memory Memory;
typedef struct MipmappedArray MipmappedArray;
typedef struct Module Module;
typedef struct Node Node;
typedef struct Operation Operation;
typedef struct Physical Physical;
typedef struct Pool Pool;
typedef struct SharedEvent SharedEvent;
typedef struct Stream Stream;
typedef struct Texture Texture;
typedef struct Thread Thread;
typedef struct UserObject UserObject;

/* ---- lookup.c: the functions of the driver -------------------------------------------------- */

/* One symbol. Those of one name (cuStreamGetCtx, cuStreamGetCtx_v2) share faults and counter. */
typedef struct Function {
    const char *name;
    const char *exported;       /* the name with its suffix */
    int version;                /* the CUDA version that introduced this signature */
    void *address;
    enum Availability {
        AFTER_INIT,
        ANYTIME,                /* before cuInit too */
        IN_CHILD,               /* after cuInit, and in a forked child */
    } available;
    unsigned id;                /* what an observer is told: counted from 0 */
    long calls;
    struct Fault *faults;
    struct Function *shared;    /* the first function of this name: has the calls and the faults */
    struct Function *next;
} Function;

void function_register(Function *function);
Function *function_find(const char *name);
Function *function_first(void);

/* Takes the lock. Anything but CUDA_SUCCESS is the answer to the call. */
CUresult call_enter(Function *function);
void call_leave(void);

/* ---- observer.c: who is told of every call -------------------------------------------------- */

typedef enum Site { ENTER, LEAVE } Site;

/* `words` are the arguments in the order of C, each extended to 64 bits; `context` is the current
 * one. `result` counts when the call is left. */
typedef void (*Observer)(Site site, unsigned function, const uint64_t *words, size_t count,
                         CUresult result, const void *context);

extern _Atomic(Observer) observer;

void observer_tell(Site site, const Function *function, const uint64_t *words, size_t count,
                   CUresult result);

/* WORDS(a, b) is (uint64_t)(a), (uint64_t)(b). The count of the arguments picks one of WORDS_n. */
#define WORDS_1(a) (uint64_t)(a)
#define WORDS_2(a, ...) (uint64_t)(a), WORDS_1(__VA_ARGS__)
#define WORDS_3(a, ...) (uint64_t)(a), WORDS_2(__VA_ARGS__)
#define WORDS_4(a, ...) (uint64_t)(a), WORDS_3(__VA_ARGS__)
#define WORDS_5(a, ...) (uint64_t)(a), WORDS_4(__VA_ARGS__)
#define WORDS_6(a, ...) (uint64_t)(a), WORDS_5(__VA_ARGS__)
#define WORDS_7(a, ...) (uint64_t)(a), WORDS_6(__VA_ARGS__)
#define WORDS_8(a, ...) (uint64_t)(a), WORDS_7(__VA_ARGS__)
#define WORDS_9(a, ...) (uint64_t)(a), WORDS_8(__VA_ARGS__)
#define WORDS_10(a, ...) (uint64_t)(a), WORDS_9(__VA_ARGS__)
#define WORDS_11(a, ...) (uint64_t)(a), WORDS_10(__VA_ARGS__)
#define WORDS_12(a, ...) (uint64_t)(a), WORDS_11(__VA_ARGS__)
#define WORDS_13(a, ...) (uint64_t)(a), WORDS_12(__VA_ARGS__)
#define WORDS_14(a, ...) (uint64_t)(a), WORDS_13(__VA_ARGS__)
#define WORDS_15(a, ...) (uint64_t)(a), WORDS_14(__VA_ARGS__)
#define WORDS_16(a, ...) (uint64_t)(a), WORDS_15(__VA_ARGS__)
#define PICK_WORDS(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, picked, ...) picked
#define WORDS(...) \
    __VA_OPT__(PICK_WORDS(__VA_ARGS__, WORDS_16, WORDS_15, WORDS_14, WORDS_13, WORDS_12, \
                          WORDS_11, WORDS_10, WORDS_9, WORDS_8, WORDS_7, WORDS_6, WORDS_5, \
                          WORDS_4, WORDS_3, WORDS_2, WORDS_1, )(__VA_ARGS__))

/* The first word is not an argument: there is no array of none. */
#define TELL_OBSERVER(site, symbol, arguments, result) \
    do { \
        if (atomic_load_explicit(&observer, memory_order_relaxed)) { \
            const uint64_t words[] = {0, WORDS arguments}; \
            observer_tell(site, &function_##symbol, words + 1, sizeof words / sizeof *words - 1, \
                          result); \
        } \
    } while (0)

/* Defines a driver function. The body that follows runs under the lock and returns the result. An
 * observer is `told` the arguments, or of a structure among them its address. */
#define DEFINE_FUNCTION_TOLD(symbol, plain_name, since, when, parameters, arguments, told) \
    CUresult symbol parameters; \
    static CUresult locked_##symbol parameters; \
    static Function function_##symbol = { \
        .name = #plain_name, .exported = #symbol, .version = since, .address = (void *)symbol, \
        .available = when}; \
    __attribute__((constructor)) static void register_##symbol(void) { \
        function_register(&function_##symbol); \
    } \
    __attribute__((visibility("default"))) CUresult symbol parameters { \
        TELL_OBSERVER(ENTER, symbol, told, CUDA_SUCCESS); \
        CUresult result = call_enter(&function_##symbol); \
        if (result == CUDA_SUCCESS) \
            result = locked_##symbol arguments; \
        call_leave(); \
        TELL_OBSERVER(LEAVE, symbol, told, result); \
        return result; \
    } \
    static CUresult locked_##symbol parameters

#define DEFINE_FUNCTION(symbol, plain_name, since, when, parameters, arguments) \
    DEFINE_FUNCTION_TOLD(symbol, plain_name, since, when, parameters, arguments, arguments)
#define DRIVER_FUNCTION(name, since, parameters, arguments) \
    DEFINE_FUNCTION(name, name, since, AFTER_INIT, parameters, arguments)
#define DRIVER_FUNCTION_AS(symbol, name, since, parameters, arguments) \
    DEFINE_FUNCTION(symbol, name, since, AFTER_INIT, parameters, arguments)
#define DRIVER_FUNCTION_ANYTIME(name, since, parameters, arguments) \
    DEFINE_FUNCTION(name, name, since, ANYTIME, parameters, arguments)

/* Marks a parameter that the simulation has no use for. */
#define UNUSED(parameter) (void)(parameter)

/* ---- state.c: the lock, the settings, points in a queue ------------------------------------- */

typedef struct Settings {
    int devices;
    int driver_version;
    size_t memory;              /* bytes of each device */
} Settings;

extern Settings settings;
extern bool initialized;        /* cuInit has succeeded */
extern bool forked;             /* a child of a process that had initialized the driver */
extern bool shut_down;          /* the process exits: host waits return, no host function runs */

void lock(void);
void unlock(void);
bool is_lock_wanted(void);      /* by another thread */
void shut_down_by_this_thread(void);
void end_by_this_thread(void);
void thread_enters(void);
void thread_leaves(void);
double now(void);               /* seconds */
void time_from_now(struct timespec *time, clockid_t clock, int microseconds);
bool time_is_before(const struct timespec *one, const struct timespec *other);
void progress(void);            /* wake everybody who waits for something to change */
void wait_for_progress(void);
void wait_for_progress_or(int microseconds);    /* maybe longer, in a schedule */
void wait_with_turn(void);      /* for progress: nobody else goes on meanwhile in a schedule */
void condition_initialize(pthread_cond_t *condition);
void wait_on(pthread_cond_t *condition);
void wait_on_or(pthread_cond_t *condition, int microseconds);
uint64_t new_id(void);

/* The place of an operation in its queue; done once the operation has run or was dropped. */
typedef struct Point {
    int references;
    bool done;
    double milliseconds;        /* when it was done, for cuEventElapsedTime */
    bool is_watched;            /* by a thread of userstream; see schedule.c, like the next one */
    unsigned unheard;
} Point;

Point *point_new(void);
Point *point_retain(Point *point);
void point_release(Point *point);
void point_reach(Point *point);
bool point_pending(const Point *point);
CUresult point_wait(Point *point, const Context *context);

/* ---- handles.c: objects behind handles ------------------------------------------------------ */

typedef enum Kind {
    KIND_CONTEXT,
    KIND_STREAM,
    KIND_EVENT,
    KIND_GRAPH,
    KIND_NODE,
    KIND_GRAPH_EXEC,
    KIND_GREEN_CONTEXT,
    KIND_POOL,
    KIND_USER_OBJECT,
    KIND_LIBRARY,
    KIND_KERNEL,
    KIND_MODULE,
    KIND_ENTRY,
    KIND_ARRAY,
    KIND_MIPMAPPED_ARRAY,
    KIND_TEXTURE,
    KIND_SURFACE,
    KIND_PHYSICAL,
    KINDS,
} Kind;

typedef struct Handle {         /* the first member of every object with a handle */
    bool live;                  /* and not hidden */
    struct Handle *next_free;
} Handle;

void *handle_new(Kind kind);    /* zeroed; the handle freed last is used first, as drivers do */
void handle_free(Kind kind, void *object);
/* The driver's own: no number that a program passes names it, not even a stale handle. */
void handle_hide(void *object);
bool handle_is(Kind kind, const void *object);
size_t handle_count(Kind kind);

#endif
