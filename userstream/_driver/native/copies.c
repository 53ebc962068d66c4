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

static Result is_busy(CUstream stream, int *answer)
{
    int mode;
    Result result = relax(&mode);
    if (result)
        return result;
    CUresult status = query_stream(stream);
    *answer = status == NOT_READY;
    return restore(mode, *answer ? 0 : failed(QUERY_STREAM, status));
}

/* Add an edge from a producer, unless the producer is idle and nobody listens to edges: an edge
 * costs the GPU microseconds. */
static Result follow(CUstream producer, CUstream stream, CUevent event, int *has_edge)
{
    *has_edge = has_edge_listeners();
    Result result = *has_edge ? 0 : is_busy(producer, has_edge);
    if (result || !*has_edge)
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

static int give_events(EventPool *pool, PyObject **events, size_t count)
{
    int status = 0;
    for (size_t i = 0; i < count; i++) {
        if (give_event(pool, events[i]))
            status = -1;
        Py_DECREF(events[i]);
    }
    return status;
}

/* fetch(lane, producer, move, start, address, limit, parts, out): copy a run of bytes to
 * page-locked memory that begins at `start`, behind the work of a producer, if that is not None,
 * and wait for the copy at most `limit` ns for each part. With an address `out`, the bytes are
 * there too if the copy is over. Returns True if the copy is over, else the point behind the copy.
 * None: nothing was queued, as a stream is captured, another context is current, or the array lies
 * in several allocations. */
static PyObject *fetch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    enum { LANE, PRODUCER, MOVE, NUMBERS }; /* and then */
    enum { START, ADDRESS, LIMIT, PARTS, OUT, GIVEN };
    enum { TO, FROM, SIZE, BELOW, SPAN, MOVE_NUMBERS };
    void *given[GIVEN], *handles[MOST_PARTS], *move[MOVE_NUMBERS] = {NULL};
    PyObject *events[MOST_PARTS];
    CUcontext current;
    int mode, has_edge = 0;
    if (count != NUMBERS + GIVEN) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %d", count, NUMBERS + GIVEN);
        return NULL;
    }
    PyObject *after = args[PRODUCER];
    if (!is_lane(args[LANE]) || (after != Py_None && !is_lane(after)) ||
        !unpack(args[MOVE], MOVE_NUMBERS, move) || !addresses(args + NUMBERS, GIVEN, GIVEN, given))
        return NULL;
    const LaneState *lane = (LaneState *)args[LANE];
    EventPool *pool = (EventPool *)lane->pool;
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle, producer = NULL;
    if (after != Py_None) {
        producer = (CUstream)(uintptr_t)((LaneState *)after)->raw_handle;
        if (!producer)
            return PyObject_CallMethod(after, "live", NULL); /* which raises */
        if (((LaneState *)after)->pool != lane->pool)
            Py_RETURN_NONE;
    }
    if (!stream)
        return PyObject_CallMethod(args[LANE], "live", NULL);
    size_t wanted = (uintptr_t)given[PARTS];
    if (wanted < 1 || wanted > MOST_PARTS)
        return PyErr_Format(PyExc_ValueError, "%zu parts were given, not 1 to %d", wanted,
                            MOST_PARTS);
    CUdeviceptr first = (uintptr_t)given[ADDRESS];
    size_t span = (uintptr_t)move[SPAN];
    Parts parts = {
        .to = (uintptr_t)given[START] + (uintptr_t)move[TO],
        .from = first + (uintptr_t)move[FROM],
        .size = (uintptr_t)move[SIZE],
        .stream = stream,
        .events = handles,
        .count = wanted,
    };
    double began = seconds();
    Result result = 0;
    for (size_t i = 0; i < wanted; i++) {
        events[i] = take_event(pool, &handles[i], &result);
        if (!events[i]) {
            give_events(pool, events, i);
            return result == FAILED ? NULL : raise_result(result, args[LANE]);
        }
    }
    size_t last = wanted - 1;
    result = CAPTURED;
    Py_BEGIN_ALLOW_THREADS
    if (!get_current(&current) && (uintptr_t)current == lane->raw_context && is_free(stream) &&
        (!producer || is_free(producer))) {
        result = span ? check_extent(first - (uintptr_t)move[BELOW], span) : 0;
        if (!result && producer)
            result = follow(producer, stream, handles[0], &has_edge);
        if (!result)
            result = queue_parts(&parts);
        if (!result)
            result = relax(&mode);
        if (!result)
            result = restore(mode, take_parts(&parts, given[OUT], (uintptr_t)given[LIMIT]));
    }
    Py_END_ALLOW_THREADS
    int is_pending = result == failed(QUERY_EVENT, NOT_READY);
    /* Nobody polls these any more. */
    int status = give_events(pool, events, is_pending ? last : wanted);
    PyObject *answer = NULL;
    if (status)
        return NULL;
    if (is_pending)
        answer = (PyObject *)new_point(pool, events[last], args[LANE], began);
    else if (result == CAPTURED)
        answer = Py_NewRef(Py_None);
    else if (result)
        return raise_result(result, result >> 32 == QUERY_STREAM ? after : args[LANE]);
    else
        answer = Py_NewRef(Py_True);
    if (answer && has_edge && report_edge(args[LANE], after))
        Py_CLEAR(answer);
    return answer;
}

static PyMethodDef methods[] = {METHOD(fetch), {NULL, NULL, 0, NULL}};

int add_copies(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "MOST_PARTS", MOST_PARTS)
               ? -1
               : 0;
}
