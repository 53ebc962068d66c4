/* The functions of the driver, arguments of calls from Python, and queries. */
#include "core.h"

#include <time.h>

#define DEFINITION_OF(number, name, function, parameters) CUresult(*function) parameters;
DRIVER_FUNCTIONS(DEFINITION_OF)
#undef DEFINITION_OF

/* The capture mode of the calling thread, relaxed between these two: a query then leaves the
 * captures of other threads alone. The mode is restored whatever the query said. */
Result relax(int *mode)
{
    *mode = CAPTURE_MODE_RELAXED;
    return failed(EXCHANGE_MODE, exchange_mode(mode));
}

Result restore(int mode, Result result)
{
    CUresult status = 0;
    for (int i = 0; i < TRIES; i++) { /* a failure may be temporary */
        int before = mode;
        status = exchange_mode(&before);
        if (!status)
            return result;
    }
    return failed(EXCHANGE_MODE, status);
}

int is_free(CUstream stream)
{
    int status;
    return is_capturing(stream, &status) == 0 && status == CAPTURE_STATUS_NONE;
}

uint64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* -- arguments ------------------------------------------------------------------------------- */

int address(PyObject *handle, void **out)
{
    if (PyLong_Check(handle)) {
        *out = PyLong_AsVoidPtr(handle);
    } else { /* a handle of cuda.bindings */
        PyObject *number = PyNumber_Long(handle);
        if (!number)
            return 0;
        *out = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
    }
    return *out || !PyErr_Occurred();
}

int is_loaded(void)
{
    if (!get_context)
        PyErr_SetString(PyExc_RuntimeError, "the driver's functions have not been loaded");
    return get_context != NULL;
}

int addresses(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, void **out)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %zd", given, wanted);
        return 0;
    }
    if (!is_loaded())
        return 0;
    for (Py_ssize_t i = 0; i < wanted; i++) {
        if (!address(args[i], &out[i]))
            return 0;
    }
    return 1;
}

static PyObject *name_append;

int append(PyObject *deque, PyObject *item)
{
    PyObject *none = PyObject_CallMethodObjArgs(deque, name_append, item, NULL);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* -- the functions --------------------------------------------------------------------------- */

/* Where each is kept. ISO C has no cast from an object's address to a function's. */
#define PLACE_OF(number, name, function, parameters) [number] = &function,
static void *const functions[FUNCTION_COUNT] = {DRIVER_FUNCTIONS(PLACE_OF)};
#undef PLACE_OF

#define NAME_OF(number, name, function, parameters) [number] = name,
static const char *const names[FUNCTION_COUNT] = {DRIVER_FUNCTIONS(NAME_OF)};
#undef NAME_OF

static PyObject *load(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *found[FUNCTION_COUNT];
    if (count != FUNCTION_COUNT) {
        PyErr_Format(PyExc_TypeError, "%zd functions were given, not %d", count, FUNCTION_COUNT);
        return NULL;
    }
    for (int i = 0; i < FUNCTION_COUNT; i++) {
        if (!address(args[i], &found[i]))
            return NULL;
        if (!found[i]) {
            PyErr_Format(PyExc_ValueError, "function %d has no address", i);
            return NULL;
        }
    }
    for (int i = 0; i < FUNCTION_COUNT; i++)
        memcpy(functions[i], &found[i], sizeof found[i]);
    Py_RETURN_NONE;
}

/* The GIL is released in each function below. Even a query may find a lock of the driver held by a
 * thread that waits for the GPU (a free does), and that GPU may wait for a thread of Python. */

static PyObject *are_free(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *stream[2];
    int answer;
    if (!addresses(args, count, 2, stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    answer = is_free(stream[0]) && is_free(stream[1]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(answer);
}

static PyObject *is_in(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *given[2]; /* stream, context */
    CUcontext context = NULL;
    CUresult status;
    if (!addresses(args, count, 2, given))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = get_context(given[0], &context);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!status && context == given[1]);
}

static PyObject *query(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *stream;
    int mode;
    Result result = CAPTURED;
    if (count == 1 && PyObject_TypeCheck(args[0], lane_type)) {
        LaneState *lane = (LaneState *)args[0];
        stream = (void *)(uintptr_t)lane->raw_handle;
        if (!lane->is_context_independent || !stream)
            return PyLong_FromLong(CAPTURED);
        if (!is_loaded())
            return NULL;
    } else if (!addresses(args, count, 1, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_free(stream)) {
        result = relax(&mode);
        if (!result)
            result = restore(mode, failed(QUERY_STREAM, query_stream(stream)));
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    METHOD(load), METHOD(are_free), METHOD(is_in), METHOD(query), {NULL, NULL, 0, NULL},
};

int add_driver(PyObject *module)
{
    if (!name_append && !(name_append = PyUnicode_InternFromString("append")))
        return -1;
    PyObject *tuple = PyTuple_New(FUNCTION_COUNT);
    for (int i = 0; tuple && i < FUNCTION_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyTuple_SetItem(tuple, i, name))
            Py_CLEAR(tuple);
    }
    int status = tuple ? PyModule_AddObjectRef(module, "FUNCTIONS", tuple) : -1;
    Py_XDECREF(tuple);
    return status || PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "CAPTURED", CAPTURED) ||
                   PyModule_AddIntConstant(module, "DUE", DUE) ||
                   PyModule_AddIntConstant(module, "NOT_READY", NOT_READY)
               ? -1
               : 0;
}
