/* Pooled events: calls reuse the events of earlier calls instead of creating their own.
 *
 * There is one pool per context. An *edge* event orders one stream after another and is spare again
 * as soon as the waits are queued: a pending wait keeps the record that it saw. The host polls a
 * *completion* event, spare again once it has completed. An event is its handle, an int. */
#include "core.h"

static PyTypeObject *pool_type;
static PyObject *name_pop, *name_popleft, *name_appendleft;

/* The next item of a deque, or NULL without an exception if there is none. */
static PyObject *take(PyObject *deque, PyObject *method)
{
    PyObject *item = PyObject_CallMethodObjArgs(deque, method, NULL);
    if (!item && PyErr_ExceptionMatches(PyExc_IndexError))
        PyErr_Clear();
    return item;
}

static Result create(CUcontext context, CUevent *event)
{
    enum { DISABLE_TIMING = 2 };
    CUcontext before;
    Result result = enter_context(context, &before);
    if (result)
        return result;
    result = failed(CREATE_EVENT, create_event(event, DISABLE_TIMING));
    return leave_context(context, before, result);
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

/* Return to the pool an event that nobody polls, or that was not recorded or has completed. A pool
 * of a foreign context destroys it: the context may be destroyed at any time, and its events with
 * the context. */
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

/* An abandoned event that has completed by now, or NULL. One that has failed is of no use. */
static PyObject *reclaim(EventPool *pool)
{
    void *handle;
    Result result;
    PyObject *event = take(pool->abandoned, name_popleft);
    if (!event || !address(event, &handle))
        return event;
    unsigned char before = set_account_of_thread(HOUSEKEEPING);
    Py_BEGIN_ALLOW_THREADS
    result = query_relaxed(handle);
    Py_END_ALLOW_THREADS
    set_account_of_thread(before);
    if (!result)
        return event;
    if (result == failed(QUERY_EVENT, NOT_READY))
        append(pool->abandoned, event);
    Py_DECREF(event);
    return NULL;
}

/* A spare event of a pool, or a new one. NULL with a result that is not 0 or an exception, then the
 * result is FAILED. */
PyObject *take_event(EventPool *pool, CUevent *handle, Result *result)
{
    PyObject *event = take(pool->free, name_pop);
    if (!event && !PyErr_Occurred() && PyObject_Size(pool->abandoned) > 0)
        event = reclaim(pool);
    *result = 0;
    if (!event && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        *result = create(pool->context, handle);
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

/* -- for Python ------------------------------------------------------------------------------ */

/* make_pool(context, keeps) */
static PyObject *make_pool(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *context;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "make_pool() takes a context and a bool");
        return NULL;
    }
    int keeps = PyObject_IsTrue(args[1]);
    if (keeps < 0 || !address(args[0], &context))
        return NULL;
    PyObject *collections = PyImport_ImportModule("collections");
    EventPool *pool = collections ? PyObject_New(EventPool, pool_type) : NULL;
    if (pool) {
        pool->context = context;
        pool->keeps = (char)keeps;
        pool->abandoned = NULL;
        pool->free = PyObject_CallMethod(collections, "deque", NULL);
        if (pool->free)
            pool->abandoned = PyObject_CallMethod(collections, "deque", NULL);
        if (!pool->abandoned)
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

static PyObject *pool_give_back(PyObject *self, PyObject *events)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(events); i++) {
        if (give_event((EventPool *)self, PyTuple_GetItem(events, i)))
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *pool_abandon(PyObject *self, PyObject *event)
{
    EventPool *pool = (EventPool *)self;
    if (pool->keeps ? append(pool->abandoned, event) : give_event(pool, event))
        return NULL;
    Py_RETURN_NONE;
}

/* Record an event of the lane's pool behind its work. */
static PyObject *record_behind(LaneState *lane)
{
    CUevent handle;
    Result result;
    EventPool *pool = (EventPool *)lane->pool;
    PyObject *event = take_event(pool, &handle, &result);
    if (!event)
        return result == FAILED ? NULL : raise_result(result, (PyObject *)lane);
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    if (!stream) { /* closed by another thread: to the driver 0 is the legacy stream */
        give_event(pool, event);
        Py_DECREF(event);
        return PyObject_CallMethod((PyObject *)lane, "live", NULL); /* which raises */
    }
    Py_BEGIN_ALLOW_THREADS
    result = failed(RECORD_EVENT, record_event(handle, stream));
    Py_END_ALLOW_THREADS
    if (!result)
        return event;
    give_event(pool, event);
    Py_DECREF(event);
    return raise_result(result, (PyObject *)lane);
}

/* record(lane): record an event behind the work of a lane, captured or not. The context is current
 * if the handle depends on it. */
static PyObject *record(PyObject *module, PyObject *lane)
{
    (void)module;
    return is_lane(lane) && is_loaded() ? record_behind((LaneState *)lane) : NULL;
}

/* mark(lane): like `record`, or None if the lane is captured or its handle depends on a context. */
static PyObject *mark(PyObject *module, PyObject *argument)
{
    (void)module;
    LaneState *lane = (LaneState *)argument;
    int answer;
    if (!is_lane(argument) || !is_loaded())
        return NULL;
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    Py_BEGIN_ALLOW_THREADS
    answer = stream && lane->is_context_independent && is_free(stream);
    Py_END_ALLOW_THREADS
    if (!answer)
        Py_RETURN_NONE;
    return record_behind(lane);
}

/* is_complete(event, target): whether an event has completed. Leaves all captures alone. */
static PyObject *is_complete(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *event;
    Result result;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "is_complete() takes an event and its target");
        return NULL;
    }
    if (!is_loaded() || !address(args[0], &event))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = query_relaxed(event);
    Py_END_ALLOW_THREADS
    if (!result)
        Py_RETURN_TRUE;
    if (result == failed(QUERY_EVENT, NOT_READY))
        Py_RETURN_FALSE;
    return raise_result(result, args[1]);
}

/* CUDA says of these errors that the context does not recover: CONTAINED, ILLEGAL_ADDRESS,
 * LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK. */
static int ends_context(CUresult status)
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

enum { IS_OVER, IS_PENDING, IS_UNKNOWN };

/* Whether the GPU no longer uses what is held until an event completes. An event that was recorded
 * in a capture never completes. */
static int state_of(CUevent event)
{
    Result result;
    unsigned char before = set_account_of_thread(HOUSEKEEPING);
    Py_BEGIN_ALLOW_THREADS
    result = query_relaxed(event);
    Py_END_ALLOW_THREADS
    set_account_of_thread(before);
    if (!result || (result >> 32 == QUERY_EVENT && ends_context((CUresult)(uint32_t)result)))
        return IS_OVER;
    return result == failed(QUERY_EVENT, NOT_READY) ? IS_PENDING : IS_UNKNOWN;
}

/* The parts of an item of a queue: an event, the times before and after its record, objects. */
static int unpack(PyObject *item, CUevent *event, double *began, double *ended)
{
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 4) {
        PyErr_SetString(PyExc_TypeError, "a queue holds tuples of four");
        return -1;
    }
    *began = PyFloat_AsDouble(PyTuple_GetItem(item, 1));
    *ended = PyFloat_AsDouble(PyTuple_GetItem(item, 2));
    return address(PyTuple_GetItem(item, 0), event) && !PyErr_Occurred() ? 0 : -1;
}

/* Whether the newest item of a queue was recorded after `ended` and is over. Then all that was
 * recorded before on the same stream is over as well, also an event that was captured. */
static int newest_is_over(PyObject *queue, double ended)
{
    CUevent event;
    double began, unused;
    PyObject *newest = PySequence_GetItem(queue, -1);
    int answer = newest && !unpack(newest, &event, &began, &unused) && ended < began &&
                 state_of(event) == IS_OVER;
    Py_XDECREF(newest);
    PyErr_Clear(); /* an IndexError: there is no other item */
    return answer;
}

/* Take from the front of `queue` the items that are over, into `over`. An item is out of the queue
 * while its event is queried: two threads never take the same one. */
static int take_over(PyObject *queue, EventPool *pool, int in_order, PyObject *over)
{
    for (;;) {
        CUevent event;
        double began, ended;
        PyObject *item = take(queue, name_popleft);
        if (!item)
            return PyErr_Occurred() ? -1 : 0;
        if (unpack(item, &event, &began, &ended))
            return -1; /* the objects leak: the GPU may use them */
        int state = state_of(event);
        if (state == IS_UNKNOWN && in_order && newest_is_over(queue, ended))
            state = IS_OVER;
        if (state != IS_OVER) {
            PyObject *none = PyObject_CallMethodObjArgs(queue, name_appendleft, item, NULL);
            if (!none) /* the objects leak: the GPU may use them */
                return -1;
            Py_DECREF(none);
            Py_DECREF(item);
            return 0;
        }
        int status = PyList_Append(over, item) || give_event(pool, PyTuple_GetItem(item, 0));
        Py_DECREF(item);
        if (status)
            return -1;
    }
}

/* sweep(queue, pool, in_order): release the objects of a queue that its stream has passed, and keep
 * the queue in `queues` while it holds something. */
static PyObject *sweep(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int mode = CAPTURE_MODE_RELAXED;
    int in_order = count == 3 && is_pool(args[1]) ? PyObject_IsTrue(args[2]) : -1;
    if (in_order < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "sweep() takes a queue, a pool and a bool");
        return NULL;
    }
    PyObject *over = is_loaded() ? PyList_New(0) : NULL;
    if (!over)
        return NULL;
    int status = take_over(args[0], (EventPool *)args[1], in_order, over);
    /* Discard first and look afterwards: `finish` appends to the queue, and then adds it. */
    if (!status)
        status = PySet_Discard(queues, args[0]) < 0 ? -1 : 0;
    if (PyObject_Size(args[0]) && PySet_Add(queues, args[0]))
        status = -1;
    Exception held = hold_exception();
    /* Destructors may free memory, which would break the captures of other threads. */
    Result result = PyList_Size(over) ? relax(&mode) : CAPTURED;
    Py_DECREF(over);
    if (!result)
        restore(mode, 0);
    go_on_with(held);
    if (status)
        return NULL;
    Py_RETURN_NONE;
}

/* -- the module ------------------------------------------------------------------------------ */

static void pool_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((EventPool *)self)->free);
    Py_XDECREF(((EventPool *)self)->abandoned);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef pool_members[] = {
    {"free", T_OBJECT_EX, offsetof(EventPool, free), READONLY, NULL},
    {"abandoned", T_OBJECT_EX, offsetof(EventPool, abandoned), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef pool_methods[] = {
    {"take", pool_take, METH_NOARGS, NULL},
    {"give_back", pool_give_back, METH_VARARGS, NULL},
    {"abandon", pool_abandon, METH_O, NULL},
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

static PyMethodDef methods[] = {
    METHOD(make_pool),
    {"record", record, METH_O, NULL},
    {"mark", mark, METH_O, NULL},
    METHOD(is_complete),
    {"is_sticky", is_sticky, METH_O, NULL},
    METHOD(sweep),
    {NULL, NULL, 0, NULL},
};

int add_events(PyObject *module)
{
    if (!pool_type && (!(pool_type = (PyTypeObject *)PyType_FromSpec(&pool_spec)) ||
                       !(name_pop = PyUnicode_InternFromString("pop")) ||
                       !(name_popleft = PyUnicode_InternFromString("popleft")) ||
                       !(name_appendleft = PyUnicode_InternFromString("appendleft"))))
        return -1;
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddObjectRef(module, "EventPool", (PyObject *)pool_type)
               ? -1
               : 0;
}
