/* libnvidia-ml beside the simulated driver: which devices the machine has, and what they are.
 *
 * Programs count devices with it. It knows all of them, whatever CUDA_VISIBLE_DEVICES hides. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define NVML __attribute__((visibility("default")))

#define FOR_EACH_RESULT(X) \
    X(NVML_SUCCESS, 0, "Success") \
    X(NVML_ERROR_UNINITIALIZED, 1, "Uninitialized") \
    X(NVML_ERROR_INVALID_ARGUMENT, 2, "Invalid Argument") \
    X(NVML_ERROR_NOT_SUPPORTED, 3, "Not Supported") \
    X(NVML_ERROR_NOT_FOUND, 6, "Not Found") \
    X(NVML_ERROR_INSUFFICIENT_SIZE, 7, "Insufficient Size") \
    X(NVML_ERROR_DRIVER_NOT_LOADED, 9, "Driver Not Loaded") \
    X(NVML_ERROR_FUNCTION_NOT_FOUND, 13, "Function Not Found") \
    X(NVML_ERROR_UNKNOWN, 999, "Unknown Error")

typedef enum Result {
#define RESULT_CODE(name, value, text) name = value,
    FOR_EACH_RESULT(RESULT_CODE)
#undef RESULT_CODE
} Result;

/* ---- the simulated driver ------------------------------------------------------------------- */

enum { TEXT_OF_UUID = 41, MAX_DEVICES = 16 };

typedef struct Machine {        /* as side_door.c of the driver has it */
    int devices;
    int driver_version;
    size_t memory;
} Machine;

static int users;
static Machine machine;
static void (*print_uuid)(char *text, int device);

/* A device is its number, in an address that is not 0. */
typedef char *Device;
static char devices[MAX_DEVICES];

static Result look_at_machine(void) {
    void (*look)(Machine *) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver) {
        *(void **)&look = dlsym(driver, "userstream_machine");
        *(void **)&print_uuid = dlsym(driver, "userstream_print_uuid");
    }
    if (!look || !print_uuid)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    look(&machine);
    return NVML_SUCCESS;
}

static Result start(void) {
    Result result = look_at_machine();
    users += result == NVML_SUCCESS;
    return result;
}

static Result check(Device device, const void *out) {
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    bool is_one = device >= devices && device < devices + machine.devices;
    return is_one && out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static Result answer_text(char *out, unsigned size, const char *text) {
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

/* ---- the library ---------------------------------------------------------------------------- */

NVML Result nvmlInit_v2(void);
NVML Result nvmlInitWithFlags(unsigned flags);
NVML Result nvmlShutdown(void);
NVML const char *nvmlErrorString(Result result);
NVML Result nvmlSystemGetCudaDriverVersion(int *version);
NVML Result nvmlSystemGetCudaDriverVersion_v2(int *version);
NVML Result nvmlSystemGetDriverVersion(char *text, unsigned size);
NVML Result nvmlSystemGetNVMLVersion(char *text, unsigned size);

typedef struct Branch {         /* nvmlSystemDriverBranchInfo_t */
    unsigned version;
    char text[80];
} Branch;

NVML Result nvmlSystemGetDriverBranch(Branch *branch, unsigned size);

Result nvmlInit_v2(void) {
    return start();
}

Result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start();
}

Result nvmlShutdown(void) {
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(Result result) {
    switch (result) {
#define TEXT_OF(name, value, text) \
    case name: \
        return text;
        FOR_EACH_RESULT(TEXT_OF)
#undef TEXT_OF
    }
    return "Unknown Error";
}

Result nvmlSystemGetCudaDriverVersion(int *version) {
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!users && look_at_machine() != NVML_SUCCESS)    /* needs no nvmlInit */
        return NVML_ERROR_DRIVER_NOT_LOADED;
    *version = machine.driver_version;
    return NVML_SUCCESS;
}

Result nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

Result nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return users ? answer_text(text, size, "580.159.03") : NVML_ERROR_UNINITIALIZED;
}

Result nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    return answer_text(text, size, "13.580.159.03");
}

Result nvmlSystemGetDriverBranch(Branch *branch, unsigned size) {
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    return branch ? answer_text(branch->text, size, "r580_00") : NVML_ERROR_INVALID_ARGUMENT;
}

/* ---- devices -------------------------------------------------------------------------------- */

NVML Result nvmlDeviceGetCount_v2(unsigned *count);
NVML Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out);
NVML Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *out);
NVML Result nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *out);
NVML Result nvmlDeviceGetIndex(Device device, unsigned *index);
NVML Result nvmlDeviceGetMinorNumber(Device device, unsigned *number);
NVML Result nvmlDeviceGetUUID(Device device, char *text, unsigned size);
NVML Result nvmlDeviceGetName(Device device, char *text, unsigned size);
NVML Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor);

Result nvmlDeviceGetCount_v2(unsigned *count) {
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned)machine.devices;
    return NVML_SUCCESS;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    if (!out || index >= (unsigned)machine.devices)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = &devices[index];
    return NVML_SUCCESS;
}

Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
    char text[TEXT_OF_UUID];
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int device = 0; device < machine.devices; device++) {
        print_uuid(text, device);
        if (strcmp(text, uuid) == 0 || strcmp(text + strlen("GPU-"), uuid) == 0) {
            *out = &devices[device];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

/* As cuDeviceGetPCIBusId: device n is on bus n + 1. */
Result nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *out) {
    unsigned domain;
    unsigned bus;
    unsigned slot;
    if (!users)
        return NVML_ERROR_UNINITIALIZED;
    if (!id || !out || sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (domain || slot || bus < 1 || bus > (unsigned)machine.devices)
        return NVML_ERROR_NOT_FOUND;
    *out = &devices[bus - 1];
    return NVML_SUCCESS;
}

Result nvmlDeviceGetIndex(Device device, unsigned *index) {
    Result result = check(device, index);
    if (result == NVML_SUCCESS)
        *index = (unsigned)(device - devices);
    return result;
}

Result nvmlDeviceGetMinorNumber(Device device, unsigned *number) {
    return nvmlDeviceGetIndex(device, number);
}

Result nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    char uuid[TEXT_OF_UUID];
    Result result = check(device, text);
    if (result != NVML_SUCCESS)
        return result;
    print_uuid(uuid, (int)(device - devices));
    return answer_text(text, size, uuid);
}

Result nvmlDeviceGetName(Device device, char *text, unsigned size) {
    char name[32];
    Result result = check(device, text);
    if (result != NVML_SUCCESS)
        return result;
    snprintf(name, sizeof name, "Simulated GPU %d", (int)(device - devices));
    return answer_text(text, size, name);
}

Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    Result result = check(device, major);
    if (result != NVML_SUCCESS || !minor)
        return result == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : result;
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}
