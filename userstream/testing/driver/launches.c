/* Launches of kernels. */
#define _GNU_SOURCE
#include "kernels.h"

#include <errno.h>
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>

/* ---- parameters ----------------------------------------------------------------------------- */

/* Like memcpy, but for addresses that may be garbage: a launch that passes too few parameters has
 * garbage where the others would be. */
static bool copy_in(void *destination, const void *source, size_t size) {
    struct iovec to = {destination, size};
    struct iovec from = {(void *)source, size};
    ssize_t copied = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    if (copied < 0 && errno != EFAULT) {    /* a container that does not permit it */
        memcpy(destination, source, size);
        return true;
    }
    return copied == (ssize_t)size;
}

static CUresult unreadable(const Definition *definition, size_t index) {
    char text[512];
    snprintf(text, sizeof text,
             "the kernel '%s' takes %zu parameters, and the launch has no readable address for "
             "number %zu",
             definition->name, definition->count, index + 1);
    this_thread()->explanation = explanation_new(CUDA_ERROR_INVALID_VALUE, text);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult read_addresses(Launch *launch, void **parameters) {
    const Definition *definition = launch->definition;
    if (definition->count && !parameters)
        return unreadable(definition, 0);
    for (size_t i = 0; i < definition->count; i++) {
        const Parameter *parameter = &definition->parameters[i];
        void *address;
        if (!copy_in(&address, &parameters[i], sizeof address) ||
            !copy_in(launch->parameters + parameter->offset, address, parameter->size))
            return unreadable(definition, i);
    }
    return CUDA_SUCCESS;
}

/* All parameters in one buffer, as CU_LAUNCH_PARAM_BUFFER_POINTER passes them. */
static CUresult read_buffer(Launch *launch, void **extra) {
    enum { END, BUFFER_POINTER, BUFFER_SIZE };
    const void *buffer = NULL;
    const size_t *size = NULL;
    for (; (uintptr_t)extra[0] != END; extra += 2) {
        if ((uintptr_t)extra[0] == BUFFER_POINTER)
            buffer = extra[1];
        else if ((uintptr_t)extra[0] == BUFFER_SIZE)
            size = extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (!buffer || !size || *size < launch->definition->size)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(launch->parameters, buffer, launch->definition->size);
    return CUDA_SUCCESS;
}

/* ---- checking and making a launch ------------------------------------------------------------ */

static bool is_possible(const Shape *shape, unsigned shared_limit) {
    static const unsigned most_blocks[3] = {2147483647, 65535, 65535};
    static const unsigned most_threads[3] = {1024, 1024, 64};
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!shape->grid[i] || shape->grid[i] > most_blocks[i])
            return false;
        if (!shape->block[i] || shape->block[i] > most_threads[i])
            return false;
        threads *= shape->block[i];
    }
    return threads <= 1024 && shape->shared_bytes <= shared_limit;
}

static CUresult run(Operation *operation, Stream *stream) {
    return launch_run(operation->launch, stream);
}

static void dispose(Operation *operation) {
    launch_free(operation->launch);
}

CUresult launch_new(Operation **out, void *kernel, const Context *context, const Shape *shape,
                    void **parameters, void **extra) {
    const char *name;
    const Context *own;
    unsigned shared_limit;
    CUresult result = kernel_look_up(kernel, &name, &own, &shared_limit);
    if (result != CUDA_SUCCESS)
        return result;
    if (own && context && own != context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_possible(shape, shared_limit) || (parameters && extra))
        return CUDA_ERROR_INVALID_VALUE;
    Launch *launch = calloc(1, sizeof *launch);
    launch->definition = definition_find(name);
    launch->definition->references++;
    launch->kernel = kernel;
    launch->context = own ? own : context;
    launch->shape = *shape;
    launch->parameters = calloc(1, launch->definition->size + 1);
    launch->addresses = calloc(launch->definition->count + 1, sizeof *launch->addresses);
    for (size_t i = 0; i < launch->definition->count; i++)
        launch->addresses[i] = launch->parameters + launch->definition->parameters[i].offset;
    result = extra ? read_buffer(launch, extra) : read_addresses(launch, parameters);
    if (result != CUDA_SUCCESS) {
        launch_free(launch);
        return result;
    }
    *out = operation_new(run, NODE_KERNEL);
    (*out)->launch = launch;
    (*out)->dispose = dispose;
    return CUDA_SUCCESS;
}

static CUresult launch(void *kernel, const Shape *shape, Stream *handle, void **parameters,
                       void **extra) {
    Stream *stream;
    CUresult result = stream_find_after_frees(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    Operation *operation;
    result = launch_new(&operation, kernel, stream->context, shape, parameters, extra);
    return result == CUDA_SUCCESS ? stream_submit(stream, operation) : result;
}

/* ---- the functions -------------------------------------------------------------------------- */

DRIVER_FUNCTION(cuLaunchKernel, 4000,
                (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream *handle,
                 void **parameters, void **extra),
                (kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, handle,
                 parameters, extra)) {
    Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return launch(kernel, &shape, handle, parameters, extra);
}

DRIVER_FUNCTION(cuLaunchCooperativeKernel, 9000,
                (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream *handle,
                 void **parameters),
                (kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, handle,
                 parameters)) {
    Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return launch(kernel, &shape, handle, parameters, NULL);
}

typedef struct Attribute {      /* CUlaunchAttribute */
    int id;
    char pad[4];
    uint64_t value[8];
} Attribute;

typedef struct Configuration {  /* CUlaunchConfig */
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream *stream;
    const Attribute *attributes;
    unsigned count;
} Configuration;

/* Those that change the order of work are not simulated, and not passed over in silence. */
static CUresult check_attributes(const Configuration *configuration) {
    enum { PROGRAMMATIC_EVENT = 7, LAUNCH_COMPLETION_EVENT = 12, DEVICE_UPDATABLE = 13 };
    if (configuration->count && !configuration->attributes)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < configuration->count; i++) {
        int id = configuration->attributes[i].id;
        if (id == PROGRAMMATIC_EVENT || id == LAUNCH_COMPLETION_EVENT || id == DEVICE_UPDATABLE)
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLaunchKernelEx, 11060,
                (const Configuration *configuration, void *kernel, void **parameters, void **extra),
                (configuration, kernel, parameters, extra)) {
    if (!configuration)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_attributes(configuration);
    if (result != CUDA_SUCCESS)
        return result;
    Shape shape = {.shared_bytes = configuration->shared_bytes};
    memcpy(shape.grid, configuration->grid, sizeof shape.grid);
    memcpy(shape.block, configuration->block, sizeof shape.block);
    return launch(kernel, &shape, configuration->stream, parameters, extra);
}
