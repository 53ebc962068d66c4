/* The lock, the settings, what happens at fork and at exit, and points in a queue. */
#include "driver.h"

#include <errno.h>
#include <time.h>

Settings settings = {.devices = 2, .driver_version = 13000, .memory = (size_t)1 << 30};
bool initialized;
bool forked;
bool shut_down;
static uint64_t exiting_thread;
static bool ended;              /* Python: nobody comes out of the driver any more */
static Thread *threads;         /* that have called the driver */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progressed;
static _Atomic uint64_t last_id;     /* a thread is numbered without the lock */

void lock(void) {
    pthread_mutex_lock(&mutex);
}

void unlock(void) {
    pthread_mutex_unlock(&mutex);
}

void progress(void) {
    pthread_cond_broadcast(&progressed);
}

void wait_for_progress(void) {
    pthread_cond_wait(&progressed, &mutex);
}

void wait_on(pthread_cond_t *condition) {
    pthread_cond_wait(condition, &mutex);
}

void wait_for_progress_or(int microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += microseconds * 1000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&progressed, &mutex, &until);
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

uint64_t new_id(void) {
    return ++last_id;
}

static void condition_initialize(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&progressed, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* The child has none of the worker threads. Before cuInit that does not matter. */
static void forked_child(void) {
    pthread_mutex_init(&mutex, NULL);
    condition_initialize();
    forked = initialized;
    threads = NULL;
    this_thread()->listed = false;
}

void shut_down_by_this_thread(void) {
    lock();
    if (!shut_down)
        exiting_thread = this_thread()->id;
    shut_down = true;
    progress();
    unlock();
}

/* ---- the end of Python ----------------------------------------------------------------------
 *
 * Up to 3.13 it ends other threads by force as soon as they come back to it, and the C++ that they
 * are in, of cuda.core say, takes that for an error of the program: "terminate called". So they
 * stay in the driver. */

static const double LAST_MOMENT = 0.1;  /* for a thread that is on its way back to Python */
static const double PARKED = 3;         /* Python ends meanwhile, or needs what the thread holds */

void thread_enters(void) {
    this_thread()->inside = true;
}

void thread_leaves(void) {
    Thread *me = this_thread();
    if (!me->listed) {
        me->listed = true;
        me->next = threads;
        threads = me;
    }
    me->left = now();
    while (ended && me->id != exiting_thread && now() - me->left < PARKED)
        wait_for_progress_or(500000);
    me->inside = false;
}

void thread_unlist(Thread *thread) {
    for (Thread **link = &threads; *link; link = &(*link)->next) {
        if (*link == thread) {
            *link = thread->next;
            break;
        }
    }
}

static bool is_anybody_on_the_way(void) {
    double before = now() - LAST_MOMENT;
    for (const Thread *thread = threads; thread; thread = thread->next) {
        if (!thread->inside && thread->id != exiting_thread && thread->left > before)
            return true;
    }
    return false;
}

/* Called without the GIL, which whoever has just left the driver can thus get: it goes on to its
 * next call, and stays there. */
void end_by_this_thread(void) {
    shut_down_by_this_thread();
    lock();
    ended = true;
    while (is_anybody_on_the_way())
        wait_for_progress_or(1000);
    unlock();
}

__attribute__((constructor)) static void state_initialize(void) {
    condition_initialize();
    pthread_atfork(lock, unlock, forked_child);
    atexit(shut_down_by_this_thread);
}

Point *point_new(void) {
    Point *point = calloc(1, sizeof *point);
    point->references = 1;
    return point;
}

Point *point_retain(Point *point) {
    if (point)
        point->references++;
    return point;
}

void point_release(Point *point) {
    if (point && --point->references == 0)
        free(point);
}

void point_reach(Point *point) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    point->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    point->done = true;
    progress();
}

bool point_pending(const Point *point) {
    return point && !point->done;
}

/* Threads that wait while the process exits stay where they are: Python ends a thread that comes
 * back, and the C++ that it is in takes that for an error of the program. */
static void stay_at_exit(void) {
    while (shut_down && this_thread()->id != exiting_thread)
        wait_for_progress();
}

/* A host wait. The exiting thread, whose finalizers may come here, does not wait. */
CUresult point_wait(Point *point, const Context *context) {
    if (!point_pending(point) || context->error != CUDA_SUCCESS)
        return context->error;
    /* Garbage collection in a kernel's thread frees memory, say: what that waits for may be this
     * very kernel. */
    if (this_thread()->runs_kernel)
        return CUDA_ERROR_NOT_PERMITTED;
    stay_at_exit();
    if (shut_down)
        return CUDA_ERROR_DEINITIALIZED;
    unsigned errors = context->errors;
    point_retain(point);
    while (point_pending(point) && context->errors == errors)
        wait_for_progress();
    point_release(point);
    stay_at_exit();
    /* The error that ended this wait may have been reset before this thread went on. */
    return context->errors == errors ? CUDA_SUCCESS : context->last_error;
}
