/* Pools of which other processes use the memory: handles and pointers that are exported. */
#include "pools.h"
#include "shared_memory.h"

#include <fcntl.h>
#include <unistd.h>

/* The first page of a pool's file says what the pool is. */
typedef struct Head {
    char magic[16];
    Location location;
} Head;

static const char magic[16] = "userstream pool";

bool pool_open_file(Pool *pool) {
    Head head = {.location = pool->location};
    memcpy(head.magic, magic, sizeof magic);
    pool->file = shared_file_new();
    pool->file_size = shared_file_rounded(sizeof head);
    return pool->file != NO_FILE && ftruncate(pool->file, (off_t)pool->file_size) == 0 &&
           write(pool->file, &head, sizeof head) == sizeof head;
}

void pool_close(Pool *pool) {
    if (pool->file != NO_FILE)
        close(pool->file);
}

/* Places in the file are not used twice: another process may still have what was there. */
CUdeviceptr pool_reserve(Pool *pool, size_t size, size_t *offset) {
    size_t end;
    if (size > INT64_MAX / 2 ||
        __builtin_add_overflow(pool->file_size, shared_file_rounded(size), &end) ||
        ftruncate(pool->file, (off_t)end))
        return 0;
    *offset = pool->file_size;
    pool->file_size = end;
    return shared_file_map(pool->file, *offset, size, 0);
}

DRIVER_FUNCTION(cuMemPoolExportToShareableHandle, 11020,
                (int *out, Pool *pool, int type, uint64_t flags), (out, pool, type, flags)) {
    if (!out || !pool_is(pool) || type != FILE_DESCRIPTOR || flags || pool->is_imported ||
        !(pool->handle_types & FILE_DESCRIPTOR))
        return CUDA_ERROR_INVALID_VALUE;
    *out = fcntl(pool->file, F_DUPFD_CLOEXEC, 0);
    return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolImportFromShareableHandle, 11020,
                (Pool **out, void *handle, int type, uint64_t flags),
                (out, handle, type, flags)) {
    Head head;
    if (!out || type != FILE_DESCRIPTOR || flags)
        return CUDA_ERROR_INVALID_VALUE;
    int file = (int)(intptr_t)handle;
    if (pread(file, &head, sizeof head, 0) != sizeof head ||
        memcmp(head.magic, magic, sizeof magic) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (head.location.type == LOCATION_DEVICE && device_check(head.location.id) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = pool_new_imported(head.location);
    (*out)->file = fcntl(file, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

typedef union Exported {        /* CUmemPoolPtrExportData */
    struct {
        char magic[16];
        uint64_t offset;
        uint64_t size;
        uint64_t file;              /* the pool's inode: programs compare what is exported */
    } part;
    unsigned char bytes[64];
} Exported;

DRIVER_FUNCTION(cuMemPoolExportPointer, 11020, (Exported *out, CUdeviceptr address),
                (out, address)) {
    const Memory *memory = memory_find(address);
    if (!out || !memory || memory->address != address || !memory->pool || memory->free_is_queued ||
        memory->pool->file == NO_FILE || memory->pool->is_imported)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (Exported){.part = {.offset = memory->file_offset,
                               .size = memory->size,
                               .file = shared_file_inode(memory->pool->file)}};
    memcpy(out->part.magic, magic, sizeof magic);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMemPoolImportPointer, 11020,
                (CUdeviceptr *out, Pool *pool, const Exported *exported), (out, pool, exported)) {
    if (!out || !exported || !pool_is(pool) || !pool->is_imported ||
        memcmp(exported->part.magic, magic, sizeof magic) != 0 ||
        exported->part.file != shared_file_inode(pool->file))
        return CUDA_ERROR_INVALID_VALUE;
    off_t end = lseek(pool->file, 0, SEEK_END);
    uint64_t last;
    if (__builtin_add_overflow(exported->part.offset, exported->part.size, &last) || end < 0 ||
        !exported->part.size || last > (uint64_t)end)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr address =
        shared_file_map(pool->file, exported->part.offset, exported->part.size, 0);
    if (!address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory_add_imported(address, exported->part.size, pool, pool->kind, pool->device);
    *out = address;
    return CUDA_SUCCESS;
}
