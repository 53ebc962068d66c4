/* Managed memory: advice, prefetches, and what is known of a range. */
#include "driver.h"

enum { PAGE = 4096 };
enum { CPU = -1, NOWHERE = -2 };        /* in the place of a device */

/* Of a page. */
struct Advice {
    bool read_mostly;
    uint32_t accessed_by;       /* bit d: device d; the last bit: the CPU */
    Location preferred;         /* LOCATION_NONE: nowhere, as of the next */
    Location prefetched;
};

static const uint32_t BIT_OF_CPU = 1u << 31;

typedef struct Range {
    Memory *memory;
    size_t first;               /* page */
    size_t end;
} Range;

/* Pages that the range has a part of. */
static CUresult find_range(Range *range, CUdeviceptr address, size_t size) {
    Memory *memory = memory_find(address);
    if (!size || !memory_has(memory, address, size) || memory->kind != MEMORY_MANAGED)
        return CUDA_ERROR_INVALID_VALUE;
    size_t begin = address - memory->address;
    *range = (Range){memory, begin / PAGE, (begin + size + PAGE - 1) / PAGE};
    if (!memory->advice)
        memory->advice = calloc((memory->size + PAGE - 1) / PAGE, sizeof *memory->advice);
    return memory->advice ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult check_location(const Location *location) {
    switch (location->type) {
    case LOCATION_DEVICE:
        return device_check(location->id);
    case LOCATION_HOST:
    case LOCATION_HOST_NUMA_CURRENT:
        return CUDA_SUCCESS;
    case LOCATION_HOST_NUMA:            /* one node, 0 */
        return location->id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Before CUDA 12.2 a device, or CPU. */
static Location location_of_device(CUdevice device) {
    if (device == CPU)
        return (Location){LOCATION_HOST, 0};
    return (Location){LOCATION_DEVICE, device};
}

/* ---- advice --------------------------------------------------------------------------------- */

enum {                          /* CUmem_advise */
    SET_READ_MOSTLY = 1,
    UNSET_READ_MOSTLY = 2,
    SET_PREFERRED_LOCATION = 3,
    UNSET_PREFERRED_LOCATION = 4,
    SET_ACCESSED_BY = 5,
    UNSET_ACCESSED_BY = 6,
};

/* The other advice has no location. "CU_MEM_LOCATION_TYPE_HOST_NUMA ... is not supported" for who
 * accesses the memory. */
static CUresult check_advice(int advice, const Location *location) {
    bool is_access = advice == SET_ACCESSED_BY || advice == UNSET_ACCESSED_BY;
    if (advice < SET_READ_MOSTLY || advice > UNSET_ACCESSED_BY)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_access && location->type != LOCATION_DEVICE && location->type != LOCATION_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_access && advice != SET_PREFERRED_LOCATION)
        return CUDA_SUCCESS;
    /* H100: also of a device that there is not. */
    return check_location(location) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static uint32_t bit_of(const Location *location) {
    return location->type == LOCATION_DEVICE ? 1u << location->id : BIT_OF_CPU;
}

static void advise_page(struct Advice *page, int advice, const Location *location) {
    switch (advice) {
    case SET_READ_MOSTLY:
    case UNSET_READ_MOSTLY:
        page->read_mostly = advice == SET_READ_MOSTLY;
        break;
    case SET_PREFERRED_LOCATION:
        page->preferred = *location;
        break;
    case UNSET_PREFERRED_LOCATION:
        page->preferred = (Location){LOCATION_NONE, 0};
        break;
    case SET_ACCESSED_BY:
        page->accessed_by |= bit_of(location);
        break;
    default:
        page->accessed_by &= ~bit_of(location);
    }
}

static CUresult advise(CUdeviceptr address, size_t size, int advice, Location location) {
    Range range;
    CUresult result = find_range(&range, address, size);
    if (result == CUDA_SUCCESS)
        result = check_advice(advice, &location);
    for (size_t i = range.first; result == CUDA_SUCCESS && i < range.end; i++)
        advise_page(&range.memory->advice[i], advice, &location);
    return result;
}

DRIVER_FUNCTION(cuMemAdvise, 8000,
                (CUdeviceptr address, size_t size, int advice, CUdevice device),
                (address, size, advice, device)) {
    return advise(address, size, advice, location_of_device(device));
}

DEFINE_FUNCTION_TOLD(cuMemAdvise_v2, cuMemAdvise, 12020, AFTER_INIT,
                     (CUdeviceptr address, size_t size, int advice, Location location),
                     (address, size, advice, location), (address, size, advice, &location)) {
    return advise(address, size, advice, location);
}

/* ---- prefetches and discarded memory -------------------------------------------------------- */

/* "The contents become undefined." */
static CUresult run_discard(Operation *operation, Stream *stream) {
    UNUSED(stream);
    Memory *memory = memory_with_id(operation->discarded.memory_id);
    if (memory)
        memset((void *)operation->discarded.address, 0xCD, operation->discarded.size);
    return CUDA_SUCCESS;
}

static CUresult queue(Stream *stream, CUdeviceptr address, size_t size, bool discard,
                      const Location *location) {
    Range range;
    CUresult result = find_range(&range, address, size);
    if (result == CUDA_SUCCESS && location)
        result = check_location(location);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t i = range.first; location && i < range.end; i++)
        range.memory->advice[i].prefetched = *location;
    Operation *operation = discard ? operation_new(run_discard, NODE_EMPTY)
                                   : operation_nothing(NODE_EMPTY);
    if (discard) {
        operation->discarded.memory_id = range.memory->id;
        operation->discarded.address = address;
        operation->discarded.size = size;
    }
    return stream_submit(stream, operation);
}

/* Neither is captured. */
static CUresult find_stream(Stream *handle, Stream **stream) {
    CUresult result = stream_find(handle, stream);
    return result == CUDA_SUCCESS ? capture_forbids_use_of_stream(*stream) : result;
}

static CUresult prefetch(CUdeviceptr address, size_t size, Location location, unsigned flags,
                         Stream *handle) {
    Stream *stream;
    CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : find_stream(handle, &stream);
    return result == CUDA_SUCCESS ? queue(stream, address, size, false, &location) : result;
}

DRIVER_FUNCTION(cuMemPrefetchAsync, 8000,
                (CUdeviceptr address, size_t size, CUdevice device, Stream *handle),
                (address, size, device, handle)) {
    return prefetch(address, size, location_of_device(device), 0, handle);
}

DEFINE_FUNCTION_TOLD(cuMemPrefetchAsync_v2, cuMemPrefetchAsync, 12020, AFTER_INIT,
                     (CUdeviceptr address, size_t size, Location location, unsigned flags,
                      Stream *handle),
                     (address, size, location, flags, handle),
                     (address, size, &location, flags, handle)) {
    return prefetch(address, size, location, flags, handle);
}

/* "prefetchLocIdxs: the index at which each location begins to apply; the first must be 0". H100:
 * they must not decrease. */
static bool are_places_right(const Location *locations, const size_t *begins, size_t count,
                             size_t operations) {
    if (!locations || !begins || !count || count > operations || begins[0])
        return false;
    for (size_t i = 1; i < count; i++) {
        if (begins[i] < begins[i - 1] || begins[i] >= operations)
            return false;
    }
    return true;
}

static CUresult batch(const CUdeviceptr *addresses, const size_t *sizes, size_t count,
                      const Location *locations, const size_t *begins, size_t places,
                      bool discard, bool prefetches, uint64_t flags, Stream *handle) {
    Stream *stream;
    Range range;
    if (!addresses || !sizes || !count || flags ||
        (prefetches && !are_places_right(locations, begins, places, count)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find_stream(handle, &stream);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = find_range(&range, addresses[i], sizes[i]);
    for (size_t i = 0; i < places && prefetches && result == CUDA_SUCCESS; i++)
        result = check_location(&locations[i]);
    for (size_t i = 0, place = 0; i < count && result == CUDA_SUCCESS; i++) {
        while (prefetches && place + 1 < places && begins[place + 1] <= i)
            place++;
        result = queue(stream, addresses[i], sizes[i], discard,
                       prefetches ? &locations[place] : NULL);
    }
    return result;
}

DRIVER_FUNCTION(cuMemPrefetchBatchAsync, 13000,
                (CUdeviceptr *addresses, size_t *sizes, size_t count, Location *locations,
                 size_t *begins, size_t places, uint64_t flags, Stream *handle),
                (addresses, sizes, count, locations, begins, places, flags, handle)) {
    return batch(addresses, sizes, count, locations, begins, places, false, true, flags, handle);
}

DRIVER_FUNCTION(cuMemDiscardBatchAsync, 13000,
                (CUdeviceptr *addresses, size_t *sizes, size_t count, uint64_t flags,
                 Stream *handle),
                (addresses, sizes, count, flags, handle)) {
    return batch(addresses, sizes, count, NULL, NULL, 0, true, false, flags, handle);
}

DRIVER_FUNCTION(cuMemDiscardAndPrefetchBatchAsync, 13000,
                (CUdeviceptr *addresses, size_t *sizes, size_t count, Location *locations,
                 size_t *begins, size_t places, uint64_t flags, Stream *handle),
                (addresses, sizes, count, locations, begins, places, flags, handle)) {
    return batch(addresses, sizes, count, locations, begins, places, true, true, flags, handle);
}

/* ---- questions ------------------------------------------------------------------------------ */

enum {                          /* CUmem_range_attribute */
    READ_MOSTLY = 1,
    PREFERRED_LOCATION = 2,
    ACCESSED_BY = 3,
    LAST_PREFETCH_LOCATION = 4,
    PREFERRED_LOCATION_TYPE = 5,
    PREFERRED_LOCATION_ID = 6,
    LAST_PREFETCH_LOCATION_TYPE = 7,
    LAST_PREFETCH_LOCATION_ID = 8,
};

/* That of all pages; none if they differ. */
static Location common_location(const Range *range, bool prefetched) {
    const struct Advice *pages = range->memory->advice;
    Location common = {LOCATION_NONE, 0};
    for (size_t i = range->first; i < range->end; i++) {
        Location here = prefetched ? pages[i].prefetched : pages[i].preferred;
        if (i > range->first && (here.type != common.type || here.id != common.id))
            return (Location){LOCATION_NONE, 0};
        common = here;
    }
    return common;
}

static int device_of(Location location) {
    if (location.type == LOCATION_DEVICE)
        return location.id;
    return location.type == LOCATION_HOST ? CPU : NOWHERE;
}

static void answer_accessed_by(int *out, size_t count, const Range *range) {
    uint32_t by_all = UINT32_MAX;
    size_t found = 0;
    for (size_t i = range->first; i < range->end; i++)
        by_all &= range->memory->advice[i].accessed_by;
    for (CUdevice device = 0; device < settings.devices && found < count; device++) {
        if (by_all >> device & 1)
            out[found++] = device;
    }
    if (by_all & BIT_OF_CPU && found < count)
        out[found++] = CPU;
    while (found < count)
        out[found++] = NOWHERE;
}

static bool are_read_mostly(const Range *range) {
    for (size_t i = range->first; i < range->end; i++) {
        if (!range->memory->advice[i].read_mostly)
            return false;
    }
    return true;
}

static CUresult answer(int *out, size_t size, int attribute, const Range *range) {
    bool is_list = attribute == ACCESSED_BY;
    if (!out || !size || size % sizeof *out || (!is_list && size != sizeof *out))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case READ_MOSTLY:
        *out = are_read_mostly(range);
        return CUDA_SUCCESS;
    case ACCESSED_BY:
        answer_accessed_by(out, size / sizeof *out, range);
        return CUDA_SUCCESS;
    case PREFERRED_LOCATION:
    case LAST_PREFETCH_LOCATION:
        *out = device_of(common_location(range, attribute == LAST_PREFETCH_LOCATION));
        return CUDA_SUCCESS;
    case PREFERRED_LOCATION_TYPE:
    case LAST_PREFETCH_LOCATION_TYPE:
        *out = common_location(range, attribute == LAST_PREFETCH_LOCATION_TYPE).type;
        return CUDA_SUCCESS;
    case PREFERRED_LOCATION_ID:
    case LAST_PREFETCH_LOCATION_ID:
        *out = common_location(range, attribute == LAST_PREFETCH_LOCATION_ID).id;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

DRIVER_FUNCTION(cuMemRangeGetAttribute, 8000,
                (int *out, size_t size, int attribute, CUdeviceptr address, size_t count),
                (out, size, attribute, address, count)) {
    Range range;
    CUresult result = find_range(&range, address, count);
    return result == CUDA_SUCCESS ? answer(out, size, attribute, &range) : result;
}

DRIVER_FUNCTION(cuMemRangeGetAttributes, 8000,
                (int **out, size_t *sizes, int *attributes, size_t how_many, CUdeviceptr address,
                 size_t count),
                (out, sizes, attributes, how_many, address, count)) {
    Range range;
    CUresult result = find_range(&range, address, count);
    if (result == CUDA_SUCCESS && (!out || !sizes || !attributes || !how_many))
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < how_many && result == CUDA_SUCCESS; i++)
        result = answer(out[i], sizes[i], attributes[i], &range);
    return result;
}
