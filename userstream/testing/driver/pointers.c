/* cuPointerGetAttribute: what is known about an address. */
#include "driver.h"

enum {                          /* CUpointer_attribute */
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    SYNC_MEMOPS = 6,
    BUFFER_ID = 7,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    IS_LEGACY_IPC_CAPABLE = 10,
    RANGE_START_ADDR = 11,
    RANGE_SIZE = 12,
    MAPPED = 13,
    ALLOWED_HANDLE_TYPES = 14,
    IS_GPU_DIRECT_RDMA_CAPABLE = 15,
    ACCESS_FLAGS = 16,
    MEMPOOL_HANDLE = 17,
    MAPPING_SIZE = 18,
    MAPPING_BASE_ADDR = 19,
    MEMORY_BLOCK_ID = 20,
    IS_HW_DECOMPRESS_CAPABLE = 21,
};

enum { TYPE_HOST = 1, TYPE_DEVICE = 2, ACCESS_READ_WRITE = 3 };
enum { NO_DEVICE = -2 };

/* The answer's width depends on the attribute. */
#define ANSWER(type, value) \
    do { \
        *(type *)out = (value); \
        return CUDA_SUCCESS; \
    } while (0)

/* H200: memory of a pool has no context, but a pool; managed memory is device memory; pinned
 * memory is host memory. */
static CUresult attribute_of(void *out, int attribute, CUdeviceptr address, const Memory *memory) {
    bool host = memory->kind & (MEMORY_PINNED | MEMORY_REGISTERED);
    switch (attribute) {
    case CONTEXT:
        ANSWER(Context *, memory->context);
    case MEMORY_TYPE:
        ANSWER(unsigned, host ? TYPE_HOST : TYPE_DEVICE);
    case DEVICE_POINTER:
        ANSWER(CUdeviceptr, address);
    case HOST_POINTER:
        if (memory->kind == MEMORY_DEVICE)
            return CUDA_ERROR_INVALID_VALUE;
        ANSWER(CUdeviceptr, address);
    case SYNC_MEMOPS:
    case IS_HW_DECOMPRESS_CAPABLE:
        ANSWER(bool, false);
    case IS_LEGACY_IPC_CAPABLE: /* what cuMemAlloc gave */
        ANSWER(bool, memory->kind == MEMORY_DEVICE && !memory->pool && !memory->node &&
                         !memory->is_imported);
    case IS_GPU_DIRECT_RDMA_CAPABLE:
        ANSWER(unsigned, 0);
    case IS_MANAGED:
        ANSWER(bool, memory->kind == MEMORY_MANAGED);
    case MAPPED:
        ANSWER(bool, true);
    case BUFFER_ID:
    case MEMORY_BLOCK_ID:
        ANSWER(uint64_t, memory->id);
    case DEVICE_ORDINAL:
        ANSWER(int, memory->device);
    case RANGE_START_ADDR:      /* H200: of host memory of a pool, where it begins in the pool */
        ANSWER(CUdeviceptr, host && memory->pool ? memory->offset : memory->address);
    case MAPPING_BASE_ADDR:
        ANSWER(CUdeviceptr, memory->address);
    case RANGE_SIZE:
    case MAPPING_SIZE:
        ANSWER(size_t, memory->size);
    case ALLOWED_HANDLE_TYPES:
        ANSWER(uint64_t, memory->pool ? (uint64_t)memory->pool->handle_types : 0);
    case ACCESS_FLAGS:
        ANSWER(unsigned, ACCESS_READ_WRITE);
    case MEMPOOL_HANDLE:
        ANSWER(Pool *, memory->pool);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* cuPointerGetAttributes: "if the pointer was not allocated by ... a CUcontext which uses UVA,
 * the output is NULL for each attribute", and CU_DEVICE_INVALID for the ordinal. */
static CUresult attribute_of_unknown(void *out, int attribute) {
    switch (attribute) {
    case DEVICE_ORDINAL:
        ANSWER(int, NO_DEVICE);
    case MEMORY_TYPE:
    case ACCESS_FLAGS:
    case IS_GPU_DIRECT_RDMA_CAPABLE:
        ANSWER(unsigned, 0);
    case SYNC_MEMOPS:
    case IS_MANAGED:
    case IS_LEGACY_IPC_CAPABLE:
    case IS_HW_DECOMPRESS_CAPABLE:
    case MAPPED:
        ANSWER(bool, false);
    case CONTEXT:
    case DEVICE_POINTER:
    case HOST_POINTER:
    case BUFFER_ID:
    case RANGE_START_ADDR:
    case RANGE_SIZE:
    case ALLOWED_HANDLE_TYPES:
    case MEMPOOL_HANDLE:
    case MAPPING_SIZE:
    case MAPPING_BASE_ADDR:
    case MEMORY_BLOCK_ID:
        ANSWER(uint64_t, 0);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* H200: host pointers, null and the pointers of empty arrays answer INVALID_VALUE. */
DRIVER_FUNCTION(cuPointerGetAttribute, 4000, (void *out, int attribute, CUdeviceptr address),
                (out, attribute, address)) {
    const Memory *memory = memory_find(address);
    if (!out || !memory)
        return CUDA_ERROR_INVALID_VALUE;
    return attribute_of(out, attribute, address, memory);
}

DRIVER_FUNCTION(cuPointerGetAttributes, 7000,
                (unsigned count, const int *attributes, void **out, CUdeviceptr address),
                (count, attributes, out, address)) {
    const Memory *memory = memory_find(address);
    if (!attributes || !out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        if (!out[i])
            result = CUDA_ERROR_INVALID_VALUE;
        else if (!memory || attribute_of(out[i], attributes[i], address, memory) != CUDA_SUCCESS)
            result = attribute_of_unknown(out[i], attributes[i]);
    }
    return result;
}

DRIVER_FUNCTION(cuPointerSetAttribute, 6000,
                (const void *value, int attribute, CUdeviceptr address),
                (value, attribute, address)) {
    if (!value || attribute != SYNC_MEMOPS || !memory_find(address))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
