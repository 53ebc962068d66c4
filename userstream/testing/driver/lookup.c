/* Lookup of the driver's functions (cuGetProcAddress), and of the names of errors. */
#include "driver.h"
#include "versions.h"

static Function *functions;

void function_register(Function *function) {
    Function *same_name = function_find(function->name);
    function->shared = same_name ? same_name->shared : function;
    function->id = functions ? functions->id + 1 : 0;
    function->next = functions;
    functions = function;
}

Function *function_first(void) {
    return functions;
}

Function *function_find(const char *name) {
    for (Function *function = functions; function; function = function->next) {
        if (strcmp(function->name, name) == 0)
            return function->shared;
    }
    return NULL;
}

/* The newest signature that is not newer than the version asked for; `exists` if there is a
 * function of this name, in any version. 0: none. */
static int newest_version(const char *name, int version, bool *exists) {
    int newest = 0;
    *exists = false;
    if (version < 0)            /* H100: as the newest */
        version = settings.driver_version;
    for (size_t i = 0; i < sizeof known_functions / sizeof *known_functions; i++) {
        if (strcmp(known_functions[i].name, name) != 0 ||
            known_functions[i].versions[0] > settings.driver_version)
            continue;
        *exists = true;
        for (int k = 0; k < MOST_VERSIONS && known_functions[i].versions[k]; k++) {
            if (known_functions[i].versions[k] <= version)
                newest = known_functions[i].versions[k];
        }
    }
    return newest;
}

static Function *function_of_version(const char *name, int version) {
    Function *function = functions;
    while (function && (function->version != version || strcmp(function->name, name) != 0))
        function = function->next;
    return function;
}

/* Found like any other function, so that a binding's table is complete, and not implemented. */
static CUresult not_simulated(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult call_enter(Function *function) {
    lock();
    thread_enters();
    schedule_enter();
    function->shared->calls++;
    this_thread()->explanation = NULL;
    CUresult injected = fault_for(function);
    if (injected != CUDA_SUCCESS)
        return injected;
    /* H200: in a forked child cuInit and cuCtxGetCurrent answer NOT_INITIALIZED. */
    if (forked && function->available != IN_CHILD)
        return CUDA_ERROR_NOT_INITIALIZED;
    /* cuLaunchHostFunc: "The host function must not make any CUDA API calls." */
    if (this_thread()->in_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    if (!initialized && function->available != ANYTIME)
        return CUDA_ERROR_NOT_INITIALIZED;
    return CUDA_SUCCESS;
}

void call_leave(void) {
    schedule_leave();
    thread_leaves();
    bool destroy = user_objects_are_due();
    unlock();
    if (destroy)
        user_objects_destroy();
}

enum { SYMBOL_FOUND = 0, SYMBOL_NOT_FOUND = 1, SYMBOL_VERSION_NOT_SUFFICIENT = 2 };
enum { FLAGS = 3 };             /* CUdriverProcAddress_flags: which default stream */

/* "If the specified CUDA version is greater than the driver version, the API will return"
 * INVALID_VALUE. H100: what is not found is told by the status alone, also where nobody asks. */
DEFINE_FUNCTION(cuGetProcAddress_v2, cuGetProcAddress, 12000, ANYTIME,
                (const char *name, void **address, int version, uint64_t flags, int *status),
                (name, address, version, flags, status)) {
    bool exists;
    if (!name || !address || flags > FLAGS || version > settings.driver_version)
        return CUDA_ERROR_INVALID_VALUE;
    int newest = newest_version(name, version, &exists);
    Function *function = newest ? function_of_version(name, newest) : NULL;
    *address = !newest ? NULL : function ? function->address : (void *)not_simulated;
    if (status)
        *status = newest ? SYMBOL_FOUND
            : exists ? SYMBOL_VERSION_NOT_SUFFICIENT : SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

DEFINE_FUNCTION(cuGetProcAddress, cuGetProcAddress, 11030, ANYTIME,
                (const char *name, void **address, int version, uint64_t flags),
                (name, address, version, flags)) {
    void *found;
    CUresult result = address ? locked_cuGetProcAddress_v2(name, &found, version, flags, NULL)
                              : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && !found)
        result = CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        *address = found;
    return result;
}

static const struct {
    CUresult result;
    const char *name;
    const char *text;
} results[] = {
#define RESULT_ROW(name, value, text) {name, #name, text},
    FOR_EACH_RESULT(RESULT_ROW)
#undef RESULT_ROW
};

/* The two functions that host functions may call too. */
#define RESULT_GETTER(symbol, member) \
    CUresult symbol(CUresult result, const char **text); \
    static Function function_##symbol = { \
        .name = #symbol, .exported = #symbol, .version = 6000, .address = (void *)symbol, \
        .available = ANYTIME}; \
    __attribute__((constructor)) static void register_##symbol(void) { \
        function_register(&function_##symbol); \
    } \
    __attribute__((visibility("default"))) CUresult symbol(CUresult result, const char **text) { \
        const Explanation *explanation = explanation_of(result); \
        if (!text) \
            return CUDA_ERROR_INVALID_VALUE; \
        for (size_t i = 0; i < sizeof results / sizeof *results; i++) { \
            if (results[i].result == result) { \
                *text = explanation ? explanation->member : results[i].member; \
                return CUDA_SUCCESS; \
            } \
        } \
        *text = NULL; \
        return CUDA_ERROR_INVALID_VALUE; \
    }

RESULT_GETTER(cuGetErrorName, name)
RESULT_GETTER(cuGetErrorString, text)
