/* Names and parameters of kernels: the driver is asked once for each kernel. */
#define _GNU_SOURCE

#include "parts.h"

#include <dlfcn.h>
#include <stdlib.h>

enum { MAX_KERNELS = 1 << 13, MOST_NAME = 16 << 10, MOST_TOLD = 2048 };

pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels[MAX_KERNELS];
static size_t kernel_count;
static Generation forgotten;
/* Kernels that are no longer in the table: since the last time that all threads had left the
 * recorder, and before. */
static Kernel *leaving, *unused;

/* What the runtime passes for a function may be a CUkernel. */
static bool parameter(uint64_t handle, size_t index, size_t *offset, size_t *size) {
    return (driver.function_parameter &&
            !driver.function_parameter(handle, index, offset, size)) ||
           (driver.kernel_parameter && !driver.kernel_parameter(handle, index, offset, size));
}

static void kernel_free(Kernel *kernel) {
    free(kernel->offsets);
    free(kernel->sizes);
    free(kernel->looks);
    free(kernel);
}

static bool make_room(Kernel *kernel, uint32_t room) {
    uint32_t *offsets = realloc(kernel->offsets, room * sizeof *offsets);
    if (offsets)
        kernel->offsets = offsets;
    uint32_t *sizes = realloc(kernel->sizes, room * sizeof *sizes);
    if (sizes)
        kernel->sizes = sizes;
    return offsets && sizes;
}

/* NULL: there is no memory for it. */
static Kernel *kernel_ask(uint64_t handle) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    size_t offset, size;
    uint32_t room = 0;
    if (!kernel)
        return NULL;
    kernel->handle = handle;
    while (kernel->count < 4096 && parameter(handle, kernel->count, &offset, &size)) {
        if (kernel->count == room) {
            room = room ? room * 2 : 16;
            if (!make_room(kernel, room)) {
                kernel_free(kernel);
                return NULL;
            }
        }
        kernel->offsets[kernel->count] = (uint32_t)offset;
        kernel->sizes[kernel->count++] = (uint32_t)size;
        if (offset + size > kernel->bytes)
            kernel->bytes = (uint32_t)(offset + size);
    }
    kernel->looks = calloc(kernel->bytes / 8 + 1, 1);
    if (!kernel->looks) {
        kernel_free(kernel);
        return NULL;
    }
    return kernel;
}

/* ---- names ----------------------------------------------------------------------------------- */

static char *(*demangle)(const char *, char *, size_t *, int *);
static bool are_loaded;         /* before their first launch */

/* Not when a kernel is seen: the thread that launches it may hold the lock of the loader. */
void kernels_prepare(void) {
    const char *loading = getenv("CUDA_MODULE_LOADING");
    are_loaded = loading && !strcmp(loading, "EAGER");
    if (demangle)
        return;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_LOCAL);
    if (library)
        *(void **)&demangle = dlsym(library, "__cxa_demangle");
}

bool kernel_may_load(Kernel *kernel) {
    if (atomic_load_explicit(&kernel->was_launched, memory_order_relaxed))
        return false;
    atomic_store_explicit(&kernel->was_launched, true, memory_order_relaxed);
    return !are_loaded;
}

static Part text_part(const char *text) {
    return (Part){text, text ? (uint32_t)strnlen(text, MOST_NAME) : 0};
}

/* A thread may find the kernel as soon as it is in the table: this record comes before. */
static void tell_of(Thread *me, Kernel *kernel) {
    const char *name = NULL;
    if (!(driver.function_name && !driver.function_name(&name, kernel->handle)) &&
        driver.kernel_name)
        driver.kernel_name(&name, kernel->handle);
    kernel->is_collective = name && strstr(name, "nccl");
    int status;
    char *readable = name && demangle ? demangle(name, NULL, NULL, &status) : NULL;
    uint32_t count = kernel->count < MOST_TOLD ? kernel->count : MOST_TOLD;
    Part parts[] = {text_part(name), text_part(readable),
                    {kernel->offsets, count * (uint32_t)sizeof *kernel->offsets},
                    {kernel->sizes, count * (uint32_t)sizeof *kernel->sizes}};
    log_write(me, (Record){.type = SEEN_KERNEL, .words = 1, .stack = -1}, &kernel->handle, parts,
              4);
    free(readable);
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Under the lock: where it is, or where it would be. */
static size_t kernel_place(uint64_t handle) {
    size_t place = (size_t)(mixed(1, handle) >> 32) % MAX_KERNELS;
    while (kernels[place] && kernels[place]->handle != handle)
        place = (place + 1) % MAX_KERNELS;
    return place;
}

/* The driver is asked without the lock. */
static Kernel *find_kernel(Thread *me, uint64_t handle) {
    pthread_mutex_lock(&kernels_lock);
    Kernel *kernel = kernels[kernel_place(handle)];
    bool full = kernel_count >= MAX_KERNELS / 2;
    pthread_mutex_unlock(&kernels_lock);
    if (kernel || full)
        return kernel;
    Kernel *asked = kernel_ask(handle);
    if (!asked)
        return NULL;
    tell_of(me, asked);
    pthread_mutex_lock(&kernels_lock);
    size_t place = kernel_place(handle);
    if (!kernels[place]) {
        kernels[place] = asked;
        kernel_count++;
        asked = NULL;
    }
    kernel = kernels[place];
    pthread_mutex_unlock(&kernels_lock);
    if (asked)                  /* another thread was faster */
        kernel_free(asked);
    return kernel;
}

Kernel *kernel_of(Thread *me, uint64_t handle) {
    unsigned generation = generation_of(&forgotten);
    unsigned place = (unsigned)(mixed(1, handle) >> 32) % KERNELS_KEPT;
    if (me->kernels.known[place].handle == handle && me->kernels.known[place].kernel &&
        me->kernels.known[place].generation == generation)
        return me->kernels.known[place].kernel;
    Kernel *kernel = find_kernel(me, handle);
    me->kernels.known[place].handle = handle;
    me->kernels.known[place].kernel = kernel;
    me->kernels.known[place].generation = generation;
    return kernel;
}

/* Threads that are in the recorder may still use the kernels. */
void kernels_forget(void) {
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MAX_KERNELS && kernel_count; i++) {
        if (!kernels[i])
            continue;
        kernels[i]->next = leaving;
        leaving = kernels[i];
        kernels[i] = NULL;
        kernel_count--;
    }
    generation_ends(&forgotten);
    pthread_mutex_unlock(&kernels_lock);
    strangers_forget();
}

void kernels_free(void) {
    if (!threads_have_left())
        return;
    pthread_mutex_lock(&kernels_lock);
    Kernel *all = unused;
    unused = leaving;
    leaving = NULL;
    pthread_mutex_unlock(&kernels_lock);
    while (all) {
        Kernel *kernel = all;
        all = kernel->next;
        kernel_free(kernel);
    }
}

Kernel *kernel_known(uint64_t handle) {
    return kernels[kernel_place(handle)];
}

void kernels_in_child(void) {
    pthread_mutex_init(&kernels_lock, NULL);
    memset(kernels, 0, sizeof kernels);
    kernel_count = 0;
    leaving = unused = NULL;
}
