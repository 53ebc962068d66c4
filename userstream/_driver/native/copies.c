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
    CUevent *events;
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

/* A copy of a run of bytes on a lane, behind the work of a producer, if there is one. */
typedef struct {
    const LaneState *lane;
    CUstream producer;
    CUdeviceptr lowest; /* of the array */
    size_t span;        /* of the array, or 0 if it is known to be in one allocation */
    Parts parts;
} Copy;

/* Read the arguments of a copy. CAPTURED if the lanes are of two contexts. */
static Result read_copy(Copy *copy, PyObject *object, PyObject *after, PyObject *numbers,
                        void *const *addresses)
{
    enum { TO, FROM, SIZE, BELOW, SPAN, MOVE_NUMBERS };
    void *move[MOVE_NUMBERS] = {NULL};
    if (!is_lane(object) || (after != Py_None && !is_lane(after)) ||
        !unpack(numbers, MOVE_NUMBERS, move))
        return FAILED;
    const LaneState *lane = (LaneState *)object, *source = (LaneState *)after;
    uintptr_t start = (uintptr_t)addresses[0], first = (uintptr_t)addresses[1];
    *copy = (Copy){
        .lane = lane,
        .producer = after == Py_None ? NULL : (CUstream)(uintptr_t)source->raw_handle,
        .lowest = first - (uintptr_t)move[BELOW],
        .span = (uintptr_t)move[SPAN],
        .parts = {.to = start + (uintptr_t)move[TO],
                  .from = first + (uintptr_t)move[FROM],
                  .size = (uintptr_t)move[SIZE],
                  .stream = (CUstream)(uintptr_t)lane->raw_handle},
    };
    if (!copy->parts.stream || (after != Py_None && !copy->producer)) {
        /* Closed: this raises. */
        Py_XDECREF(PyObject_CallMethod(copy->parts.stream ? after : object, "live", NULL));
        return FAILED;
    }
    return after == Py_None || source->pool == lane->pool ? 0 : CAPTURED;
}

/* Queue a copy. CAPTURED: nothing was queued, as a stream is captured, another context is current,
 * or the array lies in several allocations. Without the GIL. */
static Result begin_copy(const Copy *copy, int *has_edge)
{
    CUcontext current;
    CUstream producer = copy->producer, stream = copy->parts.stream;
    if (get_current(&current) || (uintptr_t)current != copy->lane->raw_context ||
        !is_free(stream) || (producer && !is_free(producer)))
        return CAPTURED;
    Result result = copy->span ? check_extent(copy->lowest, copy->span) : 0;
    if (!result && producer)
        result = follow(producer, stream, copy->parts.events[0], has_edge);
    return result ? result : queue_parts(&copy->parts);
}

static PyObject *raise_copy(Result result, PyObject *lane, PyObject *producer)
{
    return raise_result(result, result >> 32 == QUERY_STREAM ? producer : lane);
}

/* fetch(lane, producer, move, start, address, limit, parts, out): copy a run of bytes to
 * page-locked memory that begins at `start`, behind the work of a producer, if that is not None,
 * and wait for the copy at most `limit` ns for each part. With an address `out`, the bytes are
 * there too if the copy is over. Returns True if the copy is over, else the point behind the copy.
 * None: nothing was queued, see `begin_copy`. */
static PyObject *fetch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    enum { LANE, PRODUCER, MOVE, NUMBERS }; /* and then */
    enum { START, ADDRESS, LIMIT, PARTS, OUT, GIVEN };
    void *given[GIVEN], *handles[MOST_PARTS];
    PyObject *events[MOST_PARTS];
    Copy copy;
    int mode, has_edge = 0;
    if (count != NUMBERS + GIVEN) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %d", count, NUMBERS + GIVEN);
        return NULL;
    }
    if (!addresses(args + NUMBERS, GIVEN, GIVEN, given))
        return NULL;
    Result result = read_copy(&copy, args[LANE], args[PRODUCER], args[MOVE], given);
    if (result) {
        if (result == FAILED)
            return NULL;
        Py_RETURN_NONE;
    }
    EventPool *pool = (EventPool *)copy.lane->pool;
    size_t wanted = (uintptr_t)given[PARTS];
    if (wanted < 1 || wanted > MOST_PARTS)
        return PyErr_Format(PyExc_ValueError, "%zu parts were given, not 1 to %d", wanted,
                            MOST_PARTS);
    copy.parts.events = handles;
    copy.parts.count = wanted;
    double began = seconds();
    for (size_t i = 0; i < wanted; i++) {
        events[i] = take_event(pool, &handles[i], &result);
        if (!events[i]) {
            give_events(pool, events, i);
            return result == FAILED ? NULL : raise_result(result, args[LANE]);
        }
    }
    size_t last = wanted - 1;
    Py_BEGIN_ALLOW_THREADS
    result = begin_copy(&copy, &has_edge);
    if (!result)
        result = relax(&mode);
    if (!result)
        result = restore(mode, take_parts(&copy.parts, given[OUT], (uintptr_t)given[LIMIT]));
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
        return raise_copy(result, args[LANE], args[PRODUCER]);
    else
        answer = Py_NewRef(Py_True);
    if (answer && has_edge && report_edge(args[LANE], args[PRODUCER]))
        Py_CLEAR(answer);
    return answer;
}

/* queue_copy(ordering, ticket, move, start, address): queue a copy as `fetch` does, make the
 * producer wait for the copy, and hold the objects of the ticket, which then ends, until the copy
 * is over. The driver is not asked whether it is. Returns the point behind the copy, and the result
 * of `release` for what comes after the copy. None: nothing was queued, see `begin_copy`. */
static PyObject *queue_copy(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    enum { ORDERING, TICKET, MOVE, NUMBERS }; /* and then the addresses */
    void *given[2];
    CUevent handle;
    PyObject *lanes[2]; /* the consumer, and the producer or None */
    Copy copy;
    int has_edge = 0;
    if (count < NUMBERS || !is_ticket(args[TICKET])) {
        PyErr_SetString(PyExc_TypeError, "queue_copy() takes an ordering, a ticket, and a copy");
        return NULL;
    }
    if (!addresses(args + NUMBERS, count - NUMBERS, 2, given))
        return NULL;
    Result result = two_lanes(args[ORDERING], lanes);
    if (!result)
        result = read_copy(&copy, lanes[0], lanes[1], args[MOVE], given);
    if (result) {
        if (result == FAILED)
            return NULL;
        Py_RETURN_NONE;
    }
    EventPool *pool = (EventPool *)copy.lane->pool;
    double began = seconds();
    PyObject *event = take_event(pool, &handle, &result);
    if (!event)
        return result == FAILED ? NULL : raise_result(result, lanes[0]);
    copy.parts.events = &handle;
    copy.parts.count = 1;
    Py_BEGIN_ALLOW_THREADS
    result = begin_copy(&copy, &has_edge);
    Py_END_ALLOW_THREADS
    if (result) {
        if (give_events(pool, &event, 1))
            return NULL;
        if (result != CAPTURED)
            return raise_copy(result, lanes[0], lanes[1]);
        Py_RETURN_NONE;
    }
    Point *point = new_point(pool, event, lanes[0], began);
    if (!point)
        return NULL;
    result = has_edge && report_edge(lanes[0], lanes[1])
                 ? FAILED
                 : hold_behind(lanes[0], lanes[1], args[TICKET], point);
    if (result == FAILED) {
        Py_DECREF((PyObject *)point);
        return NULL;
    }
    return Py_BuildValue("(NL)", point, result);
}

static PyMethodDef methods[] = {METHOD(fetch), METHOD(queue_copy), {NULL, NULL, 0, NULL}};

int add_copies(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "MOST_PARTS", MOST_PARTS)
               ? -1
               : 0;
}
