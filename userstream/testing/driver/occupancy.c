/* How many blocks of a kernel fit: limited by its threads and its dynamic shared memory alone. */
#include "kernels.h"

enum {                          /* H200 */
    THREADS = 2048,             /* of a multiprocessor, like the next two */
    BLOCKS = 32,
    SHARED_BYTES = 233472,
    SHARED_BYTES_OF_A_BLOCK = 1024,     /* that the system takes */
    LARGEST_BLOCK = 1024,
    WARP = 32,
};

static size_t least(size_t one, size_t other) {
    return one < other ? one : other;
}

static CUresult blocks_that_fit(size_t *out, void *kernel, int block_size, size_t shared_bytes) {
    const char *name;
    const Context *context;
    unsigned shared_limit;
    CUresult result = kernel_look_up(kernel, &name, &context, &shared_limit);
    if (result != CUDA_SUCCESS)
        return result;
    if (block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    size_t threads = ((size_t)block_size + WARP - 1) / WARP * WARP;
    *out = 0;
    if (threads <= LARGEST_BLOCK && shared_bytes <= shared_limit)
        *out = least(least(BLOCKS, THREADS / threads),
                     SHARED_BYTES / (shared_bytes + SHARED_BYTES_OF_A_BLOCK));
    return CUDA_SUCCESS;
}

static CUresult count_blocks(int *out, void *kernel, int block_size, size_t shared_bytes) {
    size_t blocks;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = blocks_that_fit(&blocks, kernel, block_size, shared_bytes);
    if (result == CUDA_SUCCESS)
        *out = (int)blocks;
    return result;
}

DRIVER_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,
                (int *out, void *kernel, int block_size, size_t shared_bytes),
                (out, kernel, block_size, shared_bytes)) {
    return count_blocks(out, kernel, block_size, shared_bytes);
}

DRIVER_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000,
                (int *out, void *kernel, int block_size, size_t shared_bytes, unsigned flags),
                (out, kernel, block_size, shared_bytes, flags)) {
    UNUSED(flags);
    return count_blocks(out, kernel, block_size, shared_bytes);
}

DRIVER_FUNCTION(cuOccupancyAvailableDynamicSMemPerBlock, 10020,
                (size_t *out, void *kernel, int blocks, int block_size),
                (out, kernel, blocks, block_size)) {
    size_t fit;
    CUresult result = out ? blocks_that_fit(&fit, kernel, block_size, 0) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    if (blocks <= 0 || (size_t)blocks > fit)
        return CUDA_ERROR_INVALID_VALUE;
    *out = least(SHARED_BYTES / (size_t)blocks, SHARED_BYTES) - SHARED_BYTES_OF_A_BLOCK;
    return CUDA_SUCCESS;
}

typedef size_t (*SharedBytesOf)(int block_size);

/* The largest block with which most threads are active. The function is the caller's, and is called
 * without the lock. */
static CUresult potential_block(int *grid_size, int *block_size, void *kernel,
                                SharedBytesOf shared_bytes_of, size_t shared_bytes, int limit) {
    size_t most = 0;
    if (!grid_size || !block_size)
        return CUDA_ERROR_INVALID_VALUE;
    *grid_size = *block_size = 0;
    if (limit <= 0 || limit > LARGEST_BLOCK)
        limit = LARGEST_BLOCK;
    if (limit > WARP)
        limit -= limit % WARP;
    for (int size = limit; size > 0; size -= WARP) {
        size_t blocks;
        if (shared_bytes_of) {
            unlock();
            shared_bytes = shared_bytes_of(size);
            lock();
        }
        CUresult result = blocks_that_fit(&blocks, kernel, size, shared_bytes);
        if (result != CUDA_SUCCESS)
            return result;
        if (blocks * (size_t)size > most) {
            most = blocks * (size_t)size;
            *grid_size = (int)blocks * MULTIPROCESSORS;
            *block_size = size;
        }
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuOccupancyMaxPotentialBlockSize, 6050,
                (int *grid_size, int *block_size, void *kernel, SharedBytesOf shared_bytes_of,
                 size_t shared_bytes, int limit),
                (grid_size, block_size, kernel, shared_bytes_of, shared_bytes, limit)) {
    return potential_block(grid_size, block_size, kernel, shared_bytes_of, shared_bytes, limit);
}

DRIVER_FUNCTION(cuOccupancyMaxPotentialBlockSizeWithFlags, 7000,
                (int *grid_size, int *block_size, void *kernel, SharedBytesOf shared_bytes_of,
                 size_t shared_bytes, int limit, unsigned flags),
                (grid_size, block_size, kernel, shared_bytes_of, shared_bytes, limit, flags)) {
    UNUSED(flags);
    return potential_block(grid_size, block_size, kernel, shared_bytes_of, shared_bytes, limit);
}
