/* Kernels: what modules.c, kernels.c, launches.c and kernel_nodes.c offer each other.
 *
 * There is no code for a GPU here. A kernel is a name, and a Python function may stand for it: its
 * definition says which parameters it takes. Any image has every kernel that is defined. */
#ifndef USERSTREAM_KERNELS_H
#define USERSTREAM_KERNELS_H

#include "driver.h"

/* ---- kernels.c: what stands for a kernel, and handing launches to Python -------------------- */

typedef struct Parameter {
    size_t offset;
    size_t size;
} Parameter;

typedef struct Definition {
    uint64_t id;                /* by which Python knows its function */
    char *name;
    double seconds;             /* what each launch takes at least */
    bool replaced;              /* another one has the name */
    int references;             /* launches, queued or in graphs, and the table's */
    size_t count;
    size_t size;                /* of all parameters */
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

/* One launch, or a node of a graph: it may run many times. */
typedef struct Launch {
    Definition *definition;
    void *kernel;               /* the handle that was given */
    const Context *context;     /* in which the kernel runs */
    Shape shape;
    void **addresses;           /* of the parameters, as a graph's node shows them */
    unsigned char *parameters;
} Launch;

/* Copies the parameters, which are the caller's again afterwards. */
CUresult launch_new(Operation **operation, void *kernel, const Context *context,
                    const Shape *shape, void **parameters, void **extra);
/* Hands the launch to Python and waits for its end: on a stream's worker, under the lock. */
CUresult launch_run(const Launch *launch, Stream *stream);
void launch_free(Launch *launch);

/* ---- modules.c ------------------------------------------------------------------------------ */

enum { KERNEL_ATTRIBUTES = 18 };

struct Kernel {                 /* CUkernel */
    Handle handle;
    Library *library;
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

/* The name of the kernel, which is a CUkernel or a CUfunction; the latter has a context. */
CUresult kernel_look_up(void *kernel, const char **name, const Context **context,
                        unsigned *shared_limit);

#endif
