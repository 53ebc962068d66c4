/* Memory: the table of allocations, of every kind. Device memory is host memory. */
#include "driver.h"

#include <sys/mman.h>
#include <unistd.h>

static Memory *memories;
static size_t used[MAX_DEVICES];

enum { FILLED = 1 << 26 };

Memory *memory_find(CUdeviceptr address) {
    for (Memory *memory = memories; memory; memory = memory->next) {
        if (address >= memory->address && address - memory->address < memory->size)
            return memory;
    }
    return NULL;
}

/* ---- addresses that were memory ------------------------------------------------------------- */

typedef struct Range {
    CUdeviceptr begin;
    CUdeviceptr end;
} Range;

static Range *retired;          /* ascending; ranges that touch are one */
static size_t retired_count;

/* The first retired range that ends behind an address. */
static size_t retired_behind(CUdeviceptr address) {
    size_t low = 0;
    size_t high = retired_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (retired[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_retired(CUdeviceptr begin, CUdeviceptr end) {
    size_t behind = retired_behind(begin);
    return behind < retired_count && retired[behind].begin < end;
}

/* The system would give the addresses to whoever maps memory next, such as the stack of a thread: a
 * copy to what was freed would overwrite it. False: there are too many. */
static bool retire(CUdeviceptr begin, size_t size) {
    enum { MOST_RANGES = 1 << 15 };
    static const size_t most_bytes = (size_t)1 << 44;
    static size_t bytes;
    if (retired_count == MOST_RANGES || size > most_bytes - bytes ||
        mmap((void *)begin, size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return false;
    size_t at = retired_behind(begin ? begin - 1 : 0);
    CUdeviceptr end = begin + size;
    bytes += size;
    if (!retired)
        retired = malloc(MOST_RANGES * sizeof *retired);
    bool joins_former = at < retired_count && retired[at].end == begin;
    size_t next = at + joins_former;
    bool joins_next = next < retired_count && retired[next].begin == end;
    if (joins_former && joins_next) {
        retired[at].end = retired[next].end;
        retired_count--;
        memmove(&retired[next], &retired[next + 1], (retired_count - next) * sizeof *retired);
    } else if (joins_former) {
        retired[at].end = end;
    } else if (joins_next) {
        retired[next].begin = begin;
    } else {
        memmove(&retired[at + 1], &retired[at], (retired_count - at) * sizeof *retired);
        retired[at] = (Range){begin, end};
        retired_count++;
    }
    return true;
}

/* msync: "ENOMEM The indicated memory (or part of it) was not mapped". Addresses that are only
 * reserved, and those that were memory, are no memory. */
bool host_has(CUdeviceptr address, size_t size) {
    CUdeviceptr page = address & ~(CUdeviceptr)(sysconf(_SC_PAGESIZE) - 1);
    CUdeviceptr end;
    if (__builtin_add_overflow(address, size, &end))
        return false;
    return !is_reserved(address, size) && !is_retired(address, end) &&
           msync((void *)page, end - page, MS_ASYNC) == 0;
}

Memory *memory_with_id(uint64_t id) {
    Memory *memory = memories;
    while (memory && memory->id != id)
        memory = memory->next;
    return memory;
}

bool memory_has(const Memory *memory, CUdeviceptr address, size_t size) {
    return memory && size <= memory->size - (address - memory->address);
}

Memory *memory_behind(const Memory *memory, CUdeviceptr end) {
    CUdeviceptr next = memory->address + memory->size;
    Memory *found = memory->is_mapping && next < end ? memory_find(next) : NULL;
    return found && found->is_mapping ? found : NULL;
}

bool memory_spans(const Memory *memory, CUdeviceptr address, size_t size) {
    CUdeviceptr end;
    if (!memory || __builtin_add_overflow(address, size, &end))
        return false;
    for (const Memory *next = memory; next; next = memory_behind(memory, end))
        memory = next;
    return end - memory->address <= memory->size;
}

bool memory_contains(CUdeviceptr address, size_t size) {
    return memory_has(memory_find(address), address, size);
}

bool memory_is_accessible(const Memory *memory, const Context *context) {
    if (memory->pool)
        return pool_is_accessible(memory->pool, context->device);
    if (memory->is_mapping)
        return memory->access[context->device] != 0;
    if (memory->kind != MEMORY_DEVICE || memory->device == context->device)
        return true;
    return context->peers >> memory->device & 1;
}

bool memory_is_accessible_to(const Memory *memory, CUdeviceptr end, const Context *context) {
    while (memory && memory_is_accessible(memory, context))
        memory = memory_behind(memory, end);
    return !memory;
}

size_t memory_count(void) {
    size_t count = 0;
    for (Memory *memory = memories; memory; memory = memory->next)
        count++;
    return count;
}

static Memory *memory_add(CUdeviceptr address, size_t size, MemoryKind kind, CUdevice device) {
    Memory *memory = calloc(1, sizeof *memory);
    memory->address = address;
    memory->size = size;
    memory->kind = kind;
    memory->device = device;
    memory->id = new_id();
    memory->file = NO_FILE;
    memory->next = memories;
    memories = memory;
    return memory;
}

/* The device has it already, for the process that it is from. */
Memory *memory_add_imported(CUdeviceptr address, size_t size, Pool *pool, MemoryKind kind,
                            CUdevice device) {
    Memory *memory = memory_add(address, size, kind, device);
    memory->is_imported = true;
    memory->pool = pool;
    if (pool)
        pool_account(pool, size);
    return memory;
}

/* Memory that nobody wrote is recognisable; huge blocks are left untouched. */
static void fill(CUdeviceptr address, size_t size) {
    memset((void *)address, 0xCD, size < FILLED ? size : FILLED);
}

bool memory_is_there(CUdevice device, size_t size) {
    return size <= settings.memory - used[device];
}

/* Pages of their own. Of the heap, an address that was freed would be ordinary host memory, and
 * what still copies to it would overwrite the program's. 0: there is no more. */
CUdeviceptr memory_reserve(size_t size) {
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? 0 : (CUdeviceptr)pages;
}

void memory_unreserve(CUdeviceptr address, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!retire(address, (size + page - 1) / page * page))
        munmap((void *)address, size);
}

CUresult memory_new(size_t size, MemoryKind kind, CUdevice device, Pool *pool, unsigned flags,
                    CUdeviceptr *address) {
    if (!address || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (kind == MEMORY_DEVICE && !memory_is_there(device, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t offset = 0;
    bool in_file = pool && pool->file != NO_FILE;
    CUdeviceptr bytes = in_file ? pool_reserve(pool, size, &offset) : memory_reserve(size);
    if (!bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fill(bytes, size);
    Memory *memory = memory_add(bytes, size, kind, device);
    memory->file_offset = offset;
    memory->pool = pool;
    memory->offset = pool ? pool->used : 0;
    memory->context = pool ? NULL : context_current();
    memory->flags = flags;
    if (kind == MEMORY_DEVICE)
        used[device] += size;
    if (pool)
        pool_account(pool, size);
    *address = memory->address;
    return CUDA_SUCCESS;
}

static void memory_give_back(Memory *memory) {
    if (memory->node)
        graph_memory_release(memory->node);
    else if (memory->is_mapping)
        memory_unmap(memory->address, memory->size);
    else if (memory->kind != MEMORY_REGISTERED)
        memory_unreserve(memory->address, memory->size);
    if (memory->file != NO_FILE)
        close(memory->file);
    free(memory->advice);
    free(memory);
}

void memory_free_is_queued(Memory *memory) {
    memory->free_is_queued = true;
    if (memory->node && memory->node->live == memory)
        memory->node->live = NULL;
}

/* The memory is unknown from here on; a copy that still runs keeps its bytes. */
void memory_free(Memory *memory) {
    for (Memory **link = &memories; *link; link = &(*link)->next) {
        if (*link == memory) {
            *link = memory->next;
            break;
        }
    }
    if (memory->kind == MEMORY_DEVICE && !memory->is_imported)
        used[memory->device] -= memory->size;
    if (memory->pool)
        pool_unaccount(memory->pool, memory->size);
    memory_free_is_queued(memory);
    memory->freed = true;
    if (memory->users == 0)
        memory_give_back(memory);
}

/* ---- for graphs ----------------------------------------------------------------------------- */

/* While a free is queued, the memory that it is of and the memory that a later launch makes have
 * the same address. The later one is found by it. */
Memory *memory_of_graph(GraphMemory *node) {
    Memory *memory = memory_add(node->address, node->size, node->kind, node->device);
    memory->node = graph_memory_retain(node);
    if (node->kind == MEMORY_DEVICE)
        used[node->device] += node->size;
    return memory;
}

void memory_fill_anew(Memory *memory) {
    memory->users++;
    unlock();
    fill(memory->address, memory->size);
    lock();
    memory_unuse(memory, 0);
}

void memory_use(Memory *memory, CUdeviceptr end) {
    for (; memory; memory = memory_behind(memory, end))
        memory->users++;
}

void memory_unuse(Memory *memory, CUdeviceptr end) {
    while (memory) {
        Memory *next = memory_behind(memory, end);
        if (--memory->users == 0 && memory->freed)
            memory_give_back(memory);
        memory = next;
    }
}

void memory_of_context_free(Context *context) {
    for (Memory *memory = memories, *next; memory; memory = next) {
        next = memory->next;
        if (memory->context == context)
            memory_free(memory);
    }
}

/* ---- allocating ----------------------------------------------------------------------------- */

static CUresult allocate(CUdeviceptr *address, size_t size, MemoryKind kind, unsigned flags) {
    CUresult result = context_usable_after_frees(context_current());
    if (result == CUDA_SUCCESS)
        result = capture_forbids_unsafe_call();
    /* H200: no bytes of pinned memory are at NULL; of the other kinds they are refused. */
    if (result == CUDA_SUCCESS && kind == MEMORY_PINNED && !size && address) {
        *address = 0;
        return CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = memory_new(size, kind, context_current()->device, NULL, flags, address);
    return result;
}

DRIVER_FUNCTION_AS(cuMemAlloc_v2, cuMemAlloc, 3020, (CUdeviceptr *address, size_t size),
                   (address, size)) {
    return allocate(address, size, MEMORY_DEVICE, 0);
}

/* "The function may pad the allocation to ensure that corresponding pointers in any given row will
 * continue to meet the alignment requirements." */
DRIVER_FUNCTION_AS(cuMemAllocPitch_v2, cuMemAllocPitch, 3020,
                   (CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                    unsigned element),
                   (address, pitch, width, height, element)) {
    enum { TEXTURE_ALIGNMENT = 512 };
    size_t size;
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t rounded = (width + TEXTURE_ALIGNMENT - 1) / TEXTURE_ALIGNMENT * TEXTURE_ALIGNMENT;
    if (__builtin_mul_overflow(rounded, height, &size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate(address, size, MEMORY_DEVICE, 0);
    if (result == CUDA_SUCCESS)
        *pitch = rounded;
    return result;
}

DRIVER_FUNCTION(cuMemAllocManaged, 6000, (CUdeviceptr *address, size_t size, unsigned flags),
                (address, size, flags)) {
    enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 };
    if (flags != ATTACH_GLOBAL && flags != ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(address, size, MEMORY_MANAGED, flags);
}

DRIVER_FUNCTION_AS(cuMemAllocHost_v2, cuMemAllocHost, 3020, (CUdeviceptr *address, size_t size),
                   (address, size)) {
    return allocate(address, size, MEMORY_PINNED, 0);
}

enum { HOST_ALLOC_FLAGS = 7 };     /* portable, device map, write combined */

DRIVER_FUNCTION(cuMemHostAlloc, 2020, (CUdeviceptr *address, size_t size, unsigned flags),
                (address, size, flags)) {
    if (flags & ~(unsigned)HOST_ALLOC_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(address, size, MEMORY_PINNED, flags);
}

/* ---- freeing -------------------------------------------------------------------------------- */

/* Freeing waits for the work of the context; memory of a pool is given back at once. The wait gives
 * up the lock: another thread may have freed it, which answers `gone`. */
static CUresult free_when_idle(Memory *memory, CUresult gone) {
    uint64_t id = memory->id;
    CUresult result = CUDA_SUCCESS;
    if (memory->context)
        result = context_synchronize_to_free(memory->context);
    if (memory_with_id(id) != memory)
        return gone;
    memory_free(memory);
    return result;
}

static CUresult deallocate(CUdeviceptr address, unsigned kinds) {
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || !(memory->kind & kinds) ||
        memory->free_is_queued || memory->is_mapping)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = capture_forbids_unsafe_call();
    return result == CUDA_SUCCESS ? free_when_idle(memory, CUDA_ERROR_INVALID_VALUE) : result;
}

DRIVER_FUNCTION_AS(cuMemFree_v2, cuMemFree, 3020, (CUdeviceptr address), (address)) {
    if (!address)
        return CUDA_SUCCESS;
    return deallocate(address, MEMORY_DEVICE | MEMORY_MANAGED);
}

DRIVER_FUNCTION(cuMemFreeHost, 2000, (CUdeviceptr address), (address)) {
    return deallocate(address, MEMORY_PINNED);
}

/* ---- host memory of others ------------------------------------------------------------------ */

static bool overlaps_registered(CUdeviceptr address, size_t size) {
    for (Memory *memory = memories; memory; memory = memory->next) {
        if (address < memory->address + memory->size && memory->address < address + size)
            return true;
    }
    return false;
}

DRIVER_FUNCTION_AS(cuMemHostRegister_v2, cuMemHostRegister, 6050,
                   (CUdeviceptr address, size_t size, unsigned flags), (address, size, flags)) {
    CUresult result = context_usable_after_frees(context_current());
    if (result == CUDA_SUCCESS)
        result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    /* Only memory that is there can be locked. */
    if (!address || !size || !host_has(address, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (overlaps_registered(address, size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    CUdevice device = context_current()->device;
    Memory *memory = memory_add(address, size, MEMORY_REGISTERED, device);
    memory->context = context_current();
    memory->flags = flags;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemHostUnregister, 4000, (CUdeviceptr address), (address)) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS)
        result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || memory->kind != MEMORY_REGISTERED)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return free_when_idle(memory, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* H200: that of a pool is refused, although it is host memory. */
static const Memory *find_host_memory(CUdeviceptr address) {
    const Memory *memory = memory_find(address);
    bool host = memory && memory->kind & (MEMORY_PINNED | MEMORY_REGISTERED);
    return host && !memory->pool ? memory : NULL;
}

/* With unified addressing the device sees host memory under the address that the host uses. */
DRIVER_FUNCTION_AS(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer, 3020,
                   (CUdeviceptr *out, CUdeviceptr address, unsigned flags),
                   (out, address, flags)) {
    if (!out || flags || !find_host_memory(address))
        return CUDA_ERROR_INVALID_VALUE;
    *out = address;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemHostGetFlags, 2030, (unsigned *flags, CUdeviceptr address),
                (flags, address)) {
    const Memory *memory = find_host_memory(address);
    if (!flags || !memory)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = memory->flags;
    return CUDA_SUCCESS;
}

/* ---- questions ------------------------------------------------------------------------------ */

DRIVER_FUNCTION_AS(cuMemGetInfo_v2, cuMemGetInfo, 3020, (size_t *free_bytes, size_t *total),
                   (free_bytes, total)) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS && (!free_bytes || !total))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    *free_bytes = settings.memory - used[context_current()->device];
    *total = settings.memory;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuMemGetAddressRange_v2, cuMemGetAddressRange, 3020,
                   (CUdeviceptr *base, size_t *size, CUdeviceptr address),
                   (base, size, address)) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    const Memory *memory = memory_find(address);
    if (!memory)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = memory->address;
    if (size)
        *size = memory->size;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuStreamAttachMemAsync, 6000,
                (Stream *handle, CUdeviceptr address, size_t length, unsigned flags),
                (handle, address, length, flags)) {
    enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2, ATTACH_SINGLE = 4 };
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    const Memory *memory = memory_find(address);
    if (!memory || memory->kind != MEMORY_MANAGED || memory->address != address)
        return CUDA_ERROR_INVALID_VALUE;
    if (length != 0 && length != memory->size)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags != ATTACH_GLOBAL && flags != ATTACH_HOST && flags != ATTACH_SINGLE)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, operation_nothing(NODE_EMPTY));
}
