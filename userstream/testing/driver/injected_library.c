/* CUDA_INJECTION64_PATH: a library that cuInit loads and calls, as profilers want it. */
#include "driver.h"

#include <dlfcn.h>

typedef int (*InitializeInjection)(void);

static enum { NOT_LOADED, BEING_LOADED, LOADED } state;
static uint64_t loading_thread;

/* A library that cannot be loaded, lacks the function or answers 0 changes nothing. */
static void load_and_call(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    InitializeInjection initialize = NULL;
    if (library)
        *(void **)&initialize = dlsym(library, "InitializeInjection");
    if (initialize)
        initialize();
}

/* Without the lock: the library calls the driver. The cuInit of another thread waits until it has
 * done so, as it may want to see all calls of the program. */
void injected_library_load(void) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    while (state == BEING_LOADED && loading_thread != this_thread()->id)
        wait_for_progress();
    if (state != NOT_LOADED || !path || !*path)
        return;
    state = BEING_LOADED;
    loading_thread = this_thread()->id;
    unlock();
    load_and_call(path);
    lock();
    state = LOADED;
    progress();
}
