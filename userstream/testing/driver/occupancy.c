/* Occupancy: the blocks of a kernel per multiprocessor, by threads, registers, shared memory. */
#include "device_limits.h"
#include "kernels.h"

static size_t least(size_t one, size_t other) {
    return one < other ? one : other;
}

static size_t rounded_up(size_t number, size_t multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

/* Warps get registers of their partition of the multiprocessor. */
static size_t blocks_by_registers(const Kernel *kernel, size_t warps) {
    size_t registers = (size_t)kernel->attributes[NUM_REGS] * WARP;
    if (!registers)
        return BLOCKS_OF_A_MULTIPROCESSOR;
    size_t of_a_warp = rounded_up(registers, REGISTERS_AT_ONCE);
    return REGISTERS_OF_A_MULTIPROCESSOR / PARTITIONS / of_a_warp * PARTITIONS / warps;
}

static size_t shared_bytes_of_block(const Kernel *kernel, size_t dynamic) {
    size_t bytes = (size_t)kernel->attributes[SHARED_SIZE_BYTES] + dynamic + SHARED_BYTES_RESERVED;
    return rounded_up(bytes, SHARED_BYTES_AT_ONCE);
}

static CUresult blocks_that_fit(size_t *out, void *handle, int block_size, size_t shared_bytes) {
    const Context *context;
    const Kernel *kernel = kernel_look_up(handle, &context);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    size_t warps = ((size_t)block_size + WARP - 1) / WARP;
    *out = 0;
    /* H100: whether the kernel allows so many threads is not asked. */
    if (block_size > LARGEST_BLOCK ||
        shared_bytes > (size_t)kernel->attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES])
        return CUDA_SUCCESS;
    *out = least(least(BLOCKS_OF_A_MULTIPROCESSOR, THREADS_OF_A_MULTIPROCESSOR / (warps * WARP)),
                 least(blocks_by_registers(kernel, warps),
                       SHARED_BYTES_OF_A_MULTIPROCESSOR /
                           shared_bytes_of_block(kernel, shared_bytes)));
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
    const Context *context;
    const Kernel *found = kernel_look_up(kernel, &context);
    size_t of_a_block = SHARED_BYTES_OF_A_MULTIPROCESSOR / (size_t)blocks;
    /* H100: what the system reserves of each block is not taken off. */
    *out = least(of_a_block / SHARED_BYTES_AT_ONCE * SHARED_BYTES_AT_ONCE -
                     rounded_up((size_t)found->attributes[SHARED_SIZE_BYTES], SHARED_BYTES_AT_ONCE),
                 (size_t)found->attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES]);
    return CUDA_SUCCESS;
}

typedef size_t (*SharedBytesOf)(int block_size);

/* The largest block with which most threads are active. The function is the caller's, and is called
 * without the lock. */
static CUresult potential_block(int *grid_size, int *block_size, void *kernel,
                                SharedBytesOf shared_bytes_of, size_t shared_bytes, int limit) {
    size_t most = 0;
    const Context *context;
    const Kernel *found = kernel_look_up(kernel, &context);
    if (!grid_size || !block_size || limit < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    *grid_size = *block_size = 0;
    int allowed = found->attributes[MAX_THREADS_PER_BLOCK];
    if (!limit || limit > allowed)
        limit = allowed;
    for (int warps = (limit + WARP - 1) / WARP; warps > 0; warps--) {
        int size = limit < warps * WARP ? limit : warps * WARP;
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

/* ---- clusters ------------------------------------------------------------------------------- */

/* The multiprocessors of each part of the device in which a cluster must fit. They differ from one
 * H100 to the next. */
static const unsigned char parts[] = {18, 18, 16, 16, 16, 16, 16, 8};

enum {
    CLUSTER_OF_PAIR = 2,        /* blocks; larger clusters find fewer multiprocessors */
    CLUSTERED_BLOCKS = 8,       /* on a multiprocessor */
};

static CUresult check_configuration(const LaunchConfiguration *configuration, void *kernel,
                                    size_t *blocks) {
    if (!configuration)
        return CUDA_ERROR_INVALID_VALUE;
    const unsigned *block = configuration->block;
    CUresult result = launch_check_attributes(configuration, kernel);
    if (result != CUDA_SUCCESS)
        return result;
    return blocks_that_fit(blocks, kernel, (int)(block[0] * block[1] * block[2]),
                           configuration->shared_bytes);
}

/* "The maximum cluster size ... that would be supported" with the configuration, whose own cluster
 * is ignored if it is possible. */
DRIVER_FUNCTION(cuOccupancyMaxPotentialClusterSize, 11070,
                (int *out, void *kernel, const LaunchConfiguration *configuration),
                (out, kernel, configuration)) {
    const Context *context;
    const Kernel *found = kernel_look_up(kernel, &context);
    size_t blocks;
    CUresult result = check_configuration(configuration, kernel, &blocks);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    bool more = found->attributes[NON_PORTABLE_CLUSTER_SIZE_ALLOWED];
    *out = !blocks ? 0 : more ? LARGEST_CLUSTER_ALLOWED : LARGEST_CLUSTER;
    return CUDA_SUCCESS;
}

/* H100: none without a cluster in the configuration. */
DRIVER_FUNCTION(cuOccupancyMaxActiveClusters, 11070,
                (int *out, void *kernel, const LaunchConfiguration *configuration),
                (out, kernel, configuration)) {
    size_t blocks;
    CUresult result = check_configuration(configuration, kernel, &blocks);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    size_t size = launch_cluster_size(configuration);
    blocks = least(blocks, CLUSTERED_BLOCKS);
    *out = 0;
    if (size && size <= CLUSTER_OF_PAIR)
        *out = (int)(blocks * MULTIPROCESSORS / size);
    for (size_t i = 0; i < sizeof parts && size > CLUSTER_OF_PAIR; i++)
        *out += (int)(blocks * parts[i] / size);
    return CUDA_SUCCESS;
}
