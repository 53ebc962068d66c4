/* The tests' side door: settings, injected results, asynchronous errors, counters. */
#include "driver.h"

#define SIDE_DOOR __attribute__((visibility("default")))

/* The next `count` calls, after `skip`, of any of its functions answer `result`. */
typedef struct Injection {
    uint64_t id;
    uint64_t thread;            /* 0: of any */
    int result;
    long count;
    long skip;
    long fired;
    int references;             /* of its functions */
} Injection;

typedef struct Fault {          /* an injection, at one of its functions */
    Injection *injection;
    struct Fault *next;         /* injected later */
} Fault;

static void fault_remove(Fault **link) {
    Fault *fault = *link;
    *link = fault->next;
    if (--fault->injection->references == 0)
        free(fault->injection);
    free(fault);
}

CUresult fault_for(Function *function) {
    Fault **link = &function->shared->faults;
    while (*link) {
        Injection *injection = (*link)->injection;
        if (injection->count == 0) {    /* used up by another of its functions */
            fault_remove(link);
            continue;
        }
        bool applies = !injection->thread || injection->thread == this_thread()->id;
        if (applies && injection->skip == 0) {
            int result = injection->result;
            injection->fired++;
            if (--injection->count == 0)
                fault_remove(link);
            return (CUresult)result;
        }
        if (applies)
            injection->skip--;
        link = &(*link)->next;
    }
    return CUDA_SUCCESS;
}

/* Of one function the injection with this id, or all with id 0. */
static void remove_faults(Function *function, uint64_t id) {
    for (Fault **link = &function->faults; *link;) {
        if (id && (*link)->injection->id != id) {
            link = &(*link)->next;
            continue;
        }
        fault_remove(link);
    }
}

static Settings configured;     /* CUDA_VISIBLE_DEVICES may have hidden devices since */

/* Declared here as well: nobody but Python calls these. */
SIDE_DOOR bool userstream_configure(int devices, int driver_version, size_t memory);
SIDE_DOOR uint64_t userstream_inject(const char *const *names, size_t count_of_names, int result,
                                     long count, long skip, bool here);
SIDE_DOOR long userstream_withdraw(uint64_t id);
SIDE_DOOR size_t userstream_all_calls(const char **names, long *calls, size_t capacity);
SIDE_DOOR long userstream_calls(const char *name);
SIDE_DOOR int userstream_async_error(Stream *handle, int error);
SIDE_DOOR void userstream_reset(void);
SIDE_DOOR void userstream_shut_down(void);
SIDE_DOOR void userstream_end(void);
SIDE_DOOR void userstream_progress(void);
SIDE_DOOR bool userstream_is_forked(void);
SIDE_DOOR void userstream_statistics(long statistics[5]);
SIDE_DOOR void userstream_machine(Settings *out);
SIDE_DOOR void userstream_print_uuid(char *text, CUdevice device);

/* Of a program that nobody configures. */
__attribute__((constructor)) static void configure_by_environment(void) {
    const char *devices = getenv("USERSTREAM_SIMULATED_GPUS");
    int count = devices ? atoi(devices) : settings.devices;
    if (count >= 0 && count <= MAX_DEVICES)
        settings.devices = count;
    configured = settings;
}

/* False: the driver runs already, with other settings. */
bool userstream_configure(int devices, int driver_version, size_t memory) {
    Settings wanted = {devices, driver_version, memory};
    lock();
    bool same = memcmp(&wanted, &configured, sizeof wanted) == 0;
    bool possible = !initialized && devices <= MAX_DEVICES;
    if (possible)
        settings = configured = wanted;
    unlock();
    return possible || same;
}

/* 0: there is no such function. */
uint64_t userstream_inject(const char *const *names, size_t count_of_names, int result, long count,
                           long skip, bool here) {
    lock();
    bool known = count_of_names > 0;
    for (size_t i = 0; i < count_of_names; i++)
        known = known && function_find(names[i]);
    uint64_t id = known ? new_id() : 0;
    if (known) {
        Injection *injection = malloc(sizeof *injection);
        *injection = (Injection){id, here ? this_thread()->id : 0, result, count, skip, 0,
                                 (int)count_of_names};
        for (size_t i = 0; i < count_of_names; i++) {
            Fault **end = &function_find(names[i])->faults;
            while (*end)
                end = &(*end)->next;
            *end = malloc(sizeof **end);
            **end = (Fault){injection, NULL};
        }
    }
    unlock();
    return id;
}

/* How often it has answered; -1: it is used up, or was forgotten. */
long userstream_withdraw(uint64_t id) {
    long fired = -1;
    lock();
    for (Function *function = function_first(); function; function = function->next) {
        for (const Fault *fault = function->faults; fault; fault = fault->next) {
            if (fault->injection->id == id && fault->injection->count)
                fired = fault->injection->fired;
        }
        remove_faults(function, id);
    }
    unlock();
    return fired;
}

/* Of all functions, each name once; how many there are. */
size_t userstream_all_calls(const char **names, long *calls, size_t capacity) {
    size_t count = 0;
    lock();
    for (Function *function = function_first(); function; function = function->next) {
        if (function->shared != function)
            continue;
        if (count < capacity) {
            names[count] = function->name;
            calls[count] = function->calls;
        }
        count++;
    }
    unlock();
    return count;
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

/* A stream may not have come to them yet. */
static void forget_failures(const Context *context) {
    for (Stream *stream = context->streams; stream; stream = stream->next) {
        for (Operation *operation = stream->first; operation; operation = operation->next) {
            if (operation->run == run_failure)
                operation->failure = CUDA_SUCCESS;
        }
    }
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
        forget_failures(context);
    }
    kernels_reset();
    unlock();
}

/* The interpreter goes down: its functions must not be called any more. */
void userstream_shut_down(void) {
    shut_down_by_this_thread();
}

/* The interpreter is about to end, and takes every thread along that comes back to it. */
void userstream_end(void) {
    end_by_this_thread();
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

/* For libnvidia-ml, which sees every device. */
void userstream_machine(Settings *out) {
    *out = configured;
}

void userstream_print_uuid(char *text, CUdevice device) {
    device_print_uuid(text, device);
}
