/* Lanes, the edges between them, and the objects that their work uses. */
#include "core.h"

/* The lane and the objects of a use. A ticket is in `in_use` until its end, which keeps the objects
 * alive even if an exception drops all other references. */
typedef struct {
    PyObject ob_base;
    PyObject *lane;   /* uses the objects */
    PyObject *source; /* the ordering whose producers wait for the lane at the end, or None */
    PyObject *objects;
    unsigned long long thread;
} Ticket;

/* Owned by the frame that uses the objects. If an exception frees the use before the ticket's end,
 * the destructor appends the ticket to `orphans`, for a later sweep to hold the objects. */
typedef struct {
    PyObject ob_base;
    PyObject *ticket;
} Use;

/* The streams of some buffers, which `Ordering` in _ordering/ordering.py extends. Made in every
 * borrow: attributes of a Python object would take longer to set. */
typedef struct {
    PyObject ob_base;
    PyObject *consumer;   /* the Stream that uses the buffers */
    PyObject *lane;       /* the lane of the consumer */
    PyObject *producers;  /* a tuple of the other lanes */
    PyObject *owners;     /* keep streams of producers alive that frameworks might destroy */
    PyObject *buffers;    /* the memory that the consumer uses */
    PyObject *may_join;   /* whether the producers may join a capture of the consumer */
    PyObject *buffer_use; /* the BufferUse of a consumer that is not the unnamed user stream */
    PyObject *rest;       /* what few orderings need; None: the edges are the whole order */
} OrderingState;

enum { NEEDED = 6, ORDERING_FIELDS = 8 };

PyTypeObject *lane_type;
static PyTypeObject *ticket_type, *use_type, *ordering_type;
static PyObject *in_use, *orphans, *name_lane;
static PyObject *edge_listeners; /* a list: functions to call after each edge; or NULL */

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

/* Check the arguments: a lane, another lane (or None, if there is a third argument), anything. */
static int are_lanes(PyObject *const *args, Py_ssize_t given, Py_ssize_t needed)
{
    if (given == needed && has_pool(args[0]) &&
        ((needed > 2 && args[1] == Py_None) || PyObject_TypeCheck(args[1], lane_type)))
        return is_loaded();
    PyErr_SetString(PyExc_TypeError, "it takes lanes");
    return 0;
}

/* Record an event behind the work of `source`, unless that is done, and make `destination`, if
 * there is one, wait for the event. */
static Result order_lanes(const LaneState *source, const LaneState *destination, CUevent event,
                          int is_recorded)
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
    Py_BEGIN_ALLOW_THREADS
    int is_here = !inside || (!get_current(&current) && current == inside);
    if (is_here && is_free(from) && (to == from || is_free(to))) {
        result = is_recorded ? 0 : failed(RECORD_EVENT, record_event(event, from));
        if (!result && destination)
            result = failed(WAIT_EVENT, wait_event(to, event, 0));
    }
    Py_END_ALLOW_THREADS
    return result;
}

/* Call the listeners of `_hooks.edge_added` after `destination` was made to wait for `source`. They
 * run Python code, so nothing may depend on what follows this call. */
int report_edge(PyObject *destination, PyObject *source)
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

/* Also without the GIL: then it may be out of date. */
int has_edge_listeners(void)
{
    return edge_listeners && Py_SIZE(edge_listeners) > 0;
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

static Result add_edge(PyObject *source, PyObject *destination)
{
    CUevent handle;
    Result result;
    EventPool *pool = (EventPool *)((LaneState *)source)->pool;
    PyObject *event = take_event(pool, &handle, &result);
    if (!event)
        return result;
    result = order_lanes((LaneState *)source, (LaneState *)destination, handle, 0);
    /* The event is spare again: a pending wait keeps the record that it saw. */
    if (give_event(pool, event) || (!result && report_edge(destination, source)))
        result = FAILED;
    Py_DECREF(event);
    return result;
}

static PyObject *number_of(Result result)
{
    return result == FAILED ? NULL : PyLong_FromLongLong(result);
}

/* Whether a lane is open and not captured, in the context that its handle depends on. */
static int is_surely_free(const LaneState *lane)
{
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    CUcontext context = (CUcontext)(uintptr_t)lane->raw_context, before;
    if (!stream)
        return 0;
    if (lane->is_context_independent)
        return is_free(stream);
    if (enter_context(context, &before))
        return 0;
    int answer = is_free(stream);
    return !leave_context(context, before, 0) && answer;
}

/* are_all_free(lanes): whether every lane is open and not captured. Breaks no capture. */
static PyObject *are_all_free(PyObject *module, PyObject *lanes)
{
    (void)module;
    int answer = 1;
    PyObject *each, *iterator = is_loaded() ? PyObject_GetIter(lanes) : NULL;
    while (answer && iterator && (each = PyIter_Next(iterator))) {
        answer = is_lane(each);
        if (answer) {
            Py_BEGIN_ALLOW_THREADS
            answer = is_surely_free((LaneState *)each);
            Py_END_ALLOW_THREADS
        }
        Py_DECREF(each);
    }
    Py_XDECREF(iterator);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(answer);
}

/* wait_for(lane, event): make later work of a lane wait for an event, in the context that
 * the handle of the lane depends on. */
static PyObject *wait_for(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *event;
    CUcontext before;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "wait_for() takes a lane and an event");
        return NULL;
    }
    if (!is_lane(args[0]) || !is_loaded() || !address(args[1], &event))
        return NULL;
    const LaneState *lane = (LaneState *)args[0];
    CUstream stream = (CUstream)(uintptr_t)lane->raw_handle;
    CUcontext context = (CUcontext)(uintptr_t)lane->raw_context;
    if (!stream) /* closed: to the driver 0 is the legacy stream */
        return PyObject_CallMethod(args[0], "live", NULL); /* which raises */
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = lane->is_context_independent ? 0 : enter_context(context, &before);
    if (!result) {
        result = failed(WAIT_EVENT, wait_event(stream, event, 0));
        if (!lane->is_context_independent)
            result = leave_context(context, before, result);
    }
    Py_END_ALLOW_THREADS
    if (result)
        return raise_result(result, args[0]);
    Py_RETURN_NONE;
}

/* order(source, destination): make `destination` wait for the work queued on `source`. */
static PyObject *order(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    return are_lanes(args, count, 2) ? number_of(add_edge(args[0], args[1])) : NULL;
}

/* use(lane, source, objects): put objects into use until the ticket of the Use ends. */
static PyObject *use(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int is_ordered = count == 3 && PyObject_TypeCheck(args[1], ordering_type) && has_pool(args[0]);
    if (!is_ordered && !are_lanes(args, count, 3))
        return NULL;
    Ticket *ticket = PyObject_New(Ticket, ticket_type);
    if (!ticket)
        return NULL;
    ticket->lane = Py_NewRef(args[0]);
    ticket->source = Py_NewRef(args[1]);
    ticket->objects = Py_NewRef(args[2]);
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

int is_ticket(PyObject *object)
{
    return PyObject_TypeCheck(object, ticket_type);
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

/* The point that the work of a lane has reached, for which `destination`, if it is not None, is
 * made to wait. NULL with a result. */
static Point *point_behind(PyObject *waited, PyObject *destination, Result *result)
{
    CUevent handle;
    const LaneState *lane = (LaneState *)waited;
    EventPool *pool = (EventPool *)lane->pool;
    double began = seconds();
    PyObject *event = take_event(pool, &handle, result);
    if (!event)
        return NULL;
    *result =
        order_lanes(lane, destination == Py_None ? NULL : (LaneState *)destination, handle, 0);
    if (*result) {
        if (give_event(pool, event))
            *result = FAILED;
        Py_DECREF(event);
        return NULL;
    }
    Point *point = new_point(pool, event, waited, began);
    if (!point)
        *result = FAILED;
    return point;
}

/* Make `source`, if it is not None, wait for the work of a lane up to a point, if one is given, and
 * hold objects, or those of a ticket, which then ends, up to there. */
Result hold_behind(PyObject *waited, PyObject *source, PyObject *objects, Point *given)
{
    PyObject *ticket = NULL;
    LaneState *lane = (LaneState *)waited;
    Result result = 0;
    if (is_ticket(objects)) {
        ticket = objects;
        objects = ((Ticket *)ticket)->objects;
    }
    PyObject *queue = queue_of(lane);
    if (!queue || !is_held_queue(queue)) {
        Py_XDECREF(queue);
        return CAPTURED;
    }
    Point *point = given;
    if (!given)
        point = point_behind(waited, source, &result);
    else if (source != Py_None)
        result = order_lanes(lane, (LaneState *)source, given->handle, 1);
    if (result) {
        Py_DECREF(queue);
        return result;
    }
    double now = point->ended;
    int status = hold(queue, point, objects);
    if (!given)
        Py_DECREF((PyObject *)point);
    int is_known = status ? -1 : PySet_Contains(queues, queue);
    if (is_known >= 0 &&
        (PySet_Add(queues, queue) || (ticket && PySet_Discard(in_use, ticket) < 0)))
        is_known = -1;
    Py_DECREF(queue);
    if (is_known < 0 || (source != Py_None && report_edge(source, waited)))
        return FAILED;
    return !is_known || now - lane->swept > SWEEP_SECONDS ? DUE : 0;
}

/* -- orderings ------------------------------------------------------------------------------- */

/* The lanes of an ordering that is a matter of one edge at most: the consumer, and the producer or
 * None. CAPTURED for any other ordering. The references are borrowed: the ordering keeps them. */
Result two_lanes(PyObject *object, PyObject *lanes[2])
{
    if (!PyObject_TypeCheck(object, ordering_type)) {
        PyErr_SetString(PyExc_TypeError, "it takes an ordering");
        return FAILED;
    }
    const OrderingState *ordering = (OrderingState *)object;
    Py_ssize_t count = PyTuple_Size(ordering->producers);
    if (ordering->rest != Py_None || count > 1)
        return CAPTURED;
    lanes[0] = ordering->lane;
    lanes[1] = count == 1 ? PyTuple_GetItem(ordering->producers, 0) : Py_None;
    if (count < 0 || !is_lane(lanes[0]) || (count && !is_lane(lanes[1])) || !is_loaded())
        return FAILED;
    return 0;
}

/* acquire(ordering): make the consumer wait for the producer. CAPTURED if that takes more. */
static PyObject *acquire(PyObject *module, PyObject *ordering)
{
    (void)module;
    PyObject *lanes[2];
    Result result = two_lanes(ordering, lanes);
    if (!result && lanes[1] != Py_None)
        result = add_edge(lanes[1], lanes[0]);
    return number_of(result);
}

/* release(ordering, objects): make the producer wait for the consumer, and hold the objects, which
 * may be a ticket, until the GPU has passed this point. CAPTURED if that takes more. */
static PyObject *release(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    PyObject *lanes[2];
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "release() takes an ordering and objects");
        return NULL;
    }
    Result result = two_lanes(args[0], lanes);
    if (!result && args[1] != Py_None)
        result = hold_behind(lanes[0], lanes[1], args[1], NULL);
    else if (!result && lanes[1] != Py_None)
        result = add_edge(lanes[0], lanes[1]);
    return number_of(result);
}

/* new_ordering(type, streams, device, producer, owners, buffers, may_join): the ordering between
 * the producer of buffers on a device, a lane, and the stream of that device. None if `streams`,
 * which is by device, has no such stream, or the stream has no lane of its own. */
static PyObject *new_ordering(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 7 || !PyType_Check(args[0]) ||
        !PyType_IsSubtype((PyTypeObject *)args[0], ordering_type)) {
        PyErr_SetString(PyExc_TypeError, "it takes a type of orderings and six arguments");
        return NULL;
    }
    PyObject *consumer = PyObject_GetItem(args[1], args[2]);
    if (!consumer) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *lane = PyObject_GetAttr(consumer, name_lane);
    if (!lane || lane == Py_None) {
        Py_DECREF(consumer);
        return lane;
    }
    PyObject *self = PyType_GenericAlloc((PyTypeObject *)args[0], 0);
    OrderingState *ordering = (OrderingState *)self;
    PyObject *producers =
        !self ? NULL : lane == args[3] ? PyTuple_New(0) : PyTuple_Pack(1, args[3]);
    if (!producers) {
        Py_XDECREF(self);
        Py_DECREF(consumer);
        Py_DECREF(lane);
        return NULL;
    }
    ordering->consumer = consumer;
    ordering->lane = lane;
    ordering->producers = producers;
    ordering->owners = Py_NewRef(args[4]);
    ordering->buffers = Py_NewRef(args[5]);
    ordering->may_join = Py_NewRef(args[6]);
    ordering->buffer_use = Py_NewRef(Py_None);
    ordering->rest = Py_NewRef(Py_None);
    return self;
}

static PyObject *ordering_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *given[ORDERING_FIELDS] = {0};
    Py_ssize_t count = PyTuple_Size(args);
    if (names || count < NEEDED || count > ORDERING_FIELDS ||
        !PyTuple_Check(PyTuple_GetItem(args, 2))) {
        PyErr_SetString(PyExc_TypeError, "it takes the fields of an ordering in their order");
        return NULL;
    }
    for (int i = 0; i < ORDERING_FIELDS; i++)
        given[i] = i < count ? PyTuple_GetItem(args, i) : Py_None;
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    PyObject **fields = &((OrderingState *)self)->consumer;
    for (int i = 0; i < ORDERING_FIELDS; i++)
        fields[i] = Py_NewRef(given[i]);
    return self;
}

static void ordering_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_memory = __extension__(freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject **fields = &((OrderingState *)self)->consumer;
    for (int i = 0; i < ORDERING_FIELDS; i++)
        Py_XDECREF(fields[i]);
    free_memory(self);
    Py_DECREF(type);
}

static PyMemberDef ordering_members[] = {
    {"consumer", T_OBJECT_EX, offsetof(OrderingState, consumer), READONLY, NULL},
    {"lane", T_OBJECT_EX, offsetof(OrderingState, lane), READONLY, NULL},
    {"producers", T_OBJECT_EX, offsetof(OrderingState, producers), READONLY, NULL},
    {"owners", T_OBJECT_EX, offsetof(OrderingState, owners), READONLY, NULL},
    {"buffers", T_OBJECT_EX, offsetof(OrderingState, buffers), 0, NULL},
    {"may_join", T_OBJECT_EX, offsetof(OrderingState, may_join), READONLY, NULL},
    {"buffer_use", T_OBJECT_EX, offsetof(OrderingState, buffer_use), 0, NULL},
    {"rest", T_OBJECT_EX, offsetof(OrderingState, rest), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ordering_slots[] = {
    {Py_tp_new, FUNCTION(ordering_new)},
    {Py_tp_dealloc, FUNCTION(ordering_dealloc)},
    {Py_tp_members, ordering_members},
    {0, NULL},
};

static PyType_Spec ordering_spec = {
    .name = "userstream._driver._core.OrderingState",
    .basicsize = sizeof(OrderingState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = ordering_slots,
};

/* -- the types of lanes, tickets and uses ---------------------------------------------------- */

static void lane_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = __extension__(freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(((LaneState *)self)->pool);
    Py_XDECREF(((LaneState *)self)->held);
    release_memory(self);
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
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef ticket_members[] = {
    {"lane", T_OBJECT_EX, offsetof(Ticket, lane), READONLY, NULL},
    {"source", T_OBJECT_EX, offsetof(Ticket, source), 0, NULL},
    {"objects", T_OBJECT_EX, offsetof(Ticket, objects), READONLY, NULL},
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
    METHOD(order),
    METHOD(wait_for),
    METHOD(use),
    METHOD(new_ordering),
    {"acquire", acquire, METH_O, NULL},
    {"are_all_free", are_all_free, METH_O, NULL},
    METHOD(release),
    {"set_edge_listeners", set_edge_listeners, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int make_all(void)
{
    if (!(lane_type = (PyTypeObject *)PyType_FromSpec(&lane_spec)) ||
        !(ticket_type = (PyTypeObject *)PyType_FromSpec(&ticket_spec)) ||
        !(use_type = (PyTypeObject *)PyType_FromSpec(&use_spec)) ||
        !(ordering_type = (PyTypeObject *)PyType_FromSpec(&ordering_spec)) ||
        !(in_use = PySet_New(NULL)))
        return -1;
    if (!(name_lane = PyUnicode_InternFromString("_lane")))
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
                   PyModule_AddObjectRef(module, "OrderingState", (PyObject *)ordering_type) ||
                   PyModule_AddObjectRef(module, "in_use", in_use) ||
                   PyModule_AddObjectRef(module, "orphans", orphans)
               ? -1
               : 0;
}
