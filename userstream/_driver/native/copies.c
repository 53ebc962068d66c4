/* Copies to page-locked memory, and on to other memory while the GPU copies the rest. */
#include "core.h"

/* Busy-wait for an event, at most `limit` nanoseconds: no signal handler runs meanwhile. */
static CUresult wait_for_event(CUevent event, uint64_t limit)
{
    uint64_t began = nanoseconds();
    CUresult status;
    do
        status = query_event(event);
    while (status == NOT_READY && nanoseconds() - began < limit);
    return status;
}

/* Add an edge from a producer unless the producer is idle: an edge costs the GPU microseconds. */
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

/* A copy in parts of whole pages, with an event behind each part. */
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

/* Wait for each part, and copy the part to `out`, if any, while the GPU copies the next part. */
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

/* Check that an array lies in one allocation: an object may describe itself wrongly, and the copy
 * would then read memory of others. */
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

/* Convert a tuple of at most `most` numbers or handles. Returns their count, or 0 with an
 * exception. */
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
    enum { MOVE, EVENTS, OBJECTS }; /* and then */
    enum { START, ADDRESS, STREAM, CONTEXT, LIMIT, PRODUCER, OUT, HANDLES };
    enum { TO, FROM, SIZE, BELOW, SPAN, NUMBERS }; /* of the move */
    void *given[HANDLES], *events[MOST_PARTS], *move[NUMBERS] = {NULL};
    CUcontext current;
    int mode;
    Result result = CAPTURED;
    if (count != OBJECTS + HANDLES) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %d", count,
                     OBJECTS + HANDLES);
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
    return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {METHOD(fetch), {NULL, NULL, 0, NULL}};

int add_copies(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "MOST_PARTS", MOST_PARTS)
               ? -1
               : 0;
}
