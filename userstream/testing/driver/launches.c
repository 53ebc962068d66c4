/* Launches of kernels. */
#define _GNU_SOURCE
#include "device_limits.h"
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

static CUresult unreadable(const Launch *launch, size_t index) {
    char text[512];
    snprintf(text, sizeof text,
             "the kernel '%s' takes %zu parameters, and the launch has no readable address for "
             "number %zu",
             launch->definition->name, launch->count, index + 1);
    this_thread()->explanation = explanation_new(CUDA_ERROR_INVALID_VALUE, text);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult read_addresses(Launch *launch, void **parameters) {
    if (launch->count && !parameters)
        return unreadable(launch, 0);
    for (size_t i = 0; i < launch->count; i++) {
        const Parameter *parameter = &launch->layout[i];
        void *address;
        if (!copy_in(&address, &parameters[i], sizeof address) ||
            !copy_in(launch->parameters + parameter->offset, address, parameter->size))
            return unreadable(launch, i);
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
    if (!buffer || !size)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(launch->parameters, buffer, *size < launch->size ? *size : launch->size);
    return CUDA_SUCCESS;
}

/* ---- checking and making a launch ------------------------------------------------------------ */

/* H100: a block of one thread stands for the one that the kernel requires. */
static bool is_required(const unsigned *block, const Kernel *kernel) {
    static const unsigned any[3];
    static const unsigned one[3] = {1, 1, 1};
    const unsigned *required = kernel->in_image ? kernel->in_image->required_block : any;
    return !required[0] || memcmp(block, one, sizeof one) == 0 ||
           memcmp(block, required, sizeof one) == 0;
}

static bool is_possible(const Shape *shape, const Kernel *kernel) {
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
    return threads <= (uint64_t)kernel->attributes[MAX_THREADS_PER_BLOCK] &&
           is_required(shape->block, kernel) &&
           shape->shared_bytes <= (unsigned)kernel->attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES];
}

/* What the image says of the parameters, and what the function says that stands for the kernel. */
static bool same_parameters(const ImageKernel *kernel, const Definition *definition) {
    bool same = kernel->count == definition->count;
    for (size_t i = 0; i < definition->count && same; i++)
        same = kernel->parameters[i].size == definition->parameters[i].size &&
               kernel->parameters[i].offset == definition->parameters[i].offset;
    return same;
}

static void print_parameters(FILE *stream, const Parameter *parameters, size_t count) {
    for (size_t i = 0; i < count; i++)
        fprintf(stream, "%s%zu", i ? ", " : " of ", parameters[i].size);
    fprintf(stream, count ? " bytes" : "");
}

static CUresult other_parameters(const ImageKernel *kernel, const Definition *definition) {
    char *text;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    fprintf(stream, "the kernel '%s' takes %zu parameters", kernel->name, kernel->count);
    print_parameters(stream, kernel->parameters, kernel->count);
    fprintf(stream, ", and the Python function that stands for it takes %zu", definition->count);
    print_parameters(stream, definition->parameters, definition->count);
    fclose(stream);
    this_thread()->explanation = explanation_new(CUDA_ERROR_INVALID_VALUE, text);
    free(text);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult run(Operation *operation, Stream *stream) {
    return launch_run(operation->launch, stream);
}

static CUresult unknown_parameters(const Definition *definition) {
    char text[512];
    snprintf(text, sizeof text,
             "the Python function that stands for '%s' takes whatever the kernel takes, and the "
             "image does not say what that is: load PTX or a cubin, or name the parameters",
             definition->name);
    this_thread()->explanation = explanation_new(CUDA_ERROR_INVALID_VALUE, text);
    return CUDA_ERROR_INVALID_VALUE;
}

/* A copy: the image may be gone when the launch runs. False: no kernel has so many parameters. */
static bool set_layout(Launch *launch, const ImageKernel *in_image) {
    enum { MOST_BYTES = 32764 };
    const Definition *definition = launch->definition;
    const Parameter *parameters =
        definition->takes_all ? in_image->parameters : definition->parameters;
    launch->count = definition->takes_all ? in_image->count : definition->count;
    launch->layout = malloc((launch->count + 1) * sizeof *launch->layout);
    for (size_t i = 0; i < launch->count; i++) {
        launch->layout[i] = parameters[i];
        if (parameters[i].offset > MOST_BYTES || parameters[i].size > MOST_BYTES)
            return false;
        if (launch->size < parameters[i].offset + parameters[i].size)
            launch->size = parameters[i].offset + parameters[i].size;
    }
    return launch->size <= MOST_BYTES;
}

static void dispose(Operation *operation) {
    launch_free(operation->launch);
}

CUresult launch_new(Operation **out, void *kernel, const Context *context, const Shape *shape,
                    void **parameters, void **extra) {
    const Context *own;
    const Kernel *found = kernel_look_up(kernel, &own);
    if (!found || (own && context && own != context))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_possible(shape, found) || (parameters && extra))
        return CUDA_ERROR_INVALID_VALUE;
    Definition *definition = definition_find(found->name);
    if (!definition)
        return definition_missing(found->name);
    if (found->in_image && !definition->takes_all &&
        !same_parameters(found->in_image, definition))
        return other_parameters(found->in_image, definition);
    if (!found->in_image && definition->takes_all)
        return unknown_parameters(definition);
    Launch *launch = calloc(1, sizeof *launch);
    launch->definition = definition;
    launch->definition->references++;
    launch->kernel = kernel;
    launch->context = own ? own : context;
    launch->shape = *shape;
    if (found->in_image && found->in_image->required_block[0])
        memcpy(launch->shape.block, found->in_image->required_block, sizeof launch->shape.block);
    if (!set_layout(launch, found->in_image)) {
        launch_free(launch);
        return CUDA_ERROR_INVALID_VALUE;
    }
    launch->parameters = calloc(1, launch->size + 1);
    launch->addresses = calloc(launch->count + 1, sizeof *launch->addresses);
    for (size_t i = 0; i < launch->count; i++)
        launch->addresses[i] = launch->parameters + launch->layout[i].offset;
    CUresult result = extra ? read_buffer(launch, extra) : read_addresses(launch, parameters);
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

enum { CLUSTER_DIMENSION = 4 };  /* CUlaunchAttributeID */

unsigned launch_cluster_size(const LaunchConfiguration *configuration) {
    for (unsigned i = 0; configuration->attributes && i < configuration->count; i++) {
        const unsigned *size = configuration->attributes[i].size;
        if (configuration->attributes[i].id == CLUSTER_DIMENSION)
            return size[0] * size[1] * size[2];
    }
    return 0;
}

/* "The size in each dimension must divide that of the grid." */
static CUresult check_cluster(const LaunchConfiguration *configuration, const unsigned *size,
                              const Kernel *kernel) {
    unsigned most = kernel->attributes[NON_PORTABLE_CLUSTER_SIZE_ALLOWED] ? LARGEST_CLUSTER_ALLOWED
                                                                          : LARGEST_CLUSTER;
    for (int i = 0; i < 3; i++) {
        if (!size[i] || configuration->grid[i] % size[i])
            return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    }
    return size[0] * size[1] * size[2] > most ? CUDA_ERROR_INVALID_CLUSTER_SIZE : CUDA_SUCCESS;
}

/* Those that change the order of work are not simulated, and not passed over in silence. */
CUresult launch_check_attributes(const LaunchConfiguration *configuration, void *kernel) {
    enum { PROGRAMMATIC_EVENT = 7, LAUNCH_COMPLETION_EVENT = 12, DEVICE_UPDATABLE = 13 };
    if (configuration->count && !configuration->attributes)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < configuration->count; i++) {
        int id = configuration->attributes[i].id;
        const Context *context;
        const Kernel *found = kernel_look_up(kernel, &context);
        CUresult result = CUDA_SUCCESS;
        if (id == CLUSTER_DIMENSION && found)
            result = check_cluster(configuration, configuration->attributes[i].size, found);
        if (result != CUDA_SUCCESS)
            return result;
        if (id == PROGRAMMATIC_EVENT || id == LAUNCH_COMPLETION_EVENT || id == DEVICE_UPDATABLE)
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLaunchKernelEx, 11060,
                (const LaunchConfiguration *configuration, void *kernel, void **parameters,
                 void **extra),
                (configuration, kernel, parameters, extra)) {
    if (!configuration)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = launch_check_attributes(configuration, kernel);
    if (result != CUDA_SUCCESS)
        return result;
    Shape shape = {.shared_bytes = configuration->shared_bytes};
    memcpy(shape.grid, configuration->grid, sizeof shape.grid);
    memcpy(shape.block, configuration->block, sizeof shape.block);
    return launch(kernel, &shape, configuration->stream, parameters, extra);
}
