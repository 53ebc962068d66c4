/* The compiled core: sequences of driver calls as one call from Python.
 *
 * There is neither a header of CUDA nor a link with it: `load` is given the addresses of the
 * functions. A function that may fail returns a `Result`: 0, CAPTURED, or the number of the driver
 * function that failed << 32 | its CUresult. ../core.py turns results into exceptions; it reads
 * names and constants from the module, so that they are stated only here.
 *
 * driver.c     the functions of the driver, arguments, queries
 * account.c    on whose account a thread calls the driver
 * calls.c      calls with another current context or capture mode
 * events.c     pools of events, and points: events recorded behind work
 * bells.c      wake-ups of threads that wait for points
 * held.c       objects held until a point is passed
 * edges.c      lanes, edges, objects in use
 * copies.c     copies to page-locked memory
 * pointers.c   attributes of addresses
 * leases.c     page-locked memory that is lent
 * module.c     the module: each file adds its own part */
#ifndef USERSTREAM_CORE_H
#define USERSTREAM_CORE_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python has no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

typedef int CUresult;
typedef void *CUstream;
typedef void *CUevent;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;

enum { CAPTURE_STATUS_NONE = 0, CAPTURE_MODE_RELAXED = 2, NOT_READY = 600 };

/* -- the functions of the driver ------------------------------------------------------------- */

/* The number in a Result, the name, the variable, and the parameters (of CUDA 12.0, as
 * `cuGetProcAddress` is asked). A function is added here and nowhere else. */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(EXCHANGE_MODE, "cuThreadExchangeStreamCaptureMode", exchange_mode, (int *mode))              \
    X(IS_CAPTURING, "cuStreamIsCapturing", is_capturing, (CUstream stream, int *status))           \
    X(QUERY_STREAM, "cuStreamQuery", query_stream, (CUstream stream))                              \
    X(QUERY_EVENT, "cuEventQuery", query_event, (CUevent event))                                   \
    X(SYNCHRONIZE_EVENT, "cuEventSynchronize", synchronize_event, (CUevent event))                 \
    X(RECORD_EVENT, "cuEventRecord", record_event, (CUevent event, CUstream stream))               \
    X(WAIT_EVENT, "cuStreamWaitEvent", wait_event,                                                 \
      (CUstream stream, CUevent event, unsigned flags))                                            \
    X(CREATE_EVENT, "cuEventCreate", create_event, (CUevent * event, unsigned flags))              \
    X(DESTROY_EVENT, "cuEventDestroy", destroy_event, (CUevent event))                             \
    X(CREATE_STREAM, "cuStreamCreate", create_stream, (CUstream * stream, unsigned flags))         \
    X(GET_CURRENT, "cuCtxGetCurrent", get_current, (CUcontext * context))                          \
    X(SET_CURRENT, "cuCtxSetCurrent", set_current, (CUcontext context))                            \
    X(COPY_MEMORY, "cuMemcpyAsync", copy_memory,                                                   \
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream))                            \
    X(GET_ATTRIBUTES, "cuPointerGetAttributes", get_attributes,                                    \
      (unsigned count, const int *which, void **out, CUdeviceptr at))                              \
    X(GET_CONTEXT, "cuStreamGetCtx", get_context, (CUstream stream, CUcontext *context))

#define NUMBER_OF(number, name, function, parameters) number,
enum { DRIVER_FUNCTIONS(NUMBER_OF) FUNCTION_COUNT };
#undef NUMBER_OF

#define DECLARATION_OF(number, name, function, parameters) extern CUresult(*function) parameters;
DRIVER_FUNCTIONS(DECLARATION_OF)
#undef DECLARATION_OF

/* -- results --------------------------------------------------------------------------------- */

/* CAPTURED: nothing was queued, since a stream may be captured or another context is current.
 * DUE: done, and `sweep_if_due` is to be called. FAILED: with a Python exception. */
enum { CAPTURED = -1, DUE = -2, FAILED = -3 };
enum { TRIES = 10 }; /* of a restoration that fails */
#define SWEEP_SECONDS 200e-6

typedef long long Result;

static inline Result failed(int function, CUresult status)
{
    return status ? (Result)function << 32 | (uint32_t)status : 0;
}

Result relax(int *mode);
Result restore(int mode, Result result);
int is_free(CUstream stream);
uint64_t nanoseconds(void);
Result enter_context(CUcontext context, CUcontext *before);
Result leave_context(CUcontext context, CUcontext before, Result result);

/* -- Python ---------------------------------------------------------------------------------- */

/* A slot has a void pointer for either kind, which ISO C has no cast for. */
#define FUNCTION(name) __extension__(void *)name

/* A library that is built with the headers of Python 3.12 or later also runs on Python 3.11, which
 * counts the references of these objects; the macros of those headers do not. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)

/* A row of a table of methods. */
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

/* The exception that is on its way, while something else is done. */
#ifdef Py_LIMITED_API /* of 3.11, which has only what is deprecated since 3.12 */
typedef struct {
    PyObject *kind, *value, *trace;
} Exception;

static inline Exception hold_exception(void)
{
    Exception held;
    PyErr_Fetch(&held.kind, &held.value, &held.trace);
    return held;
}

static inline void go_on_with(Exception held)
{
    PyErr_Restore(held.kind, held.value, held.trace);
}

static inline PyObject *exception_value(Exception *held)
{
    PyErr_NormalizeException(&held->kind, &held->value, &held->trace);
    return held->value;
}

static inline void drop_exception(Exception held)
{
    Py_XDECREF(held.kind);
    Py_XDECREF(held.value);
    Py_XDECREF(held.trace);
}
#else
typedef PyObject *Exception;

static inline Exception hold_exception(void)
{
    return PyErr_GetRaisedException();
}

static inline void go_on_with(Exception held)
{
    PyErr_SetRaisedException(held);
}

static inline PyObject *exception_value(Exception *held)
{
    return *held;
}

static inline void drop_exception(Exception held)
{
    Py_XDECREF(held);
}
#endif

int address(PyObject *handle, void **out);
int is_loaded(void);
int addresses(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, void **out);
int append(PyObject *deque, PyObject *item);
PyObject *raise_result(Result result, PyObject *stream);
PyObject *call_with_rest(PyObject *args, Py_ssize_t first);

/* The account of the calling thread: see account.c. Returns the account before. The last one is for
 * native threads whose calls only wake up others: a recorder leaves them out. */
enum { PROGRAM, FUTURE, HOUSEKEEPING, ACCOUNT_COUNT, NOBODY = ACCOUNT_COUNT };
unsigned char set_account_of_thread(unsigned char wanted);
void set_own_account(unsigned char wanted);

/* The events of one context. Thread-safe without a lock: the ends of a deque are. A pool that does
 * not keep its events destroys each event that is given back. */
typedef struct {
    PyObject ob_base;
    CUcontext context;
    char keeps;
    PyObject *free;   /* a deque: events that may be recorded */
    char may_block;   /* whether there may be a blocking event: see `claim_blocking` */
    CUevent blocking; /* that event, once it is created */
    CUstream stream;  /* on which it is recorded behind other events, once it is created */
    char is_pending;  /* whether it may be pending */
    _Atomic char is_claimed;
    struct Point *owner; /* the point that has claimed it; not a reference */
    double asked;        /* when that point was last asked about: see `reclaim_blocking` */
} EventPool;

int is_pool(PyObject *object);
PyObject *take_event(EventPool *pool, CUevent *handle, Result *result);
int give_event(EventPool *pool, PyObject *event);
int ends_context(CUresult status);

/* The point that the work of a target had reached when an event was recorded. The event returns to
 * its pool with the last reference to the point. */
typedef struct Point {
    PyObject ob_base;
    EventPool *pool;
    PyObject *event;
    CUevent handle;
    PyObject *target;    /* a lane, or the work on a device */
    double began, ended; /* the times before and after the record */
    char in_order;       /* whether later points of the target, a lane, complete no sooner */
    char is_blocking;    /* whether the event is the blocking one of the pool */
    _Atomic char is_passed;
} Point;

extern PyTypeObject *point_type;

Point *new_point(EventPool *pool, PyObject *event, PyObject *target, double began);

Py_ssize_t count_passed(Point *const *points, Py_ssize_t count, int or_ended);
double seconds(void);
int has_waiter(CUevent event);
int notify(PyObject *bell, CUevent event);
int is_bell(PyObject *object);

/* What these functions read of a lane, which extends it. */
typedef struct {
    PyObject ob_base;
    unsigned long long raw_handle;  /* the stream; 0 once the lane is closed */
    unsigned long long raw_context; /* the context of the stream */
    char is_context_independent;    /* whether the handle names the stream in every context */
    PyObject *pool; /* the EventPool of the context */
    PyObject *held; /* a HeldQueue; None at first */
    double swept;   /* when `held` was last swept */
} LaneState;

enum { PER_THREAD = 2 }; /* the handle that names another stream in each thread */

extern PyTypeObject *lane_type;
extern PyObject *queues; /* a set: the HeldQueues of lanes that hold something */

int is_lane(PyObject *object);
int is_ticket(PyObject *object);
int report_edge(PyObject *destination, PyObject *source);
int has_edge_listeners(void);
int is_held_queue(PyObject *object);
int hold(PyObject *queue, Point *point, PyObject *objects);
Result hold_behind(PyObject *waited, PyObject *source, PyObject *objects, Point *given);
Result two_lanes(PyObject *object, PyObject *lanes[2]);

/* -- the parts of the module ----------------------------------------------------------------- */

/* Each adds its functions, types and constants; -1 with an exception. Called again if the module is
 * imported again: types and sets are made once. */
int add_driver(PyObject *module);
int add_account(PyObject *module);
int add_calls(PyObject *module);
int add_events(PyObject *module);
int add_bells(PyObject *module);
int add_held(PyObject *module);
int add_edges(PyObject *module);
int add_copies(PyObject *module);
int add_pointers(PyObject *module);
int add_leases(PyObject *module);

#endif
