/* Green contexts: parts of a device, which belong to its primary context. */
#include "resources.h"

static GreenContext *green_contexts;

GreenContext *context_green(const Context *context) {
    return context && handle_is(KIND_CONTEXT, context) && context->active ? context->green : NULL;
}

bool stream_is_in(const Stream *stream, const GreenContext *green) {
    return !green || stream->green == green;
}

bool stream_is_default_of_green(const Stream *stream) {
    return stream->green && stream == stream->green->default_stream;
}

/* ---- making and ending them ----------------------------------------------------------------- */

enum { DEFAULT_STREAM = 1 };    /* CU_GREEN_CTX_DEFAULT_STREAM */

static Stream *internal_stream(GreenContext *green) {
    Stream *stream = stream_new_internal(green->primary);
    stream->green = green;
    return stream;
}

/* "This API will retain the primary context on device." H200: it returns only when the work that is
 * queued in that context is done, or is not to be done any more. */
DRIVER_FUNCTION(cuGreenCtxCreate, 12040,
                (GreenContext **out, Description *description, CUdevice device, unsigned flags),
                (out, description, device, flags)) {
    Context *primary;
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !description_is(description) || (flags & ~(unsigned)DEFAULT_STREAM))
        return CUDA_ERROR_INVALID_VALUE;
    if (description->part.device != device)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    result = context_primary_retain(device, &primary);
    if (result != CUDA_SUCCESS)
        return result;
    context_synchronize(primary);
    GreenContext *green = handle_new(KIND_GREEN_CONTEXT);
    green->id = new_id();
    green->primary = primary;
    green->part = description->part;
    green->part.split = 0;      /* it may be split again */
    green->view = context_new(device, 0);
    green->view->active = true;
    green->view->green = green;
    green->collector = internal_stream(green);
    green->gate = internal_stream(green);
    if (flags & DEFAULT_STREAM) {
        green->default_stream = stream_new(primary, 0, LOWEST_PRIORITY);
        green->default_stream->green = green;
    }
    green->next = green_contexts;
    green_contexts = green;
    *out = green;
    return CUDA_SUCCESS;
}

/* "The API does not destroy streams. Any subsequent API calls involving these streams will return"
 * an error: H200, CONTEXT_IS_DESTROYED. "The API will invalidate all active captures on these
 * streams." */
static void detach_streams(GreenContext *green) {
    for (Stream *stream = green->primary->streams; stream; stream = stream->next) {
        if (stream->green != green)
            continue;
        stream->green = NULL;
        stream->detached = true;
        if (stream->capture)
            stream->capture->invalidated = true;
    }
}

static void end(GreenContext *green) {
    for (GreenContext **link = &green_contexts; *link; link = &(*link)->next) {
        if (*link == green) {
            *link = green->next;
            break;
        }
    }
    context_forget(green->view);
    detach_streams(green);
    handle_free(KIND_GREEN_CONTEXT, green);
}

DRIVER_FUNCTION(cuGreenCtxDestroy, 12040, (GreenContext *green), (green)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    CUdevice device = green->primary->device;
    Stream *own[] = {green->collector, green->gate, green->default_stream};
    end(green);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        if (own[i])
            stream_destroy(own[i]);
    }
    context_primary_release(device);
    return CUDA_SUCCESS;
}

/* A reset of the primary context, which has ended the streams. */
void green_contexts_of_context_end(Context *context) {
    for (GreenContext *green = green_contexts, *next; green; green = next) {
        next = green->next;
        if (green->primary == context) {
            end(green);
            context->references--;
        }
    }
}

/* ---- what they stand for -------------------------------------------------------------------- */

DRIVER_FUNCTION(cuCtxFromGreenCtx, 12040, (Context **out, GreenContext *green), (out, green)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = green->view;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGreenCtxGetId, 12090, (GreenContext *green, uint64_t *out), (green, out)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = green->id;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGreenCtxGetDevResource, 12040,
                (GreenContext *green, Resource *out, int type), (green, out, type)) {
    if (!handle_is(KIND_GREEN_CONTEXT, green))
        return CUDA_ERROR_INVALID_CONTEXT;
    return resource_answer(&green->part, out, type);
}

DRIVER_FUNCTION(cuCtxGetDevResource, 12040, (Context *context, Resource *out, int type),
                (context, out, type)) {
    CUresult result = context_usable(context);
    if (result != CUDA_SUCCESS)
        return result;
    const GreenContext *green = context_green(context);
    const Multiprocessors whole = resource_of_device(context->device);
    return resource_answer(green ? &green->part : &whole, out, type);
}

DRIVER_FUNCTION(cuStreamGetDevResource, 13010, (Stream *handle, Resource *out, int type),
                (handle, out, type)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    const Multiprocessors whole = resource_of_device(stream->context->device);
    return resource_answer(stream->green ? &stream->green->part : &whole, out, type);
}
