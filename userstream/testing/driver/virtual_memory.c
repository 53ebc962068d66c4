/* Virtual memory: addresses that are reserved, physical memory, and mappings between them. */
#define _GNU_SOURCE
#include "pools.h"
#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20 };         /* H100 */
enum { PINNED = 1 };                    /* CUmemAllocationType */

typedef struct Mapping {
    Memory *memory;
    Physical *physical;
    struct Mapping *next;
} Mapping;

typedef struct Reservation {
    CUdeviceptr address;
    size_t size;
    Mapping *mappings;
    struct Reservation *next;
} Reservation;

static Reservation *reservations;

/* ---- physical memory ------------------------------------------------------------------------ */

static CUresult check_properties(const PhysicalProperties *properties) {
    if (!properties || properties->type != PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handle_types & ~FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    switch (properties->location.type) {
    case LOCATION_DEVICE:
        return device_check(properties->location.id);
    case LOCATION_HOST:
    case LOCATION_HOST_NUMA_CURRENT:
        return CUDA_SUCCESS;
    case LOCATION_HOST_NUMA:
        return properties->location.id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

DRIVER_FUNCTION(cuMemGetAllocationGranularity, 10020,
                (size_t *out, const PhysicalProperties *properties, int option),
                (out, properties, option)) {
    CUresult result = check_properties(properties);
    if (result == CUDA_SUCCESS && (!out || option < 0 || option > 1))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = GRANULARITY;
    return result;
}

static Physical *physical_new(const PhysicalProperties *properties, size_t size, int file) {
    Physical *physical = handle_new(KIND_PHYSICAL);
    physical->properties = *properties;
    physical->size = size;
    physical->file = file;
    physical->references = 1;
    return physical;
}

static void physical_release(Physical *physical) {
    if (--physical->references)
        return;
    close(physical->file);
    handle_free(KIND_PHYSICAL, physical);
}

/* The first page says to another process what it is. */
DRIVER_FUNCTION(cuMemCreate, 10020,
                (Physical **out, size_t size, const PhysicalProperties *properties, uint64_t flags),
                (out, size, properties, flags)) {
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !size || size % GRANULARITY || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > INT64_MAX - GRANULARITY ||
        (properties->location.type == LOCATION_DEVICE &&
         !memory_is_there(properties->location.id, size)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int file = shared_file_new();
    if (file < 0 || ftruncate(file, (off_t)(GRANULARITY + size)) ||
        pwrite(file, properties, sizeof *properties, 0) != sizeof *properties) {
        if (file >= 0)
            close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = physical_new(properties, size, file);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemRelease, 10020, (Physical *physical), (physical)) {
    if (!handle_is(KIND_PHYSICAL, physical))
        return CUDA_ERROR_INVALID_VALUE;
    physical_release(physical);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemGetAllocationPropertiesFromHandle, 10020,
                (PhysicalProperties *out, Physical *physical), (out, physical)) {
    if (!out || !handle_is(KIND_PHYSICAL, physical))
        return CUDA_ERROR_INVALID_VALUE;
    *out = physical->properties;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemExportToShareableHandle, 10020,
                (int *out, Physical *physical, int type, uint64_t flags),
                (out, physical, type, flags)) {
    if (!out || !handle_is(KIND_PHYSICAL, physical) || type != FILE_DESCRIPTOR || flags ||
        !(physical->properties.handle_types & FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    *out = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
    return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemImportFromShareableHandle, 10020,
                (Physical **out, void *handle, int type), (out, handle, type)) {
    PhysicalProperties properties;
    int file = (int)(intptr_t)handle;
    if (!out || type != FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    off_t size = lseek(file, 0, SEEK_END) - GRANULARITY;
    if (size <= 0 || pread(file, &properties, sizeof properties, 0) != sizeof properties ||
        check_properties(&properties) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    *out = physical_new(&properties, (size_t)size, fcntl(file, F_DUPFD_CLOEXEC, 0));
    (*out)->is_imported = true;
    return CUDA_SUCCESS;
}

/* ---- addresses ------------------------------------------------------------------------------ */

static Reservation *reservation_of(CUdeviceptr address, size_t size) {
    for (Reservation *found = reservations; found; found = found->next) {
        if (address >= found->address && address - found->address <= found->size &&
            size <= found->size - (address - found->address))
            return found;
    }
    return NULL;
}

bool is_reserved(CUdeviceptr address, size_t size) {
    for (const Reservation *found = reservations; found; found = found->next) {
        if (address < found->address + found->size && found->address < address + size)
            return true;
    }
    return false;
}

uint64_t physical_place(CUdeviceptr address) {
    enum { FILE_SHIFT = 40 };       /* no allocation is larger than that */
    const Reservation *reservation = reservation_of(address, 1);
    const Mapping *mapping = reservation ? reservation->mappings : NULL;
    while (mapping && address - mapping->memory->address >= mapping->memory->size)
        mapping = mapping->next;
    if (!mapping)
        return address;
    uint64_t file = shared_file_inode(mapping->physical->file) << FILE_SHIFT;
    return (1ull << 63 | file) + (address - mapping->memory->address);
}

/* 0: there are not so many addresses. */
static CUdeviceptr reserve(size_t size, size_t alignment, CUdeviceptr wanted) {
    size_t with_alignment;
    if (__builtin_add_overflow(size, alignment, &with_alignment))
        return 0;
    void *pages = mmap((void *)wanted, with_alignment, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED)
        return 0;
    CUdeviceptr begin = (CUdeviceptr)pages;
    CUdeviceptr address = (begin + alignment - 1) / alignment * alignment;
    if (address > begin)
        munmap(pages, address - begin);
    if (begin + alignment > address)
        munmap((void *)(address + size), begin + alignment - address);
    return address;
}

/* "addr: hint for the address"; the alignment is a power of two, or 0. */
DRIVER_FUNCTION(cuMemAddressReserve, 10020,
                (CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted,
                 uint64_t flags),
                (out, size, alignment, wanted, flags)) {
    if (!out || !size || size % GRANULARITY || flags || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    size_t least = alignment > GRANULARITY ? alignment : GRANULARITY;
    CUdeviceptr address = reserve(size, least, wanted);
    if (!address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    Reservation *made = malloc(sizeof *made);
    *made = (Reservation){address, size, NULL, reservations};
    reservations = made;
    *out = address;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemAddressFree, 10020, (CUdeviceptr address, size_t size), (address, size)) {
    for (Reservation **link = &reservations; *link; link = &(*link)->next) {
        Reservation *found = *link;
        if (found->address != address || found->size != size)
            continue;
        if (found->mappings)
            return CUDA_ERROR_INVALID_VALUE;
        *link = found->next;
        munmap((void *)address, size);
        free(found);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* ---- mappings ------------------------------------------------------------------------------- */

static Mapping *mapping_at(const Reservation *reservation, CUdeviceptr address) {
    Mapping *mapping = reservation->mappings;
    while (mapping && (address < mapping->memory->address ||
                       address - mapping->memory->address >= mapping->memory->size))
        mapping = mapping->next;
    return mapping;
}

static bool is_free(const Reservation *reservation, CUdeviceptr address, size_t size) {
    for (const Mapping *mapping = reservation->mappings; mapping; mapping = mapping->next) {
        if (address < mapping->memory->address + mapping->memory->size &&
            mapping->memory->address < address + size)
            return false;
    }
    return true;
}

/* "offset: currently must be zero", and the size is that of the physical memory. Nobody has access
 * until cuMemSetAccess. */
DRIVER_FUNCTION(cuMemMap, 10020,
                (CUdeviceptr address, size_t size, size_t offset, Physical *physical,
                 uint64_t flags),
                (address, size, offset, physical, flags)) {
    if (!handle_is(KIND_PHYSICAL, physical) || offset || flags || !size ||
        address % GRANULARITY || size % GRANULARITY || size > physical->size)
        return CUDA_ERROR_INVALID_VALUE;
    Reservation *reservation = reservation_of(address, size);
    if (!reservation || !is_free(reservation, address, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (!shared_file_map(physical->file, GRANULARITY, size, address))
        return CUDA_ERROR_MAP_FAILED;
    const Location *location = &physical->properties.location;
    bool of_device = location->type == LOCATION_DEVICE;
    Mapping *mapping = malloc(sizeof *mapping);
    Memory *memory = memory_add_imported(address, size, NULL,
                                         of_device ? MEMORY_DEVICE : MEMORY_PINNED,
                                         of_device ? location->id : 0);
    memory->is_mapping = true;
    *mapping = (Mapping){memory, physical, reservation->mappings};
    physical->references++;
    reservation->mappings = mapping;
    return CUDA_SUCCESS;
}

static void unmap(Reservation *reservation, Mapping *mapping) {
    for (Mapping **link = &reservation->mappings; *link; link = &(*link)->next) {
        if (*link == mapping) {
            *link = mapping->next;
            break;
        }
    }
    physical_release(mapping->physical);
    memory_free(mapping->memory);
    free(mapping);
}

static bool is_in_use(const Reservation *reservation, CUdeviceptr address, CUdeviceptr end) {
    for (const Mapping *mapping = reservation->mappings; mapping; mapping = mapping->next) {
        const Memory *memory = mapping->memory;
        if (memory->users && memory->address >= address && memory->address < end)
            return true;
    }
    return false;
}

/* "The range must be the entire range of one or more previous mappings." The addresses stay
 * reserved. */
DRIVER_FUNCTION(cuMemUnmap, 10020, (CUdeviceptr address, size_t size), (address, size)) {
    Reservation *reservation = reservation_of(address, size);
    if (!reservation || !size)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr end = address;
    while (end < address + size) {
        const Mapping *mapping = mapping_at(reservation, end);
        if (!mapping || mapping->memory->address != end)
            return CUDA_ERROR_INVALID_VALUE;
        end += mapping->memory->size;
    }
    if (end != address + size)
        return CUDA_ERROR_INVALID_VALUE;
    /* A copy goes on without the lock. The wait gives it up: another thread may unmap meanwhile. */
    while (is_in_use(reservation, address, end)) {
        wait_for_progress_or(500);
        if (reservation_of(address, size) != reservation)
            return CUDA_ERROR_INVALID_VALUE;
    }
    while (address < end) {
        Mapping *mapping = mapping_at(reservation, address);
        if (!mapping)
            return CUDA_ERROR_INVALID_VALUE;
        address += mapping->memory->size;
        unmap(reservation, mapping);
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemSetAccess, 10020,
                (CUdeviceptr address, size_t size, const Access *access, size_t count),
                (address, size, access, count)) {
    Reservation *reservation = reservation_of(address, size);
    if (!reservation || !size || !access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *mapping = mapping_at(reservation, at);
        if (!mapping)
            return CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; i < count; i++) {
            if (!is_access(access[i].flags))
                return CUDA_ERROR_INVALID_VALUE;
            if (access[i].location.type != LOCATION_DEVICE)
                continue;
            CUresult result = device_check(access[i].location.id);
            if (result != CUDA_SUCCESS)
                return result;
            mapping->memory->access[access[i].location.id] = (unsigned char)access[i].flags;
        }
        at = mapping->memory->address + mapping->memory->size;
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemGetAccess, 10020,
                (uint64_t *flags, const Location *location, CUdeviceptr address),
                (flags, location, address)) {
    const Reservation *reservation = reservation_of(address, 1);
    const Mapping *mapping = reservation ? mapping_at(reservation, address) : NULL;
    if (!flags || !location || !mapping)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    if (location->type != LOCATION_DEVICE)
        return CUDA_SUCCESS;
    CUresult result = device_check(location->id);
    if (result == CUDA_SUCCESS)
        *flags = mapping->memory->access[location->id];
    return result;
}

DRIVER_FUNCTION(cuMemRetainAllocationHandle, 11000, (Physical **out, CUdeviceptr address),
                (out, address)) {
    const Reservation *reservation = reservation_of(address, 1);
    Mapping *mapping = reservation ? mapping_at(reservation, address) : NULL;
    if (!out || !mapping)
        return CUDA_ERROR_INVALID_VALUE;
    mapping->physical->references++;
    *out = mapping->physical;
    return CUDA_SUCCESS;
}

/* Of memory.c: the pages are only reserved again. */
void memory_unmap(CUdeviceptr address, size_t size) {
    mmap((void *)address, size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
