/* What copies and fills share. */
#ifndef USERSTREAM_COPIES_H
#define USERSTREAM_COPIES_H

#include "driver.h"

/* Which operands must be memory that the driver knows. */
enum {
    ANYTHING = 0,
    KNOWN_DESTINATION = 1,
    KNOWN_SOURCE = 2,
    KNOWN_BOTH = 3,
};

typedef struct Operands {       /* of the destination and the source */
    CUdeviceptr address[2];
    const Context *context[2];  /* must reach the memory if a pool has it; NULL: the current one */
} Operands;

typedef struct Layout {
    size_t width;
    size_t height;
    size_t depth;
    size_t pitch[2];            /* of the destination and the source */
    size_t slice[2];
} Layout;

typedef struct Copy {
    CUdeviceptr address[2];     /* of the destination and the source */
    bool known[2];              /* whether it was the driver's memory when the copy was queued */
    Memory *imported[2];        /* stays mapped until the copy has run, also if it is freed */
    Layout layout;
    void *staged;               /* the contents of a pageable source */
    struct CUDA_MEMCPY3D *described;    /* as a node was; NULL: captured */
} Copy;

CUresult copy_submit(Stream *stream, Operands operands, const Layout *layout, int needs,
                     bool synchronous);
CUresult copy_operation(const Operands *operands, const Layout *layout, int needs, bool in_graph,
                        Operation **operation);

/* Memory that the driver knows must contain the whole operand; for a graph also memory that it, or
 * another graph, will have when it is launched. `found` is the memory; NULL: none, or not yet. */
CUresult copy_check_operand(CUdeviceptr address, size_t size, bool must_be_known, bool in_graph,
                            Memory **found);

/* Adds a product, unless that is more than a size can be. */
static inline bool add_product(size_t *sum, size_t a, size_t b) {
    size_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(*sum, product, sum);
}

/* The bytes from the first to the last of `rows` rows in each of `slices` slices. SIZE_MAX: more
 * than there can be. */
size_t copy_extent(size_t width, size_t rows, size_t pitch, size_t slices, size_t slice);

/* ---- shaped_copies.c ------------------------------------------------------------------------ */

enum { TYPE_HOST = 1, TYPE_DEVICE = 2, TYPE_ARRAY = 3, TYPE_UNIFIED = 4 };  /* CUmemorytype */

typedef struct Side2D {
    size_t x;
    size_t y;
    int type;
    CUdeviceptr host;
    CUdeviceptr device;
    struct Array *array;
    size_t pitch;
} Side2D;

typedef struct CUDA_MEMCPY2D {
    Side2D source;
    Side2D destination;
    size_t width;
    size_t height;
} CUDA_MEMCPY2D;

typedef struct Side3D {
    size_t x;
    size_t y;
    size_t z;
    size_t level;
    int type;
    CUdeviceptr host;
    CUdeviceptr device;
    struct Array *array;
    void *reserved;
    size_t pitch;
    size_t height;
} Side3D;

typedef struct CUDA_MEMCPY3D {
    Side3D source;
    Side3D destination;
    size_t width;
    size_t height;
    size_t depth;
} CUDA_MEMCPY3D;

/* The stream on which synchronous copies and fills run. */
CUresult copy_check_synchronous(Stream **stream);

/* Both must be contexts. */
CUresult copy_check_peers(const Context *destination, const Context *source);

#endif
