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

/* One part of a mangled name, with its length before it; NULL: there is no more. */
static const char *next_part(const char **mangled, size_t *length) {
    char *begin;
    if (!isdigit((unsigned char)**mangled))
        return NULL;
    *length = strtoul(*mangled, &begin, 10);
    if (strnlen(begin, *length) < *length)
        return NULL;
    *mangled = begin + *length;
    return begin;
}

/* Whether a part is a name of Python's, in which numba writes <locals> as _3clocals_3e. */
static bool is_part(const char *part, size_t length, const char *name, size_t name_length) {
    size_t at = 0;
    for (size_t i = 0; i < name_length; i++) {
        char escaped[4] = {name[i]};
        if (!isalnum((unsigned char)name[i]) && name[i] != '_')
            snprintf(escaped, sizeof escaped, "_%02x", (unsigned char)name[i]);
        size_t size = strlen(escaped);
        if (at + size > length || memcmp(part + at, escaped, size) != 0)
            return false;
        at += size;
    }
    return at == length;
}

enum { MOST_PARTS = 32 };

/* The function's own name in a mangled one: scale of _Z5scaleIfEvPT_i; or its last names, those of
 * the scopes included: f.<locals>.kernel of _ZN6module1f12_3clocals_3e6kernelE. */
static bool is_mangled(const char *mangled, const char *name) {
    const char *parts[MOST_PARTS];
    size_t lengths[MOST_PARTS];
    int count = 0;
    if (strncmp(mangled, "_Z", 2) != 0)
        return false;
    mangled += mangled[2] == 'N' ? 3 : 2;
    while (count < MOST_PARTS && (parts[count] = next_part(&mangled, &lengths[count])))
        count++;
    const char *end = name + strlen(name);
    while (end > name && count > 0) {
        const char *begin = end;
        while (begin > name && begin[-1] != '.')
            begin--;
        count--;
        if (!is_part(parts[count], lengths[count], begin, (size_t)(end - begin)))
            return false;
        if (begin == name)
            return true;
        end = begin - 1;
    }
    return false;
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

/* Kernels that were asked for, and no function stood for them. They stay. */
typedef struct Missing {
    char *name;
    struct Missing *next;
} Missing;

static Missing *missing;        /* the first one first */

static void note_missing(const char *name) {
    Missing **end = &missing;
    for (; *end; end = &(*end)->next) {
        if (strcmp((*end)->name, name) == 0)
            return;
    }
    *end = malloc(sizeof **end);
    **end = (Missing){strdup(name), NULL};
}

CUresult definition_missing(const char *name) {
    note_missing(name);
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
    free(launch->layout);
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
    Stream *stream;
    enum { OFFERED, TAKEN, FINISHED } state;
    CUresult result;
    const Explanation *explanation;
    struct Job *next;
} Job;

static Job *jobs;
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER;
static int idle;                /* threads of Python that wait for a launch */
static int busy;                /* others, that have had one */

static void forked_child(void) {
    pthread_cond_init(&offered, NULL);  /* the threads that waited are the parent's */
    idle = busy = 0;
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
    if (schedule_is_active())
        return;     /* who is next says how long it takes */
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
        wait_with_turn();
    stream->actor.thread = this_thread();
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

bool kernels_are_running(void) {
    return busy > 0;
}

/* ---- the side door: Python registers functions, and serves launches ------------------------- */

typedef struct Taken {
    uint64_t job;
    uint64_t definition;
    const void *parameters;
    size_t size;
    const Parameter *layout;    /* as long as the kernel's function runs */
    size_t count;
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
                                            const size_t *offsets, bool takes_all);
SIDE_DOOR bool userstream_knows_kernel(uint64_t id);
SIDE_DOOR const char *userstream_missing_kernel(size_t n);
SIDE_DOOR bool userstream_set_duration(const char *name, double seconds);
SIDE_DOOR bool userstream_take_launch(Taken *taken);
SIDE_DOOR void userstream_finish_launch(uint64_t id, int result, const char *text);
SIDE_DOOR int userstream_use_memory(uint64_t id, CUdeviceptr address, size_t size, Range *range);
SIDE_DOOR void userstream_unuse_memory(uint64_t memory);
SIDE_DOOR int userstream_set_condition(uint64_t id, uint64_t handle, unsigned value);

uint64_t userstream_define_kernel(const char *name, size_t count, const size_t *sizes,
                                  const size_t *offsets, bool takes_all) {
    Definition *definition = calloc(1, sizeof *definition + count * sizeof *definition->parameters);
    definition->name = strdup(name);
    definition->references = 1;
    definition->count = count;
    definition->takes_all = takes_all;
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

/* NULL: there are not so many. A function may stand for the kernel by now. */
const char *userstream_missing_kernel(size_t n) {
    lock();
    const Missing *found = missing;
    while (found && n--)
        found = found->next;
    unlock();
    return found ? found->name : NULL;
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
    busy -= this_thread()->serves;
    this_thread()->serves = false;
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
    this_thread()->serves = true;
    busy++;
    job->stream->actor.thread = this_thread();
    this_thread()->acts_for = &job->stream->actor;
    const Launch *launch = job->launch;
    *taken = (Taken){.job = job->id,
                     .definition = launch->definition->id,
                     .parameters = launch->parameters,
                     .size = launch->size,
                     .layout = launch->layout,
                     .count = launch->count,
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
    this_thread()->acts_for = NULL;
    progress();
    unlock();
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
    } else if (memory_has(memory, address, size) &&
               memory_is_accessible(memory, job->launch->context)) {
        memory->users++;
        range->memory = (uint64_t)memory;
        result = CUDA_SUCCESS;
    }
    unlock();
    return (int)result;
}

void userstream_unuse_memory(uint64_t memory) {
    lock();
    memory_unuse((Memory *)memory, 0);
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
