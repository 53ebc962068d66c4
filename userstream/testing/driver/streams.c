/* Streams: making and finding them, and asking whether they have finished. */
#include "driver.h"

/* ---- finding and making streams ------------------------------------------------------------- */

static Stream *per_thread_stream(Context *context, GreenContext *green) {
    uint64_t thread = this_thread()->id;
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        if (stream->thread == thread && stream->green == green && !stream->destroyed)
            return stream;
    }
    Stream *stream = stream_new(context, 0, LOWEST_PRIORITY);
    stream->thread = thread;
    stream->green = green;
    return stream;
}

/* The bindings set this for the whole process: handle 0 then is the per-thread default stream. */
static bool null_is_per_thread(void) {
    const char *value = getenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM");
    return value && atoi(value) != 0;
}

CUresult stream_find(Stream *handle, Stream **stream) {
    uintptr_t token = (uintptr_t)handle;
    if (token <= PER_THREAD_STREAM) {
        Context *context = context_current();
        CUresult usable = context_usable(context);
        if (usable == CUDA_ERROR_INVALID_CONTEXT || usable == CUDA_ERROR_CONTEXT_IS_DESTROYED)
            return usable;
        GreenContext *green = context_green(context_on_top());
        if (token == PER_THREAD_STREAM || (token == NULL_STREAM && null_is_per_thread()))
            *stream = per_thread_stream(context, green);
        else
            *stream = green ? green->default_stream : context->legacy;
        return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    if (!handle_is(KIND_STREAM, handle) || handle->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (handle->detached)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED; /* H200; STREAM_DETACHED by the documentation */
    *stream = handle;
    return CUDA_SUCCESS;
}

CUresult stream_find_after_frees(Stream *handle, Stream **stream) {
    CUresult result = stream_find(handle, stream);
    if (result != CUDA_SUCCESS || (*stream)->capture)
        return result;
    context_usable_after_frees((*stream)->context);
    return stream_find(handle, stream);
}

static CUresult create(Stream **out, unsigned flags, int priority, Context *context,
                       GreenContext *green) {
    if (!out || (flags & ~(unsigned)STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable_after_frees(context);
    if (result != CUDA_SUCCESS)
        return result;
    /* "If priority is specified outside this range, it will automatically be clamped." */
    if (priority > LOWEST_PRIORITY)
        priority = LOWEST_PRIORITY;
    if (priority < HIGHEST_PRIORITY)
        priority = HIGHEST_PRIORITY;
    *out = stream_new(context, flags, priority);
    (*out)->green = green;
    return CUDA_SUCCESS;
}

/* A stream that is made while a green context is current is in it. */
static CUresult create_in_current(Stream **out, unsigned flags, int priority) {
    return create(out, flags, priority, context_current(), context_green(context_on_top()));
}

DRIVER_FUNCTION(cuStreamCreateWithPriority, 5050, (Stream **out, unsigned flags, int priority),
                (out, flags, priority)) {
    return create_in_current(out, flags, priority);
}

DRIVER_FUNCTION(cuStreamCreate, 2000, (Stream **out, unsigned flags), (out, flags)) {
    return create_in_current(out, flags, LOWEST_PRIORITY);
}

/* "CU_STREAM_NON_BLOCKING: This must be specified"; "the API ignores the context that is current
 * to the calling thread". */
DRIVER_FUNCTION(cuGreenCtxStreamCreate, 12050,
                (Stream **out, GreenContext *green, unsigned flags, int priority),
                (out, green, flags, priority)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!(flags & STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    return create(out, flags, priority, green->primary, green);
}

DRIVER_FUNCTION_AS(cuStreamDestroy_v2, cuStreamDestroy, 4000, (Stream *handle), (handle)) {
    Stream *stream = handle;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == stream->context->legacy || stream->thread || stream_is_default_of_green(stream))
        return CUDA_ERROR_INVALID_HANDLE;
    stream_destroy(stream);
    return CUDA_SUCCESS;
}

/* ---- questions about a stream --------------------------------------------------------------- */

#define STREAM_GETTER(function, since, type, expression, check) \
    DRIVER_FUNCTION(function, since, (Stream *handle, type *out), (handle, out)) { \
        Stream *stream; \
        CUresult result = stream_find(handle, &stream); \
        if (result == CUDA_SUCCESS && !out) \
            result = CUDA_ERROR_INVALID_VALUE; \
        if (result == CUDA_SUCCESS) \
            result = check(stream); \
        if (result == CUDA_SUCCESS) \
            *out = expression; \
        return result; \
    }

static CUresult allow(Stream *stream) {
    UNUSED(stream);
    return CUDA_SUCCESS;
}

/* H200: a capturing stream tells its priority and its context, but asking for its flags, device or
 * id answers 900 and invalidates the capture. */
STREAM_GETTER(cuStreamGetPriority, 5050, int, stream->priority, allow)
STREAM_GETTER(cuStreamGetFlags, 5050, unsigned, stream->flags, capture_forbids_use_of_stream)
STREAM_GETTER(cuStreamGetDevice, 12080, CUdevice, stream->context->device,
              capture_forbids_use_of_stream)
STREAM_GETTER(cuStreamGetId, 12000, uint64_t, stream->id, capture_forbids_use_of_stream)
STREAM_GETTER(cuStreamGetCtx, 9020, Context *,
              stream->green ? stream->green->view : stream->context, allow)
STREAM_GETTER(cuStreamGetGreenCtx, 12040, GreenContext *, stream->green, allow)

DRIVER_FUNCTION_AS(cuStreamGetCtx_v2, cuStreamGetCtx, 12050,
                   (Stream *handle, Context **out, GreenContext **green), (handle, out, green)) {
    CUresult result = locked_cuStreamGetCtx(handle, out);
    if (result == CUDA_SUCCESS && green)
        result = locked_cuStreamGetGreenCtx(handle, green);
    return result;
}

/* ---- has it finished ------------------------------------------------------------------------ */

static CUresult check_host_wait(Stream *stream) {
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    CUresult result = capture_forbids_use_of_stream(stream);
    if (result == CUDA_SUCCESS)
        result = capture_forbids_unsafe_call();
    if (result == CUDA_SUCCESS && stream == stream->context->legacy)
        result = capture_forbids_use_of_legacy(stream->context);
    return result;
}

/* What the stream still has to do; for the legacy stream that includes the blocking streams. */
static Point *pending_work(Stream *stream) {
    if (point_pending(stream->tail) || stream != stream->context->legacy)
        return stream->tail;
    for (Stream *other = stream->context->streams; other; other = other->next) {
        if (stream_is_blocking(other) && point_pending(other->tail))
            return other->tail;
    }
    return NULL;
}

DEFINE_FUNCTION(cuStreamQuery, cuStreamQuery, 2000, IN_CHILD, (Stream *handle), (handle)) {
    /* H200: in a forked child the query of any stream answers SUCCESS. */
    if (forked)
        return CUDA_SUCCESS;
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    schedule_before_query(result == CUDA_SUCCESS ? pending_work(stream) : NULL);
    result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = check_host_wait(stream);
    if (result != CUDA_SUCCESS)
        return result;
    Point *work = pending_work(stream);
    bool is_pending = point_pending(work);
    schedule_after_query(is_pending ? work : NULL);
    return is_pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* The legacy stream gets a marker, which waits for the blocking streams. */
CUresult stream_synchronize(Stream *stream) {
    if (stream == stream->context->legacy) {
        CUresult result = stream_submit(stream, operation_nothing(NODE_EMPTY));
        if (result != CUDA_SUCCESS)
            return result;
    }
    return point_wait(stream->tail, stream->context);
}

DRIVER_FUNCTION(cuStreamSynchronize, 2000, (Stream *handle), (handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = check_host_wait(stream);
    if (result != CUDA_SUCCESS)
        return result;
    return stream_synchronize(stream);
}
