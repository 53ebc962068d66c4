/* The module `userstream._driver._core`. */
#include "core.h"

/* The checksum of the sources: a checkout that has changed since refuses to use the library. The
 * build adds a file with it. */
extern const char userstream_core_source[];

static int initialise(PyObject *module)
{
    return add_driver(module) || add_account(module) || add_calls(module) || add_events(module) ||
                   add_bells(module) || add_held(module) || add_edges(module) ||
                   add_copies(module) || add_pointers(module) || add_leases(module) ||
                   PyModule_AddStringConstant(module, "SOURCE", userstream_core_source)
               ? -1
               : 0;
}

/* The stable ABI of 3.11 has no name for it; 0 says that they are not supported. */
enum { MULTIPLE_INTERPRETERS = 3, FIRST_WITH_INTERPRETERS = 0x030c0000 };

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, FUNCTION(initialise)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {MULTIPLE_INTERPRETERS, NULL},
    {0, NULL},
};

/* Python 3.11 refuses a slot that it does not know. */
static PyModuleDef_Slot older_slots[] = {
    {Py_mod_exec, FUNCTION(initialise)},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "userstream._driver._core",
};

PyMODINIT_FUNC PyInit__core(void)
{
    definition.m_slots = Py_Version < FIRST_WITH_INTERPRETERS ? older_slots : slots;
    return PyModuleDef_Init(&definition);
}
