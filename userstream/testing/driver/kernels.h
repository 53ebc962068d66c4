/* Kernels: what modules.c, kernels.c, launches.c and kernel_nodes.c offer each other.
 *
 * There is no code for a GPU here. A kernel is a name, and a Python function may stand for it: its
 * definition says which parameters it takes. An image of which nothing is known has every kernel
 * that is defined. */
#ifndef USERSTREAM_KERNELS_H
#define USERSTREAM_KERNELS_H

#include "images.h"

/* ---- kernels.c: what stands for a kernel, and handing launches to Python -------------------- */

typedef struct Definition {
    uint64_t id;                /* by which Python knows its function */
    char *name;
    double seconds;             /* what each launch takes at least */
    bool replaced;              /* another one has the name */
    bool takes_all;             /* whatever parameters the image says the kernel has */
    int references;             /* launches, queued or in graphs, and the table's */
    size_t count;
    struct Definition *next;
    Parameter parameters[];
} Definition;

/* The function that stands for a kernel of this name, which may be a mangled one. */
Definition *definition_find(const char *name);
Definition *definition_nth(size_t n);
size_t definition_count(void);
/* Lets the error of this call say that nothing stands for the kernel. */
CUresult definition_missing(const char *name);

/* ---- launches.c ----------------------------------------------------------------------------- */

typedef struct Shape {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
} Shape;

typedef struct LaunchAttribute {    /* CUlaunchAttribute */
    int id;
    char pad[4];
    union {
        unsigned size[3];       /* of a cluster */
        uint64_t value[8];
    };
} LaunchAttribute;

typedef struct LaunchConfiguration {    /* CUlaunchConfig */
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream *stream;
    const LaunchAttribute *attributes;
    unsigned count;
} LaunchConfiguration;

/* The blocks of a cluster; 0: it has no such attribute. */
unsigned launch_cluster_size(const LaunchConfiguration *configuration);
CUresult launch_check_attributes(const LaunchConfiguration *configuration, void *kernel);

/* One launch, or a node of a graph: it may run many times. */
typedef struct Launch {
    Definition *definition;
    void *kernel;               /* the handle that was given */
    const Context *context;     /* in which the kernel runs */
    Shape shape;
    size_t count;               /* of the parameters */
    size_t size;                /* of all of them */
    Parameter *layout;
    void **addresses;           /* of the parameters, as a graph's node shows them */
    unsigned char *parameters;
} Launch;

/* Copies the parameters, which are the caller's again afterwards. */
CUresult launch_new(Operation **operation, void *kernel, const Context *context,
                    const Shape *shape, void **parameters, void **extra);
/* Hands the launch to Python and waits for its end: on a stream's worker, under the lock. */
CUresult launch_run(const Launch *launch, Stream *stream);
void launch_free(Launch *launch);
/* Whether a thread that runs kernels is in Python. */
bool kernels_are_running(void);

/* ---- modules.c ------------------------------------------------------------------------------ */

enum { KERNEL_ATTRIBUTES = 18, KERNEL_ATTRIBUTES_BEFORE = 16 };

enum {                          /* CUfunction_attribute */
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
    CLUSTER_SIZE_MUST_BE_SET,
    REQUIRED_CLUSTER_WIDTH,
    REQUIRED_CLUSTER_HEIGHT,
    REQUIRED_CLUSTER_DEPTH,
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    CLUSTER_SCHEDULING_POLICY_PREFERENCE,
};

struct Kernel {                 /* CUkernel */
    Handle handle;
    Library *library;
    const ImageKernel *in_image;    /* NULL: nothing is known of the image */
    char *name;
    int attributes[KERNEL_ATTRIBUTES];
    Kernel *next;
};

struct Entry {                  /* CUfunction: a kernel in a context */
    Handle handle;
    Module *module;
    Kernel *kernel;
    Entry *next;
};

struct Library {
    Handle handle;
    Image *image;
    Kernel *kernels;            /* those that were asked for */
    bool is_modules;            /* goes with its module */
};

struct Module {
    Handle handle;
    Context *context;
    Library *library;
    Entry *entries;
    Module *next;
};

/* A CUkernel or a CUfunction; the latter has a context. NULL: neither. */
const Kernel *kernel_look_up(void *handle, const Context **context);

#endif
