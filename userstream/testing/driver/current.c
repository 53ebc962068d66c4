/* The current context: the stack of each thread, and what is asked about a context. */
#include "driver.h"

/* ---- threads -------------------------------------------------------------------------------- */

static pthread_key_t this_thread_key;

static void end_of_thread(void *value) {
    lock();
    thread_ended(value);
    thread_unlist(value);
    unlock();
    free(value);
}

__attribute__((constructor)) static void threads_initialize(void) {
    pthread_key_create(&this_thread_key, end_of_thread);
}

Thread *this_thread(void) {
    Thread *thread = pthread_getspecific(this_thread_key);
    if (!thread) {
        thread = calloc(1, sizeof *thread);
        thread->id = new_id();
        pthread_setspecific(this_thread_key, thread);
    }
    return thread;
}

Context *context_on_top(void) {
    Thread *me = this_thread();
    return me->depth ? me->contexts[me->depth - 1] : NULL;
}

Context *context_current(void) {
    Context *context = context_on_top();
    GreenContext *green = context_green(context);
    return green ? green->primary : context;
}

CUresult thread_push(Context *context) {
    Thread *me = this_thread();
    if (me->depth == MAX_PUSHED_CONTEXTS)
        return CUDA_ERROR_INVALID_VALUE;
    me->contexts[me->depth++] = context;
    return CUDA_SUCCESS;
}

/* ---- the stack of the calling thread -------------------------------------------------------- */

static bool can_be_current(const Context *context) {
    return handle_is(KIND_CONTEXT, context) && (context->active || context->primary);
}

DRIVER_FUNCTION_AS(cuCtxPushCurrent_v2, cuCtxPushCurrent, 4000, (Context *context), (context)) {
    if (!context) /* H200 */
        return CUDA_ERROR_INVALID_VALUE;
    return can_be_current(context) ? thread_push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

DRIVER_FUNCTION_AS(cuCtxPopCurrent_v2, cuCtxPopCurrent, 4000, (Context **out), (out)) {
    Context *context = context_on_top();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    this_thread()->depth--;
    if (out)
        *out = context;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxSetCurrent, 4000, (Context *context), (context)) {
    Thread *me = this_thread();
    if (context && !can_be_current(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!context) {
        if (me->depth)
            me->depth--;
        return CUDA_SUCCESS;
    }
    if (!me->depth)
        return thread_push(context);
    me->contexts[me->depth - 1] = context;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxGetCurrent, 4000, (Context **out), (out)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context_on_top();
    return CUDA_SUCCESS;
}

/* ---- questions about a context, mostly the current one -------------------------------------- */

static CUresult context_given_or_current(Context **context) {
    if (!*context)
        *context = context_on_top();
    return handle_is(KIND_CONTEXT, *context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult get_device(CUdevice *device, Context *context) {
    CUresult result = context_given_or_current(&context);
    if (result == CUDA_SUCCESS)
        *device = context->device;
    return result;
}

DRIVER_FUNCTION(cuCtxGetDevice, 2000, (CUdevice *device), (device)) {
    return get_device(device, NULL);
}

DRIVER_FUNCTION_AS(cuCtxGetDevice_v2, cuCtxGetDevice, 13000,
                   (CUdevice *device, Context *context), (device, context)) {
    return get_device(device, context);
}

static CUresult synchronize(Context *context) {
    CUresult result = context_given_or_current(&context);
    if (result == CUDA_SUCCESS)
        result = context_usable(context);
    if (result == CUDA_SUCCESS)
        result = capture_forbids_use_of_context(context, context_green(context));
    return result == CUDA_SUCCESS ? context_synchronize(context) : result;
}

DRIVER_FUNCTION(cuCtxSynchronize, 2000, (void), ()) {
    return synchronize(NULL);
}

DRIVER_FUNCTION_AS(cuCtxSynchronize_v2, cuCtxSynchronize, 13000, (Context *context), (context)) {
    return synchronize(context);
}

DRIVER_FUNCTION(cuCtxGetFlags, 7000, (unsigned *flags), (flags)) {
    Context *context = NULL;
    CUresult result = context_given_or_current(&context);
    if (result == CUDA_SUCCESS)
        *flags = context->flags;
    return result;
}

DRIVER_FUNCTION(cuCtxGetId, 12000, (Context *context, uint64_t *id), (context, id)) {
    CUresult result = context_given_or_current(&context);
    if (result == CUDA_SUCCESS)
        *id = context->id;
    return result;
}

DRIVER_FUNCTION(cuCtxGetApiVersion, 3020, (Context *context, unsigned *version),
                (context, version)) {
    CUresult result = context_given_or_current(&context);
    if (result == CUDA_SUCCESS)
        *version = 3020;
    return result;
}

DRIVER_FUNCTION(cuCtxSetLimit, 3010, (int limit, size_t value), (limit, value)) {
    if (!context_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    context_current()->limits[limit] = value;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxGetLimit, 3010, (size_t *value, int limit), (value, limit)) {
    if (!context_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = context_current()->limits[limit];
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxGetStreamPriorityRange, 5050, (int *least, int *greatest),
                (least, greatest)) {
    if (!context_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (least)
        *least = LOWEST_PRIORITY;
    if (greatest)
        *greatest = HIGHEST_PRIORITY;
    return CUDA_SUCCESS;
}

/* ---- peers ---------------------------------------------------------------------------------- */

static CUresult peer_check(const Context *peer) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_CONTEXT, peer))
        return CUDA_ERROR_INVALID_CONTEXT;
    return peer->device == context_current()->device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxEnablePeerAccess, 4000, (Context *peer, unsigned flags), (peer, flags)) {
    CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : peer_check(peer);
    if (result != CUDA_SUCCESS)
        return result;
    unsigned bit = 1u << peer->device;
    if (context_current()->peers & bit)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context_current()->peers |= bit;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuCtxDisablePeerAccess, 4000, (Context *peer), (peer)) {
    CUresult result = peer_check(peer);
    if (result != CUDA_SUCCESS)
        return result;
    unsigned bit = 1u << peer->device;
    if (!(context_current()->peers & bit))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    context_current()->peers &= ~bit;
    return CUDA_SUCCESS;
}
