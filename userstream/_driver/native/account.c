#include "core.h"

/* The account of each thread: whether its driver calls are the program's or userstream's own. A
 * recorder reads the account in each driver call, without the GIL: a query whose answer the program
 * never hears orders nothing in the program. The second byte is the account of the thread itself: a
 * schedule of the simulated driver leaves the threads of userstream alone. */
static _Thread_local unsigned char account[2]; /* PROGRAM by default */

static unsigned char *account_of_thread(void)
{
    return account;
}

static PyObject *account_address(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromVoidPtr(FUNCTION(account_of_thread));
}

unsigned char set_account_of_thread(unsigned char wanted)
{
    unsigned char before = account[0];
    account[0] = wanted;
    return before;
}

/* For a native thread that never calls on another account. */
void set_own_account(unsigned char wanted)
{
    account[0] = account[1] = wanted;
}

static int as_account(PyObject *number)
{
    long wanted = PyLong_AsLong(number);
    if (wanted >= 0 && wanted < ACCOUNT_COUNT)
        return (int)wanted;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "there is no account %ld", wanted);
    return -1;
}

static PyObject *set_account(PyObject *module, PyObject *number)
{
    (void)module;
    int wanted = as_account(number);
    if (wanted < 0)
        return NULL;
    set_own_account((unsigned char)wanted);
    Py_RETURN_NONE;
}

/* No Python code runs between the change and the call, nor between the call and the restoration: a
 * signal handler that raises there would leave the thread on another account. */
static PyObject *on_account(PyObject *module, PyObject *args)
{
    (void)module;
    if (PyTuple_Size(args) < 2) {
        PyErr_SetString(PyExc_TypeError, "on_account() takes an account, a function and arguments");
        return NULL;
    }
    int wanted = as_account(PyTuple_GetItem(args, 0));
    if (wanted < 0)
        return NULL;
    unsigned char before = set_account_of_thread((unsigned char)wanted);
    PyObject *result = call_with_rest(args, 1);
    account[0] = before;
    return result;
}

static PyMethodDef methods[] = {
    {"account_address", account_address, METH_NOARGS, NULL},
    {"set_account", set_account, METH_O, NULL},
    {"on_account", on_account, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_account(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "PROGRAM", PROGRAM) ||
                   PyModule_AddIntConstant(module, "FUTURE", FUTURE) ||
                   PyModule_AddIntConstant(module, "HOUSEKEEPING", HOUSEKEEPING)
               ? -1
               : 0;
}
