/* Wake-ups of threads that wait for the GPU, for a while at most: a thread sleeps until its bell
 * rings. A native thread, the *waiter*, blocks in the driver until an event completes, and rings
 * the bell, so that no thread that runs Python code blocks there. */
#include "core.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

/* What a bell and those who may ring it share: the latter may outlive the bell, and Python. */
typedef struct {
    sem_t
        rings; /* not a futex: a schedule of the simulated driver knows who waits for semaphores */
    _Atomic uint32_t owners;
} Chime;

typedef struct {
    PyObject ob_base;
    Chime *chime;
} Bell;

static PyTypeObject *bell_type;

/* Also a host function of a stream, on a thread of the driver: it never blocks. */
static void ring_chime(void *chime)
{
    sem_post(&((Chime *)chime)->rings);
}

/* A change of the time of day must not delay the end, where the C library can do without it. */
static int wait_at_most(sem_t *semaphore, double limit)
{
#if __GLIBC_PREREQ(2, 30)
    const clockid_t clock = CLOCK_MONOTONIC;
#else
    const clockid_t clock = CLOCK_REALTIME;
#endif
    struct timespec until;
    clock_gettime(clock, &until);
    double end = (double)until.tv_sec + (double)until.tv_nsec / 1e9 + limit;
    until.tv_sec = (time_t)end;
    until.tv_nsec = (long)((end - (double)until.tv_sec) * 1e9);
#if __GLIBC_PREREQ(2, 30)
    return sem_clockwait(semaphore, clock, &until);
#else
    return sem_timedwait(semaphore, &until);
#endif
}

/* Sleep until the bell rings, until the time is up if there is a limit, or until a signal comes.
 * Returns whether the bell has rung since the last call. */
static int await_chime(Chime *chime, const double *limit)
{
    int has_rung = !(limit ? wait_at_most(&chime->rings, *limit) : sem_wait(&chime->rings));
    while (!sem_trywait(&chime->rings))
        has_rung = 1;
    return has_rung;
}

static void drop_chime(Chime *chime)
{
    if (atomic_fetch_sub(&chime->owners, 1) == 1) {
        sem_destroy(&chime->rings);
        free(chime);
    }
}

/* -- waiters --------------------------------------------------------------------------------- */

/* One thread for each context at most, as each has one event to block on (see events.c). They are
 * never ended: a thread may be in the driver when Python exits, where it keeps nothing from ending.
 */
enum { MOST_WAITERS = 32, STACK_SIZE = 256 << 10 };
enum { NO_THREAD, IDLE, CLAIMED };

typedef struct {
    _Atomic int phase;
    _Atomic CUevent event; /* that the thread waits for */
    Chime *chime;          /* to ring then */
    Chime call;            /* rung for the thread itself */
} Waiter;

static Waiter waiters[MOST_WAITERS];

static void *wait_forever(void *argument)
{
    Waiter *self = argument;
    int mode;
    set_own_account(NOBODY);
    for (;;) {
        /* In the default mode the wait would break the captures of other threads. A failure needs
         * no care: who is woken asks the driver. */
        if (!relax(&mode))
            synchronize_event(self->event);
        Chime *chime = self->chime;
        self->event = NULL;
        self->phase = IDLE; /* before the ring: who is woken may need a waiter at once */
        ring_chime(chime);
        drop_chime(chime);
        while (!await_chime(&self->call, NULL))
            ;
    }
    return NULL;
}

static int start_thread(Waiter *waiter)
{
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_t attributes;
    if (sem_init(&waiter->call.rings, 0, 0) || pthread_attr_init(&attributes))
        return 0;
    pthread_attr_setstacksize(&attributes, STACK_SIZE);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for the threads of the program: one that sleeps must wake up. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    unsigned char account = set_account_of_thread(HOUSEKEEPING);
    int status = pthread_create(&thread, &attributes, wait_forever, waiter);
    set_account_of_thread(account);
    if (!status)
        pthread_setname_np(thread, "userstream-wait");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !status;
}

/* Whether a waiter may be in the driver with an event, which must not be recorded again then. */
int has_waiter(CUevent event)
{
    for (int i = 0; i < MOST_WAITERS; i++) {
        if (waiters[i].event == event)
            return 1;
    }
    return 0;
}

/* Ring a bell once an event has completed or failed; return 0 if no waiter is free. */
int notify(PyObject *bell, CUevent event)
{
    for (int i = 0; i < MOST_WAITERS; i++) {
        Waiter *waiter = &waiters[i];
        int phase = waiter->phase;
        if (phase == CLAIMED || !atomic_compare_exchange_strong(&waiter->phase, &phase, CLAIMED))
            continue;
        waiter->event = event;
        waiter->chime = ((Bell *)bell)->chime;
        waiter->chime->owners++;
        if (phase == IDLE) {
            ring_chime(&waiter->call);
            return 1;
        }
        if (start_thread(waiter))
            return 1;
        waiter->event = NULL;
        drop_chime(waiter->chime);
        waiter->phase = NO_THREAD;
        return 0;
    }
    return 0;
}

#define LONGEST 1e9 /* seconds */

/* -- for Python ------------------------------------------------------------------------------ */

int is_bell(PyObject *object)
{
    return PyObject_TypeCheck(object, bell_type);
}

static PyObject *bell_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    (void)args, (void)names;
    Chime *chime = malloc(sizeof *chime);
    Bell *bell = chime ? PyObject_New(Bell, type) : NULL;
    if (!bell) {
        free(chime);
        return PyErr_NoMemory();
    }
    sem_init(&chime->rings, 0, 0);
    chime->owners = 1;
    bell->chime = chime;
    return (PyObject *)bell;
}

static void bell_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    drop_chime(((Bell *)self)->chime);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ring(): make `wait` return, now or when it is called. */
static PyObject *bell_ring(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    ring_chime(((Bell *)self)->chime);
    Py_RETURN_NONE;
}

/* wait(seconds): sleep until the bell rings, at most so long, or until a signal comes. None is
 * forever. Returns whether the bell has rung since the last call. One thread waits at a time. */
static PyObject *bell_wait(PyObject *self, PyObject *argument)
{
    Chime *chime = ((Bell *)self)->chime;
    int has_rung;
    double limit = argument == Py_None ? 0 : PyFloat_AsDouble(argument);
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    limit = limit < 0 ? 0 : limit > LONGEST ? LONGEST : limit;
    Py_BEGIN_ALLOW_THREADS
    has_rung = await_chime(chime, argument == Py_None ? NULL : &limit);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_rung);
}

static PyObject *bell_address(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(((Bell *)self)->chime);
}

static PyGetSetDef bell_attributes[] = {
    {"address", bell_address, NULL, NULL, NULL}, /* the argument of RING */
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef bell_methods[] = {
    {"ring", bell_ring, METH_NOARGS, NULL},
    {"wait", bell_wait, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bell_slots[] = {
    {Py_tp_new, FUNCTION(bell_new)},
    {Py_tp_dealloc, FUNCTION(bell_dealloc)},
    {Py_tp_getset, bell_attributes},
    {Py_tp_methods, bell_methods},
    {0, NULL},
};

static PyType_Spec bell_spec = {
    .name = "userstream._driver._core.Bell",
    .basicsize = sizeof(Bell),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = bell_slots,
};

int add_bells(PyObject *module)
{
    if (!bell_type && !(bell_type = (PyTypeObject *)PyType_FromSpec(&bell_spec)))
        return -1;
    PyObject *ring = PyLong_FromVoidPtr(FUNCTION(ring_chime));
    int status = ring ? PyModule_AddObjectRef(module, "RING", ring) : -1;
    Py_XDECREF(ring);
    return status || PyModule_AddObjectRef(module, "Bell", (PyObject *)bell_type) ? -1 : 0;
}
