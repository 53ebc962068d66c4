/* The CUresult codes: one list for the enum, for cuGetErrorName and for cuGetErrorString. */
#ifndef USERSTREAM_RESULTS_H
#define USERSTREAM_RESULTS_H

#define FOR_EACH_RESULT(X) \
    X(CUDA_SUCCESS, 0, "no error") \
    X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument") \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory") \
    X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error") \
    X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down") \
    X(CUDA_ERROR_STUB_LIBRARY, 34, "CUDA driver is a stub library") \
    X(CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, 36, "API call requires a newer CUDA driver") \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46, "CUDA-capable device(s) is/are busy or unavailable") \
    X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
    X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal") \
    X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid") \
    X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context") \
    X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed") \
    X(CUDA_ERROR_UNMAP_FAILED, 206, "unmapping of buffer object failed") \
    X(CUDA_ERROR_ALREADY_MAPPED, 208, "resource already mapped") \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, \
      "no kernel image is available for execution on the device") \
    X(CUDA_ERROR_NOT_MAPPED, 211, "resource not mapped") \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered") \
    X(CUDA_ERROR_UNSUPPORTED_LIMIT, 215, "limit is not supported on this architecture") \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, \
      "peer access is not supported between these devices") \
    X(CUDA_ERROR_INVALID_PTX, 218, "a PTX JIT compilation failed") \
    X(CUDA_ERROR_FILE_NOT_FOUND, 301, "file not found") \
    X(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
    X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle") \
    X(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found") \
    X(CUDA_ERROR_NOT_READY, 600, "device not ready") \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch") \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated") \
    X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
    X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled") \
    X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, 708, "the primary context is already active") \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed") \
    X(CUDA_ERROR_ASSERT, 710, "device-side assert triggered") \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "memory range is already registered") \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer is not a registered memory region") \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714, "hardware stack error") \
    X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715, "an illegal instruction was encountered") \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, 716, "misaligned address") \
    X(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717, "operation not supported on this address space") \
    X(CUDA_ERROR_INVALID_PC, 718, "invalid program counter") \
    X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure") \
    X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted") \
    X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported") \
    X(CUDA_ERROR_SYSTEM_NOT_READY, 802, "system not yet initialized") \
    X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803, \
      "system has unsupported display or driver combination") \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, \
      "operation not permitted when stream is capturing") \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, \
      "operation failed due to a previous error during capture") \
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, \
      "operation would result in a merge of separate capture sequences") \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream") \
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, \
      "capturing stream has unjoined work in another stream") \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, \
      "dependency created on uncaptured work in another stream") \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906, \
      "operation would make the legacy stream depend on a capturing blocking stream") \
    X(CUDA_ERROR_CAPTURED_EVENT, 907, \
      "operation not permitted on an event last recorded in a capturing stream") \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908, \
      "attempt to terminate a thread-local capture sequence from another thread") \
    X(CUDA_ERROR_TIMEOUT, 909, "wait operation timed out") \
    X(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, 910, "the graph update was not performed") \
    X(CUDA_ERROR_EXTERNAL_DEVICE, 911, "an async error has occurred in external entity") \
    X(CUDA_ERROR_INVALID_CLUSTER_SIZE, 912, "cluster misconfiguration") \
    X(CUDA_ERROR_INVALID_RESOURCE_TYPE, 914, "resource type is invalid") \
    X(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, 915, \
      "resource configuration is invalid for this operation") \
    X(CUDA_ERROR_STREAM_DETACHED, 917, \
      "the stream is detached, as its green context is destroyed") \
    X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

typedef enum CUresult {
#define RESULT_CODE(name, value, text) name = value,
    FOR_EACH_RESULT(RESULT_CODE)
#undef RESULT_CODE
} CUresult;

#endif
