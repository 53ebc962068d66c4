/* Libraries and modules, and the kernels in them. */
#include "device_limits.h"
#include "kernels.h"

#include <stdio.h>

enum { READ_AT_ONCE = 1 << 16 };

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
    for (size_t i = 0; i < library->image->variable_count; i++) {
        Memory *memory = memory_with_id(library->image->variables[i].memory_id);
        if (memory)
            memory_free(memory);
    }
    image_free(library->image);
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

static void kernel_attributes_initialize(Kernel *kernel) {
    static const ImageKernel unknown = {.registers = 32};
    const ImageKernel *in_image = kernel->in_image ? kernel->in_image : &unknown;
    const Image *image = kernel->library->image;
    int *attributes = kernel->attributes;
    int most = REGISTERS_OF_A_BLOCK / (in_image->registers ? in_image->registers : 1);
    most = most / WARP * WARP;
    if (most > LARGEST_BLOCK)
        most = LARGEST_BLOCK;
    attributes[MAX_THREADS_PER_BLOCK] = in_image->max_threads ? in_image->max_threads : most;
    attributes[SHARED_SIZE_BYTES] = in_image->shared_bytes;
    attributes[CONST_SIZE_BYTES] = in_image->constant_bytes;
    attributes[LOCAL_SIZE_BYTES] = in_image->local_bytes;
    attributes[NUM_REGS] = in_image->registers;
    attributes[PTX_VERSION] = image->is_known ? image->ptx_version : COMPUTE_CAPABILITY;
    attributes[BINARY_VERSION] = image->is_known ? image->binary_version : COMPUTE_CAPABILITY;
    attributes[MAX_DYNAMIC_SHARED_SIZE_BYTES] = SHARED_BYTES_BY_DEFAULT - in_image->shared_bytes;
    attributes[PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
}

static Kernel *library_kernel(Library *library, const char *name) {
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0)
            return kernel;
    }
    const ImageKernel *in_image = image_kernel(library->image, name);
    if (library->image->is_known ? !in_image : !definition_find(name))
        return NULL;
    Kernel *kernel = handle_new(KIND_KERNEL);
    kernel->library = library;
    kernel->in_image = in_image;
    kernel->name = strdup(name);
    kernel_attributes_initialize(kernel);
    kernel->next = library->kernels;
    library->kernels = kernel;
    return kernel;
}

static Library *library_new(const void *image) {
    Library *library = handle_new(KIND_LIBRARY);
    library->image = image_read(image);
    return library;
}

/* The image in a file, with a zero behind it; NULL: there is no such file. */
static char *read_file(const char *path) {
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file)
        return NULL;
    size_t size = 0;
    char *content = NULL;
    size_t read;
    do {
        content = realloc(content, size + READ_AT_ONCE + 1);
        read = fread(content + size, 1, READ_AT_ONCE, file);
        size += read;
    } while (read);
    content[size] = 0;
    fclose(file);
    return content;
}

DRIVER_FUNCTION(cuLibraryLoadData, 12000,
                (Library **out, const void *image, int *jit_options, void **jit_values,
                 unsigned jit_count, int *options, void **values, unsigned count),
                (out, image, jit_options, jit_values, jit_count, options, values, count)) {
    if (!out || !image || (jit_count && (!jit_options || !jit_values)) ||
        (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    *out = library_new(image);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryLoadFromFile, 12000,
                (Library **out, const char *path, int *jit_options, void **jit_values,
                 unsigned jit_count, int *options, void **values, unsigned count),
                (out, path, jit_options, jit_values, jit_count, options, values, count)) {
    char *image = read_file(path);
    if (path && !image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = locked_cuLibraryLoadData(out, image, jit_options, jit_values, jit_count,
                                               options, values, count);
    free(image);
    return result;
}

DRIVER_FUNCTION(cuLibraryUnload, 12000, (Library *library), (library)) {
    if (!handle_is(KIND_LIBRARY, library) || library->is_modules)
        return CUDA_ERROR_INVALID_HANDLE;
    library_free(library);
    return CUDA_SUCCESS;
}

/* An image that is known says itself what is in it. */
static CUresult kernel_missing(const Library *library, const char *name) {
    return library->image->is_known ? CUDA_ERROR_NOT_FOUND : definition_missing(name);
}

DRIVER_FUNCTION(cuLibraryGetKernel, 12000, (Kernel **out, Library *library, const char *name),
                (out, library, name)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    *out = library_kernel(library, name);
    return *out ? CUDA_SUCCESS : kernel_missing(library, name);
}

static unsigned kernel_count(const Library *library) {
    const Image *image = library->image;
    return (unsigned)(image->is_known ? image->kernel_count : definition_count());
}

static Kernel *nth_kernel(Library *library, unsigned n) {
    const Image *image = library->image;
    return library_kernel(library, image->is_known ? image->kernels[n].name
                                                   : definition_nth(n)->name);
}

static CUresult count_kernels(unsigned *out, const Library *library) {
    if (!library)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = kernel_count(library);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryGetKernelCount, 12040, (unsigned *out, Library *library),
                (out, library)) {
    return count_kernels(out, handle_is(KIND_LIBRARY, library) ? library : NULL);
}

DRIVER_FUNCTION(cuLibraryEnumerateKernels, 12040, (Kernel **out, unsigned count, Library *library),
                (out, count, library)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || count > kernel_count(library))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        out[i] = nth_kernel(library, i);
    return CUDA_SUCCESS;
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
    Library *library = library_new(image);
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
    char *image = read_file(path);
    if (path && !image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = load_module(out, image);
    free(image);
    return result;
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
    if (!out || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    Kernel *kernel = library_kernel(module->library, name);
    if (!kernel)
        return kernel_missing(module->library, name);
    *out = entry_of(module, kernel);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuModuleGetFunctionCount, 12040, (unsigned *out, Module *module), (out, module)) {
    return count_kernels(out, handle_is(KIND_MODULE, module) ? module->library : NULL);
}

DRIVER_FUNCTION(cuModuleEnumerateFunctions, 12040, (Entry **out, unsigned count, Module *module),
                (out, count, module)) {
    if (!handle_is(KIND_MODULE, module))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || count > kernel_count(module->library))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        out[i] = entry_of(module, nth_kernel(module->library, i));
    return CUDA_SUCCESS;
}

/* ---- variables ------------------------------------------------------------------------------ */

/* They have memory, in which nothing is stored until a program does. */
static CUresult get_variable(CUdeviceptr *address, size_t *size, const Library *library,
                             const char *name) {
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    /* H100: the name of a kernel is refused in another way than one that is not there. */
    if (!name || !*name || (!address && !size) || image_kernel(library->image, name))
        return CUDA_ERROR_INVALID_VALUE;
    ImageVariable *variable = image_variable(library->image, name);
    if (!variable)
        return CUDA_ERROR_NOT_FOUND;
    if (!memory_with_id(variable->memory_id)) {
        result = memory_new(variable->size, MEMORY_DEVICE, context_current()->device, NULL, 0,
                            &variable->address);
        if (result != CUDA_SUCCESS)
            return result;
        variable->memory_id = memory_find(variable->address)->id;
        memset((void *)variable->address, 0, variable->size);
    }
    if (address)
        *address = variable->address;
    if (size)
        *size = variable->size;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuLibraryGetGlobal, 12000,
                (CUdeviceptr *address, size_t *size, Library *library, const char *name),
                (address, size, library, name)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    return get_variable(address, size, library, name);
}

/* Images have no managed variables and no unified functions here. */
DRIVER_FUNCTION(cuLibraryGetManaged, 12000,
                (CUdeviceptr *address, size_t *size, Library *library, const char *name),
                (address, size, library, name)) {
    if (!handle_is(KIND_LIBRARY, library))
        return CUDA_ERROR_INVALID_HANDLE;
    return name && *name && (address || size) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_FUNCTION(cuLibraryGetUnifiedFunction, 12000,
                (void **out, Library *library, const char *name), (out, library, name)) {
    UNUSED(out);
    UNUSED(name);
    return handle_is(KIND_LIBRARY, library) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

DRIVER_FUNCTION_AS(cuModuleGetGlobal_v2, cuModuleGetGlobal, 3020,
                   (CUdeviceptr *address, size_t *size, Module *module, const char *name),
                   (address, size, module, name)) {
    if (!handle_is(KIND_MODULE, module))
        return CUDA_ERROR_INVALID_HANDLE;
    return get_variable(address, size, module->library, name);
}

/* ---- kernels, which programs also pass where a function is wanted ---------------------------- */

static Kernel *kernel_of(void *handle) {
    if (handle_is(KIND_ENTRY, handle))
        return ((Entry *)handle)->kernel;
    return handle_is(KIND_KERNEL, handle) ? handle : NULL;
}

const Kernel *kernel_look_up(void *handle, const Context **context) {
    *context = handle_is(KIND_ENTRY, handle) ? ((Entry *)handle)->module->context : NULL;
    return kernel_of(handle);
}

/* Where the image does not say which parameters a kernel takes, the function does that stands for
 * it. */
static size_t parameters_of(const Kernel *kernel, const Parameter **parameters) {
    if (kernel->in_image) {
        *parameters = kernel->in_image->parameters;
        return kernel->in_image->count;
    }
    const Definition *definition = definition_find(kernel->name);
    *parameters = definition->parameters;
    return definition->count;
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
    const Parameter *parameters;
    if (!offset || index >= parameters_of(kernel, &parameters))
        return CUDA_ERROR_INVALID_VALUE;
    *offset = parameters[index].offset;
    if (size)
        *size = parameters[index].size;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetParamInfo, 12040,
                (Kernel *kernel, size_t index, size_t *offset, size_t *size),
                (kernel, index, offset, size)) {
    CUresult result = context_usable(context_current());
    return result == CUDA_SUCCESS ? get_parameter(kernel, index, offset, size) : result;
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
    const Parameter *parameters;
    *count = parameters_of(kernel, &parameters);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuKernelGetParamCount, 13020, (Kernel *kernel, size_t *count), (kernel, count)) {
    return count_parameters(kernel, count);
}

DRIVER_FUNCTION(cuFuncGetParamCount, 13020, (Entry *entry, size_t *count), (entry, count)) {
    return count_parameters(entry, count);
}

/* ---- attributes ----------------------------------------------------------------------------- */

static bool is_attribute(int attribute) {
    enum { ADDED = 13010 };     /* the driver's version with more of them */
    int count = settings.driver_version < ADDED ? KERNEL_ATTRIBUTES_BEFORE : KERNEL_ATTRIBUTES;
    return attribute >= 0 && attribute < count;
}

static CUresult get_attribute(int *value, int attribute, void *handle) {
    const Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!value || !is_attribute(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    *value = kernel->attributes[attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(void *handle, int attribute, int value) {
    Kernel *kernel = kernel_of(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (attribute < MAX_DYNAMIC_SHARED_SIZE_BYTES || !is_attribute(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    int most = SHARED_BYTES_OPT_IN - kernel->attributes[SHARED_SIZE_BYTES];
    if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > most))
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
