/* The queues behind streams: each is run by a worker thread, in order. */
#include "driver.h"

#include <signal.h>

/* ---- the worker of a stream ----------------------------------------------------------------- */

static void stream_free(Stream *stream) {
    schedule_stream_ends(stream);
    for (Stream **link = &stream->context->streams; *link; link = &(*link)->next) {
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    }
    point_release(stream->tail);
    pthread_cond_destroy(&stream->work);
    handle_free(KIND_STREAM, stream);
    progress();
}

bool stream_work_is_lost(const Stream *stream) {
    return stream->first->errors != stream->context->errors;
}

bool stream_can_go_on(const Stream *stream) {
    const Operation *first = stream->first;
    return first && (!first->is_ready || first->is_ready(first) || stream_work_is_lost(stream));
}

static void finish_first(Stream *stream) {
    Operation *operation = stream->first;
    schedule_operation_ends(stream);
    stream->first = operation->next;
    if (!stream->first)
        stream->last = &stream->first;
    point_reach(operation->point);
    operation_release(operation);
}

/* After an error of the context queued work is dropped: host functions are not called. */
static void run_first(Stream *stream) {
    Operation *operation = stream->first;
    Context *context = stream->context;
    CUresult result = CUDA_SUCCESS;
    schedule_operation_begins(stream);
    if (!stream_work_is_lost(stream) || operation->runs_after_error)
        result = operation->run(operation, stream);
    if (result != CUDA_SUCCESS)
        context_fail(context, result);
    finish_first(stream);
}

void stream_pass_first(Stream *stream) {
    stream->is_running = true;
    run_first(stream);
    stream->is_running = false;
    if (!stream->first && stream->destroyed)
        pthread_cond_signal(&stream->work);
}

/* Python ends a thread that comes back from a host function while the interpreter goes down. */
static void worker_was_ended(void *argument) {
    Stream *stream = argument;
    lock();
    if (this_thread()->in_host_function)
        stream->context->host_function_running = false;
    while (stream->first)
        finish_first(stream);
    stream->has_worker = false;
    unlock();
}

static void *worker(void *argument) {
    Stream *stream = argument;
    pthread_cleanup_push(worker_was_ended, stream);
    lock();
    this_thread()->acts_for = &stream->actor;
    stream->actor.thread = this_thread();
    for (;;) {
        while (stream->first ? !schedule_grants(stream) : !stream->destroyed)
            schedule_wait_for_work(stream);
        if (!stream->first)
            break;
        schedule_step_begins(stream);
        run_first(stream);
        schedule_step_ends(stream);
        if (user_objects_are_due()) {
            unlock();
            user_objects_destroy();
            lock();
        }
    }
    stream_free(stream);
    unlock();
    pthread_cleanup_pop(0);
    return NULL;
}

/* Workers leave all signals to the program's own threads. */
static bool worker_start(Stream *stream) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    stream->has_worker = pthread_create(&thread, &attributes, worker, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return stream->has_worker;
}

/* ---- queueing ------------------------------------------------------------------------------- */

static void append(Stream *stream, Operation *operation) {
    operation->point = point_new();
    operation->next = NULL;
    operation->errors = stream->context->errors;
    *stream->last = operation;
    stream->last = &operation->next;
    point_release(stream->tail);
    stream->tail = point_retain(operation->point);
    pthread_cond_signal(&stream->work);
    schedule_queued(stream, operation);
}

static CUresult run_wait(Operation *operation, Stream *stream) {
    while (point_pending(operation->awaited) && !stream_work_is_lost(stream))
        wait_for_progress();
    return CUDA_SUCCESS;
}

static bool wait_is_over(const Operation *operation) {
    return !point_pending(operation->awaited);
}

static void dispose_wait(Operation *operation) {
    point_release(operation->awaited);
}

static Operation *wait_operation(Point *point) {
    Operation *operation = operation_new(run_wait, NODE_WAIT_EVENT);
    operation->awaited = point_retain(point);
    operation->is_ready = wait_is_over;
    operation->takes_no_turn = true;
    operation->dispose = dispose_wait;
    return operation;
}

const Point *operation_awaits(const Operation *operation) {
    return operation->run == run_wait ? operation->awaited : NULL;
}

CUresult stream_wait_for(Stream *stream, Point *point) {
    return point_pending(point) ? stream_submit(stream, wait_operation(point)) : CUDA_SUCCESS;
}

/* The gate of a context is closed while it waits (cuCtxWaitEvent). */
static void append_wait_for_gate(Stream *stream, const Stream *gate) {
    if (stream != gate && point_pending(gate->tail))
        append(stream, wait_operation(gate->tail));
}

/* "The legacy default stream is an implicit stream which synchronizes with all other streams in
 * the same CUcontext except for non-blocking streams": it waits for them, they wait for it. */
static void append_implicit_waits(Stream *stream) {
    Context *context = stream->context;
    if (stream != context->legacy) {
        if (point_pending(context->legacy->tail))
            append(stream, wait_operation(context->legacy->tail));
        return;
    }
    for (Stream *other = context->streams; other; other = other->next) {
        if (other != stream && stream_is_blocking(other) && point_pending(other->tail))
            append(stream, wait_operation(other->tail));
    }
}

static CUresult check_submission(Stream *stream) {
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    if (stream == stream->context->legacy)
        return capture_forbids_use_of_legacy(stream->context);
    return CUDA_SUCCESS;
}

CUresult stream_submit(Stream *stream, Operation *operation) {
    CUresult result = check_submission(stream);
    if (result == CUDA_SUCCESS && stream->capture)
        return capture_add(stream, operation);
    if (result == CUDA_SUCCESS && !stream->has_worker && !worker_start(stream))
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result != CUDA_SUCCESS) {
        operation_release(operation);
        return result;
    }
    append_wait_for_gate(stream, stream->context->gate);
    if (stream->green && stream->green->gate)
        append_wait_for_gate(stream, stream->green->gate);
    if (stream_is_blocking(stream))
        append_implicit_waits(stream);
    append(stream, operation);
    return CUDA_SUCCESS;
}

/* ---- making and finding streams ------------------------------------------------------------- */

Stream *stream_new(Context *context, unsigned flags, int priority) {
    Stream *stream = handle_new(KIND_STREAM);
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = new_id();
    stream->last = &stream->first;
    stream_attributes_initialize(stream);
    condition_initialize(&stream->work);
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

Stream *stream_new_internal(Context *context) {
    Stream *stream = stream_new(context, STREAM_NON_BLOCKING, LOWEST_PRIORITY);
    stream->internal = true;
    handle_hide(stream);
    return stream;
}

/* "The resources associated with hStream will be released automatically once the device has
 * completed all work in hStream": work that is queued still runs. */
void stream_destroy(Stream *stream) {
    capture_leave(stream);
    stream->destroyed = true;
    if (stream->has_worker)
        pthread_cond_signal(&stream->work);
    else
        stream_free(stream);
}

bool stream_is_blocking(const Stream *stream) {
    return !(stream->flags & STREAM_NON_BLOCKING);
}

bool stream_is_user_made(const Stream *stream) {
    return !stream->thread && !stream->internal && !stream->destroyed &&
           stream != stream->context->legacy && !stream_is_default_of_green(stream);
}
