/* CUDA arrays, and the textures and surfaces through which kernels see them. */
#ifndef USERSTREAM_ARRAYS_H
#define USERSTREAM_ARRAYS_H

#include "driver.h"

typedef struct ArrayShape {     /* CUDA_ARRAY3D_DESCRIPTOR; the dimensions that it lacks are 0 */
    size_t width;
    size_t height;
    size_t depth;
    int format;
    unsigned channels;
    unsigned flags;
} ArrayShape;

enum {                          /* CUDA_ARRAY3D_... */
    ARRAY_LAYERED = 1,
    ARRAY_SURFACE = 2,
    ARRAY_CUBEMAP = 4,
    ARRAY_GATHER = 8,
};

struct Array {
    Handle handle;
    Context *context;
    ArrayShape shape;
    CUdeviceptr address;        /* rows one behind the other */
    uint64_t memory_id;         /* gone with the context */
    MipmappedArray *levels_of;  /* it is a level of; else NULL */
};

enum { MAX_LEVELS = 32 };

struct MipmappedArray {
    Handle handle;
    Context *context;
    ArrayShape shape;
    unsigned count;
    Array *levels[MAX_LEVELS];
};

/* The bytes of an element of this format; 0: there is no such format. */
size_t format_bytes(int format);
bool array_is(const Array *array);
size_t array_row(const Array *array);       /* bytes */
size_t array_rows(const Array *array);      /* of a slice */
size_t array_slices(const Array *array);

/* ---- textures.c ----------------------------------------------------------------------------- */

typedef struct TextureResource {       /* CUDA_RESOURCE_DESC */
    int type;
    union {
        Array *array;
        MipmappedArray *mipmapped;
        struct {
            CUdeviceptr address;
            int format;
            unsigned channels;
            size_t size;
        } linear;
        struct {
            CUdeviceptr address;
            int format;
            unsigned channels;
            size_t width;
            size_t height;
            size_t pitch;
        } pitched;
        int reserved[32];
    };
    unsigned flags;
} TextureResource;

typedef struct Sampling {       /* CUDA_TEXTURE_DESC */
    int address_modes[3];
    int filter_mode;
    unsigned flags;
    unsigned anisotropy;
    int mipmap_filter_mode;
    float mipmap[3];
    float border[4];
    int reserved[12];
} Sampling;

typedef struct TextureView {           /* CUDA_RESOURCE_VIEW_DESC */
    int format;
    size_t size[3];
    unsigned parts[4];
    unsigned reserved[16];
} TextureView;

struct Texture {                /* CUtexObject, CUsurfObject: the address as a number */
    Handle handle;
    TextureResource resource;
    Sampling sampling;
    TextureView view;
    bool has_view;
};

#endif
