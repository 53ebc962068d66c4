/* Streams that were seen. */
#include "parts.h"

static Ranges streams = NO_RANGES;
static Ranges defaults = NO_RANGES;  /* contexts of default streams, plus the handle */
static Ranges captured = NO_RANGES; /* of them, when they were seen */
static atomic_int any_captured;
pthread_mutex_t seeing_lock = PTHREAD_MUTEX_INITIALIZER;

/* A query in the relaxed mode harms no capture of another stream. */
static bool is_pending(uint64_t handle) {
    enum { NOT_READY = 600, RELAXED = 2 };
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
static void tell_of(uint64_t handle, bool first) {
    Range range = {handle, handle + 1, false};
    unsigned flags = 1;         /* NON_BLOCKING */
    void *context = NULL;
    int status = 0;
    driver.stream_status(handle, &status);
    if (status && !first)
        return;
    if (!status)
        driver.stream_flags(handle, &flags);
    driver.stream_context(handle, &context);
    /* Work that was queued before anybody watched may be in flight. */
    uint64_t pending = !status && is_pending(handle);
    uint64_t words[] = {handle, flags, (uint64_t)(uintptr_t)context, (uint64_t)status, pending};
    log_own(SEEN_STREAM, words, 5);
    ranges_add(&streams, range);
    if (status) {
        ranges_add(&captured, range);
        atomic_store(&any_captured, 1);
    } else {
        ranges_forget(&captured, handle, handle + 1);
    }
}

/* Tells of the default stream of a context when it is used first, if work is in flight there that
 * was queued before. While another stream is captured, nothing can be asked. */
static void see_default(uint64_t handle, uint64_t context) {
    Range found, range = {context + handle, context + handle + 1, false};
    int status = 0;
    if (!context || ranges_find(&defaults, range.begin, &found))
        return;
    pthread_mutex_lock(&seeing_lock);
    if (!driver.stream_status(handle, &status) && !status && ranges_add(&defaults, range) &&
        is_pending(handle)) {
        uint64_t words[] = {handle, 0, context, 0, 1};
        log_own(SEEN_STREAM, words, 5);
    }
    pthread_mutex_unlock(&seeing_lock);
}

/* Tells of a stream when it is used first: most were made before anybody watched. */
void see_stream(uint64_t handle, uint64_t context) {
    bool first;
    if (handle <= 2) {
        see_default(handle ? handle : 1, context);
        return;
    }
    if (!is_new(handle, &first))
        return;
    pthread_mutex_lock(&seeing_lock);
    if (is_new(handle, &first))
        tell_of(handle, first);
    pthread_mutex_unlock(&seeing_lock);
}

void forget_stream(uint64_t handle) {
    ranges_forget(&streams, handle, handle + 1);
    ranges_forget(&captured, handle, handle + 1);
}

void streams_clear(void) {
    ranges_forget(&streams, 0, UINT64_MAX);
    ranges_forget(&defaults, 0, UINT64_MAX);
    ranges_forget(&captured, 0, UINT64_MAX);
    atomic_store(&any_captured, 0);
}

void streams_in_child(void) {
    pthread_mutex_init(&seeing_lock, NULL);
    streams = captured = defaults = (Ranges)NO_RANGES;
    atomic_store(&any_captured, 0);
}
