/* Events of a whole context: what every stream of it has done, and what all of them wait for. */
#include "driver.h"

/* H200: the event is not ready while any stream of the context has work, non-blocking and legacy
 * ones too; other streams are not held up. The context's collector waits for each of them. */
DRIVER_FUNCTION(cuCtxRecordEvent, 12050, (Context *context, Event *event), (context, event)) {
    CUresult result = context_usable_after_frees(context);
    if (result != CUDA_SUCCESS)
        return result;
    /* "hEvent and hCtx must be from the same CUDA context." */
    if (!handle_is(KIND_EVENT, event) || event->context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    result = capture_forbids_use_of_context(context);
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        if (result == CUDA_SUCCESS && !stream->internal)
            result = stream_wait_for(context->collector, stream->tail);
    }
    if (result == CUDA_SUCCESS)
        result = stream_submit(context->collector, operation_nothing(NODE_EVENT_RECORD));
    if (result == CUDA_SUCCESS)
        event_set_point(event, context->collector->tail);
    return result;
}

/* "Makes all future work submitted to context hCtx wait." H200: also on streams that are made
 * later; nothing that is queued is held up. It costs the same however many streams there are: the
 * context's gate waits for the event, and what is queued meanwhile waits for the gate. */
DRIVER_FUNCTION(cuCtxWaitEvent, 12050, (Context *context, Event *event), (context, event)) {
    CUresult result = context_usable(context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_EVENT, event))
        return CUDA_ERROR_INVALID_HANDLE;
    /* "... and invalidate the capture if hEvent is part of an ongoing capture sequence or if hCtx
     * has a stream in the capture mode." */
    result = capture_forbids_use_of_context(context);
    if (result == CUDA_SUCCESS)
        result = capture_forbids_use_of_event(event);
    return result == CUDA_SUCCESS ? stream_wait_for(context->gate, event->point) : result;
}
