/* The functions of the CUDA runtime that cuda.bindings.runtime calls, made of the driver's.
 *
 * cuda.bindings have the runtime inside, and that one asks the driver for private tables. So the
 * bindings' own table of functions is changed instead: see testing/_simulated.py. Errors have the
 * same numbers in both. */
#define _GNU_SOURCE
#include "driver.h"

#include <link.h>

/* ---- the table ------------------------------------------------------------------------------ */

typedef struct RuntimeFunction {
    const char *name;
    const char *signature;      /* what the C signature contains; NULL: there is only one */
    void *address;
    struct RuntimeFunction *next;
} RuntimeFunction;

static RuntimeFunction *runtime_functions;

#define REGISTER(symbol, plain_name, contains) \
    __attribute__((constructor)) static void register_##symbol(void) { \
        static RuntimeFunction function = {#plain_name, contains, (void *)symbol, NULL}; \
        function.next = runtime_functions; \
        runtime_functions = &function; \
    }

/* ---- errors and contexts of threads --------------------------------------------------------- */

static _Thread_local CUresult last_error;
static _Thread_local CUdevice chosen_device;    /* where the thread has no current context */

static CUresult remember(CUresult result) {
    if (result != CUDA_SUCCESS)
        last_error = result;
    return result;
}

CUresult cuInit(unsigned flags);
CUresult cuCtxGetCurrent(Context **out);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxSetCurrent(Context *context);
CUresult cuDeviceGetCount(int *count);
CUresult cuDevicePrimaryCtxRetain(Context **out, CUdevice device);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);

/* Retained, as the runtime does, until the process ends. */
static CUresult enter_device(CUdevice device) {
    static _Atomic(Context *) retained[MAX_DEVICES];
    unsigned flags;
    int active;
    CUresult result = cuDevicePrimaryCtxGetState(device, &flags, &active);
    if (result != CUDA_SUCCESS)
        return result;
    Context *context = active ? atomic_load(&retained[device]) : NULL;
    if (!context)
        result = cuDevicePrimaryCtxRetain(&context, device);
    atomic_store(&retained[device], context);
    return result == CUDA_SUCCESS ? cuCtxSetCurrent(context) : result;
}

static CUresult do_not_start(void) {
    return CUDA_SUCCESS;
}

static CUresult start(void) {
    return cuInit(0);
}

/* "The runtime API initializes the primary context of the current device on first use." */
static CUresult start_with_context(void) {
    Context *context = NULL;
    CUresult result = start();
    if (result == CUDA_SUCCESS)
        result = cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && !context)
        result = enter_device(chosen_device);
    return result;
}

/* Defines a runtime function. Its body follows. */
#define RUNTIME_FUNCTION_AS(symbol, name, contains, begin, parameters, arguments) \
    static CUresult body_##symbol parameters; \
    static CUresult symbol parameters { \
        CUresult result = begin(); \
        return remember(result == CUDA_SUCCESS ? body_##symbol arguments : result); \
    } \
    REGISTER(symbol, name, contains) \
    static CUresult body_##symbol parameters

#define RUNTIME_FUNCTION(name, begin, parameters, arguments) \
    RUNTIME_FUNCTION_AS(runtime_##name, name, NULL, begin, parameters, arguments)

/* Defines a runtime function that does what one of the driver does, with the same parameters. */
#define SAME_FUNCTION(name, driver_function, begin, parameters, arguments) \
    CUresult driver_function parameters; \
    RUNTIME_FUNCTION(name, begin, parameters, arguments) { return driver_function arguments; }

#define SAME(name, driver_function, parameters, arguments) \
    SAME_FUNCTION(name, driver_function, start_with_context, parameters, arguments)

/* ---- errors --------------------------------------------------------------------------------- */

static CUresult runtime_cudaGetLastError(void) {
    CUresult result = last_error;
    last_error = CUDA_SUCCESS;
    return result;
}
REGISTER(runtime_cudaGetLastError, cudaGetLastError, NULL)

static CUresult runtime_cudaPeekAtLastError(void) {
    return last_error;
}
REGISTER(runtime_cudaPeekAtLastError, cudaPeekAtLastError, NULL)

/* ---- devices -------------------------------------------------------------------------------- */

SAME_FUNCTION(cudaDriverGetVersion, cuDriverGetVersion, start, (int *version), (version))
SAME_FUNCTION(cudaDeviceGetPCIBusId, cuDeviceGetPCIBusId, start,
              (char *id, int length, CUdevice device), (id, length, device))
SAME_FUNCTION(cudaDeviceGetByPCIBusId, cuDeviceGetByPCIBusId, start,
              (CUdevice *device, const char *id), (device, id))
SAME_FUNCTION(cudaDeviceGetAttribute, cuDeviceGetAttribute, start,
              (int *value, int attribute, CUdevice device), (value, attribute, device))
SAME_FUNCTION(cudaDeviceCanAccessPeer, cuDeviceCanAccessPeer, start,
              (int *value, CUdevice device, CUdevice peer), (value, device, peer))
SAME_FUNCTION(cudaDeviceGetP2PAttribute, cuDeviceGetP2PAttribute, start,
              (int *value, int attribute, CUdevice device, CUdevice peer),
              (value, attribute, device, peer))
SAME_FUNCTION(cudaDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, start,
              (Pool **out, CUdevice device), (out, device))
SAME_FUNCTION(cudaDeviceGetMemPool, cuDeviceGetMemPool, start, (Pool **out, CUdevice device),
              (out, device))
SAME_FUNCTION(cudaDeviceSetMemPool, cuDeviceSetMemPool, start, (CUdevice device, Pool *pool),
              (device, pool))
SAME(cudaDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest),
     (least, greatest))
SAME(cudaDeviceGetLimit, cuCtxGetLimit, (size_t *value, int limit), (value, limit))
SAME(cudaDeviceSetLimit, cuCtxSetLimit, (int limit, size_t value), (limit, value))
SAME(cudaMemGetInfo, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total), (free_bytes, total))

/* Without a device it answers that, and a count of none. */
RUNTIME_FUNCTION(cudaGetDeviceCount, do_not_start, (int *count), (count)) {
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = 0;
    CUresult result = start();
    return result == CUDA_SUCCESS ? cuDeviceGetCount(count) : result;
}

RUNTIME_FUNCTION(cudaGetDevice, start, (CUdevice *device), (device)) {
    Context *context = NULL;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuCtxGetCurrent(&context);
    if (result != CUDA_SUCCESS)
        return result;
    *device = chosen_device;
    return context ? cuCtxGetDevice(device) : CUDA_SUCCESS;
}

/* "... also explicitly initializes the runtime on the specified device." */
RUNTIME_FUNCTION(cudaSetDevice, start, (CUdevice device), (device)) {
    CUresult result = enter_device(device);
    if (result == CUDA_SUCCESS)
        chosen_device = device;
    return result;
}

/* "Initializes the device for use, without making it current." */
RUNTIME_FUNCTION(cudaInitDevice, start, (CUdevice device, unsigned device_flags, unsigned flags),
                 (device, device_flags, flags)) {
    UNUSED(device_flags);
    Context *before = NULL;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuCtxGetCurrent(&before);
    if (result == CUDA_SUCCESS)
        result = enter_device(device);
    return result == CUDA_SUCCESS ? cuCtxSetCurrent(before) : result;
}

CUresult cuCtxSynchronize(void);
CUresult cuCtxGetFlags(unsigned *flags);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult cuCtxEnablePeerAccess(Context *peer, unsigned flags);
CUresult cuCtxDisablePeerAccess(Context *peer);

RUNTIME_FUNCTION(cudaDeviceSynchronize, start_with_context, (void), ()) {
    return cuCtxSynchronize();
}

RUNTIME_FUNCTION(cudaDeviceReset, start, (void), ()) {
    CUdevice device = chosen_device;
    Context *context = NULL;
    CUresult result = cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && context)
        result = cuCtxGetDevice(&device);
    return result == CUDA_SUCCESS ? cuDevicePrimaryCtxReset_v2(device) : result;
}

enum { MAP_HOST = 8 };          /* cudaDeviceMapHost: always set */

RUNTIME_FUNCTION(cudaGetDeviceFlags, start_with_context, (unsigned *flags), (flags)) {
    CUresult result = flags ? cuCtxGetFlags(flags) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *flags |= MAP_HOST;
    return result;
}

RUNTIME_FUNCTION(cudaSetDeviceFlags, start_with_context, (unsigned flags), (flags)) {
    CUdevice device;
    CUresult result = cuCtxGetDevice(&device);
    return result == CUDA_SUCCESS ? cuDevicePrimaryCtxSetFlags_v2(device, flags) : result;
}

static CUresult with_peer(CUdevice peer, CUresult (*change)(Context *)) {
    Context *before;
    Context *context;
    CUresult result = cuCtxGetCurrent(&before);
    if (result == CUDA_SUCCESS)
        result = enter_device(peer);
    if (result == CUDA_SUCCESS)
        result = cuCtxGetCurrent(&context);
    if (result != CUDA_SUCCESS)
        return result;
    result = cuCtxSetCurrent(before);
    return result == CUDA_SUCCESS ? change(context) : result;
}

static CUresult enable(Context *peer) {
    return cuCtxEnablePeerAccess(peer, 0);
}

RUNTIME_FUNCTION(cudaDeviceEnablePeerAccess, start_with_context, (CUdevice peer, unsigned flags),
                 (peer, flags)) {
    return flags ? CUDA_ERROR_INVALID_VALUE : with_peer(peer, enable);
}

RUNTIME_FUNCTION(cudaDeviceDisablePeerAccess, start_with_context, (CUdevice peer), (peer)) {
    return with_peer(peer, cuCtxDisablePeerAccess);
}

/* ---- streams and events --------------------------------------------------------------------- */

enum { DEFAULT_FLAGS = 0 };

CUresult cuStreamCreate(Stream **out, unsigned flags);
CUresult cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags);
CUresult cuEventCreate(Event **out, unsigned flags);

RUNTIME_FUNCTION(cudaStreamCreate, start_with_context, (Stream **out), (out)) {
    return cuStreamCreate(out, DEFAULT_FLAGS);
}

SAME(cudaStreamCreateWithFlags, cuStreamCreate, (Stream **out, unsigned flags), (out, flags))
SAME(cudaStreamCreateWithPriority, cuStreamCreateWithPriority,
     (Stream **out, unsigned flags, int priority), (out, flags, priority))
SAME(cudaStreamDestroy, cuStreamDestroy_v2, (Stream *stream), (stream))
SAME(cudaStreamSynchronize, cuStreamSynchronize, (Stream *stream), (stream))
SAME(cudaStreamQuery, cuStreamQuery, (Stream *stream), (stream))
SAME(cudaStreamWaitEvent, cuStreamWaitEvent, (Stream *stream, Event *event, unsigned flags),
     (stream, event, flags))
SAME(cudaStreamGetPriority, cuStreamGetPriority, (Stream *stream, int *out), (stream, out))
SAME(cudaStreamGetFlags, cuStreamGetFlags, (Stream *stream, unsigned *out), (stream, out))
SAME(cudaStreamGetId, cuStreamGetId, (Stream *stream, uint64_t *out), (stream, out))
SAME(cudaStreamGetDevice, cuStreamGetDevice, (Stream *stream, CUdevice *out), (stream, out))
SAME(cudaStreamCopyAttributes, cuStreamCopyAttributes, (Stream *to, Stream *from), (to, from))
SAME(cudaStreamGetAttribute, cuStreamGetAttribute,
     (Stream *stream, int attribute, StreamAttribute *value), (stream, attribute, value))
SAME(cudaStreamSetAttribute, cuStreamSetAttribute,
     (Stream *stream, int attribute, const StreamAttribute *value), (stream, attribute, value))
SAME(cudaStreamAddCallback, cuStreamAddCallback,
     (Stream *stream, void (*function)(Stream *, CUresult, void *), void *argument,
      unsigned flags),
     (stream, function, argument, flags))
SAME(cudaLaunchHostFunc, cuLaunchHostFunc,
     (Stream *stream, HostFunction function, void *argument), (stream, function, argument))
SAME(cudaStreamAttachMemAsync, cuStreamAttachMemAsync,
     (Stream *stream, CUdeviceptr address, size_t length, unsigned flags),
     (stream, address, length, flags))
SAME(cudaStreamBeginCapture, cuStreamBeginCapture_v2, (Stream *stream, int mode), (stream, mode))
SAME(cudaStreamEndCapture, cuStreamEndCapture, (Stream *stream, Graph **out), (stream, out))
SAME(cudaStreamIsCapturing, cuStreamIsCapturing, (Stream *stream, int *status), (stream, status))
SAME(cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode), (mode))

RUNTIME_FUNCTION(cudaEventCreate, start_with_context, (Event **out), (out)) {
    return cuEventCreate(out, DEFAULT_FLAGS);
}

SAME(cudaEventCreateWithFlags, cuEventCreate, (Event **out, unsigned flags), (out, flags))
SAME(cudaEventDestroy, cuEventDestroy_v2, (Event *event), (event))
SAME(cudaEventRecord, cuEventRecord, (Event *event, Stream *stream), (event, stream))
SAME(cudaEventRecordWithFlags, cuEventRecordWithFlags,
     (Event *event, Stream *stream, unsigned flags), (event, stream, flags))
SAME(cudaEventQuery, cuEventQuery, (Event *event), (event))
SAME(cudaEventSynchronize, cuEventSynchronize, (Event *event), (event))
SAME(cudaEventElapsedTime, cuEventElapsedTime, (float *milliseconds, Event *begin, Event *end),
     (milliseconds, begin, end))

/* ---- memory --------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemFreeHost(CUdeviceptr address);
CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, size_t size);
CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t size, Stream *stream);
CUresult cuMemsetD8_v2(CUdeviceptr destination, unsigned char value, size_t size);
CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t size,
                         Stream *stream);
CUresult cuMemsetD2D8Async(CUdeviceptr destination, size_t pitch, unsigned char value,
                           size_t width, size_t height, Stream *stream);
CUresult cuStreamSynchronize(Stream *stream);
CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out,
                                CUdeviceptr address);

/* The runtime answers NULL for no bytes; the driver refuses them. */
RUNTIME_FUNCTION(cudaMalloc, start_with_context, (CUdeviceptr *address, size_t size),
                 (address, size)) {
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    *address = 0;
    return size ? cuMemAlloc_v2(address, size) : CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaFreeHost, start_with_context, (CUdeviceptr address), (address)) {
    return address ? cuMemFreeHost(address) : CUDA_SUCCESS;
}

SAME(cudaFree, cuMemFree_v2, (CUdeviceptr address), (address))
SAME(cudaMallocHost, cuMemAllocHost_v2, (CUdeviceptr *address, size_t size), (address, size))
SAME(cudaHostAlloc, cuMemHostAlloc, (CUdeviceptr *address, size_t size, unsigned flags),
     (address, size, flags))
SAME(cudaHostRegister, cuMemHostRegister_v2, (CUdeviceptr address, size_t size, unsigned flags),
     (address, size, flags))
SAME(cudaHostUnregister, cuMemHostUnregister, (CUdeviceptr address), (address))
SAME(cudaHostGetDevicePointer, cuMemHostGetDevicePointer_v2,
     (CUdeviceptr *out, CUdeviceptr address, unsigned flags), (out, address, flags))
SAME(cudaHostGetFlags, cuMemHostGetFlags, (unsigned *flags, CUdeviceptr address),
     (flags, address))
SAME(cudaMallocManaged, cuMemAllocManaged, (CUdeviceptr *address, size_t size, unsigned flags),
     (address, size, flags))
SAME(cudaMallocAsync, cuMemAllocAsync, (CUdeviceptr *address, size_t size, Stream *stream),
     (address, size, stream))
SAME(cudaMallocFromPoolAsync, cuMemAllocFromPoolAsync,
     (CUdeviceptr *address, size_t size, Pool *pool, Stream *stream),
     (address, size, pool, stream))
SAME(cudaFreeAsync, cuMemFreeAsync, (CUdeviceptr address, Stream *stream), (address, stream))
SAME(cudaMemPoolDestroy, cuMemPoolDestroy, (Pool *pool), (pool))
SAME(cudaMemPoolTrimTo, cuMemPoolTrimTo, (Pool *pool, size_t keep), (pool, keep))
SAME(cudaMemPoolSetAttribute, cuMemPoolSetAttribute, (Pool *pool, int attribute, void *value),
     (pool, attribute, value))
SAME(cudaMemPoolGetAttribute, cuMemPoolGetAttribute, (Pool *pool, int attribute, void *value),
     (pool, attribute, value))

enum {                          /* cudaMemcpyKind, from host to host to "default" */
    LAST_KIND = 4,
    INVALID_MEMCPY_DIRECTION = 21,
};

static CUresult check_kind(int kind) {
    return kind < 0 || kind > LAST_KIND ? (CUresult)INVALID_MEMCPY_DIRECTION : CUDA_SUCCESS;
}

/* With unified addressing the addresses say where the memory is. */
RUNTIME_FUNCTION(cudaMemcpy, start_with_context,
                 (CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (destination, source, size, kind)) {
    CUresult result = check_kind(kind);
    return result == CUDA_SUCCESS ? cuMemcpy(destination, source, size) : result;
}

RUNTIME_FUNCTION(cudaMemcpyAsync, start_with_context,
                 (CUdeviceptr destination, CUdeviceptr source, size_t size, int kind,
                  Stream *stream),
                 (destination, source, size, kind, stream)) {
    CUresult result = check_kind(kind);
    return result == CUDA_SUCCESS ? cuMemcpyAsync(destination, source, size, stream) : result;
}

RUNTIME_FUNCTION(cudaMemset, start_with_context, (CUdeviceptr address, int value, size_t size),
                 (address, value, size)) {
    return cuMemsetD8_v2(address, (unsigned char)value, size);
}

RUNTIME_FUNCTION(cudaMemsetAsync, start_with_context,
                 (CUdeviceptr address, int value, size_t size, Stream *stream),
                 (address, value, size, stream)) {
    return cuMemsetD8Async(address, (unsigned char)value, size, stream);
}

RUNTIME_FUNCTION(cudaMemset2DAsync, start_with_context,
                 (CUdeviceptr address, size_t pitch, int value, size_t width, size_t height,
                  Stream *stream),
                 (address, pitch, value, width, height, stream)) {
    return cuMemsetD2D8Async(address, pitch, (unsigned char)value, width, height, stream);
}

typedef struct PointerAttributes {  /* cudaPointerAttributes; CUDA 13 has room behind it */
    enum { UNREGISTERED, HOST, DEVICE, MANAGED } type;
    int device;
    CUdeviceptr device_pointer;
    CUdeviceptr host_pointer;
} PointerAttributes;

RUNTIME_FUNCTION(cudaPointerGetAttributes, start_with_context,
                 (PointerAttributes *out, CUdeviceptr address), (out, address)) {
    enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, ORDINAL = 9 };
    static const int asked[] = {MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, ORDINAL};
    unsigned type = UNREGISTERED;
    bool managed = false;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (PointerAttributes){0};
    void *answers[] = {&type, &out->device_pointer, &out->host_pointer, &managed, &out->device};
    CUresult result = cuPointerGetAttributes(sizeof asked / sizeof *asked, asked, answers, address);
    out->type = managed ? MANAGED : type;
    if (out->type == UNREGISTERED)
        out->host_pointer = address;
    return result;
}

/* ---- graphs --------------------------------------------------------------------------------- */

SAME(cudaGraphCreate, cuGraphCreate, (Graph **out, unsigned flags), (out, flags))
SAME(cudaGraphDestroy, cuGraphDestroy, (Graph *graph), (graph))
SAME(cudaGraphClone, cuGraphClone, (Graph **out, Graph *graph), (out, graph))
SAME(cudaGraphGetNodes, cuGraphGetNodes, (Graph *graph, Node **out, size_t *count),
     (graph, out, count))
SAME(cudaGraphInstantiate, cuGraphInstantiateWithFlags,
     (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags))
SAME(cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,
     (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags))
SAME(cudaGraphUpload, cuGraphUpload, (GraphExec *exec, Stream *stream), (exec, stream))
SAME(cudaGraphLaunch, cuGraphLaunch, (GraphExec *exec, Stream *stream), (exec, stream))
SAME(cudaGraphExecDestroy, cuGraphExecDestroy, (GraphExec *exec), (exec))

/* ---- the side door -------------------------------------------------------------------------- */

__attribute__((visibility("default"))) void *userstream_runtime_function(const char *name,
                                                                        const char *signature);
__attribute__((visibility("default"))) void userstream_redirect(const char *path, void *from,
                                                               void *to);

/* NULL: it is not simulated. */
void *userstream_runtime_function(const char *name, const char *signature) {
    for (RuntimeFunction *function = runtime_functions; function; function = function->next) {
        if (strcmp(function->name, name) == 0 &&
            (!function->signature || strstr(signature, function->signature)))
            return function->address;
    }
    return NULL;
}

typedef struct Redirection {
    const char *path;
    uintptr_t from;
    uintptr_t to;
} Redirection;

static int redirect_in(struct dl_phdr_info *object, size_t size, void *data) {
    UNUSED(size);
    const Redirection *wanted = data;
    if (strcmp(object->dlpi_name, wanted->path) != 0)
        return 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_W))
            continue;
        uintptr_t begin = object->dlpi_addr + segment->p_vaddr;
        uintptr_t end = begin + segment->p_memsz;
        for (begin = (begin + 7) & ~(uintptr_t)7; begin + sizeof(uintptr_t) <= end; begin += 8) {
            if (*(uintptr_t *)begin == wanted->from)
                *(uintptr_t *)begin = wanted->to;
        }
    }
    return 1;
}

/* In the variables of one library, what points to one function points to the other afterwards. */
void userstream_redirect(const char *path, void *from, void *to) {
    Redirection wanted = {path, (uintptr_t)from, (uintptr_t)to};
    dl_iterate_phdr(redirect_in, &wanted);
}
