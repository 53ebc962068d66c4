/* Streams: making and finding them, and asking whether they have finished. */
#include "driver.h"

/* ---- finding and making streams ------------------------------------------------------------- */

static Stream *per_thread_stream(Context *context) {
    uint64_t thread = this_thread()->id;
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        if (stream->thread == thread && !stream->destroyed)
            return stream;
    }
    Stream *stream = stream_new(context, 0, LOWEST_PRIORITY);
    stream->thread = thread;
    return stream;
}

/* The bindings set this for the whole process: handle 0 then is the per-thread default stream. */
static bool null_is_per_thread(void) {
    const char *value = getenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM");
    return value && atoi(value) != 0;
}

enum { NULL_STREAM = 0, LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };

CUresult stream_find(Stream *handle, Stream **stream) {
    uintptr_t token = (uintptr_t)handle;
    if (token <= PER_THREAD_STREAM) {
        Context *context = context_current();
        CUresult usable = context_usable(context);
        if (usable == CUDA_ERROR_INVALID_CONTEXT || usable == CUDA_ERROR_CONTEXT_IS_DESTROYED)
            return usable;
        if (token == PER_THREAD_STREAM || (token == NULL_STREAM && null_is_per_thread()))
            *stream = per_thread_stream(context);
        else
            *stream = context->legacy;
        return CUDA_SUCCESS;
    }
    if (!handle_is(KIND_STREAM, handle) || handle->destroyed)
        return CUDA_ERROR_INVALID_HANDLE;
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

static CUresult create(Stream **out, unsigned flags, int priority) {
    if (!out || (flags & ~(unsigned)STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable_after_frees(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    /* "If priority is specified outside this range, it will automatically be clamped." */
    if (priority > LOWEST_PRIORITY)
        priority = LOWEST_PRIORITY;
    if (priority < HIGHEST_PRIORITY)
        priority = HIGHEST_PRIORITY;
    *out = stream_new(context_current(), flags, priority);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuStreamCreateWithPriority, 5050, (Stream **out, unsigned flags, int priority),
                (out, flags, priority)) {
    return create(out, flags, priority);
}

DRIVER_FUNCTION(cuStreamCreate, 2000, (Stream **out, unsigned flags), (out, flags)) {
    return create(out, flags, LOWEST_PRIORITY);
}

DRIVER_FUNCTION_AS(cuStreamDestroy_v2, cuStreamDestroy, 4000, (Stream *handle), (handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == stream->context->legacy || stream->thread)
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
STREAM_GETTER(cuStreamGetCtx, 9020, Context *, stream->context, allow)

DRIVER_FUNCTION_AS(cuStreamGetCtx_v2, cuStreamGetCtx, 12050,
                   (Stream *handle, Context **out, void **green_context),
                   (handle, out, green_context)) {
    CUresult result = locked_cuStreamGetCtx(handle, out);
    if (result == CUDA_SUCCESS && green_context)
        *green_context = NULL;
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
    if (result == CUDA_SUCCESS)
        result = check_host_wait(stream);
    if (result == CUDA_SUCCESS && point_pending(pending_work(stream)))
        result = CUDA_ERROR_NOT_READY;
    return result;
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
