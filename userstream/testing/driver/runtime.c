/* The functions of the CUDA runtime that cuda.bindings.runtime calls, made of the driver's.
 *
 * cuda.bindings have the runtime inside, and that one asks the driver for private tables. So the
 * bindings' own table of functions is changed instead: see testing/_simulated.py. Errors have the
 * same numbers in both. */
#define _GNU_SOURCE
#include "copies.h"
#include "runtime.h"

#include <link.h>

/* ---- the table ------------------------------------------------------------------------------ */

static RuntimeFunction *runtime_functions;

void runtime_register(RuntimeFunction *function) {
    function->next = runtime_functions;
    runtime_functions = function;
}

/* ---- errors and contexts of threads --------------------------------------------------------- */

static _Thread_local CUresult last_error;
static _Thread_local CUdevice chosen_device;    /* where the thread has no current context */

CUresult runtime_remember(CUresult result) {
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

CUresult runtime_start(void) {
    return cuInit(0);
}

static CUresult start_since(int version) {
    enum { CALL_REQUIRES_NEWER_DRIVER = 36 };
    if (settings.driver_version < version)
        return (CUresult)CALL_REQUIRES_NEWER_DRIVER;
    return runtime_start_with_context();
}

CUresult runtime_start_13_1(void) {
    return start_since(13010);
}

CUresult runtime_start_13_2(void) {
    return start_since(13020);
}

CUresult runtime_start_with_context(void) {
    Context *context = NULL;
    CUresult result = runtime_start();
    if (result == CUDA_SUCCESS)
        result = cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && !context)
        result = enter_device(chosen_device);
    return result;
}

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

SAME_FUNCTION(cudaDriverGetVersion, cuDriverGetVersion, runtime_start, (int *version), (version))
SAME_FUNCTION(cudaDeviceGetPCIBusId, cuDeviceGetPCIBusId, runtime_start,
              (char *id, int length, CUdevice device), (id, length, device))
SAME_FUNCTION(cudaDeviceGetByPCIBusId, cuDeviceGetByPCIBusId, runtime_start,
              (CUdevice *device, const char *id), (device, id))
SAME_FUNCTION(cudaDeviceGetAttribute, cuDeviceGetAttribute, runtime_start,
              (int *value, int attribute, CUdevice device), (value, attribute, device))
SAME_FUNCTION(cudaDeviceCanAccessPeer, cuDeviceCanAccessPeer, runtime_start,
              (int *value, CUdevice device, CUdevice peer), (value, device, peer))
SAME_FUNCTION(cudaDeviceGetP2PAttribute, cuDeviceGetP2PAttribute, runtime_start,
              (int *value, int attribute, CUdevice device, CUdevice peer),
              (value, attribute, device, peer))
SAME_FUNCTION(cudaDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, runtime_start,
              (Pool **out, CUdevice device), (out, device))
SAME_FUNCTION(cudaDeviceGetMemPool, cuDeviceGetMemPool, runtime_start,
              (Pool **out, CUdevice device), (out, device))
SAME_FUNCTION(cudaDeviceSetMemPool, cuDeviceSetMemPool, runtime_start,
              (CUdevice device, Pool *pool), (device, pool))
SAME(cudaDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest),
     (least, greatest))
SAME(cudaDeviceGetLimit, cuCtxGetLimit, (size_t *value, int limit), (value, limit))
SAME(cudaDeviceSetLimit, cuCtxSetLimit, (int limit, size_t value), (limit, value))
SAME(cudaMemGetInfo, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total), (free_bytes, total))

SAME_FUNCTION(cudaDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute, runtime_start,
              (CUdevice device, int attribute, uint64_t *value), (device, attribute, value))
SAME_FUNCTION(cudaDeviceSetGraphMemAttribute, cuDeviceSetGraphMemAttribute, runtime_start,
              (CUdevice device, int attribute, const uint64_t *value), (device, attribute, value))
SAME_FUNCTION(cudaDeviceGraphMemTrim, cuDeviceGraphMemTrim, runtime_start, (CUdevice device),
              (device))
SAME(cudaDeviceGetCacheConfig, cuCtxGetCacheConfig, (int *value), (value))
SAME(cudaDeviceSetCacheConfig, cuCtxSetCacheConfig, (int value), (value))
SAME(cudaDeviceGetSharedMemConfig, cuCtxGetSharedMemConfig, (int *value), (value))
SAME(cudaDeviceSetSharedMemConfig, cuCtxSetSharedMemConfig, (int value), (value))
SAME(cudaCtxResetPersistingL2Cache, cuCtxResetPersistingL2Cache, (void), ())
SAME(cudaProfilerStart, cuProfilerStart, (void), ())
SAME(cudaProfilerStop, cuProfilerStop, (void), ())

/* Without a device it answers that, and a count of none. */
RUNTIME_FUNCTION(cudaGetDeviceCount, do_not_start, (int *count), (count)) {
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = 0;
    CUresult result = runtime_start();
    return result == CUDA_SUCCESS ? cuDeviceGetCount(count) : result;
}

RUNTIME_FUNCTION(cudaGetDevice, runtime_start, (CUdevice *device), (device)) {
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
RUNTIME_FUNCTION(cudaSetDevice, runtime_start, (CUdevice device), (device)) {
    CUresult result = enter_device(device);
    if (result == CUDA_SUCCESS)
        chosen_device = device;
    return result;
}

/* "The device which has properties that best match": all are alike. */
RUNTIME_FUNCTION(cudaChooseDevice, runtime_start, (CUdevice *device, const void *properties),
                 (device, properties)) {
    if (!device || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *device = 0;
    return CUDA_SUCCESS;
}

/* "Initializes the device for use, without making it current." */
RUNTIME_FUNCTION(cudaInitDevice, runtime_start,
                 (CUdevice device, unsigned device_flags, unsigned flags),
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

RUNTIME_FUNCTION(cudaDeviceSynchronize, runtime_start_with_context, (void), ()) {
    return cuCtxSynchronize();
}

RUNTIME_FUNCTION(cudaDeviceReset, runtime_start, (void), ()) {
    CUdevice device = chosen_device;
    Context *context = NULL;
    CUresult result = cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && context)
        result = cuCtxGetDevice(&device);
    return result == CUDA_SUCCESS ? cuDevicePrimaryCtxReset_v2(device) : result;
}

enum { MAP_HOST = 8, SCHEDULE_MASK = 7 };   /* cudaDeviceMapHost, cudaDeviceScheduleMask */

/* "If there is no current device ... flags for the first device": of its primary context. */
RUNTIME_FUNCTION(cudaGetDeviceFlags, runtime_start, (unsigned *flags), (flags)) {
    Context *context = NULL;
    int active;
    CUresult result = flags ? cuCtxGetCurrent(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = context ? cuCtxGetFlags(flags)
                         : cuDevicePrimaryCtxGetState(chosen_device, flags, &active);
    if (result == CUDA_SUCCESS)
        *flags |= MAP_HOST;
    return result;
}

/* Spin, yield and blocking wait exclude each other. */
RUNTIME_FUNCTION(cudaSetDeviceFlags, runtime_start_with_context, (unsigned flags), (flags)) {
    CUdevice device;
    unsigned schedule = flags & SCHEDULE_MASK;
    if (schedule & (schedule - 1))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuCtxGetDevice(&device);
    return result == CUDA_SUCCESS ? cuDevicePrimaryCtxSetFlags_v2(device, flags & ~MAP_HOST)
                                  : result;
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

RUNTIME_FUNCTION(cudaDeviceEnablePeerAccess, runtime_start_with_context,
                 (CUdevice peer, unsigned flags), (peer, flags)) {
    return flags ? CUDA_ERROR_INVALID_VALUE : with_peer(peer, enable);
}

RUNTIME_FUNCTION(cudaDeviceDisablePeerAccess, runtime_start_with_context, (CUdevice peer), (peer)) {
    return with_peer(peer, cuCtxDisablePeerAccess);
}

/* ---- execution contexts ---------------------------------------------------------------------- */

/* One is the primary context, or the context that stands for a green one. */
SAME_FUNCTION(cudaDeviceGetDevResource, cuDeviceGetDevResource, runtime_start,
              (CUdevice device, void *out, int type), (device, out, type))
SAME(cudaDevSmResourceSplitByCount, cuDevSmResourceSplitByCount,
     (void *out, unsigned *groups, const void *input, void *rest, unsigned flags, unsigned least),
     (out, groups, input, rest, flags, least))
SAME(cudaDevSmResourceSplit, cuDevSmResourceSplit,
     (void *out, unsigned groups, const void *input, void *rest, unsigned flags, void *wanted),
     (out, groups, input, rest, flags, wanted))
SAME(cudaDevResourceGenerateDesc, cuDevResourceGenerateDesc,
     (void **out, void *resources, unsigned count), (out, resources, count))
SAME(cudaStreamGetDevResource, cuStreamGetDevResource, (Stream *stream, void *out, int type),
     (stream, out, type))
SAME(cudaExecutionCtxGetDevice, cuCtxGetDevice_v2, (CUdevice *out, Context *context),
     (out, context))
SAME(cudaExecutionCtxGetId, cuCtxGetId, (Context *context, uint64_t *out), (context, out))
SAME(cudaExecutionCtxGetDevResource, cuCtxGetDevResource, (Context *context, void *out, int type),
     (context, out, type))
SAME(cudaExecutionCtxSynchronize, cuCtxSynchronize_v2, (Context *context), (context))
SAME(cudaExecutionCtxRecordEvent, cuCtxRecordEvent, (Context *context, Event *event),
     (context, event))
SAME(cudaExecutionCtxWaitEvent, cuCtxWaitEvent, (Context *context, Event *event),
     (context, event))

CUresult cuGreenCtxCreate(GreenContext **out, void *description, CUdevice device, unsigned flags);
CUresult cuGreenCtxDestroy(GreenContext *green);
CUresult cuCtxFromGreenCtx(Context **out, GreenContext *green);
CUresult cuStreamCreateWithPriority(Stream **out, unsigned flags, int priority);

RUNTIME_FUNCTION(cudaDeviceGetExecutionCtx, runtime_start, (Context **out, CUdevice device),
                 (out, device)) {
    Context *contexts[2];
    CUresult result =
        out ? runtime_peers(contexts, device, device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = contexts[0];
    return result;
}

RUNTIME_FUNCTION(cudaGreenCtxCreate, runtime_start_with_context,
                 (Context **out, void *description, CUdevice device, unsigned flags),
                 (out, description, device, flags)) {
    enum { DEFAULT_STREAM = 1 };        /* the driver makes none without */
    GreenContext *green;
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuGreenCtxCreate(&green, description, device, DEFAULT_STREAM);
    return result == CUDA_SUCCESS ? cuCtxFromGreenCtx(out, green) : result;
}

RUNTIME_FUNCTION(cudaExecutionCtxDestroy, runtime_start_with_context, (Context *context),
                 (context)) {
    lock();
    GreenContext *green = context_green(context);
    unlock();
    return green ? cuGreenCtxDestroy(green) : CUDA_ERROR_INVALID_VALUE;
}

RUNTIME_FUNCTION(cudaExecutionCtxStreamCreate, runtime_start_with_context,
                 (Stream **out, Context *context, unsigned flags, int priority),
                 (out, context, flags, priority)) {
    Context *before;
    lock();
    bool is_green = context_green(context);
    unlock();
    CUresult result = cuCtxGetCurrent(&before);
    if (result == CUDA_SUCCESS)
        result = cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS)
        result = cuStreamCreateWithPriority(out, is_green ? flags | STREAM_NON_BLOCKING : flags,
                                            priority);
    cuCtxSetCurrent(before);
    return result;
}

/* ---- properties ----------------------------------------------------------------------------- */

/* cudaDeviceProp: name, UUID, LUID with its mask and memory, then attributes of the device. */
enum {
    PROPERTY_NAME = 256,
    PROPERTY_UUID = 16,
    PROPERTY_MEMORY_AT = 288,
    WIDE = 0x1000,              /* a size_t */
    ONLY_12 = 0x2000,           /* in the runtime of CUDA 12 alone */
    ONLY_13 = 0x4000,
    ATTRIBUTE = 0xfff,
};

static const short properties[] = {
    WIDE | 8, 12, 10, WIDE | 11, 1, 2, 3, 4, 5, 6, 7, ONLY_12 | 13, WIDE | 9, 75, 76, WIDE | 14,
    WIDE | 51, ONLY_12 | 15, 16, ONLY_12 | 17, 18, 19, ONLY_12 | 20, 21, 77, ONLY_12 | 69, 22,
    23, 73, 74, 70, 71, 72, 45, 46, 24, 25, 26, 47, 48, 49, 52, 42, 43, 27, 28, 29, 53, 54, 55,
    56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, WIDE | 30, 31, 32, 33, 34, 50, 35, 40,
    41, ONLY_12 | 36, 37, 38, 108, 39, 78, 79, 80, WIDE | 81, 82, 83, 84, 85, 86, ONLY_12 | 87,
    88, 89, 90, 91, 95, ONLY_12 | 96, WIDE | 97, 100, 101, 106, 109, WIDE | 111, 99, 112, 113,
    114, 115, 116, 117, 118, 119, 121, 125, 120, 129, ONLY_13 | 130, ONLY_13 | 131,
    ONLY_13 | 133, ONLY_13 | 134, ONLY_13 | 139, ONLY_13 | 140, ONLY_13 | 143,
};

CUresult cuDeviceGetName(char *name, int length, CUdevice device);
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device);
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);

/* `other` marks the properties of the other version of the runtime. */
static CUresult get_properties(char *out, CUdevice device, short other) {
    CUresult result = out ? cuDeviceGetName(out, PROPERTY_NAME, device) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    memset(out + PROPERTY_NAME, 0, PROPERTY_MEMORY_AT - PROPERTY_NAME);
    cuDeviceGetUuid_v2((unsigned char *)out + PROPERTY_NAME, device);
    cuDeviceTotalMem_v2((size_t *)(out + PROPERTY_MEMORY_AT), device);
    char *at = out + PROPERTY_MEMORY_AT + sizeof(size_t);
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++) {
        int value = 0;
        if (properties[i] & other)
            continue;
        cuDeviceGetAttribute(&value, properties[i] & ATTRIBUTE, device);
        if (properties[i] & WIDE) {
            at += -(uintptr_t)at % sizeof(size_t);
            *(size_t *)at = (size_t)value;
            at += sizeof(size_t);
        } else {
            *(int *)at = value;
            at += sizeof(int);
        }
    }
    return CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaGetDeviceProperties, runtime_start, (char *out, CUdevice device),
                 (out, device)) {
    return get_properties(out, device, ONLY_12);
}

RUNTIME_FUNCTION_AS(properties_12, cudaGetDeviceProperties, "CUDA 12", runtime_start,
                    (char *out, CUdevice device), (out, device)) {
    return get_properties(out, device, ONLY_13);
}

/* ---- functions of the driver ---------------------------------------------------------------- */

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                             int *status);
CUresult cuDriverGetVersion(int *version);

RUNTIME_FUNCTION(cudaGetDriverEntryPointByVersion, runtime_start,
                 (const char *name, void **address, unsigned version, uint64_t flags,
                  int *status),
                 (name, address, version, flags, status)) {
    return cuGetProcAddress_v2(name, address, (int)version, flags, status);
}

RUNTIME_FUNCTION(cudaGetDriverEntryPoint, runtime_start,
                 (const char *name, void **address, uint64_t flags, int *status),
                 (name, address, flags, status)) {
    int version;
    cuDriverGetVersion(&version);
    return cuGetProcAddress_v2(name, address, version, flags, status);
}

/* ---- libraries and kernels ------------------------------------------------------------------ */

SAME(cudaLibraryLoadData, cuLibraryLoadData,
     (void **out, const void *image, int *jit_options, void **jit_values, unsigned jit_count,
      int *options, void **values, unsigned count),
     (out, image, jit_options, jit_values, jit_count, options, values, count))
SAME(cudaLibraryLoadFromFile, cuLibraryLoadFromFile,
     (void **out, const char *path, int *jit_options, void **jit_values, unsigned jit_count,
      int *options, void **values, unsigned count),
     (out, path, jit_options, jit_values, jit_count, options, values, count))
SAME(cudaLibraryUnload, cuLibraryUnload, (void *library), (library))
SAME(cudaLibraryGetKernel, cuLibraryGetKernel, (void **out, void *library, const char *name),
     (out, library, name))
SAME(cudaLibraryGetKernelCount, cuLibraryGetKernelCount, (unsigned *out, void *library),
     (out, library))
SAME(cudaLibraryEnumerateKernels, cuLibraryEnumerateKernels,
     (void **out, unsigned count, void *library), (out, count, library))
SAME(cudaLibraryGetGlobal, cuLibraryGetGlobal,
     (CUdeviceptr *address, size_t *size, void *library, const char *name),
     (address, size, library, name))
SAME(cudaLibraryGetManaged, cuLibraryGetManaged,
     (CUdeviceptr *address, size_t *size, void *library, const char *name),
     (address, size, library, name))
SAME(cudaLibraryGetUnifiedFunction, cuLibraryGetUnifiedFunction,
     (void **out, void *library, const char *name), (out, library, name))
SAME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,
     (int *out, void *kernel, int block_size, size_t shared_bytes),
     (out, kernel, block_size, shared_bytes))
SAME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     (int *out, void *kernel, int block_size, size_t shared_bytes, unsigned flags),
     (out, kernel, block_size, shared_bytes, flags))
SAME(cudaOccupancyAvailableDynamicSMemPerBlock, cuOccupancyAvailableDynamicSMemPerBlock,
     (size_t *out, void *kernel, int blocks, int block_size), (out, kernel, blocks, block_size))
SAME(cudaFuncSetAttribute, cuFuncSetAttribute, (void *kernel, int attribute, int value),
     (kernel, attribute, value))
SAME(cudaFuncSetCacheConfig, cuFuncSetCacheConfig, (void *kernel, int config), (kernel, config))

CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, CUdevice device);
CUresult cuFuncGetAttribute(int *value, int attribute, void *kernel);

SAME(cudaFuncGetName, cuFuncGetName, (const char **out, void *kernel), (out, kernel))
SAME(cudaFuncGetParamInfo, cuFuncGetParamInfo,
     (void *kernel, size_t index, size_t *offset, size_t *size), (kernel, index, offset, size))
SAME_FUNCTION(cudaFuncGetParamCount, cuFuncGetParamCount, runtime_start_13_2,
              (void *kernel, size_t *out), (kernel, out))

RUNTIME_FUNCTION(cudaKernelSetAttributeForDevice, runtime_start_with_context,
                 (void *kernel, int attribute, int value, CUdevice device),
                 (kernel, attribute, value, device)) {
    return cuKernelSetAttribute(attribute, value, kernel, device);
}

/* cudaFuncAttributes: three sizes, then numbers; both are attributes of a function. */
typedef struct KernelAttributes {
    size_t sizes[3];
    int numbers[13];
} KernelAttributes;

RUNTIME_FUNCTION(cudaFuncGetAttributes, runtime_start_with_context,
                 (KernelAttributes *out, void *kernel), (out, kernel)) {
    static const int sizes[3] = {1, 2, 3};
    static const int numbers[13] = {0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    CUresult result = out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 3 && result == CUDA_SUCCESS; i++) {
        int value = 0;
        result = cuFuncGetAttribute(&value, sizes[i], kernel);
        out->sizes[i] = (size_t)value;
    }
    for (int i = 0; i < 13 && result == CUDA_SUCCESS; i++)
        result = cuFuncGetAttribute(&out->numbers[i], numbers[i], kernel);
    return result;
}

/* ---- streams and events --------------------------------------------------------------------- */

enum { DEFAULT_FLAGS = 0 };

CUresult cuStreamCreate(Stream **out, unsigned flags);
CUresult cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags);
CUresult cuEventCreate(Event **out, unsigned flags);

RUNTIME_FUNCTION(cudaStreamCreate, runtime_start_with_context, (Stream **out), (out)) {
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

RUNTIME_FUNCTION(cudaEventCreate, runtime_start_with_context, (Event **out), (out)) {
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
CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, CUdeviceptr source, size_t size);
CUresult cuMemcpyDtoH_v2(CUdeviceptr destination, CUdeviceptr source, size_t size);
CUresult cuMemcpyDtoD_v2(CUdeviceptr destination, CUdeviceptr source, size_t size);
CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t size, Stream *stream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t size,
                              Stream *stream);
CUresult cuMemcpyDtoHAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t size,
                              Stream *stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t size,
                              Stream *stream);
CUresult cuMemsetD8_v2(CUdeviceptr destination, unsigned char value, size_t size);
CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t size,
                         Stream *stream);
CUresult cuStreamSynchronize(Stream *stream);
CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out,
                                CUdeviceptr address);

/* The runtime answers NULL for no bytes; the driver refuses them. */
RUNTIME_FUNCTION(cudaMalloc, runtime_start_with_context, (CUdeviceptr *address, size_t size),
                 (address, size)) {
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    *address = 0;
    return size ? cuMemAlloc_v2(address, size) : CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaFreeHost, runtime_start_with_context, (CUdeviceptr address), (address)) {
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

SAME(cudaMemPoolCreate, cuMemPoolCreate, (Pool **out, const void *properties), (out, properties))
SAME(cudaMemPoolSetAccess, cuMemPoolSetAccess, (Pool *pool, const void *access, size_t count),
     (pool, access, count))
SAME(cudaMemPoolGetAccess, cuMemPoolGetAccess, (unsigned *flags, Pool *pool, Location *location),
     (flags, pool, location))
SAME(cudaMemPoolExportPointer, cuMemPoolExportPointer, (void *out, CUdeviceptr address),
     (out, address))
SAME(cudaMemPoolImportPointer, cuMemPoolImportPointer,
     (CUdeviceptr *out, Pool *pool, const void *exported), (out, pool, exported))
SAME(cudaMemGetDefaultMemPool, cuMemGetDefaultMemPool, (Pool **out, Location *location, int type),
     (out, location, type))
SAME(cudaMemGetMemPool, cuMemGetMemPool, (Pool **out, Location *location, int type),
     (out, location, type))
SAME(cudaMemSetMemPool, cuMemSetMemPool, (Location *location, int type, Pool *pool),
     (location, type, pool))

CUresult cuMemPoolExportToShareableHandle(void *out, Pool *pool, int type, uint64_t flags);
CUresult cuMemPoolImportFromShareableHandle(Pool **out, void *handle, int type, uint64_t flags);
CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                            unsigned element);

RUNTIME_FUNCTION(cudaMemPoolExportToShareableHandle, runtime_start_with_context,
                 (void *out, Pool *pool, int type, unsigned flags), (out, pool, type, flags)) {
    return cuMemPoolExportToShareableHandle(out, pool, type, flags);
}

RUNTIME_FUNCTION(cudaMemPoolImportFromShareableHandle, runtime_start_with_context,
                 (Pool **out, void *handle, int type, unsigned flags),
                 (out, handle, type, flags)) {
    return cuMemPoolImportFromShareableHandle(out, handle, type, flags);
}

RUNTIME_FUNCTION(cudaMallocPitch, runtime_start_with_context,
                 (CUdeviceptr *address, size_t *pitch, size_t width, size_t height),
                 (address, pitch, width, height)) {
    enum { ELEMENT = 4 };
    if (!address || !pitch)
        return CUDA_ERROR_INVALID_VALUE;
    *address = *pitch = 0;
    if (!width || !height)
        return CUDA_SUCCESS;
    return cuMemAllocPitch_v2(address, pitch, width, height, ELEMENT);
}

/* ---- memory of other processes -------------------------------------------------------------- */

typedef struct IpcBytes {       /* cudaIpcMemHandle_t, cudaIpcEventHandle_t */
    char bytes[64];
} IpcBytes;

SAME(cudaIpcGetMemHandle, cuIpcGetMemHandle, (IpcBytes *out, CUdeviceptr address), (out, address))
SAME(cudaIpcOpenMemHandle, cuIpcOpenMemHandle_v2,
     (CUdeviceptr *out, IpcBytes handle, unsigned flags), (out, handle, flags))
SAME(cudaIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr address), (address))
SAME(cudaIpcGetEventHandle, cuIpcGetEventHandle, (IpcBytes *out, Event *event), (out, event))
SAME(cudaIpcOpenEventHandle, cuIpcOpenEventHandle, (Event **out, IpcBytes handle), (out, handle))

/* ---- managed memory ------------------------------------------------------------------------- */

#define LOCATION "cudaMemLocation"      /* in the signatures of CUDA 13, and in those of "_v2" */

SAME(cudaMemAdvise, cuMemAdvise, (CUdeviceptr address, size_t size, int advice, CUdevice device),
     (address, size, advice, device))
SAME_IF(cudaMemAdvise, LOCATION, cuMemAdvise_v2,
        (CUdeviceptr address, size_t size, int advice, Location location),
        (address, size, advice, location))
ALSO(cuMemAdvise_v2_as_cudaMemAdvise, cudaMemAdvise_v2)
SAME(cudaMemPrefetchAsync, cuMemPrefetchAsync,
     (CUdeviceptr address, size_t size, CUdevice device, Stream *stream),
     (address, size, device, stream))
SAME_IF(cudaMemPrefetchAsync, LOCATION, cuMemPrefetchAsync_v2,
        (CUdeviceptr address, size_t size, Location location, unsigned flags, Stream *stream),
        (address, size, location, flags, stream))
ALSO(cuMemPrefetchAsync_v2_as_cudaMemPrefetchAsync, cudaMemPrefetchAsync_v2)
SAME(cudaMemPrefetchBatchAsync, cuMemPrefetchBatchAsync,
     (CUdeviceptr *addresses, size_t *sizes, size_t count, Location *locations, size_t *begins,
      size_t places, uint64_t flags, Stream *stream),
     (addresses, sizes, count, locations, begins, places, flags, stream))
SAME(cudaMemDiscardBatchAsync, cuMemDiscardBatchAsync,
     (CUdeviceptr *addresses, size_t *sizes, size_t count, uint64_t flags, Stream *stream),
     (addresses, sizes, count, flags, stream))
SAME(cudaMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync,
     (CUdeviceptr *addresses, size_t *sizes, size_t count, Location *locations, size_t *begins,
      size_t places, uint64_t flags, Stream *stream),
     (addresses, sizes, count, locations, begins, places, flags, stream))
SAME(cudaMemRangeGetAttribute, cuMemRangeGetAttribute,
     (void *out, size_t size, int attribute, CUdeviceptr address, size_t count),
     (out, size, attribute, address, count))
SAME(cudaMemRangeGetAttributes, cuMemRangeGetAttributes,
     (void **out, size_t *sizes, int *attributes, size_t how_many, CUdeviceptr address,
      size_t count),
     (out, sizes, attributes, how_many, address, count))

/* ---- copies and fills ----------------------------------------------------------------------- */

CUresult runtime_check_kind(int kind) {
    enum { INVALID_MEMCPY_DIRECTION = 21 };
    return kind < 0 || kind > KIND_DEFAULT ? (CUresult)INVALID_MEMCPY_DIRECTION : CUDA_SUCCESS;
}

/* H100: what is said to be of the host may be on a device. */
int runtime_memory_type(int kind, int side) {
    return kind == KIND_DEFAULT ? TYPE_UNIFIED : kind & side ? TYPE_DEVICE : TYPE_HOST;
}

RUNTIME_FUNCTION(cudaMemcpy, runtime_start_with_context,
                 (CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (destination, source, size, kind)) {
    CUresult (*const copies[])(CUdeviceptr, CUdeviceptr, size_t) = {
        cuMemcpy, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2, cuMemcpyDtoD_v2, cuMemcpy};
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? copies[kind](destination, source, size) : result;
}

RUNTIME_FUNCTION(cudaMemcpyAsync, runtime_start_with_context,
                 (CUdeviceptr destination, CUdeviceptr source, size_t size, int kind,
                  Stream *stream),
                 (destination, source, size, kind, stream)) {
    CUresult (*const copies[])(CUdeviceptr, CUdeviceptr, size_t, Stream *) = {
        cuMemcpyAsync, cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuMemcpyDtoDAsync_v2,
        cuMemcpyAsync};
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? copies[kind](destination, source, size, stream) : result;
}

SAME_FUNCTION(cudaMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync, runtime_start_13_2,
              (CUdeviceptr destination, CUdeviceptr source, size_t size, void *attributes,
               Stream *stream),
              (destination, source, size, attributes, stream))
SAME(cudaMemcpyBatchAsync, cuMemcpyBatchAsync_v2,
     (CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
      void *attributes, size_t *indices, size_t attribute_count, Stream *stream),
     (destinations, sources, sizes, count, attributes, indices, attribute_count, stream))
SAME_IF(cudaMemcpyBatchAsync, "size_t *, cudaStream_t", cuMemcpyBatchAsync,    /* CUDA 12 */
        (CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
         void *attributes, size_t *indices, size_t attribute_count, size_t *failed,
         Stream *stream),
        (destinations, sources, sizes, count, attributes, indices, attribute_count, failed,
         stream))

CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copy);
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, Stream *stream);
CUresult cuMemcpyPeer(CUdeviceptr destination, Context *to, CUdeviceptr source, Context *from,
                      size_t size);
CUresult cuMemcpyPeerAsync(CUdeviceptr destination, Context *to, CUdeviceptr source,
                           Context *from, size_t size, Stream *stream);

static CUresult rectangle(CUDA_MEMCPY2D *copy, CUdeviceptr destination, size_t destination_pitch,
                          CUdeviceptr source, size_t source_pitch, size_t width, size_t height,
                          int kind) {
    *copy = (CUDA_MEMCPY2D){
        .source = {.type = runtime_memory_type(kind, SOURCE), .host = source, .device = source,
                   .pitch = source_pitch},
        .destination = {.type = runtime_memory_type(kind, DESTINATION), .host = destination,
                        .device = destination, .pitch = destination_pitch},
        .width = width,
        .height = height};
    if (height > 1 && (width > destination_pitch || width > source_pitch))
        return (CUresult)RUNTIME_INVALID_PITCH;
    return runtime_check_kind(kind);
}

RUNTIME_FUNCTION(cudaMemcpy2D, runtime_start_with_context,
                 (CUdeviceptr destination, size_t destination_pitch, CUdeviceptr source,
                  size_t source_pitch, size_t width, size_t height, int kind),
                 (destination, destination_pitch, source, source_pitch, width, height, kind)) {
    CUDA_MEMCPY2D copy;
    CUresult result = rectangle(&copy, destination, destination_pitch, source, source_pitch,
                                width, height, kind);
    return result == CUDA_SUCCESS ? cuMemcpy2DUnaligned_v2(&copy) : result;
}

RUNTIME_FUNCTION(cudaMemcpy2DAsync, runtime_start_with_context,
                 (CUdeviceptr destination, size_t destination_pitch, CUdeviceptr source,
                  size_t source_pitch, size_t width, size_t height, int kind, Stream *stream),
                 (destination, destination_pitch, source, source_pitch, width, height, kind,
                  stream)) {
    CUDA_MEMCPY2D copy;
    CUresult result = rectangle(&copy, destination, destination_pitch, source, source_pitch,
                                width, height, kind);
    return result == CUDA_SUCCESS ? cuMemcpy2DAsync_v2(&copy, stream) : result;
}

CUresult runtime_peers(Context *contexts[2], CUdevice first, CUdevice second) {
    Context *before;
    CUresult result = cuCtxGetCurrent(&before);
    for (int i = 0; i < 2 && result == CUDA_SUCCESS; i++) {
        result = enter_device(i ? second : first);
        if (result == CUDA_SUCCESS)
            result = cuCtxGetCurrent(&contexts[i]);
    }
    cuCtxSetCurrent(before);
    return result;
}

RUNTIME_FUNCTION(cudaMemcpyPeer, runtime_start_with_context,
                 (CUdeviceptr destination, CUdevice to, CUdeviceptr source, CUdevice from,
                  size_t size),
                 (destination, to, source, from, size)) {
    Context *contexts[2];
    CUresult result = runtime_peers(contexts, to, from);
    if (result != CUDA_SUCCESS)
        return result;
    return cuMemcpyPeer(destination, contexts[0], source, contexts[1], size);
}

RUNTIME_FUNCTION(cudaMemcpyPeerAsync, runtime_start_with_context,
                 (CUdeviceptr destination, CUdevice to, CUdeviceptr source, CUdevice from,
                  size_t size, Stream *stream),
                 (destination, to, source, from, size, stream)) {
    Context *contexts[2];
    CUresult result = runtime_peers(contexts, to, from);
    if (result != CUDA_SUCCESS)
        return result;
    return cuMemcpyPeerAsync(destination, contexts[0], source, contexts[1], size, stream);
}

RUNTIME_FUNCTION(cudaMemset, runtime_start_with_context,
                 (CUdeviceptr address, int value, size_t size), (address, value, size)) {
    return cuMemsetD8_v2(address, (unsigned char)value, size);
}

RUNTIME_FUNCTION(cudaMemsetAsync, runtime_start_with_context,
                 (CUdeviceptr address, int value, size_t size, Stream *stream),
                 (address, value, size, stream)) {
    return cuMemsetD8Async(address, (unsigned char)value, size, stream);
}

typedef struct PointerAttributes {  /* cudaPointerAttributes; CUDA 13 has room behind it */
    enum { UNREGISTERED, HOST, DEVICE, MANAGED } type;
    int device;
    CUdeviceptr device_pointer;
    CUdeviceptr host_pointer;
} PointerAttributes;

RUNTIME_FUNCTION(cudaPointerGetAttributes, runtime_start_with_context,
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
