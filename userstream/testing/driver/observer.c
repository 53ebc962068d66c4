/* The observer: one function that is called for every driver call, without effect on the call. */
#include "driver.h"

#include <pthread.h>
#include <sched.h>

_Atomic(Observer) observer;
static atomic_int telling;      /* threads that are in the observer, or about to be */

/* An observer that is taken away may be unloaded: `telling` says when nobody is inside. It is
 * raised before the observer is looked at, so that who takes it away sees everybody. */
void observer_tell(Site site, const Function *function, const uint64_t *words, size_t count,
                   CUresult result) {
    atomic_fetch_add(&telling, 1);
    Observer tell = atomic_load(&observer);
    if (tell) {
        Thread *me = this_thread();
        bool before = me->in_observer;
        me->in_observer = true;
        tell(site, function->id, words, count, result, context_current());
        me->in_observer = before;
    }
    atomic_fetch_sub(&telling, 1);
}

/* Declared here as well: nobody but Python calls these. */
__attribute__((visibility("default"))) bool userstream_observe(Observer wanted);
__attribute__((visibility("default"))) const char *userstream_symbol(unsigned id);

/* False: there is one already. NULL takes it away, and returns once no thread is in it; not to be
 * called from within. The lock is not held while it is called: it may call the driver, of which it
 * is told as well. */
bool userstream_observe(Observer wanted) {
    Observer none = NULL;
    if (wanted)
        return atomic_compare_exchange_strong(&observer, &none, wanted);
    atomic_store(&observer, NULL);
    while (atomic_load(&telling))
        sched_yield();
    return true;
}

/* NULL: ids end before this one. */
const char *userstream_symbol(unsigned id) {
    for (const Function *function = function_first(); function; function = function->next) {
        if (function->id == id)
            return function->exported;
    }
    return NULL;
}

/* The threads of the parent that were in its observer do not exist in a forked child. */
static void forked_child(void) {
    atomic_store(&observer, NULL);
    atomic_store(&telling, 0);
}

__attribute__((constructor)) static void prepare_for_fork(void) {
    pthread_atfork(NULL, NULL, forked_child);
}
