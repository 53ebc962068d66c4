/* The compiled core: sequences of driver calls as one call from Python.
 *
 * There is neither a header of CUDA nor a link with it: `load` is given the addresses of the
 * functions. A function that may fail returns a `Result`: 0, CAPTURED, or the number of the driver
 * function that failed << 32 | its CUresult. ../core.py turns results into exceptions; it reads
 * names and constants from the module, so that they are stated only here.
 *
 * driver.c     the functions of the driver, arguments, queries
 * account.c    on whose account a thread calls the driver
 * edges.c      lanes, edges, objects in use
 * copies.c     copies to page-locked memory
 * pointers.c   attributes of addresses
 * leases.c     page-locked memory that is lent
 * module.c     the module: each file adds its own part */
#ifndef USERSTREAM_CORE_H
#define USERSTREAM_CORE_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python has no stable ABI before 3.15 */
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

typedef int CUresult;
typedef void *CUstream;
typedef void *CUevent;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;

enum { CAPTURE_STATUS_NONE = 0, CAPTURE_MODE_RELAXED = 2, NOT_READY = 600 };

/* -- the functions of the driver ------------------------------------------------------------- */

/* The number in a Result, the name, the variable, and the parameters (of CUDA 12.0, as
 * `cuGetProcAddress` is asked). A function is added here and nowhere else. */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(EXCHANGE_MODE, "cuThreadExchangeStreamCaptureMode", exchange_mode, (int *mode))              \
    X(IS_CAPTURING, "cuStreamIsCapturing", is_capturing, (CUstream stream, int *status))           \
    X(QUERY_STREAM, "cuStreamQuery", query_stream, (CUstream stream))                              \
    X(QUERY_EVENT, "cuEventQuery", query_event, (CUevent event))                                   \
    X(RECORD_EVENT, "cuEventRecord", record_event, (CUevent event, CUstream stream))               \
    X(WAIT_EVENT, "cuStreamWaitEvent", wait_event,                                                 \
      (CUstream stream, CUevent event, unsigned flags))                                            \
    X(GET_CURRENT, "cuCtxGetCurrent", get_current, (CUcontext * context))                          \
    X(COPY_MEMORY, "cuMemcpyAsync", copy_memory,                                                   \
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream))                            \
    X(GET_ATTRIBUTES, "cuPointerGetAttributes", get_attributes,                                    \
      (unsigned count, const int *which, void **out, CUdeviceptr at))                              \
    X(GET_CONTEXT, "cuStreamGetCtx", get_context, (CUstream stream, CUcontext *context))

#define NUMBER_OF(number, name, function, parameters) number,
enum { DRIVER_FUNCTIONS(NUMBER_OF) FUNCTION_COUNT };
#undef NUMBER_OF

#define DECLARATION_OF(number, name, function, parameters) extern CUresult(*function) parameters;
DRIVER_FUNCTIONS(DECLARATION_OF)
#undef DECLARATION_OF

/* -- results --------------------------------------------------------------------------------- */

/* CAPTURED: nothing was queued, since a stream may be captured or another context is current.
 * DUE: done, and `sweep_if_due` is to be called. FAILED: with a Python exception. */
enum { CAPTURED = -1, DUE = -2, FAILED = -3 };
#define SWEEP_SECONDS 200e-6

typedef long long Result;

static inline Result failed(int function, CUresult status)
{
    return status ? (Result)function << 32 | (uint32_t)status : 0;
}

Result relax(int *mode);
Result restore(int mode, Result result);
int is_free(CUstream stream);
uint64_t nanoseconds(void);

/* -- Python ---------------------------------------------------------------------------------- */

/* A slot has a void pointer for either kind, which ISO C has no cast for. */
#define FUNCTION(name) __extension__(void *)name

/* A row of a table of methods. */
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

/* The exception that is on its way, while something else is done. */
#ifdef Py_LIMITED_API /* of 3.11, which has only what is deprecated since 3.12 */
typedef struct {
    PyObject *kind, *value, *trace;
} Exception;

static inline Exception hold_exception(void)
{
    Exception held;
    PyErr_Fetch(&held.kind, &held.value, &held.trace);
    return held;
}

static inline void go_on_with(Exception held)
{
    PyErr_Restore(held.kind, held.value, held.trace);
}
#else
typedef PyObject *Exception;

static inline Exception hold_exception(void)
{
    return PyErr_GetRaisedException();
}

static inline void go_on_with(Exception held)
{
    PyErr_SetRaisedException(held);
}
#endif

int address(PyObject *handle, void **out);
int is_loaded(void);
int addresses(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, void **out);
int append(PyObject *deque, PyObject *item);

/* What these functions read of a lane, which extends it. */
typedef struct {
    PyObject ob_base;
    unsigned long long raw_handle;  /* the stream; 0 once the lane is closed */
    unsigned long long raw_context; /* the context of the stream */
    char is_context_independent;    /* whether the handle names the stream in every context */
    PyObject *free; /* a deque: events of the context that may be recorded */
    PyObject *held; /* a deque: objects held until the stream has passed a point; None at first */
    double swept;   /* when `held` was last swept */
} LaneState;

extern PyTypeObject *lane_type;

/* -- the parts of the module ----------------------------------------------------------------- */

/* Each adds its functions, types and constants; -1 with an exception. Called again if the module is
 * imported again: types and sets are made once. */
int add_driver(PyObject *module);
int add_account(PyObject *module);
int add_edges(PyObject *module);
int add_copies(PyObject *module);
int add_pointers(PyObject *module);
int add_leases(PyObject *module);

#endif
