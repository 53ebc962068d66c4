/* cuIpc: memory and events of one process in another. */
#include "shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

typedef union IpcHandle {       /* CUipcMemHandle, CUipcEventHandle */
    struct {
        char magic[8];
        int process;
        int file;
        uint64_t size;
        uint64_t inode;         /* of the file: another one may have its number by then */
        CUdevice device;
    } there;
    unsigned char bytes[64];
} IpcHandle;

static const char memory_magic[8] = "memory";
static const char event_magic[8] = "event";

static bool is_handle_of(const IpcHandle *handle, const char expected[8]) {
    return memcmp(handle->there.magic, expected, sizeof handle->there.magic) == 0;
}

/* ---- memory --------------------------------------------------------------------------------- */

static bool write_all(int file, const Memory *memory) {
    for (size_t done = 0; done < memory->size;) {
        ssize_t written = pwrite(file, (const char *)memory->address + done, memory->size - done,
                                 (off_t)done);
        if (written <= 0)
            return false;
        done += (size_t)written;
    }
    return true;
}

/* Moves the bytes into a file, at the same address. */
static CUresult share(Memory *memory) {
    /* A copy goes on without the lock. The wait gives it up: another thread may free the memory. */
    for (uint64_t id = memory->id; memory->users && !shut_down;) {
        wait_for_progress_or(500);
        if (memory_with_id(id) != memory)
            return CUDA_ERROR_INVALID_VALUE;
    }
    int file = shared_file_new();
    if (file < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!write_all(file, memory) || !shared_file_map(file, 0, memory->size, memory->address)) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->file = file;
    return CUDA_SUCCESS;
}

/* "... an existing device memory allocation created with cuMemAlloc." */
DRIVER_FUNCTION(cuIpcGetMemHandle, 4010, (IpcHandle *out, CUdeviceptr address), (out, address)) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    Memory *memory = memory_find(address);
    if (!out || !memory || memory->kind != MEMORY_DEVICE || memory->pool || memory->node ||
        memory->is_imported)
        return CUDA_ERROR_INVALID_VALUE;
    if (memory->file == NO_FILE)
        result = share(memory);
    if (result != CUDA_SUCCESS)
        return result;
    *out = (IpcHandle){.there = {.process = getpid(),
                                 .file = memory->file,
                                 .size = memory->size,
                                 .inode = shared_file_inode(memory->file),
                                 .device = memory->device}};
    memcpy(out->there.magic, memory_magic, sizeof memory_magic);
    return CUDA_SUCCESS;
}

/* H200: a process cannot open what is its own. */
static CUresult open_memory(CUdeviceptr *out, const IpcHandle *handle, unsigned flags) {
    enum { LAZY_ENABLE_PEER_ACCESS = 1 };
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || flags != LAZY_ENABLE_PEER_ACCESS || !is_handle_of(handle, memory_magic))
        return CUDA_ERROR_INVALID_VALUE;
    if (handle->there.process == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    int file =
        shared_file_open(handle->there.process, handle->there.file, handle->there.inode,
                         handle->there.size);
    if (file < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr address = shared_file_map(file, 0, handle->there.size, 0);
    close(file);
    if (!address)
        return CUDA_ERROR_MAP_FAILED;
    Memory *memory = memory_add_imported(address, handle->there.size, NULL, MEMORY_DEVICE,
                                         context_current()->device);
    memory->context = context_current();
    *out = address;
    return CUDA_SUCCESS;
}

#define OPEN_MEMORY(symbol, since) \
    DEFINE_FUNCTION_TOLD(symbol, cuIpcOpenMemHandle, since, AFTER_INIT, \
                         (CUdeviceptr *out, IpcHandle handle, unsigned flags), \
                         (out, handle, flags), (out, &handle, flags)) { \
        return open_memory(out, &handle, flags); \
    }

OPEN_MEMORY(cuIpcOpenMemHandle, 4010)
OPEN_MEMORY(cuIpcOpenMemHandle_v2, 11000)

DRIVER_FUNCTION(cuIpcCloseMemHandle, 4010, (CUdeviceptr address), (address)) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || !memory->is_imported || memory->pool)
        return CUDA_ERROR_INVALID_VALUE;
    memory_free(memory);
    return CUDA_SUCCESS;
}

/* ---- events --------------------------------------------------------------------------------- */

/* "This event must have been created with the CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING
 * flags set." */
DRIVER_FUNCTION(cuIpcGetEventHandle, 4010, (IpcHandle *out, Event *event), (out, event)) {
    if (!handle_is(KIND_EVENT, event) || !event->shared)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (IpcHandle){.there = {.process = getpid(),
                                 .file = shared_event_file(event->shared),
                                 .inode = shared_file_inode(shared_event_file(event->shared)),
                                 .device = event->context->device}};
    memcpy(out->there.magic, event_magic, sizeof event_magic);
    return CUDA_SUCCESS;
}

/* "A CUevent that behaves like a locally created event with the CU_EVENT_DISABLE_TIMING flag." */
DEFINE_FUNCTION_TOLD(cuIpcOpenEventHandle, cuIpcOpenEventHandle, 4010, AFTER_INIT,
                     (Event **out, IpcHandle handle), (out, handle), (out, &handle)) {
    enum { DISABLE_TIMING = 2 };
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !is_handle_of(&handle, event_magic))
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.there.process == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    SharedEvent *shared =
        shared_event_open(handle.there.process, handle.there.file, handle.there.inode);
    if (!shared)
        return CUDA_ERROR_MAP_FAILED;
    *out = event_new(context_current(), DISABLE_TIMING);
    (*out)->shared = shared;
    return CUDA_SUCCESS;
}
