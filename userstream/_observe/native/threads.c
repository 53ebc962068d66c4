/* The recorder's data of each thread, which saves threads from waiting for each other. */
#define _GNU_SOURCE

#include "parts.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t threads_lock = PTHREAD_MUTEX_INITIALIZER;
Thread *threads;
static atomic_uint last_number;
static __thread Thread *mine;
static pthread_key_t at_end;

/* The C library frees this storage in another thread, in an order that TSAN does not know of. */
__attribute__((noinline, no_sanitize("thread"))) static void set_mine(Thread *thread) {
    mine = thread;
}

static void thread_ends(void *thread) {
    Thread *me = thread;
    me->busy = true;
    atomic_store(&me->inside, true);
    if (is_recording())
        log_thread_ends(me);
    set_mine(NULL);             /* another destructor may call the driver yet: as a new thread */
    atomic_store(&me->inside, false);
    atomic_store(&me->ended, true);
}

static Thread *thread_new(void) {
    Thread *thread = calloc(1, sizeof *thread);
    if (!thread)
        return NULL;
    thread->number = atomic_fetch_add(&last_number, 1) + 1;
    thread->system_number = (uint32_t)syscall(SYS_gettid);
    pthread_mutex_lock(&threads_lock);
    thread->next = threads;
    threads = thread;
    pthread_mutex_unlock(&threads_lock);
    set_mine(thread);
    pthread_setspecific(at_end, thread);
    return thread;
}

Thread *thread_me(void) {
    return mine ? mine : thread_new();
}

Thread *thread_enter(void) {
    Thread *me = thread_me();
    if (!me || me->busy)
        return NULL;
    me->busy = true;
    atomic_store(&me->inside, true);    /* before it looks at anything: see threads_wait */
    return me;
}

void thread_leave(Thread *me) {
    atomic_store_explicit(&me->inside, false, memory_order_release);
    me->busy = false;
}

bool threads_wait(void) {
    enum { TURNS = 10000 };     /* of 100 microseconds */
    for (int turn = 0; turn < TURNS; turn++) {
        bool inside = false;
        pthread_mutex_lock(&threads_lock);
        for (Thread *each = threads; each; each = each->next)
            inside |= each != mine && atomic_load(&each->inside);
        pthread_mutex_unlock(&threads_lock);
        if (!inside)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return false;
}

bool threads_have_left(void) {
    bool all = true;
    pthread_mutex_lock(&threads_lock);
    for (Thread *each = threads; each; each = each->next) {
        each->left |= !atomic_load(&each->inside);
        all &= each->left;
    }
    for (Thread *each = threads; all && each; each = each->next)
        each->left = false;
    pthread_mutex_unlock(&threads_lock);
    return all;
}

void threads_free_ended(void) {
    pthread_mutex_lock(&threads_lock);
    for (Thread **link = &threads; *link;) {
        Thread *each = *link;
        if (atomic_load(&each->ended) && log_is_read(&each->written)) {
            *link = each->next;
            free(each);
        } else {
            link = &each->next;
        }
    }
    pthread_mutex_unlock(&threads_lock);
}

unsigned threads_seen(void) {
    return atomic_load(&last_number);
}

void threads_in_child(void) {
    pthread_mutex_init(&threads_lock, NULL);
    threads = mine = NULL;
    pthread_setspecific(at_end, NULL);
}

__attribute__((constructor)) static void initialize(void) {
    pthread_key_create(&at_end, thread_ends);
}
