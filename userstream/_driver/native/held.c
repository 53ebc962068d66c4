/* Objects that are kept alive until the GPU has passed a point of a stream. */
#include "core.h"

/* Objects that a stream uses, and the point behind their last use. */
typedef struct {
    Point *point;
    Py_ssize_t uses;   /* how many calls of `hold` it stands for */
    PyObject *objects; /* a list of the objects of several calls, if it stands for several */
} Held;

/* The objects held for one stream, the oldest first. */
typedef struct {
    PyObject ob_base;
    PyObject *weak_references;
    Held *items;
    Py_ssize_t count, room;
    Py_ssize_t limit; /* the count at which neighbours are merged */
} HeldQueue;

/* The events of a stream in its queue: the limit, and about as many as merging leaves. */
enum { MOST_EVENTS = 64, FEWER_EVENTS = 48 };

static PyTypeObject *queue_type;
PyObject *queues;

int is_held_queue(PyObject *object)
{
    return PyObject_TypeCheck(object, queue_type);
}

#ifdef Py_GIL_DISABLED
#define BEGIN_QUEUE(queue) Py_BEGIN_CRITICAL_SECTION(queue)
#define END_QUEUE() Py_END_CRITICAL_SECTION()
#else
#define BEGIN_QUEUE(queue) {
#define END_QUEUE() }
#endif

static int reserve(Held **items, Py_ssize_t *room, Py_ssize_t wanted)
{
    if (wanted <= *room)
        return 0;
    wanted = wanted < MOST_EVENTS ? MOST_EVENTS : wanted + wanted / 2;
    Held *larger = PyMem_Realloc(*items, (size_t)wanted * sizeof *larger);
    if (!larger) {
        PyErr_NoMemory();
        return -1;
    }
    *items = larger;
    *room = wanted;
    return 0;
}

/* Take all items out of a queue. */
static Held *take_out(HeldQueue *queue, Py_ssize_t *count, Py_ssize_t *room)
{
    Held *items;
    BEGIN_QUEUE((PyObject *)queue);
    items = queue->items;
    *count = queue->count;
    *room = queue->room;
    queue->items = NULL;
    queue->count = queue->room = 0;
    END_QUEUE();
    return items;
}

/* Put items back in front of those that came meanwhile. */
static int put_back(HeldQueue *queue, Held *items, Py_ssize_t count, Py_ssize_t room)
{
    Held *newer;
    int status = 0;
    BEGIN_QUEUE((PyObject *)queue);
    newer = queue->items;
    if (queue->count)
        status = reserve(&items, &room, count + queue->count);
    if (!status) { /* otherwise `items` leak: the GPU may use their objects */
        if (queue->count)
            memcpy(items + count, newer, (size_t)queue->count * sizeof *newer);
        queue->items = items;
        queue->count += count;
        queue->room = room;
    }
    END_QUEUE();
    if (!status)
        PyMem_Free(newer);
    return status;
}

/* Add the objects of `later` to those of `held`. Returns -1 without an exception if there is no
 * memory: then nothing has changed. */
static int join_objects(Held *held, const Held *later)
{
    PyObject *list = held->objects;
    Py_ssize_t end = PY_SSIZE_T_MAX;
    int status;
    if (held->uses == 1) {
        list = PyList_New(1);
        if (!list) {
            PyErr_Clear();
            return -1;
        }
        PyList_SetItem(list, 0, Py_NewRef(held->objects));
    }
    status = later->uses == 1 ? PyList_Append(list, later->objects)
                              : PyList_SetSlice(list, end, end, later->objects);
    if (status)
        PyErr_Clear();
    else if (list != held->objects) {
        Py_DECREF(held->objects); /* the list keeps them */
        held->objects = list;
        list = NULL;
    }
    if (list && list != held->objects)
        Py_DECREF(list);
    return status;
}

/* Merge neighbours: a later point of a stream covers the objects of an earlier one. A merged item
 * stands for at most 1/24 of all uses, so objects are released at most so much later. Returns the
 * new count. `spare` gets the points that are not needed any more. */
static Py_ssize_t merge(Held *items, Py_ssize_t count, Point **spare, Py_ssize_t *dropped)
{
    Py_ssize_t uses = 0, last = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        uses += items[i].uses;
    Py_ssize_t most = uses / (FEWER_EVENTS / 2) > 2 ? uses / (FEWER_EVENTS / 2) : 2;
    for (Py_ssize_t i = 1; i < count; i++) {
        Held *earlier = &items[last], *later = &items[i];
        if (*dropped < MOST_EVENTS && earlier->uses + later->uses <= most &&
            later->point->in_order && earlier->point->ended < later->point->began &&
            !join_objects(earlier, later)) {
            spare[(*dropped)++] = earlier->point;
            Py_DECREF(later->objects);
            later->objects = earlier->objects;
            later->uses += earlier->uses;
            *earlier = *later;
        } else
            items[++last] = *later;
    }
    return last + 1;
}

static void release_all(const Held *items, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF((PyObject *)items[i].point);
        Py_DECREF(items[i].objects);
    }
}

/* Hold objects until the GPU has passed a point. */
int hold(PyObject *object, Point *point, PyObject *objects)
{
    HeldQueue *queue = (HeldQueue *)object;
    int status, is_full = 0;
    BEGIN_QUEUE(object);
    status = reserve(&queue->items, &queue->room, queue->count + 1);
    if (!status) {
        Py_INCREF((PyObject *)point);
        queue->items[queue->count++] = (Held){point, 1, Py_NewRef(objects)};
        is_full = queue->count >= queue->limit;
    }
    END_QUEUE();
    if (is_full) {
        Point *spare[MOST_EVENTS];
        Py_ssize_t count, room, dropped = 0;
        /* Out of the queue meanwhile: a garbage collection may run a destructor that holds. */
        Held *items = take_out(queue, &count, &room);
        if (count)
            count = merge(items, count, spare, &dropped);
        /* Points that threads have recorded at the same time cannot be merged. */
        Py_ssize_t next = count + MOST_EVENTS - FEWER_EVENTS;
        queue->limit = next > MOST_EVENTS ? next : MOST_EVENTS;
        status = put_back(queue, items, count, room);
        for (Py_ssize_t i = 0; i < dropped; i++)
            Py_DECREF((PyObject *)spare[i]);
    }
    return status;
}

/* -- sweeps ---------------------------------------------------------------------------------- */

enum { AT_ONCE = 4 * MOST_EVENTS };

/* Copy the points at the front of a queue, with a reference to each; return how many. */
static Py_ssize_t first_points(HeldQueue *queue, Point **points)
{
    Py_ssize_t count;
    BEGIN_QUEUE((PyObject *)queue);
    count = queue->count < AT_ONCE ? queue->count : AT_ONCE;
    for (Py_ssize_t i = 0; i < count; i++)
        points[i] = (Point *)Py_NewRef((PyObject *)queue->items[i].point);
    END_QUEUE();
    return count;
}

/* Move the items whose points are among those given from the front of a queue. Since the points
 * were copied, items may have been merged, or moved by another sweep. Returns how many, or -1. */
static Py_ssize_t take_front(HeldQueue *queue, Point *const *points, Py_ssize_t count, Held *items)
{
    Py_ssize_t taken = 0, known = 0;
    BEGIN_QUEUE((PyObject *)queue);
    for (; taken < queue->count; taken++) {
        while (known < count && points[known] != queue->items[taken].point)
            known++;
        if (known == count)
            break;
        items[taken] = queue->items[taken];
    }
    queue->count -= taken;
    if (taken)
        memmove(queue->items, queue->items + taken, (size_t)queue->count * sizeof *items);
    END_QUEUE();
    return taken;
}

/* Release objects at the front of a queue; return whether there may be more. */
static int sweep_front(HeldQueue *queue)
{
    Point *points[AT_ONCE];
    Held items[AT_ONCE];
    int mode;
    Py_ssize_t passed = 0, count = first_points(queue, points);
    if (!count)
        return 0;
    unsigned char before = set_account_of_thread(HOUSEKEEPING);
    Py_BEGIN_ALLOW_THREADS
    if (!relax(&mode)) {
        passed = count_passed(points, count, 1);
        restore(mode, 0);
    }
    Py_END_ALLOW_THREADS
    set_account_of_thread(before);
    Py_ssize_t taken = take_front(queue, points, passed, items);
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF((PyObject *)points[i]);
    if (!taken)
        return 0;
    /* Destructors may free memory, which would break the captures of other threads. */
    Result result = relax(&mode);
    release_all(items, taken);
    if (!result)
        restore(mode, 0);
    return passed == AT_ONCE;
}

/* sweep(queue): release the objects that the GPU has passed, and keep the queue in `queues` while
 * it holds something. Leaves all captures alone. */
static PyObject *sweep(PyObject *module, PyObject *object)
{
    (void)module;
    if (!is_held_queue(object)) {
        PyErr_SetString(PyExc_TypeError, "sweep() takes a queue of held objects");
        return NULL;
    }
    if (!is_loaded())
        return NULL;
    HeldQueue *queue = (HeldQueue *)object;
    while (sweep_front(queue))
        ;
    /* Discard first and look afterwards: `hold` is followed by the addition to the set. */
    if (PySet_Discard(queues, object) < 0 || (queue->count && PySet_Add(queues, object)))
        return NULL;
    Py_RETURN_NONE;
}

/* -- the type -------------------------------------------------------------------------------- */

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    (void)args, (void)names;
    HeldQueue *queue = (HeldQueue *)PyType_GenericAlloc(type, 0);
    if (queue)
        queue->limit = MOST_EVENTS;
    return (PyObject *)queue;
}

static void queue_dealloc(PyObject *self)
{
    HeldQueue *queue = (HeldQueue *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = __extension__(freefunc)PyType_GetSlot(type, Py_tp_free);
    if (queue->weak_references)
        PyObject_ClearWeakRefs(self);
    release_all(queue->items, queue->count);
    PyMem_Free(queue->items);
    release_memory(self);
    Py_DECREF(type);
}

static Py_ssize_t queue_length(PyObject *self)
{
    return ((HeldQueue *)self)->count;
}

static PyObject *queue_hold(PyObject *self, PyObject *args)
{
    PyObject *point, *objects;
    if (!PyArg_ParseTuple(args, "O!O", point_type, &point, &objects) ||
        hold(self, (Point *)point, objects))
        return NULL;
    Py_RETURN_NONE;
}

static PyMemberDef queue_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(HeldQueue, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef queue_methods[] = {
    {"hold", queue_hold, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_new, FUNCTION(queue_new)},
    {Py_tp_dealloc, FUNCTION(queue_dealloc)},
    {Py_tp_members, queue_members},
    {Py_tp_methods, queue_methods},
    {Py_sq_length, FUNCTION(queue_length)},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "userstream._driver._core.HeldQueue",
    .basicsize = sizeof(HeldQueue),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

static PyMethodDef methods[] = {{"sweep", sweep, METH_O, NULL}, {NULL, NULL, 0, NULL}};

int add_held(PyObject *module)
{
    if (!queues && !(queues = PySet_New(NULL)))
        return -1;
    if (!queue_type && !(queue_type = (PyTypeObject *)PyType_FromSpec(&queue_spec)))
        return -1;
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddObjectRef(module, "HeldQueue", (PyObject *)queue_type) ||
                   PyModule_AddObjectRef(module, "queues", queues)
               ? -1
               : 0;
}
