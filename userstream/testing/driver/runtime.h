/* Functions of the CUDA runtime, which the bindings' own table of functions gets: see runtime.c. */
#ifndef USERSTREAM_RUNTIME_H
#define USERSTREAM_RUNTIME_H

#include "driver.h"

typedef struct RuntimeFunction {
    const char *name;
    const char *signature;      /* what the C signature contains; NULL: any */
    void *address;
    struct RuntimeFunction *next;
} RuntimeFunction;

/* A function that is registered later is preferred. */
void runtime_register(RuntimeFunction *function);

#define REGISTER(symbol, plain_name, contains) \
    __attribute__((constructor)) static void register_##symbol##_##plain_name(void) { \
        static RuntimeFunction function = {#plain_name, contains, (void *)symbol, NULL}; \
        runtime_register(&function); \
    }

CUresult runtime_remember(CUresult result);
CUresult runtime_start(void);

/* Of functions that need a newer driver than the rest. */
CUresult runtime_start_13_1(void);
CUresult runtime_start_13_2(void);

/* "The runtime API initializes the primary context of the current device on first use." */
CUresult runtime_start_with_context(void);

enum { KIND_DEFAULT = 4 };      /* cudaMemcpyKind: the last one */
enum { DESTINATION = 1, SOURCE = 2 };   /* bits of the kinds before: which are on a device */

enum { RUNTIME_INVALID_PITCH = 12 };    /* cudaErrorInvalidPitchValue */

CUresult runtime_check_kind(int kind);
int runtime_memory_type(int kind, int side);    /* of copies.h, of one of the sides */

/* The primary contexts of two devices; the current one stays. */
CUresult runtime_peers(Context *contexts[2], CUdevice first, CUdevice second);

/* ---- runtime_arrays.c ----------------------------------------------------------------------- */

struct CUDA_MEMCPY3D;

/* From and to cudaMemcpy3DParms. */
CUresult runtime_copy_3d(struct CUDA_MEMCPY3D *out, const void *given);
CUresult runtime_describe_copy(void *out, const struct CUDA_MEMCPY3D *copy);

/* ---- defining functions --------------------------------------------------------------------- */

/* Defines a runtime function. Its body follows. */
#define RUNTIME_FUNCTION_AS(symbol, name, contains, begin, parameters, arguments) \
    static CUresult body_##symbol parameters; \
    static CUresult symbol parameters { \
        CUresult result = begin(); \
        return runtime_remember(result == CUDA_SUCCESS ? body_##symbol arguments : result); \
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
    SAME_FUNCTION(name, driver_function, runtime_start_with_context, parameters, arguments)

/* Registers it under another name too. */
#define ALSO(symbol, name) REGISTER(symbol, name, NULL)

/* The same, if the signature in the bindings has a part. */
#define SAME_IF(name, contains, driver_function, parameters, arguments) \
    CUresult driver_function parameters; \
    RUNTIME_FUNCTION_AS(driver_function##_as_##name, name, contains, runtime_start_with_context, \
                        parameters, arguments) { \
        return driver_function arguments; \
    }

#endif
