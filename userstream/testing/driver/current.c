/* The current context: the stack of each thread, and what is asked about a context. */
#include "driver.h"

/* ---- threads -------------------------------------------------------------------------------- */

static pthread_key_t this_thread_key;

void thread_end(void *value) {
    lock();
    schedule_thread_ends(value);
    thread_ended(value);
    thread_unlist(value);
    unlock();
    outside_close(value);
    free(value);
}

__attribute__((constructor)) static void threads_initialize(void) {
    pthread_key_create(&this_thread_key, thread_end);
}

Thread *this_thread_or_null(void) {
    return pthread_getspecific(this_thread_key);
}

Thread *thread_new(void) {
    Thread *thread = calloc(1, sizeof *thread);
    thread->id = new_id();
    thread->stat = -1;
    condition_initialize(&thread->granted);
    sem_init(&thread->woken, 0, 0);
    return thread;
}

void thread_becomes(Thread *thread) {
    pthread_setspecific(this_thread_key, thread);
}

Thread *this_thread(void) {
    Thread *thread = this_thread_or_null();
    if (!thread) {
        thread = thread_new();
        thread_becomes(thread);
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

/* `out`: where the answer goes. */
static CUresult answer_about(Context **context, const void *out) {
    CUresult result = context_given_or_current(context);
    return result == CUDA_SUCCESS && !out ? CUDA_ERROR_INVALID_VALUE : result;
}

static CUresult get_device(CUdevice *device, Context *context) {
    CUresult result = answer_about(&context, device);
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

enum { MAP_HOST = 8 };          /* H100: of a primary context without being set */
enum { CORE_DUMPS = 32 | 64 };  /* H100: of an active one without effect */

DRIVER_FUNCTION(cuCtxGetFlags, 7000, (unsigned *flags), (flags)) {
    Context *context = NULL;
    CUresult result = answer_about(&context, flags);
    if (result == CUDA_SUCCESS)
        *flags = context->primary ? (context->flags & ~CORE_DUMPS) | MAP_HOST : context->flags;
    return result;
}

DRIVER_FUNCTION(cuCtxGetId, 12000, (Context *context, uint64_t *id), (context, id)) {
    CUresult result = answer_about(&context, id);
    if (result == CUDA_SUCCESS)
        *id = context->id;
    return result;
}

DRIVER_FUNCTION(cuCtxGetApiVersion, 3020, (Context *context, unsigned *version),
                (context, version)) {
    CUresult result = answer_about(&context, version);
    if (result == CUDA_SUCCESS)
        *version = 3020;
    return result;
}

static CUresult check_limit(int limit) {
    enum { SYNC_DEPTH = 3, LAST = 9 };
    if (!context_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (limit < 0 || limit > LAST)
        return CUDA_ERROR_INVALID_VALUE;
    return limit == SYNC_DEPTH || limit >= LIMITS ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_SUCCESS;
}

/* "The driver is free to modify the requested value to meet h/w requirements". H100: what 3 becomes
 * is the least here; larger values stay, and those of graphics (shared memory too) are refused. */
DRIVER_FUNCTION(cuCtxSetLimit, 3010, (int limit, size_t value), (limit, value)) {
    enum { SHARED_MEMORY = 7 };
    static const size_t least[SHARED_MEMORY] = {16, 512 << 10, 4 << 20, 0, 32, 0, 3276800};
    CUresult result = check_limit(limit);
    if (result == CUDA_SUCCESS && limit >= SHARED_MEMORY)
        result = CUDA_ERROR_NOT_PERMITTED;
    if (result == CUDA_SUCCESS)
        context_current()->limits[limit] = value < least[limit] ? least[limit] : value;
    return result;
}

DRIVER_FUNCTION(cuCtxGetLimit, 3010, (size_t *value, int limit), (value, limit)) {
    CUresult result = check_limit(limit);
    if (result == CUDA_SUCCESS && !value)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *value = context_current()->limits[limit];
    return result;
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

/* ---- preferences, which have no effect ------------------------------------------------------- */

static CUresult set_preference(int *preference, int value, int last) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS && (value < 0 || value > last))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *preference = value;
    return result;
}

static CUresult get_preference(int *out, int preference) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS && !out)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = preference;
    return result;
}

enum { PREFER_EQUAL = 3, EIGHT_BYTE_BANKS = 2 };

DRIVER_FUNCTION(cuCtxSetCacheConfig, 3020, (int value), (value)) {
    Context *context = context_current();
    return set_preference(context ? &context->cache : NULL, value, PREFER_EQUAL);
}

DRIVER_FUNCTION(cuCtxGetCacheConfig, 3020, (int *out), (out)) {
    const Context *context = context_current();
    return get_preference(out, context ? context->cache : 0);
}

DRIVER_FUNCTION(cuCtxSetSharedMemConfig, 4020, (int value), (value)) {
    Context *context = context_current();
    return set_preference(context ? &context->banks : NULL, value, EIGHT_BYTE_BANKS);
}

DRIVER_FUNCTION(cuCtxGetSharedMemConfig, 4020, (int *out), (out)) {
    const Context *context = context_current();
    return get_preference(out, context ? context->banks : 0);
}

DRIVER_FUNCTION(cuCtxResetPersistingL2Cache, 11000, (void), ()) {
    return context_usable(context_current());
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
