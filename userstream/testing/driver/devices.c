/* Devices: what they are called and what they can do. */
#include "arrays.h"
#include "device_attributes.h"
#include "device_limits.h"
#include "driver.h"

#include <stdio.h>

/* ---- which devices there are ---------------------------------------------------------------- */

static CUdevice visible[MAX_DEVICES];   /* the number of each in the machine */

static void get_uuid(unsigned char uuid[16], CUdevice in_machine) {
    memcpy(uuid, "simulated-GPU-00", 16);
    uuid[14] = (unsigned char)('0' + in_machine / 10);
    uuid[15] = (unsigned char)('0' + in_machine % 10);
}

void device_print_uuid(char text[UUID_TEXT], CUdevice in_machine) {
    unsigned char uuid[16];
    get_uuid(uuid, in_machine);
    int at = sprintf(text, "GPU");
    for (int i = 0; i < 16; i++) {
        bool begins_a_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        at += sprintf(text + at, begins_a_group ? "-%02x" : "%02x", uuid[i]);
    }
}

/* The device that an entry of CUDA_VISIBLE_DEVICES names; -1: none. "Only the first few characters
 * of the UUID are needed", as many as make it unique. */
static CUdevice device_named(const char *entry, size_t length) {
    CUdevice found = -1;
    int matches = 0;
    char text[UUID_TEXT];
    char *end;
    long number = strtol(entry, &end, 10);
    if (length && end == entry + length)
        return number >= 0 && number < settings.devices ? (CUdevice)number : -1;
    for (CUdevice device = 0; device < settings.devices; device++) {
        device_print_uuid(text, device);
        if (length > strlen("GPU-") && strncmp(text, entry, length) == 0) {
            found = device;
            matches++;
        }
    }
    return matches == 1 ? found : -1;
}

static bool is_among(CUdevice device, const CUdevice *devices, int count) {
    for (int i = 0; i < count; i++) {
        if (devices[i] == device)
            return true;
    }
    return false;
}

/* "If one of the indices is invalid, only the devices whose index precedes the invalid index are
 * visible to CUDA applications." H100: if a device is named twice, cuInit fails: NAMED_TWICE. */
static int read_visible(const char *list) {
    int count = 0;
    for (const char *entry = list;; entry++) {
        entry += strspn(entry, " ");
        size_t length = strcspn(entry, ", ");
        CUdevice device = device_named(entry, length);
        if (device < 0)
            return count;
        if (is_among(device, visible, count))
            return NAMED_TWICE;
        visible[count++] = device;
        entry += length;
        entry += strspn(entry, " ");
        if (*entry != ',')
            return count;
    }
}

void devices_make_visible(void) {
    static bool is_done;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (is_done)
        return;
    is_done = true;
    for (CUdevice device = 0; device < settings.devices; device++)
        visible[device] = device;
    if (list)
        settings.devices = read_visible(list);
}

CUresult device_check(CUdevice device) {
    return device >= 0 && device < settings.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* ---- what is asked -------------------------------------------------------------------------- */

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
    CUresult result = device ? device_check(ordinal) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
}

DRIVER_FUNCTION(cuDeviceGetName, 2000, (char *name, int length, CUdevice device),
                (name, length, device)) {
    CUresult result = name && length > 0 ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "Simulated GPU %d", visible[device]);
    return result;
}

static CUresult answer_uuid(unsigned char uuid[16], CUdevice device) {
    CUresult result = uuid ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        get_uuid(uuid, visible[device]);
    return result;
}

DRIVER_FUNCTION(cuDeviceGetUuid, 9020, (unsigned char *uuid, CUdevice device), (uuid, device)) {
    return answer_uuid(uuid, device);
}

DRIVER_FUNCTION_AS(cuDeviceGetUuid_v2, cuDeviceGetUuid, 11040,
                   (unsigned char *uuid, CUdevice device), (uuid, device)) {
    return answer_uuid(uuid, device);
}

DRIVER_FUNCTION_AS(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice device),
                   (bytes, device)) {
    CUresult result = bytes ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *bytes = settings.memory;
    return result;
}

DRIVER_FUNCTION(cuDeviceGetPCIBusId, 4010, (char *id, int length, CUdevice device),
                (id, length, device)) {
    CUresult result = id && length > 0 ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        snprintf(id, (size_t)length, "0000:%02x:00.0", visible[device] + 1);
    return result;
}

DRIVER_FUNCTION(cuDeviceGetByPCIBusId, 4010, (CUdevice *out, const char *id), (out, id)) {
    unsigned domain;
    unsigned bus;
    unsigned slot = 0;
    if (!out || !id)
        return CUDA_ERROR_INVALID_VALUE;
    /* "[domain]:[bus]:[device].[function]", and from the right what may be left out. */
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3 &&
        (domain = 0, sscanf(id, "%x:%x", &bus, &slot)) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdevice device = 0; device < settings.devices; device++) {
        if (!domain && !slot && visible[device] + 1 == (CUdevice)bus) {
            *out = device;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

DRIVER_FUNCTION(cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device),
                (value, attribute, device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || attribute <= 0 || attribute > LAST_ATTRIBUTE)
        return CUDA_ERROR_INVALID_VALUE;
    *value = device_attributes[attribute];
    if (attribute == PCI_BUS_ID)
        *value = visible[device] + 1;
    if (attribute == MULTI_GPU_BOARD_GROUP_ID)
        *value = visible[device];
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDeviceComputeCapability, 2000, (int *major, int *minor, CUdevice device),
                (major, minor, device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = COMPUTE_CAPABILITY / 10;
    *minor = COMPUTE_CAPABILITY % 10;
    return CUDA_SUCCESS;
}

typedef struct Properties {     /* CUdevprop, of the attributes in this order */
    int numbers[14];
} Properties;

DRIVER_FUNCTION(cuDeviceGetProperties, 2000, (Properties *out, CUdevice device), (out, device)) {
    static const int attributes[14] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
    CUresult result = out ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 14 && result == CUDA_SUCCESS; i++)
        out->numbers[i] = device_attributes[attributes[i]];
    return result;
}

/* "The maximum number of elements allocatable in a 1D linear texture": as many as 2**28, and as fit
 * into the memory. */
DRIVER_FUNCTION(cuDeviceGetTexture1DLinearMaxWidth, 11010,
                (size_t *out, int format, unsigned channels, CUdevice device),
                (out, format, channels, device)) {
    const size_t most = 1 << 30;        /* H100: or as many as there are in 4 GiB */
    size_t element = format_bytes(format) * channels;
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !element || (channels != 1 && channels != 2 && channels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    *out = most < ((size_t)1 << 32) / element ? most : ((size_t)1 << 32) / element;
    return CUDA_SUCCESS;
}

static CUresult two_devices(int *value, CUdevice device, CUdevice peer) {
    CUresult result = value ? device_check(device) : CUDA_ERROR_INVALID_VALUE;
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
    enum { PERFORMANCE_RANK = 1, LAST = 5, RANK_OF_NVLINK = 0 };
    CUresult result = device == peer ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && (!value || attribute < PERFORMANCE_RANK || attribute > LAST))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = two_devices(value, device, peer);
    if (result == CUDA_SUCCESS && attribute == PERFORMANCE_RANK)
        *value = RANK_OF_NVLINK;
    return result;
}

DRIVER_FUNCTION(cuModuleGetLoadingMode, 11070, (int *mode), (mode)) {
    enum { EAGER = 1 };
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = EAGER;
    return CUDA_SUCCESS;
}

/* ---- profiling, which there is none ---------------------------------------------------------- */

DRIVER_FUNCTION(cuProfilerStart, 4000, (void), ()) {
    return context_usable(context_current());
}

DRIVER_FUNCTION(cuProfilerStop, 4000, (void), ()) {
    return context_usable(context_current());
}

/* The tables through which the statically linked runtime talks to the driver are not simulated. */
DRIVER_FUNCTION(cuGetExportTable, 3000, (const void **table, const void *id), (table, id)) {
    UNUSED(id);
    if (table)
        *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}
