/* Memory pools and stream-ordered allocation. */
#include "pools.h"

enum { PINNED = 1, MANAGED = 2, ALLOCATION_TYPES };     /* CUmemAllocationType */

/* For each allocation type: where its memory is, and which pool allocates there. The host comes
 * behind the devices, and memory without a place behind the host. */
enum { HOST_PLACE = MAX_DEVICES, NO_PLACE, PLACES };

static Pool *default_pools[ALLOCATION_TYPES][PLACES];
static Pool *current_pools[ALLOCATION_TYPES][PLACES];

/* ---- pools ---------------------------------------------------------------------------------- */

/* H200: no device may access a pool of a NUMA node of the host until it is told. */
static Pool *pool_new(Location location, int allocation_type) {
    Pool *pool = handle_new(KIND_POOL);
    pool->location = location;
    pool->allocation_type = allocation_type;
    pool->device = location.type == LOCATION_DEVICE ? location.id : 0;
    pool->file = NO_FILE;
    if (allocation_type == MANAGED)
        pool->kind = MEMORY_MANAGED;
    else
        pool->kind = location.type == LOCATION_DEVICE ? MEMORY_DEVICE : MEMORY_PINNED;
    for (size_t i = 0; i < sizeof pool->reuse / sizeof *pool->reuse; i++)
        pool->reuse[i] = 1;
    bool for_all = allocation_type == MANAGED || location.type == LOCATION_HOST;
    for (CUdevice d = 0; d < MAX_DEVICES; d++)
        pool->access[d] = for_all || (location.type == LOCATION_DEVICE && d == location.id)
            ? ACCESS_READ_WRITE : ACCESS_NONE;
    return pool;
}

static int place_of(const Location *location) {
    if (location->type == LOCATION_DEVICE)
        return location->id;
    return location->type == LOCATION_NONE ? NO_PLACE : HOST_PLACE;
}

static void add_default_pool(Location location, int allocation_type) {
    Pool *pool = pool_new(location, allocation_type);
    pool->is_default = true;
    default_pools[allocation_type][place_of(&location)] = pool;
    current_pools[allocation_type][place_of(&location)] = pool;
}

void pools_initialize(void) {
    for (int type = PINNED; type <= MANAGED; type++) {
        for (CUdevice device = 0; device < settings.devices; device++)
            add_default_pool((Location){LOCATION_DEVICE, device}, type);
        add_default_pool((Location){LOCATION_HOST, 0}, type);
    }
    add_default_pool((Location){LOCATION_NONE, 0}, MANAGED);
}

void pool_account(Pool *pool, size_t size) {
    pool->used += size;
    pool->allocations++;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

static void pool_free(Pool *pool) {
    pool_close(pool);
    handle_free(KIND_POOL, pool);
}

void pool_unaccount(Pool *pool, size_t size) {
    pool->used -= size;
    pool->allocations--;
    if (pool->destroyed && pool->allocations == 0)
        pool_free(pool);
}

bool pool_is(const Pool *pool) {
    return handle_is(KIND_POOL, pool) && !pool->destroyed;
}

bool pool_is_accessible(const Pool *pool, CUdevice device) {
    return pool->access[device] != ACCESS_NONE;
}

/* ---- which pool allocates where ------------------------------------------------------------- */

DRIVER_FUNCTION(cuDeviceGetDefaultMemPool, 11020, (Pool **out, CUdevice device), (out, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS && !out)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = default_pools[PINNED][device];
    return result;
}

DRIVER_FUNCTION(cuDeviceGetMemPool, 11020, (Pool **out, CUdevice device), (out, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS && !out)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = current_pools[PINNED][device];
    return result;
}

/* "Imported memory pools may not be used in cuDeviceSetMemPool." */
DRIVER_FUNCTION(cuDeviceSetMemPool, 11020, (CUdevice device, Pool *pool), (device, pool)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pool_is(pool) || pool->kind != MEMORY_DEVICE || pool->device != device ||
        pool->is_imported)
        return CUDA_ERROR_INVALID_VALUE;
    current_pools[PINNED][device] = pool;
    return CUDA_SUCCESS;
}

static CUresult check_place(const Location *location, int type) {
    if (!location || (type != PINNED && type != MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    switch (location->type) {
    case LOCATION_DEVICE:
        return device_check(location->id);
    case LOCATION_HOST:
        return CUDA_SUCCESS;
    case LOCATION_HOST_NUMA:            /* one node, 0 */
        return location->id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case LOCATION_NONE:
        return type == MANAGED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult pool_at(Pool **out, const Location *location, int type,
                        Pool *const pools[ALLOCATION_TYPES][PLACES]) {
    CUresult result = out ? check_place(location, type) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = pools[type][place_of(location)];
    return result;
}

DRIVER_FUNCTION(cuMemGetDefaultMemPool, 13000, (Pool **out, Location *location, int type),
                (out, location, type)) {
    return pool_at(out, location, type, default_pools);
}

DRIVER_FUNCTION(cuMemGetMemPool, 13000, (Pool **out, Location *location, int type),
                (out, location, type)) {
    return pool_at(out, location, type, current_pools);
}

DRIVER_FUNCTION(cuMemSetMemPool, 13000, (Location *location, int type, Pool *pool),
                (location, type, pool)) {
    CUresult result = check_place(location, type);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pool_is(pool) || pool->allocation_type != type || pool->is_imported ||
        place_of(&pool->location) != place_of(location))
        return CUDA_ERROR_INVALID_VALUE;
    current_pools[type][place_of(location)] = pool;
    return CUDA_SUCCESS;
}

/* ---- making and ending pools ---------------------------------------------------------------- */

typedef struct Properties {     /* CUmemPoolProps */
    int allocation_type;
    int handle_types;
    Location location;
    void *security;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
} Properties;

/* Other processes are told of a pool by a file descriptor, and of no other handle. */
static CUresult check_handles(const Properties *properties) {
    if (!properties->handle_types)
        return CUDA_SUCCESS;
    if (properties->allocation_type == MANAGED || properties->location.type == LOCATION_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return properties->handle_types == FILE_DESCRIPTOR ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/* "CUmemPoolProps::maxSize must be set to zero for managed memory pools." */
DRIVER_FUNCTION(cuMemPoolCreate, 11020, (Pool **out, const Properties *properties),
                (out, properties)) {
    if (!out || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_place(&properties->location, properties->allocation_type);
    if (result == CUDA_SUCCESS)
        result = check_handles(properties);
    if (result == CUDA_SUCCESS && properties->allocation_type == MANAGED && properties->max_size)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    Pool *pool = pool_new(properties->location, properties->allocation_type);
    pool->max_size = properties->max_size;
    pool->handle_types = properties->handle_types;
    if (pool->handle_types && !pool_open_file(pool)) {
        pool_free(pool);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = pool;
    return CUDA_SUCCESS;
}

Pool *pool_new_imported(Location location) {
    Pool *pool = pool_new(location, PINNED);
    pool->is_imported = true;
    return pool;
}

/* "If any pointers obtained from this pool haven't been freed ... the function will return
 * immediately and the resources associated with the pool will be released automatically once
 * there are no more outstanding allocations"; "destroying the current mempool of a device sets
 * the default mempool". */
DRIVER_FUNCTION(cuMemPoolDestroy, 11020, (Pool *pool), (pool)) {
    if (!pool_is(pool) || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    int place = place_of(&pool->location);
    if (current_pools[pool->allocation_type][place] == pool)
        current_pools[pool->allocation_type][place] = default_pools[pool->allocation_type][place];
    pool->destroyed = true;
    if (pool->allocations == 0)
        pool_free(pool);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolTrimTo, 11020, (Pool *pool, size_t keep), (pool, keep)) {
    UNUSED(keep);   /* nothing is kept */
    return pool_is(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- attributes and access ------------------------------------------------------------------ */

enum {                          /* CUmemPool_attribute; the first three are the kinds of reuse */
    LAST_REUSE = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_MEM_CURRENT = 5,
    RESERVED_MEM_HIGH = 6,
    USED_MEM_CURRENT = 7,
    USED_MEM_HIGH = 8,
    ALLOCATION_TYPE = 9,        /* since CUDA 13, like the rest */
    EXPORT_HANDLE_TYPES = 10,
    LOCATION_ID = 11,
    LOCATION_TYPE = 12,
    MAX_POOL_SIZE = 13,
    HW_DECOMPRESS_ENABLED = 14,
};

/* "The value can only be set to 0" of a high watermark: then it is what is in use now. */
DRIVER_FUNCTION(cuMemPoolSetAttribute, 11020, (Pool *pool, int attribute, void *value),
                (pool, attribute, value)) {
    if (!pool_is(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute >= 1 && attribute <= LAST_REUSE) {
        pool->reuse[attribute - 1] = *(int *)value;
    } else if (attribute == RELEASE_THRESHOLD) {
        pool->release_threshold = *(uint64_t *)value;
    } else if (attribute == USED_MEM_HIGH || attribute == RESERVED_MEM_HIGH) {
        if (*(uint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE;
        pool->used_high = pool->used;
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolGetAttribute, 11020, (Pool *pool, int attribute, void *value),
                (pool, attribute, value)) {
    if (!pool_is(pool) || !value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute >= 1 && attribute <= LAST_REUSE)
        *(int *)value = pool->reuse[attribute - 1];
    else if (attribute == RELEASE_THRESHOLD)
        *(uint64_t *)value = pool->release_threshold;
    else if (attribute == USED_MEM_CURRENT || attribute == RESERVED_MEM_CURRENT)
        *(uint64_t *)value = pool->used;
    else if (attribute == USED_MEM_HIGH || attribute == RESERVED_MEM_HIGH)
        *(uint64_t *)value = pool->used_high;
    else if (attribute == ALLOCATION_TYPE)
        *(int *)value = pool->allocation_type;
    else if (attribute == EXPORT_HANDLE_TYPES)
        *(int *)value = pool->handle_types;
    else if (attribute == LOCATION_ID)
        *(int *)value = pool->location.id;
    else if (attribute == LOCATION_TYPE)
        *(int *)value = pool->location.type;
    else if (attribute == MAX_POOL_SIZE)
        *(uint64_t *)value = pool->max_size;
    else if (attribute == HW_DECOMPRESS_ENABLED)
        *(int *)value = 0;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* A device cannot be kept from its own memory. Nothing is changed unless everything can be. */
static CUresult check_access(const Pool *pool, const Access *access) {
    if (!is_access(access->flags))
        return CUDA_ERROR_INVALID_VALUE;
    if (access->location.type != LOCATION_DEVICE)
        return CUDA_SUCCESS;
    CUresult result = device_check(access->location.id);
    bool is_own = pool->kind == MEMORY_DEVICE && access->location.id == pool->device;
    if (result == CUDA_SUCCESS && is_own && access->flags != ACCESS_READ_WRITE)
        result = CUDA_ERROR_INVALID_DEVICE;
    return result;
}

DRIVER_FUNCTION(cuMemPoolSetAccess, 11020, (Pool *pool, const Access *access, size_t count),
                (pool, access, count)) {
    if (!pool_is(pool) || (count && !access))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        CUresult result = check_access(pool, &access[i]);
        if (result != CUDA_SUCCESS)
            return result;
    }
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type == LOCATION_DEVICE)
            pool->access[access[i].location.id] = access[i].flags;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolGetAccess, 11020, (unsigned *flags, Pool *pool, Location *location),
                (flags, pool, location)) {
    if (!pool_is(pool) || !flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = pool->kind == MEMORY_DEVICE ? ACCESS_NONE : ACCESS_READ_WRITE;
    if (location->type != LOCATION_DEVICE)
        return CUDA_SUCCESS;
    CUresult result = device_check(location->id);
    if (result == CUDA_SUCCESS)
        *flags = pool->access[location->id];
    return result;
}

/* ---- allocating in the order of a stream ---------------------------------------------------- */

static CUresult allocate_in_graph(CUdeviceptr *address, size_t size, MemoryKind kind,
                                  Stream *stream) {
    Operation *operation;
    CUresult result = graph_memory_allocation(size, kind, stream->context->device, &operation);
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
    /* "Imported memory pools do not support creating new allocations." */
    if (!pool_is(pool) || pool->is_imported)
        return CUDA_ERROR_INVALID_VALUE;
    /* H200: no bytes are at NULL, and freeing NULL does nothing. */
    if (!size && address) {
        *address = 0;
        return CUDA_SUCCESS;
    }
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture)
        return allocate_in_graph(address, size, pool->kind, stream);
    /* H200: outside of the capture, as unsafe as any other allocation. */
    CUresult result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    if (pool->max_size && size > pool->max_size - pool->used)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return memory_new(size, pool->kind, pool->device, pool, 0, address);
}

DRIVER_FUNCTION(cuMemAllocAsync, 11020, (CUdeviceptr *address, size_t size, Stream *handle),
                (address, size, handle)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return allocate(address, size, current_pools[PINNED][stream->context->device], stream);
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
    if (memory->is_mapping || (!memory->pool && memory->kind != MEMORY_DEVICE))
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
