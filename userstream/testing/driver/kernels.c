/* Kernels: the Python functions that stand for them, and how a launch gets there and back.
 *
 * A stream's worker must not run Python. It offers the launch; a thread of Python takes it, calls
 * the function and finishes it, and the worker waits for that. */
#include "kernels.h"

#include <ctype.h>
#include <stdio.h>
#include <time.h>

#define SIDE_DOOR __attribute__((visibility("default")))

/* ---- definitions ---------------------------------------------------------------------------- */

static Definition *definitions;         /* the newest first; replaced ones until they are unused */

/* The function's own name in a mangled one that has no namespace: scale of _Z5scaleIfEvPT_i. */
static bool is_mangled(const char *mangled, const char *name) {
    if (strncmp(mangled, "_Z", 2) != 0 || !isdigit((unsigned char)mangled[2]))
        return false;
    char *begin;
    size_t length = strtoul(mangled + 2, &begin, 10);
    return length == strlen(name) && strncmp(begin, name, length) == 0;
}

static Definition *find_exactly(const char *name) {
    for (Definition *definition = definitions; definition; definition = definition->next) {
        if (!definition->replaced && strcmp(definition->name, name) == 0)
            return definition;
    }
    return NULL;
}

Definition *definition_find(const char *name) {
    Definition *found = find_exactly(name);
    for (Definition *other = definitions; other && !found; other = other->next) {
        if (!other->replaced && is_mangled(name, other->name))
            found = other;
    }
    return found;
}

Definition *definition_nth(size_t n) {
    for (Definition *definition = definitions; definition; definition = definition->next) {
        if (!definition->replaced && n-- == 0)
            return definition;
    }
    return NULL;
}

size_t definition_count(void) {
    size_t count = 0;
    while (definition_nth(count))
        count++;
    return count;
}

CUresult definition_missing(const char *name) {
    char *text;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    fprintf(stream,
            "no Python function stands for the kernel '%s' on the simulated driver: decorate one "
            "with @userstream.testing.kernel('%s'); known:",
            name, name);
    for (size_t i = 0; i < definition_count(); i++)
        fprintf(stream, "%s '%s'", i ? "," : "", definition_nth(i)->name);
    if (!definition_count())
        fprintf(stream, " none");
    fclose(stream);
    this_thread()->explanation = explanation_new(CUDA_ERROR_NOT_FOUND, text);
    free(text);
    return CUDA_ERROR_NOT_FOUND;
}

static void definition_release(Definition *definition) {
    if (--definition->references)
        return;
    for (Definition **link = &definitions; *link; link = &(*link)->next) {
        if (*link == definition) {
            *link = definition->next;
            break;
        }
    }
    free(definition->name);
    free(definition);
}

void launch_free(Launch *launch) {
    definition_release(launch->definition);
    free(launch->addresses);
    free(launch->parameters);
    free(launch);
}

void kernels_reset(void) {
    for (Definition *definition = definitions; definition; definition = definition->next)
        definition->seconds = 0;
}

/* ---- a launch, on the worker ---------------------------------------------------------------- */

/* Lives as long as the worker waits. */
typedef struct Job {
    uint64_t id;
    const Launch *launch;
    const Stream *stream;
    enum { OFFERED, TAKEN, FINISHED } state;
    CUresult result;
    const Explanation *explanation;
    struct Job *next;
} Job;

static Job *jobs;
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER;
static int idle;                /* threads of Python that wait for a launch */

static void forked_child(void) {
    pthread_cond_init(&offered, NULL);  /* the threads that waited are the parent's */
    idle = 0;
    jobs = NULL;
}

__attribute__((constructor)) static void kernels_initialize(void) {
    pthread_atfork(NULL, NULL, forked_child);
}

static Job *job_find(uint64_t id) {
    Job *job = jobs;
    while (job && job->id != id)
        job = job->next;
    return job;
}

/* Before what the kernel does is seen: whoever did not wait for it finds the old bytes. */
static void let_time_pass(const Launch *launch, const Stream *stream) {
    enum { LONGEST = 100000 };  /* microseconds of one wait */
    double end = now() + launch->definition->seconds;
    for (double left; (left = end - now()) > 0;) {
        if (shut_down || stream_work_is_lost(stream))
            break;
        wait_for_progress_or(left * 1e6 < LONGEST ? (int)(left * 1e6) + 1 : LONGEST);
    }
}

CUresult launch_run(const Launch *launch, Stream *stream) {
    let_time_pass(launch, stream);
    Job job = {.id = new_id(), .launch = launch, .stream = stream};
    Job **end = &jobs;
    while (*end)
        end = &(*end)->next;
    *end = &job;
    pthread_cond_signal(&offered);
    /* What Python has taken it uses until it finishes it; at exit that may be never. */
    while (job.state == TAKEN ||
           (job.state == OFFERED && !shut_down && !stream_work_is_lost(stream)))
        wait_for_progress();
    for (Job **link = &jobs; *link; link = &(*link)->next) {
        if (*link == &job) {
            *link = job.next;
            break;
        }
    }
    if (job.result != CUDA_SUCCESS && stream->context->error == CUDA_SUCCESS)
        stream->context->explanation = job.explanation;
    return job.result;
}

/* ---- the side door: Python registers functions, and serves launches ------------------------- */

typedef struct Taken {
    uint64_t job;
    uint64_t definition;
    const void *parameters;
    size_t size;
    unsigned grid[3];
    unsigned block[3];
    bool others_wait;           /* threads, for the next launch */
} Taken;

typedef struct Range {
    uint64_t memory;            /* to be given to userstream_unuse_memory */
    uint64_t base;              /* the allocation at the address; 0: there is none */
    size_t size;
} Range;

SIDE_DOOR uint64_t userstream_define_kernel(const char *name, size_t count, const size_t *sizes,
                                            const size_t *offsets, size_t size);
SIDE_DOOR bool userstream_knows_kernel(uint64_t id);
SIDE_DOOR bool userstream_set_duration(const char *name, double seconds);
SIDE_DOOR bool userstream_take_launch(Taken *taken);
SIDE_DOOR void userstream_finish_launch(uint64_t id, int result, const char *text);
SIDE_DOOR int userstream_use_memory(uint64_t id, CUdeviceptr address, size_t size, Range *range);
SIDE_DOOR void userstream_unuse_memory(uint64_t memory);
SIDE_DOOR int userstream_set_condition(uint64_t id, uint64_t handle, unsigned value);

uint64_t userstream_define_kernel(const char *name, size_t count, const size_t *sizes,
                                  const size_t *offsets, size_t size) {
    Definition *definition = calloc(1, sizeof *definition + count * sizeof *definition->parameters);
    definition->name = strdup(name);
    definition->references = 1;
    definition->count = count;
    definition->size = size;
    for (size_t i = 0; i < count; i++)
        definition->parameters[i] = (Parameter){offsets[i], sizes[i]};
    lock();
    uint64_t id = definition->id = new_id();
    Definition *before = find_exactly(name);
    definition->next = definitions;
    definitions = definition;
    if (before) {
        before->replaced = true;
        definition_release(before);
    }
    unlock();
    return id;
}

/* False: no launch will ask for this function any more. */
bool userstream_knows_kernel(uint64_t id) {
    lock();
    const Definition *definition = definitions;
    while (definition && definition->id != id)
        definition = definition->next;
    unlock();
    return definition != NULL;
}

bool userstream_set_duration(const char *name, double seconds) {
    lock();
    Definition *definition = find_exactly(name);
    if (definition)
        definition->seconds = seconds;
    unlock();
    return definition != NULL;
}

/* Waits for a launch. False: enough other threads do. Once the process ends there are no more, and
 * it does not return: a thread that needs Python then would be ended by force. */
bool userstream_take_launch(Taken *taken) {
    enum { ENOUGH = 4 };
    lock();
    if (idle == ENOUGH) {
        unlock();
        return false;
    }
    idle++;
    Job *job = NULL;
    for (;;) {
        for (job = jobs; job && job->state != OFFERED; job = job->next)
            ;
        if (job && !shut_down)
            break;
        wait_on(&offered);
    }
    idle--;
    job->state = TAKEN;
    this_thread()->runs_kernel = true;
    const Launch *launch = job->launch;
    *taken = (Taken){.job = job->id,
                     .definition = launch->definition->id,
                     .parameters = launch->parameters,
                     .size = launch->definition->size,
                     .others_wait = idle > 0};
    memcpy(taken->grid, launch->shape.grid, sizeof taken->grid);
    memcpy(taken->block, launch->shape.block, sizeof taken->block);
    unlock();
    return true;
}

void userstream_finish_launch(uint64_t id, int result, const char *text) {
    lock();
    Job *job = job_find(id);
    job->result = (CUresult)result;
    job->explanation = text ? explanation_new(job->result, text) : NULL;
    job->state = FINISHED;
    this_thread()->runs_kernel = false;
    progress();
    unlock();
}

/* Whether a kernel that runs in the context reaches the memory. */
static bool is_accessible(const Context *context, const Memory *memory) {
    if (memory->pool)
        return memory->pool->access[context->device] != 0;
    if (memory->kind != MEMORY_DEVICE || memory->device == context->device)
        return true;
    return context->peers >> memory->device & 1;
}

/* Keeps the bytes until `userstream_unuse_memory`, also if the memory is freed. NOT_FOUND: the
 * launch is over. */
int userstream_use_memory(uint64_t id, CUdeviceptr address, size_t size, Range *range) {
    lock();
    CUresult result = CUDA_ERROR_ILLEGAL_ADDRESS;
    const Job *job = job_find(id);
    Memory *memory = memory_find(address);
    *range = (Range){0};
    if (memory) {
        range->base = memory->address;
        range->size = memory->size;
    }
    if (!job) {
        result = CUDA_ERROR_NOT_FOUND;
    } else if (memory && memory_contains(address, size) &&
               is_accessible(job->launch->context, memory)) {
        memory->users++;
        range->memory = (uint64_t)memory;
        result = CUDA_SUCCESS;
    }
    unlock();
    return (int)result;
}

void userstream_unuse_memory(uint64_t memory) {
    lock();
    memory_unuse((Memory *)memory);
    unlock();
}

/* cudaGraphSetConditional. NOT_FOUND: the launch is over; INVALID_VALUE: the kernel is not in a
 * graph that has the condition. "Handles can only be set from the context with which they are
 * associated." */
int userstream_set_condition(uint64_t id, uint64_t handle, unsigned value) {
    lock();
    CUresult result = CUDA_ERROR_NOT_FOUND;
    const Job *job = job_find(id);
    if (job) {
        Condition *condition = condition_of_running_plan(job->stream, handle);
        bool is_its = condition && condition->context == job->launch->context;
        result = is_its ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        if (is_its)
            condition->value = value;
    }
    unlock();
    return (int)result;
}
