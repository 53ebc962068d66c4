/* User objects: callbacks that run when no graph needs an object any more. */
#include "driver.h"

typedef struct Retained {
    UserObject *object;
    unsigned count;
    struct Retained *next;
} Retained;

/* ---- the end of an object ------------------------------------------------------------------- */

typedef struct Due {
    HostFunction destroy;
    void *object;
    struct Due *next;
} Due;

static Due *due;

static void release(UserObject *object, unsigned count) {
    object->references -= count < object->references ? count : object->references;
    if (object->references)
        return;
    Due *last = malloc(sizeof *last);
    *last = (Due){object->destroy, object->object, due};
    due = last;
    handle_free(KIND_USER_OBJECT, object);
}

bool user_objects_are_due(void) {
    return due != NULL;
}

/* Destructors are not called under the lock, and not when the process exits. */
void user_objects_destroy(void) {
    lock();
    while (due && !shut_down) {
        Due *first = due;
        due = first->next;
        unlock();
        first->destroy(first->object);
        free(first);
        lock();
    }
    unlock();
}

/* ---- what graphs keep ----------------------------------------------------------------------- */

void retained_add(Retained **list, UserObject *object, unsigned count) {
    Retained *retained = malloc(sizeof *retained);
    *retained = (Retained){object, count, *list};
    *list = retained;
}

void retained_add_all(Retained **list, Retained *from) {
    for (; from; from = from->next) {
        from->object->references++;
        retained_add(list, from->object, 1);
    }
}

void retained_release(Retained *retained) {
    while (retained) {
        Retained *next = retained->next;
        release(retained->object, retained->count);
        free(retained);
        retained = next;
    }
}

/* ---- the functions -------------------------------------------------------------------------- */

DRIVER_FUNCTION(cuUserObjectCreate, 11030,
                (UserObject **out, void *object, HostFunction destroy, unsigned references,
                 unsigned flags),
                (out, object, destroy, references, flags)) {
    enum { NO_DESTRUCTOR_SYNC = 1 };    /* "Presently the only supported flag"; it is required */
    if (!out || !destroy || !references || flags != NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    *out = handle_new(KIND_USER_OBJECT);
    (*out)->object = object;
    (*out)->destroy = destroy;
    (*out)->references = references;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuUserObjectRetain, 11030, (UserObject *object, unsigned count),
                (object, count)) {
    if (!handle_is(KIND_USER_OBJECT, object) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    object->references += count;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuUserObjectRelease, 11030, (UserObject *object, unsigned count),
                (object, count)) {
    if (!handle_is(KIND_USER_OBJECT, object) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    release(object, count);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphRetainUserObject, 11030,
                (Graph *graph, UserObject *object, unsigned count, unsigned flags),
                (graph, object, count, flags)) {
    enum { MOVE = 1 };          /* the graph takes over references of the caller */
    if (!handle_is(KIND_GRAPH, graph) || !handle_is(KIND_USER_OBJECT, object) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!(flags & MOVE))
        object->references += count;
    retained_add(&graph->retained, object, count);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphReleaseUserObject, 11030,
                (Graph *graph, UserObject *object, unsigned count), (graph, object, count)) {
    if (!handle_is(KIND_GRAPH, graph) || !handle_is(KIND_USER_OBJECT, object) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (Retained **link = &graph->retained; *link; link = &(*link)->next) {
        Retained *retained = *link;
        if (retained->object != object || retained->count < count)
            continue;
        retained->count -= count;
        if (retained->count == 0) {
            *link = retained->next;
            free(retained);
        }
        release(object, count);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}
