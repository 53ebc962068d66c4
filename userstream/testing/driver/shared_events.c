/* Events of several processes: how often they were recorded, and how often that was reached. */
#include "shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

enum { POLL_MICROSECONDS = 500 };   /* nobody is told what another process does */

typedef struct Counters {
    _Atomic uint64_t recorded;
    _Atomic uint64_t reached;
} Counters;

struct SharedEvent {
    int references;             /* the event's, and those of operations */
    int file;
    Counters *counters;
};

static SharedEvent *shared_event_of(int file) {
    CUdeviceptr counters = file < 0 ? 0 : shared_file_map(file, 0, sizeof(Counters), 0);
    if (!counters) {
        if (file >= 0)
            close(file);
        return NULL;
    }
    SharedEvent *shared = malloc(sizeof *shared);
    *shared = (SharedEvent){1, file, (Counters *)counters};
    return shared;
}

SharedEvent *shared_event_new(void) {
    int file = shared_file_new();
    if (file >= 0 && ftruncate(file, (off_t)sizeof(Counters))) {
        close(file);
        file = -1;
    }
    return shared_event_of(file);
}

SharedEvent *shared_event_open(int process, int file, uint64_t inode) {
    return shared_event_of(shared_file_open(process, file, inode, sizeof(Counters)));
}

int shared_event_file(const SharedEvent *shared) {
    return shared->file;
}

void shared_event_release(SharedEvent *shared) {
    if (!shared || --shared->references)
        return;
    munmap(shared->counters, sizeof *shared->counters);
    close(shared->file);
    free(shared);
}

bool shared_event_pending(const SharedEvent *shared) {
    return atomic_load(&shared->counters->reached) < atomic_load(&shared->counters->recorded);
}

/* ---- operations ----------------------------------------------------------------------------- */

static void dispose(Operation *operation) {
    shared_event_release(operation->shared_event.event);
}

static Operation *operation_for(SharedEvent *shared, Run run, NodeType type, uint64_t number) {
    Operation *operation = operation_new(run, type);
    shared->references++;
    operation->shared_event.event = shared;
    operation->shared_event.number = number;
    operation->dispose = dispose;
    return operation;
}

/* Records of other streams and processes may have come later and be over already. */
static CUresult run_record(Operation *operation, Stream *stream) {
    UNUSED(stream);
    _Atomic uint64_t *reached = &operation->shared_event.event->counters->reached;
    uint64_t before = atomic_load(reached);
    while (before < operation->shared_event.number &&
           !atomic_compare_exchange_weak(reached, &before, operation->shared_event.number))
        ;
    return CUDA_SUCCESS;
}

Operation *shared_event_record(SharedEvent *shared) {
    uint64_t number = atomic_fetch_add(&shared->counters->recorded, 1) + 1;
    Operation *operation = operation_for(shared, run_record, NODE_EVENT_RECORD, number);
    operation->runs_after_error = true;     /* other processes wait for it */
    operation->takes_no_turn = true;
    return operation;
}

static bool is_reached(const SharedEvent *shared, uint64_t number) {
    return atomic_load(&shared->counters->reached) >= number;
}

static CUresult run_wait(Operation *operation, Stream *stream) {
    while (!is_reached(operation->shared_event.event, operation->shared_event.number) &&
           !stream_work_is_lost(stream) && !shut_down)
        wait_for_progress_or(POLL_MICROSECONDS);
    return CUDA_SUCCESS;
}

static bool is_wait_over(const Operation *operation) {
    return is_reached(operation->shared_event.event, operation->shared_event.number);
}

Operation *shared_event_wait(SharedEvent *shared) {
    Operation *operation = operation_for(shared, run_wait, NODE_WAIT_EVENT,
                                         atomic_load(&shared->counters->recorded));
    operation->is_ready = is_wait_over;
    operation->takes_no_turn = true;
    return operation;
}

CUresult shared_event_synchronize(SharedEvent *shared, const Context *context) {
    uint64_t number = atomic_load(&shared->counters->recorded);
    shared->references++;
    while (!is_reached(shared, number) && context->error == CUDA_SUCCESS && !shut_down)
        wait_for_progress_or(POLL_MICROSECONDS);
    shared_event_release(shared);
    return context->error;
}
