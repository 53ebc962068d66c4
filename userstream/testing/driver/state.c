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
static atomic_int wanting_lock;  /* threads */
static unsigned waiting;        /* threads, for progress */
static unsigned woken;          /* threads that waited for progress, and want the lock */
static uint64_t wake_ups;
static _Atomic uint64_t last_id;     /* a thread is numbered without the lock */

void lock(void) {
    atomic_fetch_add(&wanting_lock, 1);
    pthread_mutex_lock(&mutex);
    atomic_fetch_sub(&wanting_lock, 1);
}

void unlock(void) {
    pthread_mutex_unlock(&mutex);
}

bool is_lock_wanted(void) {
    return atomic_load(&wanting_lock) > 0 || woken > 0;
}

void progress(void) {
    schedule_note_progress();
    woken += waiting;
    waiting = 0;
    wake_ups++;
    pthread_cond_broadcast(&progressed);
}

/* Without a limit if `microseconds` is 0. */
static void wait_for_wake_up(int microseconds) {
    uint64_t before = wake_ups;
    waiting++;
    if (microseconds)
        wait_on_or(&progressed, microseconds);
    else
        wait_on(&progressed);
    --*(wake_ups == before ? &waiting : &woken);
}

void wait_for_progress(void) {
    if (schedule_waits(false))
        return;
    wait_with_turn();
    schedule_resumes(false);
}

void wait_for_progress_or(int microseconds) {
    if (schedule_waits(true))
        return;
    wait_for_wake_up(microseconds);
    schedule_resumes(true);
}

void wait_with_turn(void) {
    wait_for_wake_up(0);
}

void wait_on(pthread_cond_t *condition) {
    pthread_cond_wait(condition, &mutex);
}

void time_from_now(struct timespec *time, clockid_t clock, int microseconds) {
    clock_gettime(clock, time);
    time->tv_sec += microseconds / 1000000;
    time->tv_nsec += microseconds % 1000000 * 1000L;
    if (time->tv_nsec >= 1000000000L) {
        time->tv_nsec -= 1000000000L;
        time->tv_sec++;
    }
}

bool time_is_before(const struct timespec *one, const struct timespec *other) {
    return one->tv_sec < other->tv_sec ||
           (one->tv_sec == other->tv_sec && one->tv_nsec < other->tv_nsec);
}

/* The condition takes its time from the monotonic clock: see `condition_initialize`. */
void wait_on_or(pthread_cond_t *condition, int microseconds) {
    struct timespec until;
    time_from_now(&until, CLOCK_MONOTONIC, microseconds);
    pthread_cond_timedwait(condition, &mutex, &until);
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

uint64_t new_id(void) {
    return ++last_id;
}

void condition_initialize(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* The child has none of the worker threads. Before cuInit that does not matter. */
static void forked_child(void) {
    pthread_mutex_init(&mutex, NULL);
    condition_initialize(&progressed);
    wanting_lock = 0;
    waiting = woken = 0;
    schedule_forked();
    forked = initialized;
    threads = NULL;
    this_thread()->listed = false;
}

void shut_down_by_this_thread(void) {
    lock();
    if (!shut_down)
        exiting_thread = this_thread()->id;
    shut_down = true;
    schedule_stop();
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
    condition_initialize(&progressed);
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
    if (point && --point->references == 0) {
        schedule_forget(point);
        free(point);
    }
}

void point_reach(Point *point) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    point->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    point->done = true;
    schedule_reached(point);
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
    schedule_awaits(point);
    while (point_pending(point) && context->errors == errors)
        wait_for_progress();
    schedule_awaits(NULL);
    point_release(point);
    stay_at_exit();
    /* The error that ended this wait may have been reset before this thread went on. */
    return context->errors == errors ? CUDA_SUCCESS : context->last_error;
}
