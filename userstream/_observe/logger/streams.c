/* Streams that were seen. */
#include "parts.h"

static Ranges streams = NO_RANGES;
static Ranges captured = NO_RANGES; /* of them, when they were seen */
static atomic_int any_captured;

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

/* Tells of a stream when it is used first: most were made before anybody watched.
 *
 * To ask a stream that is being captured for its flags would end the capture (H200). It is taken
 * for one that does not block, and asked when it is used after the capture. */
void see_stream(uint64_t handle) {
    Range found, range = {handle, handle + 1, false};
    if (handle <= 2)
        return;
    bool first = ranges_add(&streams, range);
    if (!first && (!atomic_load_explicit(&any_captured, memory_order_relaxed) ||
                   !ranges_find(&captured, handle, &found)))
        return;
    unsigned flags = 1;         /* NON_BLOCKING */
    void *context = NULL;
    int status = 0;
    driver.stream_status(handle, &status);
    if (status && !first)
        return;
    if (status) {
        ranges_add(&captured, range);
        atomic_store(&any_captured, 1);
    } else {
        ranges_forget(&captured, handle, handle + 1);
        driver.stream_flags(handle, &flags);
    }
    driver.stream_context(handle, &context);
    /* Work that was queued before anybody watched may be in flight. */
    uint64_t pending = !status && is_pending(handle);
    uint64_t words[] = {handle, flags, (uint64_t)(uintptr_t)context, (uint64_t)status, pending};
    log_write((Record){.function = SEEN_STREAM, .words = 5, .stack = -1}, words, NULL, 0);
}

void forget_stream(uint64_t handle) {
    ranges_forget(&streams, handle, handle + 1);
    ranges_forget(&captured, handle, handle + 1);
}

void streams_clear(void) {
    ranges_forget(&streams, 0, UINT64_MAX);
    ranges_forget(&captured, 0, UINT64_MAX);
    atomic_store(&any_captured, 0);
}

void streams_in_child(void) {
    pthread_mutex_init(&captured.lock, NULL);
    pthread_mutex_init(&streams.lock, NULL);
}
