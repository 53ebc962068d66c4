/* Events: a place in a stream that others can wait for. */
#include "driver.h"

enum {
    EVENT_DISABLE_TIMING = 2,
    EVENT_INTERPROCESS = 4,
    EVENT_FLAGS = 7,
    EVENT_EXTERNAL = 1,         /* CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL */
};

static Event *events;

static void event_free(Event *event) {
    for (Event **link = &events; *link; link = &(*link)->next) {
        if (*link == event) {
            *link = event->next;
            break;
        }
    }
    schedule_forget(event->point);
    point_release(event->point);
    nodes_clear(&event->captured);
    shared_event_release(event->shared);
    handle_free(KIND_EVENT, event);
}

void events_of_context_free(Context *context) {
    for (Event *event = events, *next; event; event = next) {
        next = event->next;
        if (event->context == context)
            event_free(event);
    }
}

void event_set_point(Event *event, Point *point) {
    point_retain(point);
    schedule_forget(event->point);
    point_release(event->point);
    event->point = point;
    event->capture = 0;
}

Event *event_new(Context *context, unsigned flags) {
    Event *event = handle_new(KIND_EVENT);
    event->id = new_id();
    event->context = context;
    event->flags = flags;
    event->next = events;
    events = event;
    return event;
}

/* H200: without a current context an event cannot be created; all else works there. */
DRIVER_FUNCTION(cuEventCreate, 2000, (Event **out, unsigned flags), (out, flags)) {
    if (!out || (flags & ~(unsigned)EVENT_FLAGS))
        return CUDA_ERROR_INVALID_VALUE;
    /* "CU_EVENT_INTERPROCESS must be specified along with CU_EVENT_DISABLE_TIMING" */
    if ((flags & EVENT_INTERPROCESS) && !(flags & EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable_after_frees(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    SharedEvent *shared = flags & EVENT_INTERPROCESS ? shared_event_new() : NULL;
    if (flags & EVENT_INTERPROCESS && !shared)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = event_new(context_current(), flags);
    (*out)->shared = shared;
    return CUDA_SUCCESS;
}

/* "An event may be destroyed before it is complete": pending waits keep the point they saw. */
DRIVER_FUNCTION_AS(cuEventDestroy_v2, cuEventDestroy, 4000, (Event *event), (event)) {
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    event_free(event);
    return CUDA_SUCCESS;
}

/* ---- recording ------------------------------------------------------------------------------ */

/* A record inside a capture is no work: it notes what a wait for the event would come after. */
static CUresult record_captured(Event *event, const Stream *stream) {
    if (stream->capture->invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = stream->capture->id;
    nodes_set(&event->captured, &stream->dependencies);
    return CUDA_SUCCESS;
}

/* NULL: it was destroyed. */
static Event *event_of(const Operation *operation) {
    Event *event = operation->event.handle;
    return handle_is(KIND_EVENT, event) && event->id == operation->event.id ? event : NULL;
}

static Operation *event_operation(Run run, NodeType type, Event *event) {
    Operation *operation = operation_new(run, type);
    operation->event.handle = event;
    operation->event.id = event->id;
    return operation;
}

/* In a graph: an external record sets the event anew at each launch. */
static CUresult run_external_record(Operation *operation, Stream *stream) {
    Event *event = event_of(operation);
    if (event)
        event_set_point(event, stream->first->point);
    return CUDA_SUCCESS;
}

Operation *event_record_operation(Event *event) {
    return event_operation(run_external_record, NODE_EVENT_RECORD, event);
}

/* The external flag "is invalid outside of stream capture". H200: ILLEGAL_STATE there. */
static CUresult check_flags(unsigned flags, const Stream *stream) {
    if (flags & ~(unsigned)EVENT_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    return flags && !stream->capture ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

static CUresult record(Event *event, Stream *handle, unsigned flags) {
    Stream *stream;
    CUresult result = stream_find_after_frees(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    result = check_flags(flags, stream);
    if (result != CUDA_SUCCESS)
        return result;
    /* "hEvent and hStream must be from the same context." H200: INVALID_HANDLE. */
    if (event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture && !(flags & EVENT_EXTERNAL))
        return record_captured(event, stream);
    if (stream->capture)
        return stream_submit(stream, event_record_operation(event));
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    result = stream_submit(stream, event->shared ? shared_event_record(event->shared)
                                                 : operation_nothing(NODE_EVENT_RECORD));
    if (result != CUDA_SUCCESS)
        return result;
    event_set_point(event, stream->tail);
    schedule_recorded(event->point);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuEventRecord, 2000, (Event *event, Stream *handle), (event, handle)) {
    return record(event, handle, 0);
}

DRIVER_FUNCTION(cuEventRecordWithFlags, 11010, (Event *event, Stream *handle, unsigned flags),
                (event, handle, flags)) {
    return record(event, handle, flags);
}

/* ---- waiting -------------------------------------------------------------------------------- */

static CUresult run_external_wait(Operation *operation, Stream *stream) {
    const Event *event = event_of(operation);
    Point *point = event ? point_retain(event->point) : NULL;
    while (point_pending(point) && point != stream->first->point && !stream_work_is_lost(stream))
        wait_for_progress();
    point_release(point);
    return CUDA_SUCCESS;
}

Operation *event_wait_operation(Event *event) {
    return event_operation(run_external_wait, NODE_WAIT_EVENT, event);
}

/* The wait keeps the record that the event has now: a later one does not change it. */
DRIVER_FUNCTION(cuStreamWaitEvent, 3020, (Stream *handle, Event *event, unsigned flags),
                (handle, event, flags)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    result = check_flags(flags, stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    if (stream->capture && (flags & EVENT_EXTERNAL))
        return stream_submit(stream, event_wait_operation(event));
    if (stream == stream->context->legacy) {
        result = capture_forbids_use_of_legacy(stream->context);
        if (result != CUDA_SUCCESS)
            return result;
    }
    if (event->capture)
        return capture_join(stream, event);
    if (stream->capture) {
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (event->shared)
        return stream_submit(stream, shared_event_wait(event->shared));
    return stream_wait_for(stream, event->point);
}

/* ---- has it happened ------------------------------------------------------------------------ */

static CUresult check_host_wait(Event *event) {
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->context->error != CUDA_SUCCESS)
        return event->context->error;
    if (event->capture) {
        Capture *capture = capture_find(event->capture);
        if (capture)
            capture->invalidated = true;
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return capture_forbids_unsafe_call();
}

DRIVER_FUNCTION(cuEventQuery, 2000, (Event *event), (event)) {
    schedule_before_query(handle_is(KIND_EVENT, event) ? event->point : NULL);
    CUresult result = check_host_wait(event);
    if (result != CUDA_SUCCESS)
        return result;
    schedule_after_query(event->point);
    bool pending = event->shared ? shared_event_pending(event->shared)
                                 : point_pending(event->point);
    return pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuEventSynchronize, 2000, (Event *event), (event)) {
    CUresult result = check_host_wait(event);
    if (result != CUDA_SUCCESS)
        return result;
    return event->shared ? shared_event_synchronize(event->shared, event->context)
                         : point_wait(event->point, event->context);
}

static CUresult elapsed(float *milliseconds, Event *start, Event *end) {
    if (!handle_is(KIND_EVENT, start) || !handle_is(KIND_EVENT, end))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->point || !end->point)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->context != end->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (point_pending(start->point) || point_pending(end->point))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)(end->point->milliseconds - start->point->milliseconds);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuEventElapsedTime, 2000, (float *milliseconds, Event *start, Event *end),
                (milliseconds, start, end)) {
    return elapsed(milliseconds, start, end);
}

DRIVER_FUNCTION_AS(cuEventElapsedTime_v2, cuEventElapsedTime, 12080,
                   (float *milliseconds, Event *start, Event *end), (milliseconds, start, end)) {
    return elapsed(milliseconds, start, end);
}
