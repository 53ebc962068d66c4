/* Attributes of addresses. */
#include "core.h"

/* CU_POINTER_ATTRIBUTE_MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, CONTEXT, RANGE_START_ADDR and
 * RANGE_SIZE. None is larger than 64 bits; the bytes that a smaller one leaves stay 0. */
static const int wanted[] = {2, 8, 9, 1, 11, 12};
enum { WANTED = sizeof wanted / sizeof *wanted };

static PyObject *pointer(PyObject *module, PyObject *argument)
{
    (void)module;
    unsigned long long found[WANTED] = {0};
    void *places[WANTED];
    CUresult status;
    if (!is_loaded())
        return NULL;
    CUdeviceptr at = PyLong_AsUnsignedLongLongMask(argument);
    if (PyErr_Occurred())
        return NULL;
    for (int i = 0; i < WANTED; i++)
        places[i] = &found[i];
    Py_BEGIN_ALLOW_THREADS
    status = get_attributes(WANTED, wanted, places, at);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(iKKKKKK)", status, found[0], found[1], found[2], found[3], found[4],
                         found[5]);
}

static PyMethodDef methods[] = {{"pointer", pointer, METH_O, NULL}, {NULL, NULL, 0, NULL}};

int add_pointers(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
