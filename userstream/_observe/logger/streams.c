/* Streams that were seen. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t *streams;
static size_t stream_count, stream_capacity;

static size_t stream_place(uint64_t handle) {
    size_t low = 0, high = stream_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (streams[middle] < handle)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Tells of a stream when it is used first: most were made before anybody watched. */
void see_stream(uint64_t handle) {
    if (handle <= 2)
        return;
    pthread_mutex_lock(&streams_lock);
    size_t place = stream_place(handle);
    bool known = place < stream_count && streams[place] == handle;
    if (!known) {
        if (stream_count == stream_capacity) {
            size_t capacity = stream_capacity ? stream_capacity * 2 : 64;
            uint64_t *more = realloc(streams, capacity * sizeof *streams);
            if (!more) {
                pthread_mutex_unlock(&streams_lock);
                return;
            }
            streams = more;
            stream_capacity = capacity;
        }
        memmove(streams + place + 1, streams + place, (stream_count - place) * sizeof *streams);
        streams[place] = handle;
        stream_count++;
    }
    pthread_mutex_unlock(&streams_lock);
    if (known)
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
    pthread_mutex_lock(&streams_lock);
    size_t place = stream_place(handle);
    if (place < stream_count && streams[place] == handle) {
        stream_count--;
        memmove(streams + place, streams + place + 1, (stream_count - place) * sizeof *streams);
    }
    pthread_mutex_unlock(&streams_lock);
}

void streams_clear(void) {
    pthread_mutex_lock(&streams_lock);
    stream_count = 0;
    pthread_mutex_unlock(&streams_lock);
}

void streams_in_child(void) {
    pthread_mutex_init(&streams_lock, NULL);
}
