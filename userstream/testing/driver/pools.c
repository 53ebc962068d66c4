/* Memory pools and stream-ordered allocation. */
#include "driver.h"

static Pool *default_pools[MAX_DEVICES];
static Pool *current_pools[MAX_DEVICES];
static Pool *host_pool;

enum { ACCESS_NONE = 0, ACCESS_READ_WRITE = 3 };

typedef struct Location {       /* CUmemLocation */
    int type;
    int id;
} Location;

enum { LOCATION_DEVICE = 1, LOCATION_HOST = 2, LOCATION_HOST_NUMA = 3 };

/* H200: no device may access a pool of a NUMA node of the host until it is told. */
static Pool *pool_new(CUdevice device, int location) {
    Pool *pool = handle_new(KIND_POOL);
    pool->device = device;
    pool->of_host = location != LOCATION_DEVICE;
    for (size_t i = 0; i < sizeof pool->reuse / sizeof *pool->reuse; i++)
        pool->reuse[i] = 1;
    for (CUdevice d = 0; d < MAX_DEVICES; d++)
        pool->access[d] = location == LOCATION_HOST || (location == LOCATION_DEVICE && d == device)
            ? ACCESS_READ_WRITE : ACCESS_NONE;
    return pool;
}

void pools_initialize(void) {
    for (CUdevice device = 0; device < settings.devices; device++) {
        default_pools[device] = pool_new(device, LOCATION_DEVICE);
        default_pools[device]->is_default = true;
        current_pools[device] = default_pools[device];
    }
    host_pool = pool_new(0, LOCATION_HOST);
    host_pool->is_default = true;
}

void pool_account(Pool *pool, size_t size) {
    pool->used += size;
    pool->allocations++;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

void pool_unaccount(Pool *pool, size_t size) {
    pool->used -= size;
    pool->allocations--;
    if (pool->destroyed && pool->allocations == 0)
        handle_free(KIND_POOL, pool);
}

static bool is_pool(const Pool *pool) {
    return handle_is(KIND_POOL, pool) && !pool->destroyed;
}

/* ---- pools ---------------------------------------------------------------------------------- */

DRIVER_FUNCTION(cuDeviceGetDefaultMemPool, 11020, (Pool **out, CUdevice device), (out, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        *out = default_pools[device];
    return result;
}

DRIVER_FUNCTION(cuDeviceGetMemPool, 11020, (Pool **out, CUdevice device), (out, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        *out = current_pools[device];
    return result;
}

DRIVER_FUNCTION(cuDeviceSetMemPool, 11020, (CUdevice device, Pool *pool), (device, pool)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_pool(pool) || pool->of_host || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    current_pools[device] = pool;
    return CUDA_SUCCESS;
}

static CUresult pool_at(Pool **out, const Location *location, Pool *const *device_pools) {
    if (!out || !location)
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type != LOCATION_DEVICE) {
        *out = host_pool;
        return CUDA_SUCCESS;
    }
    CUresult result = device_check(location->id);
    if (result == CUDA_SUCCESS)
        *out = device_pools[location->id];
    return result;
}

DRIVER_FUNCTION(cuMemGetDefaultMemPool, 13000, (Pool **out, Location *location, int type),
                (out, location, type)) {
    UNUSED(type);
    return pool_at(out, location, default_pools);
}

DRIVER_FUNCTION(cuMemGetMemPool, 13000, (Pool **out, Location *location, int type),
                (out, location, type)) {
    UNUSED(type);
    return pool_at(out, location, current_pools);
}

typedef struct Properties {     /* CUmemPoolProps */
    int allocation_type;
    int handle_types;
    Location location;
    void *security;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
} Properties;

DRIVER_FUNCTION(cuMemPoolCreate, 11020, (Pool **out, const Properties *properties),
                (out, properties)) {
    if (!out || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    /* Handles for other processes are not simulated. */
    if (properties->handle_types)
        return CUDA_ERROR_NOT_SUPPORTED;
    bool of_device = properties->location.type == LOCATION_DEVICE;
    CUresult result = of_device ? device_check(properties->location.id) : CUDA_SUCCESS;
    if (properties->location.type == LOCATION_HOST_NUMA && properties->location.id)
        result = CUDA_ERROR_INVALID_VALUE;      /* one node, 0 */
    if (result == CUDA_SUCCESS)
        *out = pool_new(of_device ? properties->location.id : 0, properties->location.type);
    return result;
}

/* "If any pointers obtained from this pool haven't been freed ... the function will return
 * immediately and the resources associated with the pool will be released automatically once
 * there are no more outstanding allocations"; "destroying the current mempool of a device sets
 * the default mempool". */
DRIVER_FUNCTION(cuMemPoolDestroy, 11020, (Pool *pool), (pool)) {
    if (!is_pool(pool) || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdevice device = 0; device < settings.devices; device++) {
        if (current_pools[device] == pool)
            current_pools[device] = default_pools[device];
    }
    pool->destroyed = true;
    if (pool->allocations == 0)
        handle_free(KIND_POOL, pool);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolTrimTo, 11020, (Pool *pool, size_t keep), (pool, keep)) {
    UNUSED(keep);   /* nothing is kept */
    return is_pool(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

enum {                          /* CUmemPool_attribute; the first three are the kinds of reuse */
    LAST_REUSE = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_MEM_CURRENT = 5,
    RESERVED_MEM_HIGH = 6,
    USED_MEM_CURRENT = 7,
    USED_MEM_HIGH = 8,
};

DRIVER_FUNCTION(cuMemPoolSetAttribute, 11020, (Pool *pool, int attribute, void *value),
                (pool, attribute, value)) {
    if (!is_pool(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute >= 1 && attribute <= LAST_REUSE)
        pool->reuse[attribute - 1] = *(int *)value;
    else if (attribute == RELEASE_THRESHOLD)
        pool->release_threshold = *(uint64_t *)value;
    else if (attribute == USED_MEM_HIGH || attribute == RESERVED_MEM_HIGH)
        pool->used_high = pool->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolGetAttribute, 11020, (Pool *pool, int attribute, void *value),
                (pool, attribute, value)) {
    if (!is_pool(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute >= 1 && attribute <= LAST_REUSE)
        *(int *)value = pool->reuse[attribute - 1];
    else if (attribute == RELEASE_THRESHOLD)
        *(uint64_t *)value = pool->release_threshold;
    else if (attribute == USED_MEM_CURRENT || attribute == RESERVED_MEM_CURRENT)
        *(uint64_t *)value = pool->used;
    else if (attribute == USED_MEM_HIGH || attribute == RESERVED_MEM_HIGH)
        *(uint64_t *)value = pool->used_high;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

typedef struct Access {         /* CUmemAccessDesc */
    Location location;
    unsigned flags;
} Access;

DRIVER_FUNCTION(cuMemPoolSetAccess, 11020, (Pool *pool, const Access *access, size_t count),
                (pool, access, count)) {
    if (!is_pool(pool))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != LOCATION_DEVICE)
            continue;
        CUresult result = device_check(access[i].location.id);
        if (result != CUDA_SUCCESS)
            return result;
        pool->access[access[i].location.id] = access[i].flags;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolGetAccess, 11020, (unsigned *flags, Pool *pool, Location *location),
                (flags, pool, location)) {
    if (!is_pool(pool) || !flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = pool->of_host ? ACCESS_READ_WRITE : ACCESS_NONE;
    if (location->type != LOCATION_DEVICE)
        return CUDA_SUCCESS;
    CUresult result = device_check(location->id);
    if (result == CUDA_SUCCESS)
        *flags = pool->access[location->id];
    return result;
}

/* ---- allocating in the order of a stream ---------------------------------------------------- */

static CUresult allocate_in_graph(CUdeviceptr *address, size_t size, Stream *stream) {
    Operation *operation;
    CUresult result = graph_memory_allocation(size, stream->context->device, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    *address = operation->graph_memory->address;
    return stream_submit(stream, operation);
}

static CUresult free_in_graph(CUdeviceptr address, Stream *stream) {
    Operation *operation;
    CUresult result = graph_memory_free(address, stream->capture->graph, &operation);
    return result == CUDA_SUCCESS ? stream_submit(stream, operation) : result;
}

static CUresult allocate(CUdeviceptr *address, size_t size, Pool *pool, Stream *stream) {
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    if (!is_pool(pool))
        return CUDA_ERROR_INVALID_VALUE;
    /* H200: no bytes are at NULL, and freeing NULL does nothing. */
    if (!size && address) {
        *address = 0;
        return CUDA_SUCCESS;
    }
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture)
        return allocate_in_graph(address, size, stream);
    /* H200: outside of the capture, as unsafe as any other allocation. */
    CUresult result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    MemoryKind kind = pool->of_host ? MEMORY_PINNED : MEMORY_DEVICE;
    return memory_new(size, kind, pool->device, pool, 0, address);
}

DRIVER_FUNCTION(cuMemAllocAsync, 11020, (CUdeviceptr *address, size_t size, Stream *handle),
                (address, size, handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return allocate(address, size, current_pools[stream->context->device], stream);
}

DRIVER_FUNCTION(cuMemAllocFromPoolAsync, 11020,
                (CUdeviceptr *address, size_t size, Pool *pool, Stream *handle),
                (address, size, pool, handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return allocate(address, size, pool, stream);
}

/* Work that comes here after the free finds the memory unknown: an illegal address. The memory may
 * be gone with its context, and its address another's. */
static CUresult run_free(Operation *operation, Stream *stream) {
    UNUSED(stream);
    Memory *memory = memory_with_id(operation->memory_id);
    if (memory)
        memory_free(memory);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemFreeAsync, 11020, (CUdeviceptr address, Stream *handle), (address, handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address)
        return CUDA_SUCCESS;
    if (stream->capture)
        return free_in_graph(address, stream);
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || memory->free_is_queued)
        return CUDA_ERROR_INVALID_VALUE;
    if (!memory->pool && memory->kind != MEMORY_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = operation_new(run_free, NODE_MEM_FREE);
    operation->memory_id = memory->id;
    operation->runs_after_error = true;
    result = stream_submit(stream, operation);
    if (result == CUDA_SUCCESS)
        memory_free_is_queued(memory);
    return result;
}
