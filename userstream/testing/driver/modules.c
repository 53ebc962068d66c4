/* Libraries and modules, and the kernels in them. */
#include "kernels.h"

#include <unistd.h>

/* CUfunction_attribute */
enum {
    MAX_THREADS_PER_BLOCK,
    SHARED_SIZE_BYTES,
    CONST_SIZE_BYTES,
    LOCAL_SIZE_BYTES,
    NUM_REGS,
    PTX_VERSION,
    BINARY_VERSION,
    CACHE_MODE_CA,
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    PREFERRED_SHARED_MEMORY_CARVEOUT,
};

enum { SHARED_MEMORY_OPT_IN = 232448 };     /* H200 */

static Module *modules;

/* ---- libraries ------------------------------------------------------------------------------ */

static void module_free(Module *module) {
    for (Module **link = &modules; *link; link = &(*link)->next) {
        if (*link == module) {
            *link = module->next;
            break;
        }
    }
    for (Entry *entry = module->entries, *next; entry; entry = next) {
        next = entry->next;
        handle_free(KIND_ENTRY, entry);
    }
    handle_free(KIND_MODULE, module);
}

static void library_free(Library *library) {
    for (Module *module = modules, *next; module; module = next) {
        next = module->next;
        if (module->library == library)
            module_free(module);
    }
    for (Kernel *kernel = library->kernels, *next; kernel; kernel = next) {
        next = kernel->next;
        free(kernel->name);
        handle_free(KIND_KERNEL, kernel);
    }
    handle_free(KIND_LIBRARY, library);
}

void modules_of_context_free(const Context *context) {
    for (Module *module = modules, *next; module; module = next) {
        next = module->next;
        if (module->context != context)
            continue;
        if (module->library->is_modules)
            library_free(module->library);
        else
            module_free(module);
    }
}

static Kernel *library_kernel(Library *library, const char *name) {
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0)
            return kernel;
    }
    if (!definition_find(name))
        return NULL;
    Kernel *kernel = handle_new(KIND_KERNEL);
    kernel->library = library;
    kernel->name = strdup(name);
    kernel->attributes[MAX_THREADS_PER_BLOCK] = 1024;
    kernel->attributes[NUM_REGS] = 32;
    kernel->attributes[PTX_VERSION] = 90;
    kernel->attributes[BINARY_VERSION] = 90;
    kernel->attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
    kernel->attributes[PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
    kernel->next = library->kernels;
    library->kernels = kernel;
    return kernel;
}

DRIVER_FUNCTION(cuLibraryLoadData, 12000,
                (Library **out, const void *image, int *jit_options, void **jit_values,
                 unsigned jit_count, int *options, void **values, unsigned count),
                (out, image, jit_options, jit_values, jit_count, options, values, count)) {
    if (!out || !image || (jit_count && (!jit_options || !jit_values)) ||
        (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    *out = handle_new(KIND_LIBRARY);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryLoadFromFile, 12000,
                (Library **out, const char *path, int *jit_options, void **jit_values,
                 unsigned jit_count, int *options, void **values, unsigned count),
                (out, path, jit_options, jit_values, jit_count, options, values, count)) {
    if (path && access(path, R_OK))
        return CUDA_ERROR_FILE_NOT_FOUND;
    return locked_cuLibraryLoadData(out, path, jit_options, jit_values, jit_count, options, values,
                                    count);
}

DRIVER_FUNCTION(cuLibraryUnload, 12000, (Library *library), (library)) {
    if (!handle_is(KIND_LIBRARY, library) || library->is_modules)
        return CUDA_ERROR_INVALID_HANDLE;
    library_free(library);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryGetKernel, 12000, (Kernel **out, Library *library, const char *name),
                (out, library, name)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    *out = library_kernel(library, name);
    return *out ? CUDA_SUCCESS : definition_missing(name);
}

static CUresult count_kernels(unsigned *out, bool known) {
    if (!known)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (unsigned)definition_count();
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryGetKernelCount, 12040, (unsigned *out, Library *library),
                (out, library)) {
    return count_kernels(out, handle_is(KIND_LIBRARY, library));
}

DRIVER_FUNCTION(cuLibraryEnumerateKernels, 12040, (Kernel **out, unsigned count, Library *library),
                (out, count, library)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || count > definition_count())
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        out[i] = library_kernel(library, definition_nth(i)->name);
    return CUDA_SUCCESS;
}

/* Variables are not simulated: no image has one. */
DRIVER_FUNCTION(cuLibraryGetGlobal, 12000,
                (CUdeviceptr *address, size_t *size, Library *library, const char *name),
                (address, size, library, name)) {
    UNUSED(address);
    UNUSED(size);
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    return name ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
}

/* ---- modules: a library in a context -------------------------------------------------------- */

static Module *module_of(Library *library, Context *context) {
    for (Module *module = modules; module; module = module->next) {
        if (module->library == library && module->context == context)
            return module;
    }
    Module *module = handle_new(KIND_MODULE);
    module->library = library;
    module->context = context;
    module->next = modules;
    modules = module;
    return module;
}

static Entry *entry_of(Module *module, Kernel *kernel) {
    for (Entry *entry = module->entries; entry; entry = entry->next) {
        if (entry->kernel == kernel)
            return entry;
    }
    Entry *entry = handle_new(KIND_ENTRY);
    entry->module = module;
    entry->kernel = kernel;
    entry->next = module->entries;
    module->entries = entry;
    return entry;
}

DRIVER_FUNCTION(cuLibraryGetModule, 12000, (Module **out, Library *library), (out, library)) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = module_of(library, context_current());
    return CUDA_SUCCESS;
}

static CUresult load_module(Module **out, const void *image) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    Library *library = handle_new(KIND_LIBRARY);
    library->is_modules = true;
    *out = module_of(library, context_current());
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuModuleLoadData, 2000, (Module **out, const void *image), (out, image)) {
    return load_module(out, image);
}

DRIVER_FUNCTION(cuModuleLoadDataEx, 2010,
                (Module **out, const void *image, unsigned count, int *options, void **values),
                (out, image, count, options, values)) {
    if (count && (!options || !values))
        return CUDA_ERROR_INVALID_VALUE;
    return load_module(out, image);
}

DRIVER_FUNCTION(cuModuleLoadFatBinary, 2000, (Module **out, const void *image), (out, image)) {
    return load_module(out, image);
}

DRIVER_FUNCTION(cuModuleLoad, 2000, (Module **out, const char *path), (out, path)) {
    if (path && access(path, R_OK))
        return CUDA_ERROR_FILE_NOT_FOUND;
    return load_module(out, path);
}

DRIVER_FUNCTION(cuModuleUnload, 2000, (Module *module), (module)) {
    if (!handle_is(KIND_MODULE, module) || !module->library->is_modules)
        return CUDA_ERROR_INVALID_HANDLE;
    library_free(module->library);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuModuleGetFunction, 2000, (Entry **out, Module *module, const char *name),
                (out, module, name)) {
    if (!handle_is(KIND_MODULE, module))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    Kernel *kernel = library_kernel(module->library, name);
    if (!kernel)
        return definition_missing(name);
    *out = entry_of(module, kernel);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuModuleGetFunctionCount, 12040, (unsigned *out, Module *module), (out, module)) {
    return count_kernels(out, handle_is(KIND_MODULE, module));
}

DRIVER_FUNCTION(cuModuleEnumerateFunctions, 12040, (Entry **out, unsigned count, Module *module),
                (out, count, module)) {
    if (!handle_is(KIND_MODULE, module))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || count > definition_count())
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        out[i] = entry_of(module, library_kernel(module->library, definition_nth(i)->name));
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuModuleGetGlobal_v2, cuModuleGetGlobal, 3020,
                   (CUdeviceptr *address, size_t *size, Module *module, const char *name),
                   (address, size, module, name)) {
    UNUSED(address);
    UNUSED(size);
    if (!handle_is(KIND_MODULE, module))
        return CUDA_ERROR_INVALID_HANDLE;
    return name ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
}

/* ---- kernels, which programs also pass where a function is wanted ---------------------------- */

static Kernel *kernel_of(void *handle) {
    if (handle_is(KIND_ENTRY, handle))
        return ((Entry *)handle)->kernel;
    return handle_is(KIND_KERNEL, handle) ? handle : NULL;
}

CUresult kernel_look_up(void *handle, const char **name, const Context **context,
                        unsigned *shared_limit) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    *name = kernel->name;
    *context = handle_is(KIND_ENTRY, handle) ? ((Entry *)handle)->module->context : NULL;
    *shared_limit = (unsigned)kernel->attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES];
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetFunction, 12000, (Entry **out, Kernel *kernel), (out, kernel)) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_is(KIND_KERNEL, kernel))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = entry_of(module_of(kernel->library, context_current()), kernel);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetLibrary, 12050, (Library **out, Kernel *kernel), (out, kernel)) {
    if (!handle_is(KIND_KERNEL, kernel))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = kernel->library;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuFuncGetModule, 11000, (Module **out, Entry *entry), (out, entry)) {
    if (!handle_is(KIND_ENTRY, entry))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = entry->module;
    return CUDA_SUCCESS;
}

static CUresult get_name(const char **out, void *handle) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = kernel->name;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetName, 12030, (const char **out, Kernel *kernel), (out, kernel)) {
    return get_name(out, kernel);
}

DRIVER_FUNCTION(cuFuncGetName, 12030, (const char **out, Entry *entry), (out, entry)) {
    return get_name(out, entry);
}

DRIVER_FUNCTION(cuFuncIsLoaded, 12040, (int *state, Entry *entry), (state, entry)) {
    enum { LOADED = 1 };
    if (!state || !handle_is(KIND_ENTRY, entry))
        return CUDA_ERROR_INVALID_VALUE;
    *state = LOADED;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuFuncLoad, 12040, (Entry *entry), (entry)) {
    return handle_is(KIND_ENTRY, entry) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Answers INVALID_VALUE past the last parameter: that is how programs count them. */
static CUresult get_parameter(void *handle, size_t index, size_t *offset, size_t *size) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    const Definition *definition = definition_find(kernel->name);
    if (!offset || index >= definition->count)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = definition->parameters[index].offset;
    if (size)
        *size = definition->parameters[index].size;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetParamInfo, 12040,
                (Kernel *kernel, size_t index, size_t *offset, size_t *size),
                (kernel, index, offset, size)) {
    return get_parameter(kernel, index, offset, size);
}

DRIVER_FUNCTION(cuFuncGetParamInfo, 12040,
                (Entry *entry, size_t index, size_t *offset, size_t *size),
                (entry, index, offset, size)) {
    return get_parameter(entry, index, offset, size);
}

static CUresult count_parameters(void *handle, size_t *count) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = definition_find(kernel->name)->count;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetParamCount, 13020, (Kernel *kernel, size_t *count), (kernel, count)) {
    return count_parameters(kernel, count);
}

DRIVER_FUNCTION(cuFuncGetParamCount, 13020, (Entry *entry, size_t *count), (entry, count)) {
    return count_parameters(entry, count);
}

/* ---- attributes ----------------------------------------------------------------------------- */

static CUresult get_attribute(int *value, int attribute, void *handle) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!value || attribute < 0 || attribute >= KERNEL_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = kernel->attributes[attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(void *handle, int attribute, int value) {
    Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (attribute < MAX_DYNAMIC_SHARED_SIZE_BYTES || attribute >= KERNEL_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > SHARED_MEMORY_OPT_IN))
        return CUDA_ERROR_INVALID_VALUE;
    kernel->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuFuncGetAttribute, 2020, (int *value, int attribute, Entry *entry),
                (value, attribute, entry)) {
    return get_attribute(value, attribute, entry);
}

DRIVER_FUNCTION(cuFuncSetAttribute, 9000, (Entry *entry, int attribute, int value),
                (entry, attribute, value)) {
    return set_attribute(entry, attribute, value);
}

DRIVER_FUNCTION(cuFuncSetCacheConfig, 3000, (Entry *entry, int config), (entry, config)) {
    UNUSED(config);
    return kernel_of(entry) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

DRIVER_FUNCTION(cuKernelGetAttribute, 12000,
                (int *value, int attribute, Kernel *kernel, CUdevice device),
                (value, attribute, kernel, device)) {
    CUresult result = device_check(device);
    return result == CUDA_SUCCESS ? get_attribute(value, attribute, kernel) : result;
}

DRIVER_FUNCTION(cuKernelSetAttribute, 12000,
                (int attribute, int value, Kernel *kernel, CUdevice device),
                (attribute, value, kernel, device)) {
    CUresult result = device_check(device);
    return result == CUDA_SUCCESS ? set_attribute(kernel, attribute, value) : result;
}

DRIVER_FUNCTION(cuKernelSetCacheConfig, 12000, (Kernel *kernel, int config, CUdevice device),
                (kernel, config, device)) {
    UNUSED(config);
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    return kernel_of(kernel) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
