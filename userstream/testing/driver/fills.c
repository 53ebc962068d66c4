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
    bool possible = add_product(&row, fill->count, fill->width);
    return possible ? copy_extent(row, fill->height, fill->pitch, 1, 0) : SIZE_MAX;
}

static void fill_bytes(const Fill *fill) {
    for (size_t y = 0; y < fill->height; y++) {
        char *row = (char *)fill->destination + y * fill->pitch;
        for (size_t x = 0; x < fill->count; x++)
            memcpy(row + x * fill->width, &fill->pattern, fill->width);
    }
}

static CUresult run_fill(Operation *operation, Stream *stream) {
    UNUSED(stream);
    const Fill *fill = operation->fill;
    size_t size = extent(fill);
    if (size == 0)
        return CUDA_SUCCESS;
    if (!memory_contains(fill->destination, size))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    Memory *memory = memory_find(fill->destination);
    memory->users++;
    unlock();
    fill_bytes(fill);
    lock();
    memory_unuse(memory);
    return CUDA_SUCCESS;
}

static void dispose_fill(Operation *operation) {
    free(operation->fill);
}

static CUresult submit(Stream *stream, Fill fill, bool synchronous) {
    if (fill.destination % fill.width || fill.pitch % fill.width)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_check_operand(fill.destination, extent(&fill), true);
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = operation_new(run_fill, NODE_MEMSET);
    operation->fill = malloc(sizeof fill);
    *operation->fill = fill;
    operation->dispose = dispose_fill;
    result = stream_submit(stream, operation);
    if (result == CUDA_SUCCESS && synchronous)
        result = point_wait(stream->tail, stream->context);
    return result;
}

static CUresult fill_now(Fill fill) {
    Stream *stream;
    CUresult result = copy_check_synchronous(&stream);
    return result == CUDA_SUCCESS ? submit(stream, fill, true) : result;
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
    }

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)
