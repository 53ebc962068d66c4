/* Host functions and callbacks. */
#include "driver.h"

/* H200: host functions of a context run one at a time; while one is blocked those of its other
 * streams do not run, those of another device do. */
void call_user(Context *context, HostFunction function, void *argument) {
    while (context->host_function_running && !shut_down)
        wait_for_progress();
    if (shut_down)
        return;
    context->host_function_running = true;
    this_thread()->in_host_function = true;
    unlock();
    function(argument);
    lock();
    this_thread()->in_host_function = false;
    context->host_function_running = false;
    progress();
}

static CUresult run_host_function(Operation *operation, Stream *stream) {
    call_user(stream->context, operation->host.function, operation->host.argument);
    return CUDA_SUCCESS;
}

static CUresult launch(Stream *handle, HostFunction function, void *argument) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, host_function_operation(function, argument));
}

Operation *host_function_operation(HostFunction function, void *argument) {
    Operation *operation = operation_new(run_host_function, NODE_HOST);
    operation->host.function = function;
    operation->host.argument = argument;
    return operation;
}

DRIVER_FUNCTION(cuLaunchHostFunc, 10000, (Stream *handle, HostFunction function, void *argument),
                (handle, function, argument)) {
    return launch(handle, function, argument);
}

DRIVER_FUNCTION_AS(cuLaunchHostFunc_v2, cuLaunchHostFunc, 13010,
                   (Stream *handle, HostFunction function, void *argument, unsigned mode),
                   (handle, function, argument, mode)) {
    UNUSED(mode);   /* whether the driver waits by blocking or by spinning */
    return launch(handle, function, argument);
}

/* ---- callbacks: they get the stream, and an error too --------------------------------------- */

typedef struct Callback {
    const Operation *operation;
    CUresult result;
} Callback;

static void call_back(void *argument) {
    Callback *callback = argument;
    const Operation *operation = callback->operation;
    operation->callback.function(operation->callback.handle, callback->result,
                                 operation->callback.argument);
}

/* "In the event of a device error, all subsequently executed callbacks will receive an appropriate
 * CUresult." */
static CUresult run_callback(Operation *operation, Stream *stream) {
    CUresult error = stream_work_is_lost(stream) ? stream->context->error : CUDA_SUCCESS;
    Callback callback = {operation, error};
    call_user(stream->context, call_back, &callback);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuStreamAddCallback, 5000,
                (Stream *handle, void (*function)(Stream *, CUresult, void *), void *argument,
                 unsigned flags),
                (handle, function, argument, flags)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags || !function)
        return CUDA_ERROR_INVALID_VALUE;
    /* Callbacks cannot be captured. */
    result = capture_forbids_use_of_stream(stream);
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = operation_new(run_callback, NODE_HOST);
    operation->runs_after_error = true;
    operation->callback.function = function;
    operation->callback.handle = handle;
    operation->callback.argument = argument;
    return stream_submit(stream, operation);
}
