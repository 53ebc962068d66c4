/* Streams that were seen. */
#include "parts.h"

static Ranges streams = NO_RANGES;

/* Tells of a stream when it is used first: most were made before anybody watched. */
void see_stream(uint64_t handle) {
    if (handle <= 2 || !ranges_add(&streams, (Range){handle, handle + 1, false}))
        return;
    unsigned flags = 1;         /* NON_BLOCKING */
    void *context = NULL;
    int status = 0;
    driver.stream_flags(handle, &flags);
    driver.stream_context(handle, &context);
    driver.stream_status(handle, &status);
    uint64_t words[] = {handle, flags, (uint64_t)(uintptr_t)context, (uint64_t)status};
    log_write((Record){.function = SEEN_STREAM, .words = 4, .stack = -1}, words, NULL, 0);
}

void forget_stream(uint64_t handle) {
    ranges_forget(&streams, handle, handle + 1);
}

void streams_clear(void) {
    ranges_forget(&streams, 0, UINT64_MAX);
}

void streams_in_child(void) {
    pthread_mutex_init(&streams.lock, NULL);
}
