/* Kernels: their parameters and names, asked for once. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_KERNELS = 1 << 13 };

pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels[MAX_KERNELS];
static size_t kernel_count;

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
    atomic_init(&kernel->references, 1);
    return kernel;
}

/* A thread may find the kernel as soon as it is in the table: this record comes before. */
static void tell_of(const Kernel *kernel) {
    const char *name = NULL;
    if (!(driver.function_name && !driver.function_name(&name, kernel->handle)) &&
        driver.kernel_name)
        driver.kernel_name(&name, kernel->handle);
    Part parts[] = {{name, name ? (uint32_t)strlen(name) : 0},
                    {kernel->offsets, kernel->count * (uint32_t)sizeof *kernel->offsets}};
    log_write((Record){.function = SEEN_KERNEL, .words = 1, .stack = -1}, &kernel->handle, parts,
              2);
}

/* Under the lock: where it is, or where it would be. */
static size_t kernel_place(uint64_t handle) {
    size_t place = (size_t)(mixed(1, handle) >> 32) % MAX_KERNELS;
    while (kernels[place] && kernels[place]->handle != handle)
        place = (place + 1) % MAX_KERNELS;
    return place;
}

/* Returns a kernel with a reference for the caller. The driver is asked without the lock. */
Kernel *kernel_acquire(uint64_t handle) {
    pthread_mutex_lock(&kernels_lock);
    Kernel *kernel = kernels[kernel_place(handle)];
    if (kernel)
        atomic_fetch_add(&kernel->references, 1);
    bool full = kernel_count >= MAX_KERNELS / 2;
    pthread_mutex_unlock(&kernels_lock);
    if (kernel || full)
        return kernel;
    Kernel *asked = kernel_ask(handle);
    if (!asked)
        return NULL;
    tell_of(asked);
    pthread_mutex_lock(&kernels_lock);
    size_t place = kernel_place(handle);
    if (!kernels[place]) {
        kernels[place] = asked;
        kernel_count++;
        asked = NULL;
    }
    kernel = kernels[place];
    atomic_fetch_add(&kernel->references, 1);
    pthread_mutex_unlock(&kernels_lock);
    if (asked)                  /* another thread was faster */
        kernel_free(asked);
    return kernel;
}

void kernel_release(Kernel *kernel) {
    if (atomic_fetch_sub(&kernel->references, 1) == 1)
        kernel_free(kernel);
}

/* A kernel that a thread still uses is freed when that thread releases it. */
void kernels_forget(void) {
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MAX_KERNELS && kernel_count; i++) {
        if (!kernels[i])
            continue;
        kernel_release(kernels[i]);
        kernels[i] = NULL;
        kernel_count--;
    }
    pthread_mutex_unlock(&kernels_lock);
    strangers_forget();
}

/* Words that are no addresses, so that the driver is not asked at each launch. */
enum { STRANGERS = 4096 };

static _Atomic uint64_t strangers[STRANGERS];

void strangers_forget(void) {
    for (size_t i = 0; i < STRANGERS; i++)
        atomic_store_explicit(&strangers[i], 0, memory_order_relaxed);
}

bool is_memory(uint64_t word, Range *found) {
    if (word < 1 << 16 || word >> 57)
        return false;
    if (memory_known(word, found))
        return true;
    _Atomic uint64_t *stranger = &strangers[mixed(1, word) % STRANGERS];
    if (atomic_load_explicit(stranger, memory_order_relaxed) == word)
        return false;
    see_memory(word);
    if (memory_known(word, found))
        return true;
    atomic_store_explicit(stranger, word, memory_order_relaxed);
    return false;
}

Kernel *kernel_known(uint64_t handle) {
    return kernels[kernel_place(handle)];
}

void kernels_in_child(void) {
    pthread_mutex_init(&kernels_lock, NULL);
    memset(kernels, 0, sizeof kernels);
    kernel_count = 0;
}
