/* Sequences of driver calls as one call from Python: what they cost is then what the driver costs.
 *
 * Neither a header of CUDA nor a link with it: `load` is given the addresses of the functions.
 * pure.py has the same functions in Python, and ../_engine/pure.py those that take lanes. They are
 * the reference; `tests/driver/test_native.py` and `tests/driver/test_fused.py` run both.
 *
 * A result is 0, or the number of the function that failed << 32 | its CUresult: see `named`. */

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python has no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef void *CUstream;
typedef void *CUevent;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;

enum { CAPTURE_STATUS_NONE = 0, CAPTURE_MODE_RELAXED = 2, NOT_READY = 600 };

/* The functions, in the order of FUNCTIONS in pure.py. */
static CUresult (*exchange_mode)(int *mode);
static CUresult (*is_capturing)(CUstream stream, int *status);
static CUresult (*query_stream)(CUstream stream);
static CUresult (*query_event)(CUevent event);
static CUresult (*record_event)(CUevent event, CUstream stream);
static CUresult (*wait_event)(CUstream stream, CUevent event, unsigned flags);
static CUresult (*get_current)(CUcontext *context);
static CUresult (*copy_memory)(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
static CUresult (*get_attributes)(unsigned count, const int *which, void **out, CUdeviceptr at);
static CUresult (*get_context)(CUstream stream, CUcontext *context);

enum { EXCHANGE_MODE, IS_CAPTURING, QUERY_STREAM, QUERY_EVENT, RECORD_EVENT, WAIT_EVENT };
enum { GET_CURRENT = WAIT_EVENT + 1, COPY_MEMORY, GET_ATTRIBUTES, GET_CONTEXT, FUNCTION_COUNT };
enum { CAPTURED = -1, DUE = -2, FAILED = -3, TRIES = 10 }; /* `FAILED`: with an exception */
#define SWEEP_SECONDS 200e-6

typedef long long Result;

static Result failed(int function, CUresult status)
{
    return status ? (Result)function << 32 | (uint32_t)status : 0;
}

/* The capture mode of the calling thread, relaxed between these two: a query then leaves the
 * captures of other threads alone. The mode is restored whatever the query said. */
static Result relax(int *mode)
{
    *mode = CAPTURE_MODE_RELAXED;
    return failed(EXCHANGE_MODE, exchange_mode(mode));
}

static Result restore(int mode, Result result)
{
    CUresult status = 0;
    for (int i = 0; i < TRIES; i++) { /* the next one mends what is of the moment: restoring.py */
        int before = mode;
        status = exchange_mode(&before);
        if (!status)
            return result;
    }
    return failed(EXCHANGE_MODE, status);
}

static int is_free(CUstream stream)
{
    int status;
    return is_capturing(stream, &status) == 0 && status == CAPTURE_STATUS_NONE;
}

/* -- Python ---------------------------------------------------------------------------------- */

/* A slot has a void pointer for either kind, which ISO C has no cast for. */
#define FUNCTION(name) __extension__(void *)name

/* The exception that is on its way, while something else is done. */
#ifdef Py_LIMITED_API /* of 3.11, which has only what is deprecated since 3.12 */
typedef struct {
    PyObject *kind, *value, *trace;
} Exception;

static Exception hold_exception(void)
{
    Exception held;
    PyErr_Fetch(&held.kind, &held.value, &held.trace);
    return held;
}

static void go_on_with(Exception held)
{
    PyErr_Restore(held.kind, held.value, held.trace);
}
#else
typedef PyObject *Exception;

static Exception hold_exception(void)
{
    return PyErr_GetRaisedException();
}

static void go_on_with(Exception held)
{
    PyErr_SetRaisedException(held);
}
#endif

/* -- the account ----------------------------------------------------------------------------- */

/* On whose account the calling thread calls the driver. A recorder reads it in each driver call,
 * without the GIL: a query whose answer the program never hears orders nothing in the program. */
enum { PROGRAM, FUTURE, HOUSEKEEPING, ACCOUNT_COUNT };

static _Thread_local unsigned char account; /* PROGRAM in threads that userstream does not know */

static unsigned char *account_of_thread(void)
{
    return &account;
}

static PyObject *account_address(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromVoidPtr(FUNCTION(account_of_thread));
}

static int as_account(PyObject *number)
{
    long wanted = PyLong_AsLong(number);
    if (wanted >= 0 && wanted < ACCOUNT_COUNT)
        return (int)wanted;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "there is no account %ld", wanted);
    return -1;
}

static PyObject *set_account(PyObject *module, PyObject *number)
{
    (void)module;
    int wanted = as_account(number);
    if (wanted < 0)
        return NULL;
    account = (unsigned char)wanted;
    Py_RETURN_NONE;
}

/* No Python code runs between the change and the call, nor between the call and the restoration: a
 * signal handler that raises there would leave the thread on another account. */
static PyObject *on_account(PyObject *module, PyObject *args)
{
    (void)module;
    Py_ssize_t count = PyTuple_Size(args);
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "on_account() takes an account, a function and arguments");
        return NULL;
    }
    int wanted = as_account(PyTuple_GetItem(args, 0));
    PyObject *rest = wanted < 0 ? NULL : PyTuple_GetSlice(args, 2, count);
    if (!rest)
        return NULL;
    unsigned char before = account;
    account = (unsigned char)wanted;
    PyObject *result = PyObject_Call(PyTuple_GetItem(args, 1), rest, NULL);
    account = before;
    Py_DECREF(rest);
    return result;
}

/* -- arguments ------------------------------------------------------------------------------- */

static int address(PyObject *handle, void **out)
{
    if (PyLong_Check(handle)) {
        *out = PyLong_AsVoidPtr(handle);
    } else { /* a handle of cuda.bindings */
        PyObject *number = PyNumber_Long(handle);
        if (!number)
            return 0;
        *out = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
    }
    return *out || !PyErr_Occurred();
}

static int is_loaded(void)
{
    if (!get_context)
        PyErr_SetString(PyExc_RuntimeError, "the driver's functions have not been loaded");
    return get_context != NULL;
}

static int addresses(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, void **out)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %zd", given, wanted);
        return 0;
    }
    if (!is_loaded())
        return 0;
    for (Py_ssize_t i = 0; i < wanted; i++) {
        if (!address(args[i], &out[i]))
            return 0;
    }
    return 1;
}

/* What these functions read of a lane, which extends it. */
typedef struct {
    PyObject ob_base;
    unsigned long long raw_handle;  /* the stream; 0 once the lane is closed */
    unsigned long long raw_context; /* the context of the stream */
    char is_context_independent;    /* whether the handle names the stream in every context */
    PyObject *free; /* a deque: events of the context that may be recorded */
    PyObject *held; /* a deque: objects held until the stream has passed a point; None at first */
    double swept;   /* when `held` was last swept */
} LaneState;

static PyTypeObject *lane_type;

/* -- the functions --------------------------------------------------------------------------- */

/* Where each is kept. ISO C has no cast from an object's address to a function's. */
static void *const functions[FUNCTION_COUNT] = {
    [EXCHANGE_MODE] = &exchange_mode,
    [IS_CAPTURING] = &is_capturing,
    [QUERY_STREAM] = &query_stream,
    [QUERY_EVENT] = &query_event,
    [RECORD_EVENT] = &record_event,
    [WAIT_EVENT] = &wait_event,
    [GET_CURRENT] = &get_current,
    [COPY_MEMORY] = &copy_memory,
    [GET_ATTRIBUTES] = &get_attributes,
    [GET_CONTEXT] = &get_context,
};

static PyObject *load(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *found[FUNCTION_COUNT];
    if (count != FUNCTION_COUNT) {
        PyErr_Format(PyExc_TypeError, "%zd functions were given, not %d", count, FUNCTION_COUNT);
        return NULL;
    }
    for (int i = 0; i < FUNCTION_COUNT; i++) {
        if (!address(args[i], &found[i]))
            return NULL;
        if (!found[i]) {
            PyErr_Format(PyExc_ValueError, "function %d has no address", i);
            return NULL;
        }
    }
    for (int i = 0; i < FUNCTION_COUNT; i++)
        memcpy(functions[i], &found[i], sizeof found[i]);
    Py_RETURN_NONE;
}

/* The GIL is released in each function below. Even a query may find a lock of the driver held by a
 * thread that waits for the GPU (a free does), and that GPU may wait for a thread of Python. */

static PyObject *are_free(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *stream[2];
    int answer;
    if (!addresses(args, count, 2, stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    answer = is_free(stream[0]) && is_free(stream[1]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(answer);
}

static PyObject *is_in(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *given[2]; /* stream, context */
    CUcontext context = NULL;
    CUresult status;
    if (!addresses(args, count, 2, given))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = get_context(given[0], &context);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!status && context == given[1]);
}

static PyObject *query(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *stream;
    int mode;
    Result result = CAPTURED;
    if (count == 1 && PyObject_TypeCheck(args[0], lane_type)) {
        LaneState *lane = (LaneState *)args[0];
        stream = (void *)(uintptr_t)lane->raw_handle;
        if (!lane->is_context_independent || !stream)
            return PyLong_FromLong(CAPTURED);
        if (!is_loaded())
            return NULL;
    } else if (!addresses(args, count, 1, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_free(stream)) {
        result = relax(&mode);
        if (!result)
            result = restore(mode, failed(QUERY_STREAM, query_stream(stream)));
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(result);
}

static uint64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Not for longer than the caller says: meanwhile nothing else, a Ctrl-C neither, is looked at. */
static CUresult wait_for_event(CUevent event, uint64_t limit)
{
    uint64_t began = nanoseconds();
    CUresult status;
    do
        status = query_event(event);
    while (status == NOT_READY && nanoseconds() - began < limit);
    return status;
}

/* A producer that has nothing to do needs no edge, which would cost the GPU microseconds. */
static Result follow(CUstream producer, CUstream stream, CUevent event)
{
    int mode;
    Result result = relax(&mode);
    if (result)
        return result;
    CUresult status = query_stream(producer);
    result = restore(mode, status == NOT_READY ? 0 : failed(QUERY_STREAM, status));
    if (result || status != NOT_READY)
        return result;
    result = failed(RECORD_EVENT, record_event(event, producer));
    return result ? result : failed(WAIT_EVENT, wait_event(stream, event, 0));
}

enum { MOST_PARTS = 32, PAGE = 4096 };

/* A copy in parts of some pages, an event behind each. */
typedef struct {
    CUdeviceptr to, from;
    size_t size;
    CUstream stream;
    void **events;
    size_t count;
} Parts;

static size_t part_size(const Parts *parts)
{
    size_t each = (parts->size + parts->count - 1) / parts->count;
    return (each + PAGE - 1) / PAGE * PAGE;
}

static Result queue_parts(const Parts *parts)
{
    size_t each = part_size(parts);
    Result result = 0;
    for (size_t i = 0, at = 0; i < parts->count && !result; i++, at += each) {
        if (at < parts->size) {
            size_t left = parts->size - at, size = left < each ? left : each;
            result = failed(COPY_MEMORY,
                            copy_memory(parts->to + at, parts->from + at, size, parts->stream));
        }
        if (!result) /* the last one is always behind all that is queued */
            result = failed(RECORD_EVENT, record_event(parts->events[i], parts->stream));
    }
    return result;
}

/* Each part goes on to `out`, if there is one, while the GPU copies the next. */
static Result take_parts(const Parts *parts, char *out, uint64_t limit)
{
    size_t each = part_size(parts);
    for (size_t i = 0, at = 0; i < parts->count; i++, at += each) {
        CUresult status = wait_for_event(parts->events[i], limit);
        if (status)
            return failed(QUERY_EVENT, status);
        if (out && at < parts->size) {
            size_t left = parts->size - at;
            memcpy(out + at, (char *)(uintptr_t)parts->to + at, left < each ? left : each);
        }
    }
    return 0;
}

/* Whether memory reaches so far. It is asked here, where that costs next to nothing: what an object
 * says of itself may be wrong, and the copy would bring what belongs to others. */
static Result check_extent(CUdeviceptr at, size_t size)
{
    enum { RANGE_START_ADDR = 11, RANGE_SIZE };
    static const int which[] = {RANGE_START_ADDR, RANGE_SIZE};
    unsigned long long start = 0, there = 0; /* left as they are where no memory is known */
    void *places[] = {&start, &there};
    CUresult status = get_attributes(2, which, places, at);
    if (status)
        return failed(GET_ATTRIBUTES, status);
    return at >= start && at - start <= there && size <= there - (at - start) ? 0 : CAPTURED;
}

/* The GIL is held and nothing looks at signals: whatever exception a handler raises, these objects
 * are kept, as the copy goes on. */
static int leave(PyObject *left, PyObject *used)
{
    PyObject *key = PyLong_FromVoidPtr(used);
    int status = key ? PyDict_SetItem(left, key, used) : -1;
    Py_XDECREF(key);
    return status;
}

/* The numbers or handles of a tuple, at most `most`; how many, or 0 with an exception. */
static Py_ssize_t unpack(PyObject *tuple, Py_ssize_t most, void **out)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    if (count < 1 || count > most) {
        PyErr_Format(PyExc_TypeError, "not a tuple of 1 to %zd: %R", most, tuple);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!address(PyTuple_GetItem(tuple, i), &out[i]))
            return 0;
    }
    return count;
}

static PyObject *fetch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    enum { LEFT, USED, MOVE, EVENTS, OBJECTS }; /* and then */
    enum { START, ADDRESS, STREAM, CONTEXT, LIMIT, PRODUCER, OUT, HANDLES };
    enum { TO, FROM, SIZE, BELOW, SPAN, NUMBERS }; /* of the move */
    void *given[HANDLES], *events[MOST_PARTS], *move[NUMBERS] = {NULL};
    CUcontext current;
    int mode;
    Result result = CAPTURED;
    if (count != OBJECTS + HANDLES || !PyDict_Check(args[LEFT])) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not a dictionary and %d more",
                     count, OBJECTS + HANDLES - 1);
        return NULL;
    }
    Py_ssize_t parts_wanted = unpack(args[EVENTS], MOST_PARTS, events);
    if (!parts_wanted || !unpack(args[MOVE], NUMBERS, move) ||
        !addresses(args + OBJECTS, HANDLES, HANDLES, given))
        return NULL;
    CUdeviceptr first = (uintptr_t)given[ADDRESS];
    Parts parts = {
        .to = (uintptr_t)given[START] + (uintptr_t)move[TO],
        .from = first + (uintptr_t)move[FROM],
        .size = (uintptr_t)move[SIZE],
        .stream = given[STREAM],
        .events = events,
        .count = (size_t)parts_wanted,
    };
    size_t span = (uintptr_t)move[SPAN];
    Py_BEGIN_ALLOW_THREADS
    if (!get_current(&current) && current == given[CONTEXT] && is_free(given[STREAM]) &&
        (!given[PRODUCER] || is_free(given[PRODUCER]))) {
        result = span ? check_extent(first - (uintptr_t)move[BELOW], span) : 0;
        if (!result && given[PRODUCER])
            result = follow(given[PRODUCER], given[STREAM], parts.events[0]);
        if (!result)
            result = queue_parts(&parts);
        if (!result)
            result = relax(&mode);
        if (!result)
            result = restore(mode, take_parts(&parts, given[OUT], (uintptr_t)given[LIMIT]));
    }
    Py_END_ALLOW_THREADS
    if (result && result != CAPTURED && leave(args[LEFT], args[USED]))
        return NULL;
    return PyLong_FromLongLong(result);
}

/* As _WANTED in pure.py. No attribute is larger, and what is beside them stays 0. */
static const int wanted[] = {2, 8, 9, 1, 11, 12};
enum { WANTED = sizeof wanted / sizeof *wanted };

static PyObject *pointer(PyObject *module, PyObject *argument)
{
    (void)module;
    unsigned long long found[WANTED] = {0};
    void *places[WANTED];
    CUresult status;
    if (!is_loaded())
        return NULL;
    CUdeviceptr at = PyLong_AsUnsignedLongLongMask(argument);
    if (PyErr_Occurred())
        return NULL;
    for (int i = 0; i < WANTED; i++)
        places[i] = &found[i];
    Py_BEGIN_ALLOW_THREADS
    status = get_attributes(WANTED, wanted, places, at);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(iKKKKKK)", status, found[0], found[1], found[2], found[3], found[4],
                         found[5]);
}

/* -- lanes ----------------------------------------------------------------------------------- */

/* What a use is about. Until its end it is in `in_use`, whatever else forgets it. */
typedef struct {
    PyObject ob_base;
    PyObject *lane, *source; /* who uses the objects, and who waits for that, or None */
    PyObject *objects, *order;
    unsigned long long thread;
} Ticket;

/* If it goes before its end, the ticket is among the orphans. No Python runs in between, so no
 * signal comes there, and a garbage collection may let it go. */
typedef struct {
    PyObject ob_base;
    PyObject *ticket;
} Use;

static PyTypeObject *ticket_type, *use_type;
static PyObject *in_use, *orphans, *queues, *name_pop, *name_append, *name_raw_handle;

/* A lane, another one, which may be None unless there are but these two, and anything. */
static int are_lanes(PyObject *const *args, Py_ssize_t given, Py_ssize_t needed)
{
    if (given == needed && PyObject_TypeCheck(args[0], lane_type) &&
        ((needed > 2 && args[1] == Py_None) || PyObject_TypeCheck(args[1], lane_type)))
        return is_loaded();
    PyErr_SetString(PyExc_TypeError, "it takes lanes");
    return 0;
}

static double seconds(void) /* of time.monotonic */
{
    return (double)nanoseconds() / 1e9;
}

static int append(PyObject *deque, PyObject *item)
{
    PyObject *none = PyObject_CallMethodObjArgs(deque, name_append, item, NULL);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* Records a spare event behind the work of `source`, and lets `destination`, if there is one, wait
 * for it. Only if the result is 0 does `*recorded` have it. */
static Result order_lanes(LaneState *source, LaneState *destination, PyObject **recorded)
{
    /* Read once, as another thread may close one: to the driver 0 is the legacy stream. */
    CUstream from = (CUstream)(uintptr_t)source->raw_handle, to = from;
    CUcontext inside = source->is_context_independent ? NULL : (CUcontext)(uintptr_t)source->raw_context;
    CUcontext current = NULL;
    Result result = CAPTURED;
    if (destination) {
        to = (CUstream)(uintptr_t)destination->raw_handle;
        if (!destination->is_context_independent) {
            if (inside && inside != (CUcontext)(uintptr_t)destination->raw_context)
                return CAPTURED;
            inside = (CUcontext)(uintptr_t)destination->raw_context;
        }
    }
    if (!from || !to)
        return CAPTURED;
    PyObject *event = PyObject_CallMethodObjArgs(source->free, name_pop, NULL);
    if (!event) {
        if (PyErr_ExceptionMatches(PyExc_IndexError)) {
            PyErr_Clear();
            return CAPTURED;
        }
        return FAILED;
    }
    PyObject *number = PyObject_GetAttr(event, name_raw_handle);
    void *handle = NULL;
    int is_known = number && address(number, &handle);
    Py_XDECREF(number);
    if (!is_known) {
        Py_DECREF(event);
        return FAILED;
    }
    Py_BEGIN_ALLOW_THREADS
    int is_here = !inside || (!get_current(&current) && current == inside);
    if (is_here && is_free(from) && (to == from || is_free(to))) {
        result = failed(RECORD_EVENT, record_event(handle, from));
        if (!result && destination)
            result = failed(WAIT_EVENT, wait_event(to, handle, 0));
    }
    Py_END_ALLOW_THREADS
    if (!result)
        *recorded = event;
    else {
        if (append(source->free, event))
            result = FAILED;
        Py_DECREF(event);
    }
    return result;
}

static PyObject *order(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    PyObject *event;
    if (!are_lanes(args, count, 2))
        return NULL;
    LaneState *source = (LaneState *)args[0];
    Result result = order_lanes(source, (LaneState *)args[1], &event);
    if (!result) {
        if (append(source->free, event)) /* a wait that is pending keeps the record that it saw */
            result = FAILED;
        Py_DECREF(event);
    }
    return result == FAILED ? NULL : PyLong_FromLongLong(result);
}

static PyObject *use(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (!are_lanes(args, count, 3))
        return NULL;
    Ticket *ticket = PyObject_New(Ticket, ticket_type);
    if (!ticket)
        return NULL;
    ticket->lane = Py_NewRef(args[0]);
    ticket->source = Py_NewRef(args[1]);
    ticket->objects = Py_NewRef(args[2]);
    ticket->order = Py_NewRef(Py_None);
    ticket->thread = ((LaneState *)args[0])->is_context_independent ? 0 : PyThread_get_thread_ident();
    Use *made = PyObject_New(Use, use_type);
    if (made)
        made->ticket = (PyObject *)ticket;
    else
        Py_DECREF(ticket);
    if (made && PySet_Add(in_use, (PyObject *)ticket))
        Py_CLEAR(made);
    return (PyObject *)made;
}

/* Owned, and read once: another thread may give the lane its queue at the same time. */
static PyObject *queue_of(LaneState *lane)
{
    PyObject *queue;
#ifdef Py_GIL_DISABLED
    Py_BEGIN_CRITICAL_SECTION(lane);
#endif
    queue = Py_XNewRef(lane->held);
#ifdef Py_GIL_DISABLED
    Py_END_CRITICAL_SECTION();
#endif
    return queue;
}

static PyObject *finish(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    PyObject *event;
    if (!are_lanes(args, count, 3))
        return NULL;
    LaneState *lane = (LaneState *)args[0];
    LaneState *source = args[1] == Py_None ? NULL : (LaneState *)args[1];
    PyObject *objects = args[2], *ticket = NULL;
    if (PyObject_TypeCheck(objects, ticket_type)) {
        ticket = objects;
        objects = ((Ticket *)ticket)->objects;
    }
    PyObject *queue = queue_of(lane);
    if (!queue || queue == Py_None) {
        Py_XDECREF(queue);
        return PyLong_FromLong(CAPTURED);
    }
    double began = seconds();
    Result result = order_lanes(lane, source, &event);
    if (result) {
        Py_DECREF(queue);
        return result == FAILED ? NULL : PyLong_FromLongLong(result);
    }
    double now = seconds();
    PyObject *held = Py_BuildValue("(NddO)", event, began, now, objects);
    int status = held ? append(queue, held) : -1;
    Py_XDECREF(held);
    int is_known = status ? -1 : PySet_Contains(queues, queue);
    if (is_known >= 0 &&
        (PySet_Add(queues, queue) || (ticket && PySet_Discard(in_use, ticket) < 0)))
        is_known = -1;
    Py_DECREF(queue);
    if (is_known < 0)
        return NULL;
    return PyLong_FromLong(!is_known || now - lane->swept > SWEEP_SECONDS ? DUE : 0);
}

static void lane_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = __extension__(freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(((LaneState *)self)->free);
    Py_XDECREF(((LaneState *)self)->held);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef lane_members[] = {
    {"raw_handle", T_ULONGLONG, offsetof(LaneState, raw_handle), 0, NULL},
    {"raw_context", T_ULONGLONG, offsetof(LaneState, raw_context), 0, NULL},
    {"is_context_independent", T_BOOL, offsetof(LaneState, is_context_independent), 0, NULL},
    {"free", T_OBJECT_EX, offsetof(LaneState, free), 0, NULL},
    {"held", T_OBJECT, offsetof(LaneState, held), 0, NULL},
    {"swept", T_DOUBLE, offsetof(LaneState, swept), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot lane_slots[] = {
    {Py_tp_new, FUNCTION(PyType_GenericNew)},
    {Py_tp_dealloc, FUNCTION(lane_dealloc)},
    {Py_tp_members, lane_members},
    {0, NULL},
};

static PyType_Spec lane_spec = {
    .name = "userstream._driver._native.LaneState",
    .basicsize = sizeof(LaneState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = lane_slots,
};

static PyObject *ticket_end(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    if (PySet_Discard(in_use, self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void ticket_dealloc(PyObject *self)
{
    Ticket *ticket = (Ticket *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(ticket->lane);
    Py_XDECREF(ticket->source);
    Py_XDECREF(ticket->objects);
    Py_XDECREF(ticket->order);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef ticket_members[] = {
    {"lane", T_OBJECT_EX, offsetof(Ticket, lane), READONLY, NULL},
    {"source", T_OBJECT_EX, offsetof(Ticket, source), 0, NULL},
    {"objects", T_OBJECT_EX, offsetof(Ticket, objects), READONLY, NULL},
    {"order", T_OBJECT_EX, offsetof(Ticket, order), 0, NULL},
    {"thread", T_ULONGLONG, offsetof(Ticket, thread), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef ticket_methods[] = {
    {"end", ticket_end, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ticket_slots[] = {
    {Py_tp_dealloc, FUNCTION(ticket_dealloc)},
    {Py_tp_members, ticket_members},
    {Py_tp_methods, ticket_methods},
    {0, NULL},
};

static PyType_Spec ticket_spec = {
    .name = "userstream._driver._native.Ticket",
    .basicsize = sizeof(Ticket),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = ticket_slots,
};

static void use_dealloc(PyObject *self)
{
    PyObject *ticket = ((Use *)self)->ticket;
    PyTypeObject *type = Py_TYPE(self);
    Exception held = hold_exception();
    if (PySet_Contains(in_use, ticket) == 1 && append(orphans, ticket))
        PyErr_WriteUnraisable(orphans); /* the objects stay in use */
    go_on_with(held);
    Py_DECREF(ticket);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef use_members[] = {
    {"ticket", T_OBJECT_EX, offsetof(Use, ticket), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot use_slots[] = {
    {Py_tp_dealloc, FUNCTION(use_dealloc)},
    {Py_tp_members, use_members},
    {0, NULL},
};

static PyType_Spec use_spec = {
    .name = "userstream._driver._native.Use",
    .basicsize = sizeof(Use),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = use_slots,
};

/* -- memory that is lent --------------------------------------------------------------------- */

/* As long as something uses it, it is in no dictionary; then it is back in that of the free ones. No
 * Python runs in between, so no signal comes there, and a garbage collection may let it go. */
typedef struct {
    PyObject ob_base;
    PyObject *address; /* a number of Python's */
    PyObject *blocks;  /* the dictionary by address that it is from */
    Py_ssize_t size;
} Lease;

static PyTypeObject *lease_type;
static PyObject *popitem; /* its name */

static PyObject *lend(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "it takes a dictionary by address, and a size");
        return NULL;
    }
    Py_ssize_t size = PyLong_AsSsize_t(args[1]);
    if (size == -1 && PyErr_Occurred())
        return NULL;
    Lease *lease = PyObject_New(Lease, lease_type); /* first, or a block would be lost without it */
    if (!lease)
        return NULL;
    lease->address = lease->blocks = NULL;
    PyObject *item = PyObject_CallMethodObjArgs(args[0], popitem, NULL);
    if (!item) {
        Py_DECREF(lease);
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    lease->address = Py_NewRef(PyTuple_GetItem(item, 0));
    lease->blocks = Py_NewRef(args[0]);
    lease->size = size;
    Py_DECREF(item);
    return (PyObject *)lease;
}

static void lease_dealloc(PyObject *self)
{
    Lease *lease = (Lease *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (lease->blocks) {
        Exception held = hold_exception();
        if (PyDict_SetItem(lease->blocks, lease->address, Py_None))
            PyErr_WriteUnraisable(lease->blocks); /* it is not used again */
        go_on_with(held);
    }
    Py_XDECREF(lease->blocks);
    Py_XDECREF(lease->address);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int lease_buffer(PyObject *self, Py_buffer *view, int flags)
{
    Lease *lease = (Lease *)self;
    return PyBuffer_FillInfo(view, self, PyLong_AsVoidPtr(lease->address), lease->size, 0, flags);
}

static PyObject *lease_address(PyObject *self, void *closure)
{
    (void)closure;
    return Py_NewRef(((Lease *)self)->address);
}

static PyGetSetDef lease_attributes[] = {
    {"address", lease_address, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lease_slots[] = {
    {Py_tp_dealloc, FUNCTION(lease_dealloc)},
    {Py_tp_getset, lease_attributes},
    {Py_bf_getbuffer, FUNCTION(lease_buffer)},
    {0, NULL},
};

static PyType_Spec lease_spec = {
    .name = "userstream._driver._native.Lease",
    .basicsize = sizeof(Lease),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = lease_slots,
};

/* -- the module ------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"account_address", account_address, METH_NOARGS, NULL},
    {"set_account", set_account, METH_O, NULL},
    {"on_account", on_account, METH_VARARGS, NULL},
    {"load", (PyCFunction)(void (*)(void))load, METH_FASTCALL, NULL},
    {"are_free", (PyCFunction)(void (*)(void))are_free, METH_FASTCALL, NULL},
    {"is_in", (PyCFunction)(void (*)(void))is_in, METH_FASTCALL, NULL},
    {"query", (PyCFunction)(void (*)(void))query, METH_FASTCALL, NULL},
    {"order", (PyCFunction)(void (*)(void))order, METH_FASTCALL, NULL},
    {"use", (PyCFunction)(void (*)(void))use, METH_FASTCALL, NULL},
    {"finish", (PyCFunction)(void (*)(void))finish, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, NULL},
    {"pointer", pointer, METH_O, NULL},
    {"lend", (PyCFunction)(void (*)(void))lend, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

#ifndef SOURCE
#define SOURCE ""
#endif

static int make_all(void)
{
    if (!(lease_type = (PyTypeObject *)PyType_FromSpec(&lease_spec)) ||
        !(lane_type = (PyTypeObject *)PyType_FromSpec(&lane_spec)) ||
        !(ticket_type = (PyTypeObject *)PyType_FromSpec(&ticket_spec)) ||
        !(use_type = (PyTypeObject *)PyType_FromSpec(&use_spec)) ||
        !(name_pop = PyUnicode_InternFromString("pop")) ||
        !(name_append = PyUnicode_InternFromString("append")) ||
        !(name_raw_handle = PyUnicode_InternFromString("raw_handle")) || !(in_use = PySet_New(NULL)) ||
        !(queues = PySet_New(NULL)) || !(popitem = PyUnicode_InternFromString("popitem")))
        return -1;
    PyObject *collections = PyImport_ImportModule("collections");
    orphans = collections ? PyObject_CallMethod(collections, "deque", NULL) : NULL;
    Py_XDECREF(collections);
    return orphans ? 0 : -1;
}

static int initialise(PyObject *module)
{
    /* Once: if it is imported again, what is in use stays so, and lanes that there are stay lanes. */
    if ((!orphans && make_all()) || PyModule_AddObjectRef(module, "LaneState", (PyObject *)lane_type) ||
        PyModule_AddObjectRef(module, "Ticket", (PyObject *)ticket_type) ||
        PyModule_AddObjectRef(module, "in_use", in_use) ||
        PyModule_AddObjectRef(module, "queues", queues) ||
        PyModule_AddObjectRef(module, "orphans", orphans))
        return -1;
    /* The checksum of the source, by which one that a checkout has changed since is known. */
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

/* The stable ABI of 3.11 has no name for it; 0 says that they are not supported. */
enum { MULTIPLE_INTERPRETERS = 3, FIRST_WITH_INTERPRETERS = 0x030c0000 };

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, FUNCTION(initialise)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {MULTIPLE_INTERPRETERS, NULL},
    {0, NULL},
};

/* Python 3.11 refuses a slot that it does not know. */
static PyModuleDef_Slot older_slots[] = {
    {Py_mod_exec, FUNCTION(initialise)},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "userstream._driver._native",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    definition.m_slots = Py_Version < FIRST_WITH_INTERPRETERS ? older_slots : slots;
    return PyModuleDef_Init(&definition);
}
