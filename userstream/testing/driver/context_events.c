/* Events of a whole context: what every stream of it has done, and what all of them wait for. A
 * green context is a part of its primary one, which covers it. */
#include "driver.h"

/* H200: the event is not ready while any stream of the context has work, non-blocking and legacy
 * ones too; other streams are not held up. A collector waits for each of them. */
static CUresult record(Context *context, const GreenContext *green, Stream *collector,
                       Event *event) {
    /* "hEvent and hCtx must be from the same CUDA context." */
    if (!handle_is(KIND_EVENT, event) || event->context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = capture_forbids_events_of_context(context, green);
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        if (result == CUDA_SUCCESS && !stream->internal && stream_is_in(stream, green))
            result = stream_wait_for(collector, stream->tail);
    }
    if (result == CUDA_SUCCESS)
        result = stream_submit(collector, event->shared ? shared_event_record(event->shared)
                                                        : operation_nothing(NODE_EVENT_RECORD));
    if (result != CUDA_SUCCESS)
        return result;
    event_set_point(event, collector->tail);
    schedule_recorded(event->point);
    return CUDA_SUCCESS;
}

/* "Makes all future work submitted to context hCtx wait." H200: also on streams that are made
 * later; nothing that is queued is held up. It costs the same however many streams there are: the
 * context's gate waits for the event, and what is queued meanwhile waits for the gate. */
static CUresult wait(const Context *context, const GreenContext *green, Stream *gate,
                     Event *event) {
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    /* "... and invalidate the capture if hEvent is part of an ongoing capture sequence or if hCtx
     * has a stream in the capture mode." */
    CUresult result = capture_forbids_events_of_context(context, green);
    if (result != CUDA_SUCCESS)
        return result;
    if (capture_forbids_use_of_event(event) != CUDA_SUCCESS)
        return CUDA_ERROR_CAPTURED_EVENT; /* H200 */
    if (event->shared)
        return stream_submit(gate, shared_event_wait(event->shared));
    return stream_wait_for(gate, event->point);
}

static CUresult record_green(const GreenContext *green, Event *event) {
    return record(green->primary, green, green->collector, event);
}

static CUresult wait_green(const GreenContext *green, Event *event) {
    return wait(green->primary, green, green->gate, event);
}

DRIVER_FUNCTION(cuCtxRecordEvent, 12050, (Context *context, Event *event), (context, event)) {
    CUresult result = context_usable_after_frees(context);
    if (result != CUDA_SUCCESS)
        return result;
    const GreenContext *green = context_green(context);
    return green ? record_green(green, event) : record(context, NULL, context->collector, event);
}

DRIVER_FUNCTION(cuCtxWaitEvent, 12050, (Context *context, Event *event), (context, event)) {
    CUresult result = context_usable(context);
    if (result != CUDA_SUCCESS)
        return result;
    const GreenContext *green = context_green(context);
    return green ? wait_green(green, event) : wait(context, NULL, context->gate, event);
}

DRIVER_FUNCTION(cuGreenCtxRecordEvent, 12040, (GreenContext *green, Event *event),
                (green, event)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    return record_green(green, event);
}

DRIVER_FUNCTION(cuGreenCtxWaitEvent, 12040, (GreenContext *green, Event *event), (green, event)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    return wait_green(green, event);
}
