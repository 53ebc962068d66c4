/* Mailbox from the pump to a thread of Python: the log, for a judge in this process, or the answers
 * of a judge in another process. A pipe would not do: a program may close any descriptor. */
#define _GNU_SOURCE

#include "parts.h"

#include <time.h>

enum { SIZE = 1 << 18 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static char ring[SIZE];
static size_t first, used;      /* bytes of it that were not received */
static bool is_rung, is_closed;

/* Under the lock. */
static void wait_until(uint64_t end) {
    struct timespec time = {.tv_sec = (time_t)(end / 1000000000u),
                            .tv_nsec = (long)(end % 1000000000u)};
    pthread_cond_timedwait(&changed, &lock, &time);
}

void mailbox_open(void) {
    pthread_mutex_lock(&lock);
    first = used = 0;
    is_rung = is_closed = false;
    pthread_mutex_unlock(&lock);
}

/* Returns how many bytes there was room for; once nobody wants them, for all. */
size_t mailbox_put(const char *data, size_t size) {
    pthread_mutex_lock(&lock);
    size_t room = SIZE - used, count = size < room ? size : room;
    for (size_t done = 0; !is_closed && done < count;) {
        size_t at = (first + used) % SIZE, left = count - done;
        size_t piece = left < SIZE - at ? left : SIZE - at;
        memcpy(ring + at, data + done, piece);
        used += piece;
        done += piece;
    }
    if (is_closed)
        count = size;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return count;
}

/* Waits for room, not for long. */
void mailbox_wait(unsigned milliseconds) {
    pthread_mutex_lock(&lock);
    if (used == SIZE && !is_closed)
        wait_until(now() + milliseconds * 1000000u);
    pthread_mutex_unlock(&lock);
}

/* Takes what has arrived. Returns how many bytes: 0 after that time, or if somebody has rung. */
PUBLIC size_t recorder_receive(char *out, size_t capacity, unsigned milliseconds) {
    uint64_t end = now() + (uint64_t)milliseconds * 1000000u;
    size_t size = 0;
    pthread_mutex_lock(&lock);
    while (!used && !is_rung && now() < end)
        wait_until(end);
    while (used && size < capacity) {
        size_t piece = used < SIZE - first ? used : SIZE - first;
        if (piece > capacity - size)
            piece = capacity - size;
        memcpy(out + size, ring + first, piece);
        first = (first + piece) % SIZE;
        used -= piece;
        size += piece;
    }
    is_rung = is_rung && size;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return size;
}

/* Lets recorder_receive return. */
PUBLIC void recorder_ring(void) {
    pthread_mutex_lock(&lock);
    is_rung = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Nobody receives anything any more. */
PUBLIC void recorder_hang_up(void) {
    pthread_mutex_lock(&lock);
    is_closed = true;
    first = used = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void make_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void mailbox_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    make_condition();
}

__attribute__((constructor)) static void initialize(void) {
    make_condition();
}
