/* What a capture forbids: the calls that fail while it lasts, and those that end it. */
#include "driver.h"

/* Whether an ongoing capture makes "potentially unsafe" calls of this thread an error. The rules
 * of cuThreadExchangeStreamCaptureMode: with the mode GLOBAL those of this thread's own captures
 * and of any thread's global ones; THREAD_LOCAL: of its own; RELAXED: none. A relaxed capture
 * forbids nothing. */
static bool forbids_unsafe_calls(const Capture *capture) {
    const Thread *me = this_thread();
    if (capture->invalidated || capture->mode == CAPTURE_RELAXED)
        return false;
    if (me->capture_mode == CAPTURE_RELAXED)
        return false;
    if (capture->thread == me->id)
        return true;
    return me->capture_mode == CAPTURE_GLOBAL && capture->mode == CAPTURE_GLOBAL;
}

/* H200: queries, host waits and pinned allocations of another thread answer 900, and invalidate the
 * capture; under RELAXED they succeed and it survives. */
CUresult capture_forbids_unsafe_call(void) {
    CUresult result = CUDA_SUCCESS;
    for (Capture *capture = capture_first(); capture; capture = capture->next) {
        if (forbids_unsafe_calls(capture)) {
            capture->invalidated = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

static CUresult invalidate_captures(const Context *whole, const GreenContext *green, bool parts) {
    CUresult result = CUDA_SUCCESS;
    for (Stream *stream = whole->streams; stream; stream = stream->next) {
        bool concerned = stream_is_in(stream, green) && (parts || stream->green == green);
        if (concerned && stream->capture && !stream->capture->invalidated) {
            stream->capture->invalidated = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

/* H200: cuCtxSynchronize, cuCtxRecordEvent and cuCtxWaitEvent invalidate every capture that a
 * stream of the context takes part in, in every mode. */
CUresult capture_forbids_use_of_context(const Context *context, const GreenContext *green) {
    return invalidate_captures(green ? green->primary : context, green, true);
}

/* H200: the two events of the primary context do nothing to a capture of a green one, whose work
 * they cover otherwise. */
CUresult capture_forbids_events_of_context(const Context *context, const GreenContext *green) {
    return invalidate_captures(green ? green->primary : context, green, false);
}

/* An event that was recorded in a capture stands for no work. */
CUresult capture_forbids_use_of_event(const Event *event) {
    Capture *capture = event->capture ? capture_find(event->capture) : NULL;
    if (capture)
        capture->invalidated = true;
    return event->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static Capture *blocking_capture(const Context *context) {
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        if (stream->capture && !stream->capture->invalidated && stream_is_blocking(stream))
            return stream->capture;
    }
    return NULL;
}

/* H200: the legacy stream would have to wait for a blocking stream, which is being captured. Asking
 * whether it captures is refused; using it invalidates the capture too. */
CUresult capture_would_forbid_legacy(const Context *context) {
    return blocking_capture(context) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

CUresult capture_forbids_use_of_legacy(const Context *context) {
    CUresult result = capture_would_forbid_legacy(context);
    for (Capture *capture = blocking_capture(context); capture; capture = blocking_capture(context))
        capture->invalidated = true;
    return result;
}

/* "It is invalid to synchronize or query the execution status of a stream which is being
 * captured"; "when an invalid operation is attempted, any associated capture graphs are
 * invalidated". */
CUresult capture_forbids_use_of_stream(Stream *stream) {
    if (!stream->capture)
        return CUDA_SUCCESS;
    if (stream->capture->invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
