/* Pooled events, and points of a stream that the host asks for.
 *
 * Calls reuse the events of earlier calls instead of creating their own. There is one pool per
 * context. An *edge* event orders one stream after another and is spare again as soon as the waits
 * are queued: a pending wait keeps the record that it saw. The event of a *point* is spare again
 * once nobody asks for the point any more. An event is its handle, an int. */
#include "core.h"

static PyTypeObject *pool_type;
PyTypeObject *point_type;
static PyObject *name_pop;

enum { NON_BLOCKING = 1, BLOCKING_SYNC = 1, DISABLE_TIMING = 2 };
#define RECLAIM_SECONDS 1e-3

static Result create(const EventPool *pool, CUevent *event, unsigned flags)
{
    CUcontext before;
    Result result = enter_context(pool->context, &before);
    if (result)
        return result;
    result = failed(CREATE_EVENT, create_event(event, DISABLE_TIMING | flags));
    return leave_context(pool->context, before, result);
}

static Result query_relaxed(CUevent event)
{
    int mode;
    Result result = relax(&mode);
    return result ? result : restore(mode, failed(QUERY_EVENT, query_event(event)));
}

int is_pool(PyObject *object)
{
    return PyObject_TypeCheck(object, pool_type);
}

/* Return to the pool an event that nobody polls. A pool of a foreign context destroys it: the
 * context may be destroyed at any time, and its events with the context. */
int give_event(EventPool *pool, PyObject *event)
{
    void *handle;
    if (pool->keeps)
        return append(pool->free, event);
    if (!address(event, &handle))
        return -1;
    Py_BEGIN_ALLOW_THREADS
    destroy_event(handle); /* the driver keeps what pending operations need */
    Py_END_ALLOW_THREADS
    return 0;
}

/* A spare event of a pool, or a new one. NULL with a result that is not 0 or an exception, then the
 * result is FAILED. */
PyObject *take_event(EventPool *pool, CUevent *handle, Result *result)
{
    PyObject *event = PyObject_CallMethodObjArgs(pool->free, name_pop, NULL);
    *result = 0;
    if (!event && PyErr_ExceptionMatches(PyExc_IndexError)) {
        PyErr_Clear();
        Py_BEGIN_ALLOW_THREADS
        *result = create(pool, handle, 0);
        Py_END_ALLOW_THREADS
        if (*result)
            return NULL;
        event = PyLong_FromVoidPtr(*handle);
    }
    if (event && !address(event, handle))
        Py_CLEAR(event);
    if (!event)
        *result = FAILED;
    return event;
}

/* Claim the blocking event of a context, which wakes up a native thread (see bells.c); return 0 if
 * there is none, or it is in use, or pending. There is one for a context, because its record
 * occupies a hardware queue until the stream has come there: with eight of them pending, no launch
 * on any other stream of an H100 began. Also without the GIL. */
static int claim_blocking(EventPool *pool)
{
    char is_claimed = 0;
    if (!pool->may_block || !atomic_compare_exchange_strong(&pool->is_claimed, &is_claimed, 1))
        return 0;
    int is_spare = pool->blocking ? !has_waiter(pool->blocking)
                                  : !create(pool, &pool->blocking, BLOCKING_SYNC);
    if (is_spare && pool->is_pending) {
        unsigned char before = set_account_of_thread(HOUSEKEEPING);
        is_spare = query_relaxed(pool->blocking) != failed(QUERY_EVENT, NOT_READY);
        set_account_of_thread(before);
    }
    if (is_spare)
        pool->is_pending = 1;
    else
        pool->is_claimed = 0;
    return is_spare;
}

/* Make the blocking event complete after another event, on a stream of the pool's own: nothing is
 * added to a stream of the program, which a recorder need not know. Returns whether it is recorded
 * and claimed. */
static int chain_blocking(EventPool *pool, CUevent after)
{
    CUcontext before;
    if (!claim_blocking(pool))
        return 0;
    unsigned char account = set_account_of_thread(NOBODY);
    Result result = 0;
    if (!pool->stream && !(result = enter_context(pool->context, &before)))
        result = leave_context(pool->context, before,
                               failed(CREATE_STREAM, create_stream(&pool->stream, NON_BLOCKING)));
    int is_recorded = !result && !wait_event(pool->stream, after, 0) &&
                      !record_event(pool->blocking, pool->stream);
    set_account_of_thread(account);
    if (!is_recorded)
        pool->is_claimed = 0;
    return is_recorded;
}

/* Take the blocking event from a point that is passed, and that nobody has asked about since: a
 * program may keep the completions of all of its copies. */
static void reclaim_blocking(EventPool *pool, double now)
{
#ifndef Py_GIL_DISABLED /* with the GIL, the point of the pool is alive */
    Point *owner = pool->owner;
    if (!owner || now - owner->ended < RECLAIM_SECONDS || now - pool->asked < RECLAIM_SECONDS)
        return;
    Result result;
    pool->asked = now;
    Py_INCREF((PyObject *)owner);
    unsigned char before = set_account_of_thread(HOUSEKEEPING);
    Py_BEGIN_ALLOW_THREADS
    result = query_relaxed(owner->handle);
    Py_END_ALLOW_THREADS
    set_account_of_thread(before);
    if (!result && pool->owner == owner && !has_waiter(owner->handle)) {
        owner->is_passed = 1; /* first: from now on the event may be recorded again */
        pool->owner = NULL;
        pool->is_pending = 0;
        pool->is_claimed = 0;
    }
    Py_DECREF((PyObject *)owner);
#else
    (void)pool, (void)now;
#endif
}

/* -- points ---------------------------------------------------------------------------------- */

double seconds(void) /* of time.monotonic */
{
    return (double)nanoseconds() / 1e9;
}

/* The point of an event that was recorded just now, whose reference it takes over. Without an
 * event, that of the blocking event, which the caller has claimed. */
Point *new_point(EventPool *pool, PyObject *event, PyObject *target, double began)
{
    void *handle = pool->blocking;
    int is_blocking = !event;
    if (is_blocking)
        event = PyLong_FromVoidPtr(handle);
    Point *point = event && address(event, &handle) ? PyObject_New(Point, point_type) : NULL;
    if (!point) {
        if (is_blocking)
            pool->is_claimed = 0;
        Py_XDECREF(event);
        return NULL;
    }
    point->pool = (EventPool *)Py_NewRef((PyObject *)pool);
    point->event = event;
    point->handle = handle;
    point->target = Py_NewRef(target);
    point->began = began;
    point->ended = seconds();
    point->in_order = PyObject_TypeCheck(target, lane_type) &&
                      ((LaneState *)target)->raw_handle != PER_THREAD;
    point->is_blocking = (char)is_blocking;
    point->is_passed = 0;
    if (is_blocking)
        pool->owner = point;
    return point;
}

/* Whether the GPU has passed a point. Without the GIL, in relaxed mode. After an error that ends
 * the context nothing runs any more, which only the memory of the work may count as passed. */
static int is_over(Point *point, int or_ended)
{
    if (!point->is_passed) {
        CUresult status = query_event(point->handle);
        if (status) /* unless the event was reclaimed meanwhile, and has been recorded again */
            return point->is_passed || (or_ended && ends_context(status));
        point->is_passed = 1;
    }
    return 1;
}

/* How many points at the front of a queue of one target the GPU has passed, as for `is_over`. In a
 * stream in order, bisection finds the last one in few queries; it covers earlier points, also
 * those recorded in a capture, which never complete. */
Py_ssize_t count_passed(Point *const *points, Py_ssize_t count, int or_ended)
{
    Py_ssize_t passed = 0, low = -1, high = count > 0 && points[0]->in_order ? count : 0;
    for (Py_ssize_t at = high - 1; low + 1 < high; at = low + (high - low) / 2) {
        if (is_over(points[at], or_ended))
            low = at;
        else
            high = at;
    }
    while (passed < low &&
           (points[passed]->ended < points[low]->began || is_over(points[passed], or_ended)))
        points[passed++]->is_passed |= points[low]->is_passed;
    if (passed == low)
        return passed + 1;
    while (low < 0 && !high && passed < count && is_over(points[passed], or_ended))
        passed++;
    return passed;
}

/* In a forked child and at exit no destructor calls the driver. */
static int is_halted;

static PyObject *halt(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    is_halted = 1;
    Py_RETURN_NONE;
}

static void point_dealloc(PyObject *self)
{
    Point *point = (Point *)self;
    EventPool *pool = point->pool;
    PyTypeObject *type = Py_TYPE(self);
    Exception held = hold_exception();
    if (pool->owner == point) {
        pool->owner = NULL;
        pool->is_pending = !point->is_passed;
        pool->is_claimed = 0;
    } else if (!point->is_blocking && (pool->keeps || !is_halted) &&
               give_event(pool, point->event))
        PyErr_Clear(); /* the event is not used again */
    go_on_with(held);
    Py_DECREF((PyObject *)pool);
    Py_DECREF(point->event);
    Py_DECREF(point->target);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Point(pool, event, target, began): for an event of a pool that was recorded just now, since a
 * time of `time.monotonic`. */
static PyObject *point_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    (void)type;
    PyObject *pool, *event, *target;
    double began;
    if (names || !PyArg_ParseTuple(args, "OOOd", &pool, &event, &target, &began))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "it takes no names");
    if (!is_pool(pool))
        return PyErr_Format(PyExc_TypeError, "it takes a pool of events, not %R", pool);
    return (PyObject *)new_point((EventPool *)pool, Py_NewRef(event), target, began);
}

/* is_done(): whether the GPU has passed the point; raises its error. Leaves all captures alone. */
static PyObject *point_is_done(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    Point *point = (Point *)self;
    Result result;
    if (point->is_passed)
        Py_RETURN_TRUE;
    if (!is_loaded())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = query_relaxed(point->handle);
    Py_END_ALLOW_THREADS
    if (point->is_passed) /* the event was reclaimed meanwhile */
        Py_RETURN_TRUE;
    if (result == failed(QUERY_EVENT, NOT_READY))
        Py_RETURN_FALSE;
    if (result)
        return raise_result(result, point->target);
    point->is_passed = 1;
    Py_RETURN_TRUE;
}

/* notify(bell): ring a bell when the GPU has passed the point or has failed. False if no event or
 * no thread can at present: then the point has to be polled. `is_done` comes first and raises for
 * an event of a capture, which would make the stream of the pool part of the capture. */
static PyObject *point_notify(PyObject *self, PyObject *bell)
{
    Point *point = (Point *)self;
    if (!is_bell(bell)) {
        PyErr_SetString(PyExc_TypeError, "notify() takes a bell");
        return NULL;
    }
    if (!is_loaded())
        return NULL;
    EventPool *pool = point->pool;
    if (pool->owner == point)
        return PyBool_FromLong(notify(bell, point->handle));
    int rings;
    reclaim_blocking(pool, seconds());
    Py_BEGIN_ALLOW_THREADS
    rings = !point->is_blocking && chain_blocking(pool, point->handle);
    Py_END_ALLOW_THREADS
    if (rings) {
        rings = notify(bell, pool->blocking);
        pool->is_claimed = 0; /* last: from now on the waiter, or the query, keeps others away */
    }
    return PyBool_FromLong(rings);
}

/* passed(points): how many at the front of a list of points of one target the GPU has passed.
 * Points that have failed count as pending. Leaves all captures alone. */
static PyObject *passed(PyObject *module, PyObject *list)
{
    (void)module;
    int mode;
    Py_ssize_t found = 0, count = PyList_Check(list) ? PyList_Size(list) : -1;
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "passed() takes a list of points");
        return NULL;
    }
    Point **points = is_loaded() ? PyMem_Malloc((size_t)(count + 1) * sizeof *points) : NULL;
    if (!points)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i); /* borrowed: the caller keeps the list as it is */
        if (!item || !PyObject_TypeCheck(item, point_type)) {
            PyErr_SetString(PyExc_TypeError, "passed() takes points");
            PyMem_Free(points);
            return NULL;
        }
        points[i] = (Point *)item;
    }
    Py_BEGIN_ALLOW_THREADS
    Result result = relax(&mode);
    if (!result) {
        found = count_passed(points, count, 0);
        restore(mode, 0);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(points);
    return PyLong_FromSsize_t(found);
}

/* -- for Python ------------------------------------------------------------------------------ */

/* make_pool(context, keeps, may_block) */
static PyObject *make_pool(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *context;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "make_pool() takes a context and two bools");
        return NULL;
    }
    int keeps = PyObject_IsTrue(args[1]), may_block = PyObject_IsTrue(args[2]);
    if (keeps < 0 || may_block < 0 || !address(args[0], &context))
        return NULL;
    PyObject *collections = PyImport_ImportModule("collections");
    EventPool *pool = collections ? PyObject_New(EventPool, pool_type) : NULL;
    if (pool) {
        pool->context = context;
        pool->keeps = (char)keeps;
        pool->may_block = (char)(keeps && may_block);
        pool->blocking = NULL;
        pool->stream = NULL;
        pool->is_pending = 0;
        pool->is_claimed = 0;
        pool->owner = NULL;
        pool->asked = 0;
        pool->free = PyObject_CallMethod(collections, "deque", NULL);
        if (!pool->free)
            Py_CLEAR(pool);
    }
    Py_XDECREF(collections);
    return (PyObject *)pool;
}

static PyObject *pool_take(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    CUevent handle;
    Result result;
    if (!is_loaded())
        return NULL;
    PyObject *event = take_event((EventPool *)self, &handle, &result);
    return event || result == FAILED ? event : raise_result(result, NULL);
}

static PyObject *pool_give_back(PyObject *self, PyObject *event)
{
    if (give_event((EventPool *)self, event))
        return NULL;
    Py_RETURN_NONE;
}

/* record(lane): record an event behind the work of a lane, captured or not. The context is current
 * if the handle depends on it. */
static PyObject *record(PyObject *module, PyObject *argument)
{
    (void)module;
    CUevent handle;
    Result result;
    if (!is_lane(argument) || !is_loaded())
        return NULL;
    const LaneState *lane = (LaneState *)argument;
    EventPool *pool = (EventPool *)lane->pool;
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    if (!stream) /* closed by another thread: to the driver 0 is the legacy stream */
        return PyObject_CallMethod(argument, "live", NULL); /* which raises */
    PyObject *event = take_event(pool, &handle, &result);
    if (!event)
        return result == FAILED ? NULL : raise_result(result, argument);
    Py_BEGIN_ALLOW_THREADS
    result = failed(RECORD_EVENT, record_event(handle, stream));
    Py_END_ALLOW_THREADS
    if (!result)
        return event;
    give_event(pool, event);
    Py_DECREF(event);
    return raise_result(result, argument);
}

/* mark(lane): like `record`, or None if the lane is captured or its handle depends on a context. */
static PyObject *mark(PyObject *module, PyObject *argument)
{
    int answer;
    if (!is_lane(argument) || !is_loaded())
        return NULL;
    const LaneState *lane = (LaneState *)argument;
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    Py_BEGIN_ALLOW_THREADS
    answer = stream && lane->is_context_independent && is_free(stream);
    Py_END_ALLOW_THREADS
    if (!answer)
        Py_RETURN_NONE;
    return record(module, argument);
}

/* point(lane, may_block): the point that a lane has reached, for host waits: of the blocking event
 * if that is wanted and possible. Otherwise like `record`. */
static PyObject *point(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    double began = seconds();
    Result result = 0;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "point() takes a lane and a bool");
        return NULL;
    }
    PyObject *argument = args[0];
    int is_blocking = PyObject_IsTrue(args[1]);
    if (is_blocking < 0 || !is_lane(argument) || !is_loaded())
        return NULL;
    const LaneState *lane = (LaneState *)argument;
    EventPool *pool = (EventPool *)lane->pool;
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    if (is_blocking)
        reclaim_blocking(pool, began);
    Py_BEGIN_ALLOW_THREADS
    is_blocking = is_blocking && stream && claim_blocking(pool);
    if (is_blocking) {
        result = failed(RECORD_EVENT, record_event(pool->blocking, stream));
        if (result)
            pool->is_claimed = 0;
    }
    Py_END_ALLOW_THREADS
    if (result)
        return raise_result(result, argument);
    PyObject *event = is_blocking ? NULL : record(module, argument);
    return is_blocking || event ? (PyObject *)new_point(pool, event, argument, began) : NULL;
}

/* CUDA says of these errors that the context does not recover: CONTAINED, ILLEGAL_ADDRESS,
 * LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK. */
int ends_context(CUresult status)
{
    return status == 226 || status == 700 || status == 702 || status == 710 ||
           (status >= 714 && status <= 719) || status == 721;
}

static PyObject *is_sticky(PyObject *module, PyObject *code)
{
    (void)module;
    long status = PyLong_AsLong(code);
    if (status == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(ends_context((CUresult)status));
}

/* -- the module ------------------------------------------------------------------------------ */

static void pool_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((EventPool *)self)->free);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef pool_members[] = {
    {"free", T_OBJECT_EX, offsetof(EventPool, free), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef pool_methods[] = {
    {"take", pool_take, METH_NOARGS, NULL},
    {"give_back", pool_give_back, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_dealloc, FUNCTION(pool_dealloc)},
    {Py_tp_members, pool_members},
    {Py_tp_methods, pool_methods},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "userstream._driver._core.EventPool",
    .basicsize = sizeof(EventPool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = pool_slots,
};

static PyMemberDef point_members[] = {
    {"began", T_DOUBLE, offsetof(Point, began), READONLY, NULL},
    {"event", T_OBJECT_EX, offsetof(Point, event), READONLY, NULL},
    {"is_blocking", T_BOOL, offsetof(Point, is_blocking), READONLY, NULL},
    {"target", T_OBJECT_EX, offsetof(Point, target), READONLY, NULL},
    {"in_order", T_BOOL, offsetof(Point, in_order), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef point_methods[] = {
    {"is_done", point_is_done, METH_NOARGS, NULL},
    {"notify", point_notify, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot point_slots[] = {
    {Py_tp_new, FUNCTION(point_new)},
    {Py_tp_dealloc, FUNCTION(point_dealloc)},
    {Py_tp_members, point_members},
    {Py_tp_methods, point_methods},
    {0, NULL},
};

static PyType_Spec point_spec = {
    .name = "userstream._driver._core.Point",
    .basicsize = sizeof(Point),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = point_slots,
};

static PyMethodDef methods[] = {
    METHOD(make_pool),
    {"record", record, METH_O, NULL},
    {"mark", mark, METH_O, NULL},
    METHOD(point),
    {"passed", passed, METH_O, NULL},
    {"halt", halt, METH_NOARGS, NULL},
    {"is_sticky", is_sticky, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_events(PyObject *module)
{
    if (!pool_type && (!(pool_type = (PyTypeObject *)PyType_FromSpec(&pool_spec)) ||
                       !(point_type = (PyTypeObject *)PyType_FromSpec(&point_spec)) ||
                       !(name_pop = PyUnicode_InternFromString("pop"))))
        return -1;
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddObjectRef(module, "EventPool", (PyObject *)pool_type) ||
                   PyModule_AddObjectRef(module, "Point", (PyObject *)point_type)
               ? -1
               : 0;
}
