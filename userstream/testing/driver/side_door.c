/* The tests' side door: settings, injected results, asynchronous errors, counters. */
#include "driver.h"

#define SIDE_DOOR __attribute__((visibility("default")))

/* The next `count` calls, after `skip`, answer `result`. */
typedef struct Fault {
    uint64_t id;
    uint64_t thread;            /* 0: of any */
    int result;
    long count;
    long skip;
    struct Fault *next;         /* injected later */
} Fault;

CUresult fault_for(Function *function) {
    for (Fault **link = &function->shared->faults; *link; link = &(*link)->next) {
        Fault *fault = *link;
        if (fault->thread && fault->thread != this_thread()->id)
            continue;
        if (fault->skip > 0) {
            fault->skip--;
            continue;
        }
        int result = fault->result;
        if (--fault->count == 0) {
            *link = fault->next;
            free(fault);
        }
        return (CUresult)result;
    }
    return CUDA_SUCCESS;
}

static void remove_faults(Function *function, uint64_t id) {
    for (Fault **link = &function->faults; *link;) {
        Fault *fault = *link;
        if (id && fault->id != id) {
            link = &fault->next;
            continue;
        }
        *link = fault->next;
        free(fault);
    }
}

/* Declared here as well: nobody but Python calls these. */
SIDE_DOOR bool userstream_configure(int devices, int driver_version, size_t memory);
SIDE_DOOR uint64_t userstream_inject(const char *name, int result, long count, long skip,
                                     bool here);
SIDE_DOOR void userstream_withdraw(const char *name, uint64_t id);
SIDE_DOOR long userstream_calls(const char *name);
SIDE_DOOR int userstream_async_error(Stream *handle, int error);
SIDE_DOOR void userstream_reset(void);
SIDE_DOOR void userstream_shut_down(void);
SIDE_DOOR void userstream_progress(void);
SIDE_DOOR bool userstream_is_forked(void);
SIDE_DOOR void userstream_statistics(long statistics[5]);

bool userstream_configure(int devices, int driver_version, size_t memory) {
    lock();
    bool possible = !initialized && devices <= MAX_DEVICES;
    if (possible)
        settings = (Settings){devices, driver_version, memory};
    unlock();
    return possible;
}

/* 0: there is no such function. */
uint64_t userstream_inject(const char *name, int result, long count, long skip, bool here) {
    lock();
    uint64_t id = 0;
    Function *function = function_find(name);
    if (function) {
        Fault **end = &function->faults;
        while (*end)
            end = &(*end)->next;
        id = new_id();
        *end = malloc(sizeof **end);
        **end = (Fault){id, here ? this_thread()->id : 0, result, count, skip, NULL};
    }
    unlock();
    return id;
}

void userstream_withdraw(const char *name, uint64_t id) {
    lock();
    Function *function = function_find(name);
    if (function && id)
        remove_faults(function, id);
    unlock();
}

/* -1: there is no such function. */
long userstream_calls(const char *name) {
    lock();
    const Function *function = function_find(name);
    long calls = function ? function->calls : -1;
    unlock();
    return calls;
}

static CUresult run_failure(Operation *operation, Stream *stream) {
    UNUSED(stream);
    return (CUresult)operation->failure;
}

int userstream_async_error(Stream *handle, int error) {
    Stream *stream;
    lock();
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream->capture)
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result == CUDA_SUCCESS) {
        Operation *operation = operation_new(run_failure, NODE_EMPTY);
        operation->failure = error;
        result = stream_submit(stream, operation);
    }
    unlock();
    return (int)result;
}

void userstream_reset(void) {
    lock();
    for (Function *function = function_first(); function; function = function->next) {
        remove_faults(function, 0);
        function->calls = 0;
    }
    for (Context *context = context_first(); context; context = context->next) {
        if (context->active)
            context->error = CUDA_SUCCESS;
        context->explanation = NULL;
    }
    kernels_reset();
    unlock();
}

/* The interpreter goes down: its functions must not be called any more. */
void userstream_shut_down(void) {
    shut_down_by_this_thread();
}

/* The driver is lost here: it had been initialized in the parent. */
bool userstream_is_forked(void) {
    return forked;
}

/* A word that streams may wait for was written. */
void userstream_progress(void) {
    lock();
    progress();
    unlock();
}

void userstream_statistics(long statistics[5]) {
    long streams = 0;
    lock();
    for (Context *context = context_first(); context; context = context->next) {
        for (Stream *stream = context->streams; stream; stream = stream->next)
            streams += stream_is_user_made(stream);
    }
    statistics[0] = streams;
    statistics[1] = (long)handle_count(KIND_EVENT);
    statistics[2] = (long)memory_count();
    statistics[3] = waiting_for_values;
    statistics[4] = (long)capture_count();
    unlock();
}
