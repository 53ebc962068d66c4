/* Texture and surface objects: arrays and memory as kernels read them. */
#include "arrays.h"

enum {                          /* CUresourcetype */
    RESOURCE_ARRAY,
    RESOURCE_MIPMAPPED_ARRAY,
    RESOURCE_LINEAR,
    RESOURCE_PITCH_2D,
};

enum { SEAMLESS_CUBEMAP = 64 };         /* CU_TRSF_... */
enum { TEXTURE_ALIGNMENT = 512, PITCH_ALIGNMENT = 32, LONGEST_LINEAR = 1 << 28 };
enum { WIDEST_PITCHED = 131072, HIGHEST_PITCHED = 65000, LONGEST_PITCH = 2097120 };    /* H100 */

/* ---- checks --------------------------------------------------------------------------------- */

static bool is_element(int format, unsigned channels) {
    return format_bytes(format) && (channels == 1 || channels == 2 || channels == 4);
}

static bool is_memory(CUdeviceptr address, size_t size, size_t alignment) {
    return size && address % alignment == 0 && memory_contains(address, size);
}

static CUresult check_resource(const TextureResource *resource) {
    bool possible = false;
    if (!resource || resource->flags)
        return CUDA_ERROR_INVALID_VALUE;
    switch (resource->type) {
    case RESOURCE_ARRAY:
        possible = array_is(resource->array);
        break;
    case RESOURCE_MIPMAPPED_ARRAY:
        possible = handle_is(KIND_MIPMAPPED_ARRAY, resource->mipmapped) &&
                   array_is(resource->mipmapped->levels[0]);
        break;
    case RESOURCE_LINEAR:
        possible = is_element(resource->linear.format, resource->linear.channels) &&
                   /* H100: it may be of no size. */
                   is_memory(resource->linear.address,
                             resource->linear.size ? resource->linear.size : 1,
                             TEXTURE_ALIGNMENT) &&
                   resource->linear.size / format_bytes(resource->linear.format) /
                           resource->linear.channels <= LONGEST_LINEAR;
        break;
    case RESOURCE_PITCH_2D: {
        size_t row = resource->pitched.width * format_bytes(resource->pitched.format) *
                     resource->pitched.channels;
        possible = is_element(resource->pitched.format, resource->pitched.channels) &&
                   resource->pitched.height && resource->pitched.height <= HIGHEST_PITCHED &&
                   resource->pitched.width <= WIDEST_PITCHED && resource->pitched.pitch >= row &&
                   resource->pitched.pitch <= LONGEST_PITCH &&
                   resource->pitched.pitch % PITCH_ALIGNMENT == 0 &&
                   is_memory(resource->pitched.address,
                             (resource->pitched.height - 1) * resource->pitched.pitch + row,
                             TEXTURE_ALIGNMENT);
        break;
    }
    }
    return possible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* H100: only a cubemap has seams. */
static bool has_seams(const TextureResource *resource) {
    return resource->type == RESOURCE_ARRAY && resource->array->shape.flags & ARRAY_CUBEMAP;
}

/* CUaddress_mode is wrap, clamp, mirror or border; CUfilter_mode is point or linear. */
static bool is_sampling(const Sampling *sampling) {
    enum { LAST_ADDRESS_MODE = 3, LAST_FILTER_MODE = 1 };
    for (int i = 0; sampling && i < 3; i++) {
        if (sampling->address_modes[i] < 0 || sampling->address_modes[i] > LAST_ADDRESS_MODE)
            return false;
    }
    return sampling && sampling->filter_mode >= 0 && sampling->filter_mode <= LAST_FILTER_MODE &&
           sampling->mipmap_filter_mode >= 0 && sampling->mipmap_filter_mode <= LAST_FILTER_MODE;
}

/* ---- objects -------------------------------------------------------------------------------- */

/* "pResViewDesc can only be specified if the type of resource is a CUDA array or a CUDA mipmapped
 * array." */
DRIVER_FUNCTION(cuTexObjectCreate, 5000,
                (uint64_t *out, const TextureResource *resource, const Sampling *sampling,
                 const TextureView *view),
                (out, resource, sampling, view)) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS)
        result = check_resource(resource);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || !is_sampling(sampling) || (view && resource->type > RESOURCE_MIPMAPPED_ARRAY) ||
        (sampling->flags & SEAMLESS_CUBEMAP && !has_seams(resource)))
        return CUDA_ERROR_INVALID_VALUE;
    Texture *texture = handle_new(KIND_TEXTURE);
    texture->resource = *resource;
    texture->sampling = *sampling;
    texture->has_view = view != NULL;
    if (view)
        texture->view = *view;
    *out = (uint64_t)texture;
    return CUDA_SUCCESS;
}

/* H100: also of an array without the flag for it. */
DRIVER_FUNCTION(cuSurfObjectCreate, 5000, (uint64_t *out, const TextureResource *resource),
                (out, resource)) {
    CUresult result = context_usable(context_current());
    if (result == CUDA_SUCCESS)
        result = check_resource(resource);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || resource->type != RESOURCE_ARRAY)
        return CUDA_ERROR_INVALID_VALUE;
    Texture *surface = handle_new(KIND_SURFACE);
    surface->resource = *resource;
    *out = (uint64_t)surface;
    return CUDA_SUCCESS;
}

static Texture *object(uint64_t number, Kind kind) {
    return handle_is(kind, (void *)number) ? (Texture *)number : NULL;
}

static CUresult destroy(uint64_t number, Kind kind) {
    if (!object(number, kind))
        return CUDA_ERROR_INVALID_VALUE;
    handle_free(kind, (void *)number);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuTexObjectDestroy, 5000, (uint64_t texture), (texture)) {
    return destroy(texture, KIND_TEXTURE);
}

DRIVER_FUNCTION(cuSurfObjectDestroy, 5000, (uint64_t surface), (surface)) {
    return destroy(surface, KIND_SURFACE);
}

#define GETTER(name, type, kind, member, condition) \
    DRIVER_FUNCTION(name, 5000, (type *out, uint64_t number), (out, number)) { \
        const Texture *found = object(number, kind); \
        if (!found || !out || !(condition)) \
            return CUDA_ERROR_INVALID_VALUE; \
        *out = found->member; \
        return CUDA_SUCCESS; \
    }

GETTER(cuTexObjectGetResourceDesc, TextureResource, KIND_TEXTURE, resource, true)
GETTER(cuTexObjectGetTextureDesc, Sampling, KIND_TEXTURE, sampling, true)
GETTER(cuTexObjectGetResourceViewDesc, TextureView, KIND_TEXTURE, view, found->has_view)
GETTER(cuSurfObjectGetResourceDesc, TextureResource, KIND_SURFACE, resource, true)

/* ---- the side door: what a kernel's function reads ------------------------------------------- */

typedef struct Contents {
    CUdeviceptr address;
    size_t shape[3];            /* depth, height and width in elements; 0: it lacks the dimension */
    size_t pitch;               /* bytes from row to row */
    int format;
    unsigned channels;
    bool is_writable;
} Contents;

__attribute__((visibility("default"))) bool userstream_texture_contents(uint64_t number,
                                                                       Contents *out);

/* Of a mipmapped array the first level. False: the number is of no texture or surface. */
static bool contents_of(uint64_t number, Contents *out) {
    const Texture *surface = object(number, KIND_SURFACE);
    const Texture *found = surface ? surface : object(number, KIND_TEXTURE);
    const TextureResource *resource = found ? &found->resource : NULL;
    bool known = resource && check_resource(resource) == CUDA_SUCCESS;
    if (known && resource->type <= RESOURCE_MIPMAPPED_ARRAY) {
        const Array *array = resource->type == RESOURCE_ARRAY ? resource->array
                                                              : resource->mipmapped->levels[0];
        const ArrayShape *shape = &array->shape;
        *out = (Contents){array->address, {shape->depth, shape->height, shape->width},
                          array_row(array), shape->format, shape->channels, surface != NULL};
    } else if (known && resource->type == RESOURCE_LINEAR) {
        size_t element = format_bytes(resource->linear.format) * resource->linear.channels;
        *out = (Contents){resource->linear.address, {0, 0, resource->linear.size / element},
                          resource->linear.size, resource->linear.format,
                          resource->linear.channels, false};
    } else if (known) {
        *out = (Contents){resource->pitched.address,
                          {0, resource->pitched.height, resource->pitched.width},
                          resource->pitched.pitch, resource->pitched.format,
                          resource->pitched.channels, false};
    }
    return known;
}

bool userstream_texture_contents(uint64_t number, Contents *out) {
    lock();
    bool known = contents_of(number, out);
    unlock();
    return known;
}

void texture_touches(uint64_t number, Touch touch) {
    Contents contents;
    if (!contents_of(number, &contents))
        return;
    size_t size = contents.pitch;
    for (int i = 0; i < 2; i++)
        size *= contents.shape[i] ? contents.shape[i] : 1;
    touch(contents.address, size, contents.is_writable);
}
