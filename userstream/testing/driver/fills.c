/* Fills: cuMemset. */
#include "copies.h"

typedef struct Fill {
    CUdeviceptr destination;
    uint32_t pattern;
    unsigned width;             /* bytes of one element */
    size_t count;               /* elements of a row */
    size_t pitch;
    size_t height;
} Fill;

static size_t extent(const Fill *fill) {
    size_t row = 0;
    bool possible = add_product(&row, fill->count, fill->width) &&
                    (fill->height <= 1 || fill->pitch >= row);  /* rows do not overlap */
    return possible ? copy_extent(row, fill->height, fill->pitch, 1, 0) : SIZE_MAX;
}

static void fill_bytes(const Fill *fill) {
    for (size_t y = 0; y < fill->height; y++) {
        char *row = (char *)fill->destination + y * fill->pitch;
        if (fill->width == 1)
            memset(row, (int)fill->pattern, fill->count);
        for (size_t x = 0; fill->width > 1 && x < fill->count; x++)
            memcpy(row + x * fill->width, &fill->pattern, fill->width);
    }
}

static CUresult run_fill(Operation *operation, Stream *stream) {
    UNUSED(stream);
    const Fill *fill = operation->fill;
    size_t size = extent(fill);
    if (size == 0)
        return CUDA_SUCCESS;
    Memory *memory = memory_find(fill->destination);
    CUdeviceptr end = fill->destination + size;
    if (!memory_spans(memory, fill->destination, size))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memory_use(memory, end);
    unlock();
    fill_bytes(fill);
    lock();
    memory_unuse(memory, end);
    return CUDA_SUCCESS;
}

void fill_touches(const Operation *operation, Touch touch) {
    touch(operation->fill->destination, extent(operation->fill), true);
}

static void dispose_fill(Operation *operation) {
    free(operation->fill);
}

static CUresult fill_operation(Fill fill, bool in_graph, const Context *context,
                               Operation **operation) {
    if (fill.destination % fill.width || fill.pitch % fill.width)
        return CUDA_ERROR_INVALID_VALUE;
    size_t size = extent(&fill);
    Memory *memory;
    CUresult result = copy_check_operand(fill.destination, size, true, in_graph, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    /* H100: the device fills the memory itself, so it must have access to it. */
    if (size && memory && !memory_is_accessible_to(memory, fill.destination + size, context))
        return CUDA_ERROR_INVALID_VALUE;
    *operation = operation_new(run_fill, NODE_MEMSET);
    (*operation)->fill = malloc(sizeof fill);
    *(*operation)->fill = fill;
    (*operation)->dispose = dispose_fill;
    return CUDA_SUCCESS;
}

static CUresult submit(Stream *stream, Fill fill, bool synchronous) {
    Operation *operation;
    CUresult result = fill_operation(fill, stream->capture, stream->context, &operation);
    if (result == CUDA_SUCCESS)
        result = stream_submit(stream, operation);
    if (result == CUDA_SUCCESS && synchronous)
        result = point_wait(stream->tail, stream->context);
    return result;
}

/* "The memset functions are asynchronous with respect to the host", save for memory of the host. A
 * program that forgets so works mostly all the same, and here always but in a schedule. */
static bool waits(const Fill *fill) {
    const Memory *memory = memory_find(fill->destination);
    return !schedule_is_active() || !memory || memory->kind != MEMORY_DEVICE;
}

static CUresult fill_now(Fill fill) {
    Stream *stream;
    CUresult result = copy_check_synchronous(&stream);
    return result == CUDA_SUCCESS ? submit(stream, fill, waits(&fill)) : result;
}

static CUresult fill_async(Fill fill, Stream *handle) {
    Stream *stream;
    CUresult result = stream_find_after_frees(handle, &stream);
    return result == CUDA_SUCCESS ? submit(stream, fill, false) : result;
}

#define FILL(bits, type) \
    DRIVER_FUNCTION_AS(cuMemsetD##bits##_v2, cuMemsetD##bits, 3020, \
                       (CUdeviceptr destination, type pattern, size_t count), \
                       (destination, pattern, count)) { \
        return fill_now((Fill){destination, pattern, bits / 8, count, 0, 1}); \
    } \
    DRIVER_FUNCTION(cuMemsetD##bits##Async, 3020, \
                    (CUdeviceptr destination, type pattern, size_t count, Stream *handle), \
                    (destination, pattern, count, handle)) { \
        return fill_async((Fill){destination, pattern, bits / 8, count, 0, 1}, handle); \
    } \
    DRIVER_FUNCTION(cuMemsetD2D##bits##Async, 3020, \
                    (CUdeviceptr destination, size_t pitch, type pattern, size_t count, \
                     size_t height, Stream *handle), \
                    (destination, pitch, pattern, count, height, handle)) { \
        return fill_async((Fill){destination, pattern, bits / 8, count, pitch, height}, handle); \
    } \
    DRIVER_FUNCTION_AS(cuMemsetD2D##bits##_v2, cuMemsetD2D##bits, 3020, \
                       (CUdeviceptr destination, size_t pitch, type pattern, size_t count, \
                        size_t height), \
                       (destination, pitch, pattern, count, height)) { \
        return fill_now((Fill){destination, pattern, bits / 8, count, pitch, height}); \
    }

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)

/* ---- nodes ---------------------------------------------------------------------------------- */

typedef struct FillNode {       /* CUDA_MEMSET_NODE_PARAMS */
    CUdeviceptr destination;
    size_t pitch;
    unsigned pattern;
    unsigned width;
    size_t count;
    size_t height;
} FillNode;

CUresult fill_node_operation(const void *parameters, const Context *context,
                             Operation **operation) {
    const FillNode *node = parameters;
    if (!node || !handle_is(KIND_CONTEXT, context))
        return CUDA_ERROR_INVALID_VALUE;
    if (node->width != 1 && node->width != 2 && node->width != 4)
        return CUDA_ERROR_INVALID_VALUE;
    Fill fill = {node->destination, node->pattern, node->width,
                 node->count, node->pitch, node->height};
    return fill_operation(fill, true, context, operation);
}

DRIVER_FUNCTION(cuGraphAddMemsetNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count,
                 const FillNode *parameters, Context *context),
                (out, graph, dependencies, count, parameters, context)) {
    Operation *operation;
    CUresult result = fill_node_operation(parameters, context, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    return graph_add_checked(out, graph, dependencies, count, operation);
}

DRIVER_FUNCTION(cuGraphMemsetNodeGetParams, 10000, (Node *node, FillNode *out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_MEMSET);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    const Fill *fill = operation->fill;
    *out = (FillNode){fill->destination, fill->pitch, fill->pattern, fill->width, fill->count,
                      fill->height};
    return CUDA_SUCCESS;
}
