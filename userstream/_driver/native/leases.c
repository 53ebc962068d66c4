/* Leases of page-locked blocks. */
#include "core.h"

/* A block is in no dictionary while a lease exists. The end of the lease puts the block back into
 * the dictionary of free blocks: without Python code, so no signal handler comes in between, and a
 * garbage collection may end a lease. */
typedef struct {
    PyObject ob_base;
    PyObject *address; /* a number of Python's */
    PyObject *blocks;  /* the dictionary by address that it is from */
    Py_ssize_t size;
} Lease;

static PyTypeObject *lease_type;
static PyObject *popitem; /* its name */

static PyObject *lend(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "it takes a dictionary by address, and a size");
        return NULL;
    }
    Py_ssize_t size = PyLong_AsSsize_t(args[1]);
    if (size == -1 && PyErr_Occurred())
        return NULL;
    Lease *lease = PyObject_New(Lease, lease_type); /* first, or a block would be lost without it */
    if (!lease)
        return NULL;
    lease->address = lease->blocks = NULL;
    PyObject *item = PyObject_CallMethodObjArgs(args[0], popitem, NULL);
    if (!item) {
        Py_DECREF(lease);
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    lease->address = Py_NewRef(PyTuple_GetItem(item, 0));
    lease->blocks = Py_NewRef(args[0]);
    lease->size = size;
    Py_DECREF(item);
    return (PyObject *)lease;
}

static void lease_dealloc(PyObject *self)
{
    Lease *lease = (Lease *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (lease->blocks) {
        Exception held = hold_exception();
        if (PyDict_SetItem(lease->blocks, lease->address, Py_None))
            PyErr_WriteUnraisable(lease->blocks); /* it is not used again */
        go_on_with(held);
    }
    Py_XDECREF(lease->blocks);
    Py_XDECREF(lease->address);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int lease_buffer(PyObject *self, Py_buffer *view, int flags)
{
    Lease *lease = (Lease *)self;
    return PyBuffer_FillInfo(view, self, PyLong_AsVoidPtr(lease->address), lease->size, 0, flags);
}

static PyObject *lease_address(PyObject *self, void *closure)
{
    (void)closure;
    return Py_NewRef(((Lease *)self)->address);
}

static PyGetSetDef lease_attributes[] = {
    {"address", lease_address, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lease_slots[] = {
    {Py_tp_dealloc, FUNCTION(lease_dealloc)},
    {Py_tp_getset, lease_attributes},
    {Py_bf_getbuffer, FUNCTION(lease_buffer)},
    {0, NULL},
};

static PyType_Spec lease_spec = {
    .name = "userstream._driver._core.Lease",
    .basicsize = sizeof(Lease),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = lease_slots,
};

/* address_of(object): the address of the memory of an object with the buffer protocol. */
static PyObject *address_of(PyObject *module, PyObject *object)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_STRIDES))
        return NULL;
    PyObject *answer = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return answer;
}

static PyMethodDef methods[] = {
    METHOD(lend),
    {"address_of", address_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_leases(PyObject *module)
{
    if (!popitem && !(popitem = PyUnicode_InternFromString("popitem")))
        return -1;
    if (!lease_type && !(lease_type = (PyTypeObject *)PyType_FromSpec(&lease_spec)))
        return -1;
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddObjectRef(module, "Lease", (PyObject *)lease_type)
               ? -1
               : 0;
}
