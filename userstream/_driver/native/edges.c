/* Lanes, the edges between them, and the objects that their work uses. */
#include "core.h"

/* The lane and the objects of a use. A ticket is in `in_use` until its end, which keeps the objects
 * alive even if an exception drops all other references. */
typedef struct {
    PyObject ob_base;
    PyObject *lane, *source; /* who uses the objects; who waits for it, or None */
    PyObject *objects, *order;
    unsigned long long thread;
} Ticket;

/* Owned by the frame that uses the objects. If an exception frees the use before the ticket's end,
 * the destructor appends the ticket to `orphans`, for a later sweep to hold the objects. */
typedef struct {
    PyObject ob_base;
    PyObject *ticket;
} Use;

PyTypeObject *lane_type;
static PyTypeObject *ticket_type, *use_type;
static PyObject *in_use, *orphans;
static PyObject *edge_listeners; /* a list: functions to call after each edge; or NULL */
PyObject *queues;

static int has_pool(PyObject *object)
{
    PyObject *pool = PyObject_TypeCheck(object, lane_type) ? ((LaneState *)object)->pool : NULL;
    return pool && is_pool(pool);
}

int is_lane(PyObject *object)
{
    if (has_pool(object))
        return 1;
    PyErr_SetString(PyExc_TypeError, "it takes a lane");
    return 0;
}

static double seconds(void) /* of time.monotonic */
{
    return (double)nanoseconds() / 1e9;
}

/* Check the arguments: a lane, another lane (or None, if there is a third argument), anything. */
static int are_lanes(PyObject *const *args, Py_ssize_t given, Py_ssize_t needed)
{
    if (given == needed && has_pool(args[0]) &&
        ((needed > 2 && args[1] == Py_None) || PyObject_TypeCheck(args[1], lane_type)))
        return is_loaded();
    PyErr_SetString(PyExc_TypeError, "it takes lanes");
    return 0;
}

/* Record an event behind the work of `source`, and make `destination`, if there is one, wait for
 * the event. `*recorded` has the event if the result is 0. */
static Result order_lanes(LaneState *source, LaneState *destination, PyObject **recorded)
{
    /* Read once: another thread may close a lane, and to the driver 0 is the legacy stream. */
    CUstream from = (CUstream)(uintptr_t)source->raw_handle, to = from;
    CUcontext inside =
        source->is_context_independent ? NULL : (CUcontext)(uintptr_t)source->raw_context;
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
    CUevent handle;
    PyObject *event = take_event((EventPool *)source->pool, &handle, &result);
    if (!event)
        return result;
    result = CAPTURED;
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
        if (give_event((EventPool *)source->pool, event))
            result = FAILED;
        Py_DECREF(event);
    }
    return result;
}

/* Call the listeners after `destination` was made to wait for `source`. They run Python code, so
 * nothing may depend on what follows this call. */
static int report_edge(PyObject *destination, PyObject *source)
{
    for (Py_ssize_t i = 0; edge_listeners && i < PyList_Size(edge_listeners); i++) {
        PyObject *listener = Py_XNewRef(PyList_GetItem(edge_listeners, i));
        PyObject *answer =
            listener ? PyObject_CallFunctionObjArgs(listener, destination, source, NULL) : NULL;
        Py_XDECREF(listener);
        Py_XDECREF(answer);
        if (!answer)
            return -1;
    }
    return 0;
}

static PyObject *set_edge_listeners(PyObject *module, PyObject *list)
{
    (void)module;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "it takes a list");
        return NULL;
    }
    PyObject *before = edge_listeners;
    edge_listeners = Py_NewRef(list);
    Py_XDECREF(before);
    Py_RETURN_NONE;
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
        /* A pending wait keeps the record that it saw. */
        if (give_event((EventPool *)source->pool, event) || report_edge(args[1], args[0]))
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
    ticket->thread =
        ((LaneState *)args[0])->is_context_independent ? 0 : PyThread_get_thread_ident();
    Use *made = PyObject_New(Use, use_type);
    if (made)
        made->ticket = (PyObject *)ticket;
    else
        Py_DECREF(ticket);
    if (made && PySet_Add(in_use, (PyObject *)ticket))
        Py_CLEAR(made);
    return (PyObject *)made;
}

/* Return a new reference: another thread may set the queue of the lane at the same time. */
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
    if (is_known < 0 || (source && report_edge(args[1], args[0])))
        return NULL;
    return PyLong_FromLong(!is_known || now - lane->swept > SWEEP_SECONDS ? DUE : 0);
}

static void lane_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = __extension__(freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(((LaneState *)self)->pool);
    Py_XDECREF(((LaneState *)self)->held);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef lane_members[] = {
    {"raw_handle", T_ULONGLONG, offsetof(LaneState, raw_handle), 0, NULL},
    {"raw_context", T_ULONGLONG, offsetof(LaneState, raw_context), 0, NULL},
    {"is_context_independent", T_BOOL, offsetof(LaneState, is_context_independent), 0, NULL},
    {"pool", T_OBJECT_EX, offsetof(LaneState, pool), 0, NULL},
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
    .name = "userstream._driver._core.LaneState",
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
    .name = "userstream._driver._core.Ticket",
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
        PyErr_WriteUnraisable(orphans); /* the ticket stays in `in_use` */
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
    .name = "userstream._driver._core.Use",
    .basicsize = sizeof(Use),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = use_slots,
};

static PyMethodDef methods[] = {
    METHOD(order), METHOD(use), METHOD(finish),
    {"set_edge_listeners", set_edge_listeners, METH_O, NULL}, {NULL, NULL, 0, NULL},
};

static int make_all(void)
{
    if (!(lane_type = (PyTypeObject *)PyType_FromSpec(&lane_spec)) ||
        !(ticket_type = (PyTypeObject *)PyType_FromSpec(&ticket_spec)) ||
        !(use_type = (PyTypeObject *)PyType_FromSpec(&use_spec)) ||
        !(in_use = PySet_New(NULL)) || !(queues = PySet_New(NULL)))
        return -1;
    PyObject *collections = PyImport_ImportModule("collections");
    orphans = collections ? PyObject_CallMethod(collections, "deque", NULL) : NULL;
    Py_XDECREF(collections);
    return orphans ? 0 : -1;
}

int add_edges(PyObject *module)
{
    PyObject *seconds_between = PyFloat_FromDouble(SWEEP_SECONDS);
    int status = seconds_between
                     ? PyModule_AddObjectRef(module, "SWEEP_SECONDS", seconds_between)
                     : -1;
    Py_XDECREF(seconds_between);
    /* Once: a module that is imported again keeps the objects in use and the types of lanes. */
    return status || (!orphans && make_all()) || PyModule_AddFunctions(module, methods) ||
                   PyModule_AddObjectRef(module, "LaneState", (PyObject *)lane_type) ||
                   PyModule_AddObjectRef(module, "Ticket", (PyObject *)ticket_type) ||
                   PyModule_AddObjectRef(module, "Use", (PyObject *)use_type) ||
                   PyModule_AddObjectRef(module, "in_use", in_use) ||
                   PyModule_AddObjectRef(module, "queues", queues) ||
                   PyModule_AddObjectRef(module, "orphans", orphans)
               ? -1
               : 0;
}
