/* Contexts: the primary one of each device, and others beside it. */
#include "driver.h"

static Context *contexts;
static Context *primary_contexts[MAX_DEVICES];

Context *context_first(void) {
    return contexts;
}

CUresult context_usable(const Context *context) {
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!handle_is(KIND_CONTEXT, context) || !context->active)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const GreenContext *green = context_green(context);
    return green ? green->primary->error : context->error;
}

/* The per-thread default streams go with their thread. */
void thread_ended(Thread *ended) {
    for (Context *context = contexts; context; context = context->next) {
        for (Stream *stream = context->streams, *next; stream; stream = next) {
            next = stream->next;
            if (stream->thread == ended->id && !stream->destroyed)
                stream_destroy(stream);
        }
    }
}

/* ---- making and ending contexts ------------------------------------------------------------- */

static void context_activate(Context *context) {
    context->active = true;
    context->error = CUDA_SUCCESS;
    context->explanation = NULL;
    context->legacy = stream_new(context, 0, LOWEST_PRIORITY);
    context->collector = stream_new_internal(context);
    context->gate = stream_new_internal(context);
}

Context *context_new(CUdevice device, unsigned flags) {
    /* H100: stack, printf FIFO, heap; device runtime: depth, which is unsupported, and launches;
     * granularity of fetches and persisting part of the L2 cache; shared memory; graphics. */
    static const size_t limits[LIMITS] = {1024, 8650752, 8 << 20, 0, 2048, 64, 9830400, 232448, 0};
    Context *context = handle_new(KIND_CONTEXT);
    context->device = device;
    context->flags = flags;
    context->id = new_id();
    memcpy(context->limits, limits, sizeof limits);
    context->banks = 1;
    context->next = contexts;
    contexts = context;
    return context;
}

CUresult context_synchronize(Context *given) {
    const GreenContext *green = context_green(given);
    Context *context = green ? green->primary : given;
    CUresult result = context->error;
    for (;;) {
        /* The list may change while the lock is given up: look from the start after each wait. */
        Stream *stream = context->streams;
        while (stream && (stream->internal || !stream_is_in(stream, green) ||
                          !point_pending(stream->tail)))
            stream = stream->next;
        if (!stream || result != CUDA_SUCCESS)
            return result;
        result = point_wait(stream->tail, context);
    }
}

/* H200: memory is freed when all streams are idle. */
CUresult context_synchronize_to_free(Context *context) {
    context->frees++;
    CUresult result = context_synchronize(context);
    context->frees--;
    progress();
    return result;
}

/* H200: meanwhile many calls of other threads wait too: those that make something, copy, fill or
 * record. They look up afterwards what they use, as the wait gives up the lock. */
CUresult context_usable_after_frees(const Context *context) {
    while (context_usable(context) == CUDA_SUCCESS && context->frees && !shut_down &&
           !this_thread()->runs_kernel)
        wait_for_progress();
    return context_usable(context);
}

/* Sticky: the context keeps its first error, all work that is queued in it is dropped. */
void context_fail(Context *context, CUresult error) {
    if (context->error != CUDA_SUCCESS)
        return;
    context->error = error;
    context->last_error = error;
    context->errors++;
    schedule_note_failure();
    progress();
}

/* Everything of the context becomes invalid; queued work is dropped. */
static void context_end(Context *context) {
    context_fail(context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    context->active = false;
    for (Stream *stream = context->streams, *next; stream; stream = next) {
        next = stream->next;
        if (!stream->destroyed)
            stream_destroy(stream);
    }
    green_contexts_of_context_end(context);
    context->legacy = NULL;
    context->collector = NULL;
    context->gate = NULL;
    events_of_context_free(context);
    memory_of_context_free(context);
    modules_of_context_free(context);
}

/* The memory stays, as workers may still look at it: a destroyed context is never reused. */
void context_forget(Context *context) {
    context->active = false;
    for (Context **link = &contexts; *link; link = &(*link)->next) {
        if (*link == context) {
            *link = context->next;
            break;
        }
    }
}

/* ---- cuInit and the primary contexts -------------------------------------------------------- */

DRIVER_FUNCTION_ANYTIME(cuInit, 2000, (unsigned flags), (flags)) {
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    devices_make_visible();
    if (settings.devices == NAMED_TWICE)
        return CUDA_ERROR_INVALID_DEVICE;
    if (settings.devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    if (!initialized)
        pools_initialize();
    initialized = true;
    injected_library_load();
    return CUDA_SUCCESS;
}

/* Active only while it is retained. */
static Context *primary_of(CUdevice device) {
    if (!primary_contexts[device]) {
        primary_contexts[device] = context_new(device, 0);
        primary_contexts[device]->primary = true;
    }
    return primary_contexts[device];
}

CUresult context_primary_retain(CUdevice device, Context **out) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    Context *context = primary_of(device);
    if (!context->active)
        context_activate(context);
    context->references++;
    *out = context;
    return CUDA_SUCCESS;
}

/* "The primary context is automatically reset once the last reference to it is released." */
void context_primary_release(CUdevice device) {
    Context *context = primary_contexts[device];
    if (--context->references == 0)
        context_end(context);
}

DRIVER_FUNCTION(cuDevicePrimaryCtxRetain, 7000, (Context **out, CUdevice device), (out, device)) {
    return context_primary_retain(device, out);
}

DRIVER_FUNCTION_AS(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000,
                   (CUdevice device), (device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    Context *context = primary_contexts[device];
    if (!context || context->references == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    context_primary_release(device);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000,
                   (CUdevice device), (device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    Context *context = primary_contexts[device];
    if (context && context->active) {
        context_end(context);
        if (context->references)
            context_activate(context);
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuDevicePrimaryCtxSetFlags_v2, cuDevicePrimaryCtxSetFlags, 11000,
                   (CUdevice device, unsigned flags), (device, flags)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        primary_of(device)->flags = flags;
    return result;
}

DRIVER_FUNCTION(cuDevicePrimaryCtxGetState, 7000, (CUdevice device, unsigned *flags, int *active),
                (device, flags, active)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS && (!flags || !active))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    const Context *context = primary_contexts[device];
    *flags = context ? context->flags : 0;
    *active = context && context->active;
    return CUDA_SUCCESS;
}

/* ---- other contexts ------------------------------------------------------------------------- */

static CUresult create(Context **out, unsigned flags, CUdevice device) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context_new(device, flags);
    context_activate(*out);
    return thread_push(*out);
}

DRIVER_FUNCTION_AS(cuCtxCreate_v2, cuCtxCreate, 3020,
                   (Context **out, unsigned flags, CUdevice device), (out, flags, device)) {
    return create(out, flags, device);
}

DRIVER_FUNCTION_AS(cuCtxCreate_v3, cuCtxCreate, 11040,
                   (Context **out, void *affinities, int count, unsigned flags, CUdevice device),
                   (out, affinities, count, flags, device)) {
    return affinities || count ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}

DRIVER_FUNCTION_AS(cuCtxCreate_v4, cuCtxCreate, 12050,
                   (Context **out, void *parameters, unsigned flags, CUdevice device),
                   (out, parameters, flags, device)) {
    return parameters ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}

/* "It is the responsibility of the calling function to ensure that no API call issues using ctx
 * while cuCtxDestroy() is executing"; "If ctx is current to the calling thread then it is also
 * popped". */
DRIVER_FUNCTION_AS(cuCtxDestroy_v2, cuCtxDestroy, 4000, (Context *context), (context)) {
    if (!handle_is(KIND_CONTEXT, context) || context->primary || context->green)
        return CUDA_ERROR_INVALID_CONTEXT;
    context_synchronize(context);
    if (context_on_top() == context)
        this_thread()->depth--;
    context_end(context);
    context_forget(context);
    return CUDA_SUCCESS;
}
