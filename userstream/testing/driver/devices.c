/* Devices: what they are called and what they can do. */
#include "driver.h"

#include <stdio.h>

CUresult device_check(CUdevice device) {
    return device >= 0 && device < settings.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

DRIVER_FUNCTION_ANYTIME(cuDriverGetVersion, 2020, (int *version), (version)) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = settings.driver_version;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDeviceGetCount, 2000, (int *count), (count)) {
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = settings.devices;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDeviceGet, 2000, (CUdevice *device, int ordinal), (device, ordinal)) {
    CUresult result = device_check(ordinal);
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
}

DRIVER_FUNCTION(cuDeviceGetName, 2000, (char *name, int length, CUdevice device),
                (name, length, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "Simulated GPU %d", device);
    return result;
}

static CUresult get_uuid(char uuid[16], CUdevice device) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(uuid, "simulated-GPU-00", 16);
    uuid[14] = (char)('0' + device / 10);
    uuid[15] = (char)('0' + device % 10);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDeviceGetUuid, 9020, (char *uuid, CUdevice device), (uuid, device)) {
    return get_uuid(uuid, device);
}

DRIVER_FUNCTION_AS(cuDeviceGetUuid_v2, cuDeviceGetUuid, 11040, (char *uuid, CUdevice device),
                   (uuid, device)) {
    return get_uuid(uuid, device);
}

DRIVER_FUNCTION_AS(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice device),
                   (bytes, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        *bytes = settings.memory;
    return result;
}

DRIVER_FUNCTION(cuDeviceGetPCIBusId, 4010, (char *id, int length, CUdevice device),
                (id, length, device)) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
    return result;
}

DRIVER_FUNCTION(cuDeviceGetByPCIBusId, 4010, (CUdevice *device, const char *id), (device, id)) {
    unsigned domain;
    unsigned bus;
    if (!id || sscanf(id, "%x:%x", &domain, &bus) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = device_check((CUdevice)bus - 1);
    if (result == CUDA_SUCCESS)
        *device = (CUdevice)bus - 1;
    return result;
}

/* CUdevice_attribute values; those that are not here are 0. */
static const struct {
    int attribute;
    int value;
} attributes[] = {
    {1, 1024},          /* MAX_THREADS_PER_BLOCK */
    {2, 1024},          /* MAX_BLOCK_DIM_X */
    {3, 1024},          /* MAX_BLOCK_DIM_Y */
    {4, 64},            /* MAX_BLOCK_DIM_Z */
    {5, 2147483647},    /* MAX_GRID_DIM_X */
    {6, 65535},         /* MAX_GRID_DIM_Y */
    {7, 65535},         /* MAX_GRID_DIM_Z */
    {8, 49152},         /* MAX_SHARED_MEMORY_PER_BLOCK */
    {9, 65536},         /* TOTAL_CONSTANT_MEMORY */
    {10, 32},           /* WARP_SIZE */
    {11, 2147483647},   /* MAX_PITCH */
    {12, 65536},        /* MAX_REGISTERS_PER_BLOCK */
    {13, 1980000},      /* CLOCK_RATE */
    {14, 512},          /* TEXTURE_ALIGNMENT */
    {15, 1},            /* GPU_OVERLAP */
    {16, 132},          /* MULTIPROCESSOR_COUNT */
    {19, 1},            /* CAN_MAP_HOST_MEMORY */
    {31, 1},            /* CONCURRENT_KERNELS */
    {38, 52428800},     /* L2_CACHE_SIZE */
    {39, 2048},         /* MAX_THREADS_PER_MULTIPROCESSOR */
    {40, 3},            /* ASYNC_ENGINE_COUNT */
    {41, 1},            /* UNIFIED_ADDRESSING */
    {75, 9},            /* COMPUTE_CAPABILITY_MAJOR */
    {76, 0},            /* COMPUTE_CAPABILITY_MINOR */
    {78, 1},            /* STREAM_PRIORITIES_SUPPORTED */
    {83, 1},            /* MANAGED_MEMORY */
    {89, 1},            /* CONCURRENT_MANAGED_ACCESS */
    {91, 1},            /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    {95, 1},            /* COOPERATIVE_LAUNCH */
    {99, 1},            /* HOST_REGISTER_SUPPORTED */
    {115, 1},           /* MEMORY_POOLS_SUPPORTED */
    /* H200: the attributes of the first version of memory operations, 92 to 94, are 0. */
    {109, 134213632},   /* MAX_ACCESS_POLICY_WINDOW_SIZE */
    {122, 1},           /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    {123, 1},           /* CAN_USE_STREAM_WAIT_VALUE_NOR */
    {126, 4},           /* MEM_SYNC_DOMAIN_COUNT */
    {142, 1},           /* HOST_NUMA_MEMORY_POOLS_SUPPORTED; the node, 134, is 0 */
    {144, 1},           /* HOST_MEMORY_POOLS_SUPPORTED */
};

enum { LAST_ATTRIBUTE = 200, PCI_BUS_ID = 33 };

DRIVER_FUNCTION(cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device),
                (value, attribute, device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || attribute <= 0 || attribute > LAST_ATTRIBUTE)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == PCI_BUS_ID ? device + 1 : 0;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (attributes[i].attribute == attribute)
            *value = attributes[i].value;
    }
    return CUDA_SUCCESS;
}

static CUresult two_devices(int *value, CUdevice device, CUdevice peer) {
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        result = device_check(peer);
    if (result == CUDA_SUCCESS)
        *value = device != peer;
    return result;
}

DRIVER_FUNCTION(cuDeviceCanAccessPeer, 4000, (int *value, CUdevice device, CUdevice peer),
                (value, device, peer)) {
    return two_devices(value, device, peer);
}

DRIVER_FUNCTION(cuDeviceGetP2PAttribute, 8000,
                (int *value, int attribute, CUdevice device, CUdevice peer),
                (value, attribute, device, peer)) {
    UNUSED(attribute);
    if (device == peer)
        return CUDA_ERROR_INVALID_DEVICE;
    return two_devices(value, device, peer);
}

DRIVER_FUNCTION(cuModuleGetLoadingMode, 11070, (int *mode), (mode)) {
    enum { EAGER = 1 };
    *mode = EAGER;
    return CUDA_SUCCESS;
}

/* The tables through which the statically linked runtime talks to the driver are not simulated. */
DRIVER_FUNCTION(cuGetExportTable, 3000, (const void **table, const void *id), (table, id)) {
    UNUSED(id);
    if (table)
        *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}
