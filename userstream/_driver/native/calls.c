/* Calls with another current context or capture mode, and the errors of the driver.
 *
 * No Python code runs between the change and the call, nor between the call and the restoration: an
 * exception of a signal handler there would leave the thread with the other context or mode. */
#include "core.h"

static PyObject *make_error, *report_failure; /* functions of ../core.py */

static PyObject *set_failures(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "set_failures() takes two functions");
        return NULL;
    }
    PyObject *old_error = make_error, *old_report = report_failure;
    make_error = Py_NewRef(args[0]);
    report_failure = Py_NewRef(args[1]);
    Py_XDECREF(old_error);
    Py_XDECREF(old_report);
    Py_RETURN_NONE;
}

/* Raise the exception for a result; always NULL. */
PyObject *raise_result(Result result, PyObject *stream)
{
    PyObject *number = PyLong_FromLongLong(result);
    PyObject *error =
        number ? PyObject_CallFunctionObjArgs(make_error, number, stream ? stream : Py_None, NULL)
               : NULL;
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(number);
    return NULL;
}

/* Call args[first](*args[first + 1:]). */
PyObject *call_with_rest(PyObject *args, Py_ssize_t first)
{
    Py_ssize_t count = PyTuple_Size(args);
    if (count <= first) {
        PyErr_SetString(PyExc_TypeError, "no function was given to call");
        return NULL;
    }
    PyObject *rest = PyTuple_GetSlice(args, first + 1, count);
    PyObject *answer = rest ? PyObject_Call(PyTuple_GetItem(args, first), rest, NULL) : NULL;
    Py_XDECREF(rest);
    return answer;
}

/* -- the changes, with or without the GIL ---------------------------------------------------- */

Result enter_context(CUcontext context, CUcontext *before)
{
    Result result = failed(GET_CURRENT, get_current(before));
    if (result || *before == context)
        return result;
    return failed(SET_CURRENT, set_current(context));
}

/* A temporary failure of the driver goes away when the call is repeated. */
Result leave_context(CUcontext context, CUcontext before, Result result)
{
    CUresult status = 0;
    if (before == context)
        return result;
    for (int i = 0; i < TRIES; i++) {
        status = set_current(before);
        if (!status)
            return result;
    }
    return failed(SET_CURRENT, status);
}

/* Handle a restoration that failed: raise its error, or add a note to the exception of the call. */
static PyObject *not_restored(PyObject *answer, Result result, PyObject *what)
{
    Exception held = hold_exception();
    PyObject *number = PyLong_FromLongLong(result);
    PyObject *done = NULL;
    if (number && what)
        done = PyObject_CallFunctionObjArgs(report_failure, number, what,
                                            answer ? Py_None : exception_value(&held), NULL);
    Py_XDECREF(number);
    Py_XDECREF(what);
    Py_XDECREF(answer);
    if (done) {
        Py_DECREF(done);
        go_on_with(held);
    } else
        drop_exception(held);
    return NULL;
}

static PyObject *context_name(CUcontext context)
{
    return PyUnicode_FromFormat("context %p", context);
}

static PyObject *mode_name(int mode)
{
    static const char *const names[] = {"global", "thread-local", "relaxed"};
    return PyUnicode_FromFormat("capture mode %s", mode >= 0 && mode < 3 ? names[mode] : "?");
}

/* -- for Python ------------------------------------------------------------------------------ */

/* within(context, function, *args): call a function with a context current. */
static PyObject *within(PyObject *module, PyObject *args)
{
    (void)module;
    void *context;
    CUcontext before = NULL;
    Result result;
    if (PyTuple_Size(args) < 2) {
        PyErr_SetString(PyExc_TypeError, "within() takes a context, a function and arguments");
        return NULL;
    }
    if (!address(PyTuple_GetItem(args, 0), &context) || !is_loaded())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = enter_context(context, &before);
    Py_END_ALLOW_THREADS
    if (result)
        return raise_result(result, NULL);
    PyObject *answer = call_with_rest(args, 1);
    if (before == context)
        return answer;
    Py_BEGIN_ALLOW_THREADS
    result = leave_context(context, before, 0);
    Py_END_ALLOW_THREADS
    return result ? not_restored(answer, result, context_name(before)) : answer;
}

/* relaxed(function, *args): call a function in relaxed capture mode, in which the calls of this
 * thread leave the captures of other threads alone. */
static PyObject *relaxed(PyObject *module, PyObject *args)
{
    (void)module;
    int mode = CAPTURE_MODE_RELAXED;
    if (!is_loaded())
        return NULL;
    Result result = relax(&mode);
    if (result)
        return raise_result(result, NULL);
    PyObject *answer = call_with_rest(args, 0);
    result = mode == CAPTURE_MODE_RELAXED ? 0 : restore(mode, 0);
    return result ? not_restored(answer, result, mode_name(mode)) : answer;
}

/* enter(context, changed): append the current context to a list, and change it. The list is filled
 * before Python code runs, so a `finally` block finds the context to restore. */
static PyObject *enter(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *context;
    CUcontext before = NULL;
    if (count != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "enter() takes a context and a list");
        return NULL;
    }
    if (!address(args[0], &context) || !is_loaded())
        return NULL;
    Result result = enter_context(context, &before);
    if (result)
        return raise_result(result, NULL);
    PyObject *number = before == context ? NULL : PyLong_FromVoidPtr(before);
    int status = number ? PyList_Append(args[1], number) : 0;
    Py_XDECREF(number);
    if (status || PyErr_Occurred()) {
        leave_context(context, before, 0);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* leave(changed, error): restore the context that `enter` has appended to the list, if any. Without
 * an `error` that leaves the block, raise if that fails; otherwise add a note to the error. */
static PyObject *leave(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    void *before;
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "leave() takes a list and an error");
        return NULL;
    }
    if (!PyList_Size(args[0]))
        Py_RETURN_NONE;
    if (!address(PyList_GetItem(args[0], 0), &before))
        return NULL;
    Result result = leave_context((char *)before + 1, before, 0);
    PyObject *what = result ? context_name(before) : NULL;
    PyObject *number = what ? PyLong_FromLongLong(result) : NULL;
    PyObject *done =
        number ? PyObject_CallFunctionObjArgs(report_failure, number, what, args[1], NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(what);
    Py_XDECREF(done);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* enter_mode(mode, changed) and leave_mode(changed, error): the same for the capture mode. */
static PyObject *enter_mode(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "enter_mode() takes a capture mode and a list");
        return NULL;
    }
    int wanted = (int)PyLong_AsLong(args[0]), mode = wanted;
    if ((mode == -1 && PyErr_Occurred()) || !is_loaded())
        return NULL;
    Result result = failed(EXCHANGE_MODE, exchange_mode(&mode));
    if (result)
        return raise_result(result, NULL);
    if (mode == wanted)
        Py_RETURN_NONE;
    PyObject *number = PyLong_FromLong(mode);
    if (!number || PyList_Append(args[1], number)) {
        Py_XDECREF(number);
        restore(mode, 0);
        return NULL;
    }
    Py_DECREF(number);
    Py_RETURN_NONE;
}

static PyObject *leave_mode(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "leave_mode() takes a list and an error");
        return NULL;
    }
    if (!PyList_Size(args[0]))
        Py_RETURN_NONE;
    int mode = (int)PyLong_AsLong(PyList_GetItem(args[0], 0));
    if (mode == -1 && PyErr_Occurred())
        return NULL;
    Result result = restore(mode, 0);
    PyObject *what = result ? mode_name(mode) : NULL;
    PyObject *number = what ? PyLong_FromLongLong(result) : NULL;
    PyObject *done =
        number ? PyObject_CallFunctionObjArgs(report_failure, number, what, args[1], NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(what);
    Py_XDECREF(done);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(set_failures),
    {"within", within, METH_VARARGS, NULL},
    {"relaxed", relaxed, METH_VARARGS, NULL},
    METHOD(enter),
    METHOD(leave),
    METHOD(enter_mode),
    METHOD(leave_mode),
    {NULL, NULL, 0, NULL},
};

int add_calls(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
