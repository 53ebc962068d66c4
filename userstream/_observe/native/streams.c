/* Table of the streams and contexts that the recorder has seen. */
#include "parts.h"

static Ranges streams = NO_RANGES;
static Ranges defaults = NO_RANGES;  /* contexts of default streams, plus the handle */
static Ranges captured = NO_RANGES; /* of them, when they were seen */
static atomic_int any_captured;
static Generation forgotten;    /* streams */
static Ranges contexts = NO_RANGES, greens = NO_RANGES;
static Generation contexts_forgotten;
enum { RELAXED = 2 };           /* captures of other streams and threads are not harmed */
pthread_mutex_t seeing_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- contexts -------------------------------------------------------------------------------- */

/* Under the lock. `primary`: of a green context, the one that it is a part of. */
static void tell_of_context(Thread *me, uint64_t context, int device, uint64_t primary) {
    uint64_t words[] = {context, (uint64_t)(int64_t)device, primary};
    if (log_own(me, CONTEXT, words, 3))
        ranges_add(&contexts, (Range){context, context + 1, false, 0});
}

void see_context(Thread *me, uint64_t context) {
    unsigned generation = generation_of(&contexts_forgotten);
    Range found;
    if (!context || (me->streams.context == context && me->streams.generation == generation))
        return;
    pthread_mutex_lock(&seeing_lock);
    int device = -1;
    if (!ranges_find(&contexts, context, &found)) {
        if (driver.context_device)
            driver.context_device(&device);
        tell_of_context(me, context, device, context);
    }
    pthread_mutex_unlock(&seeing_lock);
    me->streams.context = context;
    me->streams.generation = generation;
}

static uint64_t primary_of(int device, uint64_t context) {
    void *primary = NULL;
    int mode = RELAXED;
    bool exchanged = !driver.capture_mode(&mode);
    if (driver.primary_retain && !driver.primary_retain(&primary, device))
        driver.primary_release(device);
    if (exchanged)
        driver.capture_mode(&mode);
    return primary ? (uint64_t)(uintptr_t)primary : context;
}

/* Under the lock: a stream's context may be another than the current one. */
static void see_context_of(Thread *me, uint64_t handle, void *context) {
    uint64_t own = (uint64_t)(uintptr_t)context;
    Range found;
    void *green = NULL;
    int device = -1;
    bool is_green = driver.stream_green && !driver.stream_green(handle, &green) && green;
    if (!own || ranges_find(is_green ? &greens : &contexts, own, &found))
        return;
    if (driver.context_push && !driver.context_push(context)) {
        driver.context_device(&device);
        driver.context_pop(&context);
    }
    tell_of_context(me, own, device, is_green ? primary_of(device, own) : own);
    if (is_green)
        ranges_add(&greens, (Range){own, own + 1, false, 0});
}

void contexts_forget(void) {
    ranges_forget(&contexts, 0, UINT64_MAX);
    ranges_forget(&greens, 0, UINT64_MAX);
    generation_ends(&contexts_forgotten);
}

/* ---- streams --------------------------------------------------------------------------------- */

static bool is_pending(uint64_t handle) {
    enum { NOT_READY = 600 };
    int mode = RELAXED;
    bool exchanged = !driver.capture_mode(&mode);
    bool pending = driver.stream_query(handle) == NOT_READY;
    if (exchanged)
        driver.capture_mode(&mode);
    return pending;
}

/* Returns whether the record of a stream has to be written, for the first time or once more because
 * the stream was captured then. */
static bool is_new(uint64_t handle, bool *first) {
    Range found;
    *first = !ranges_find(&streams, handle, &found);
    return *first || (atomic_load_explicit(&any_captured, memory_order_relaxed) &&
                      ranges_find(&captured, handle, &found));
}

/* Under the lock. Asking a captured stream for its flags would end the capture (H200).
 * It is taken for one that does not block, and asked when it is used after the capture. */
static void tell_of(Thread *me, uint64_t handle, bool first) {
    Range range = {handle, handle + 1, false, 0};
    unsigned flags = 1;         /* NON_BLOCKING */
    void *context = NULL;
    int status = 0, priority = 0;
    driver.stream_status(handle, &status);
    if (status && !first)
        return;
    if (!status)
        driver.stream_flags(handle, &flags);
    driver.stream_context(handle, &context);
    if (driver.stream_priority)
        driver.stream_priority(handle, &priority);
    see_context_of(me, handle, context);
    /* Work that was queued before anybody watched may be in flight. */
    uint64_t pending = !status && is_pending(handle);
    uint64_t words[] = {handle, flags, (uint64_t)(uintptr_t)context, (uint64_t)status, pending,
                        (uint64_t)(int64_t)priority};
    log_own(me, SEEN_STREAM, words, 6);
    ranges_add(&streams, range);
    if (status) {
        ranges_add(&captured, range);
        atomic_store(&any_captured, 1);
    } else {
        ranges_forget(&captured, handle, handle + 1);
    }
}

/* Tells of the default stream of a context when it is used first, if work is in flight there that
 * was queued before. False: nothing can be asked, as another stream is captured. */
static bool see_default(Thread *me, uint64_t handle, uint64_t context) {
    Range found, range = {context + handle, context + handle + 1, false, 0};
    int status = 0;
    if (!context)
        return false;
    if (ranges_find(&defaults, range.begin, &found))
        return true;
    pthread_mutex_lock(&seeing_lock);
    bool can_ask = !driver.stream_status(handle, &status) && !status;
    if (can_ask && ranges_add(&defaults, range) && is_pending(handle)) {
        uint64_t words[] = {handle, 0, context, 0, 1, 0};
        log_own(me, SEEN_STREAM, words, 6);
    }
    pthread_mutex_unlock(&seeing_lock);
    return can_ask;
}

/* Tells of a stream when it is used first: most were made before anybody watched. */
void see_stream(Thread *me, uint64_t handle, uint64_t context) {
    bool is_default = handle <= 2;
    uint64_t key = is_default ? context + (handle ? handle : 1) : handle;
    unsigned generation = generation_of(&forgotten);
    unsigned place = (unsigned)(mixed(1, key) >> 32) % STREAMS_KEPT;
    if (me->streams.known[place].handle == key &&
        me->streams.known[place].generation == generation &&
        !atomic_load_explicit(&any_captured, memory_order_relaxed))
        return;
    if (is_default && !see_default(me, key - context, context))
        return;
    bool first;
    if (!is_default && is_new(handle, &first)) {
        pthread_mutex_lock(&seeing_lock);
        if (is_new(handle, &first))
            tell_of(me, handle, first);
        pthread_mutex_unlock(&seeing_lock);
    }
    me->streams.known[place].handle = key;
    me->streams.known[place].generation = generation;
}

void forget_stream(uint64_t handle) {
    ranges_forget(&streams, handle, handle + 1);
    ranges_forget(&captured, handle, handle + 1);
    generation_ends(&forgotten);
}

bool stream_is_seen(uint64_t handle) {
    Range found;
    return ranges_find(&streams, handle, &found);
}

void streams_clear(void) {
    ranges_forget(&streams, 0, UINT64_MAX);
    ranges_forget(&defaults, 0, UINT64_MAX);
    ranges_forget(&captured, 0, UINT64_MAX);
    atomic_store(&any_captured, 0);
    generation_ends(&forgotten);
    contexts_forget();
}

void streams_in_child(void) {
    pthread_mutex_init(&seeing_lock, NULL);
    streams = captured = defaults = contexts = greens = (Ranges)NO_RANGES;
    atomic_store(&any_captured, 0);
}
