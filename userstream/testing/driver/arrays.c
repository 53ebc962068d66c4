/* CUDA arrays: memory with dimensions and an element type, in a layout of the driver's own. */
#include "arrays.h"

/* ---- shapes --------------------------------------------------------------------------------- */

size_t format_bytes(int format) {
    enum {                      /* CUarray_format */
        UNSIGNED_INT8 = 0x01,
        UNSIGNED_INT16 = 0x02,
        UNSIGNED_INT32 = 0x03,
        SIGNED_INT8 = 0x08,
        SIGNED_INT16 = 0x09,
        SIGNED_INT32 = 0x0a,
        HALF = 0x10,
        FLOAT = 0x20,
    };
    switch (format) {
    case UNSIGNED_INT8:
    case SIGNED_INT8:
        return 1;
    case UNSIGNED_INT16:
    case SIGNED_INT16:
    case HALF:
        return 2;
    case UNSIGNED_INT32:
    case SIGNED_INT32:
    case FLOAT:
        return 4;
    default:
        return 0;
    }
}

static size_t at_least_one(size_t size) {
    return size ? size : 1;
}

size_t array_row(const Array *array) {
    return array->shape.width * format_bytes(array->shape.format) * array->shape.channels;
}

size_t array_rows(const Array *array) {
    return at_least_one(array->shape.height);
}

size_t array_slices(const Array *array) {
    return at_least_one(array->shape.depth);
}

/* H100: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE... */
static bool has_limits(const ArrayShape *shape) {
    enum { WIDTH = 131072, HEIGHT = 65536, CUBE = 16384, LAYERED = 32768, LAYERS = 2048 };
    if (shape->flags & ARRAY_LAYERED)
        return shape->width <= LAYERED && shape->height <= LAYERED && shape->depth <= LAYERS;
    if (shape->depth)
        return shape->width <= CUBE && shape->height <= CUBE && shape->depth <= CUBE;
    return shape->width <= WIDTH && shape->height <= HEIGHT;
}

/* "A 3D array is allocated if all three extents are non-zero"; "a cubemap ... width must be equal
 * to height, and depth must be six"; "a layered array ... depth is the number of layers". */
static CUresult check_shape(const ArrayShape *shape) {
    const unsigned known = ARRAY_LAYERED | ARRAY_SURFACE | ARRAY_CUBEMAP | ARRAY_GATHER;
    unsigned flags = shape->flags;
    bool channels = shape->channels == 1 || shape->channels == 2 || shape->channels == 4;
    if (!shape->width || !channels || !format_bytes(shape->format) || flags & ~known)
        return CUDA_ERROR_INVALID_VALUE;
    if (!(flags & ARRAY_LAYERED) && shape->depth && !shape->height)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & ARRAY_LAYERED && !shape->depth)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & ARRAY_CUBEMAP &&
        (shape->width != shape->height || !shape->depth || shape->depth % 6 ||
         (shape->depth != 6 && !(flags & ARRAY_LAYERED))))
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & ARRAY_GATHER && (!shape->height || shape->depth))
        return CUDA_ERROR_INVALID_VALUE;
    return has_limits(shape) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- making and ending arrays --------------------------------------------------------------- */

static CUresult array_new(Array **out, const ArrayShape *shape) {
    Array *array = handle_new(KIND_ARRAY);
    array->context = context_current();
    array->shape = *shape;
    size_t size = array_row(array) * array_rows(array) * array_slices(array);
    CUresult result =
        memory_new(size, MEMORY_DEVICE, array->context->device, NULL, 0, &array->address);
    if (result != CUDA_SUCCESS) {
        handle_free(KIND_ARRAY, array);
        return result;
    }
    array->memory_id = memory_find(array->address)->id;
    *out = array;
    return CUDA_SUCCESS;
}

bool array_is(const Array *array) {
    return handle_is(KIND_ARRAY, array) && memory_with_id(array->memory_id);
}

static void array_free(Array *array) {
    Memory *memory = memory_with_id(array->memory_id);
    if (memory)
        memory_free(memory);
    handle_free(KIND_ARRAY, array);
}

static CUresult check_creation(const void *out, const ArrayShape *shape) {
    CUresult result = context_usable_after_frees(context_current());
    if (result == CUDA_SUCCESS)
        result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    return out && shape ? check_shape(shape) : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_FUNCTION_AS(cuArray3DCreate_v2, cuArray3DCreate, 3020,
                   (Array **out, const ArrayShape *shape), (out, shape)) {
    CUresult result = check_creation(out, shape);
    return result == CUDA_SUCCESS ? array_new(out, shape) : result;
}

typedef struct ArrayShape2D {   /* CUDA_ARRAY_DESCRIPTOR */
    size_t width;
    size_t height;
    int format;
    unsigned channels;
} ArrayShape2D;

DRIVER_FUNCTION_AS(cuArrayCreate_v2, cuArrayCreate, 3020,
                   (Array **out, const ArrayShape2D *shape), (out, shape)) {
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    ArrayShape same = {.width = shape->width,
                       .height = shape->height,
                       .format = shape->format,
                       .channels = shape->channels};
    CUresult result = check_creation(out, &same);
    return result == CUDA_SUCCESS ? array_new(out, &same) : result;
}

/* Waits, as freeing memory does. The wait gives up the lock. */
DRIVER_FUNCTION(cuArrayDestroy, 2000, (Array *array), (array)) {
    if (!array_is(array) || array->levels_of)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    context_synchronize_to_free(array->context);
    if (!array_is(array))
        return CUDA_ERROR_INVALID_HANDLE;
    array_free(array);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuArray3DGetDescriptor_v2, cuArray3DGetDescriptor, 3020,
                   (ArrayShape *out, Array *array), (out, array)) {
    if (!array_is(array))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = array->shape;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuArrayGetDescriptor_v2, cuArrayGetDescriptor, 3020,
                   (ArrayShape2D *out, Array *array), (out, array)) {
    if (!array_is(array))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (ArrayShape2D){array->shape.width, array->shape.height, array->shape.format,
                          array->shape.channels};
    return CUDA_SUCCESS;
}

/* ---- mipmapped arrays ----------------------------------------------------------------------- */

static size_t halved(size_t size, unsigned level) {
    return size ? at_least_one(size >> level) : 0;
}

/* Layers do not become fewer. */
static ArrayShape shape_of_level(const ArrayShape *shape, unsigned level) {
    ArrayShape found = *shape;
    found.width = halved(shape->width, level);
    found.height = halved(shape->height, level);
    if (!(shape->flags & (ARRAY_LAYERED | ARRAY_CUBEMAP)))
        found.depth = halved(shape->depth, level);
    return found;
}

static unsigned most_levels(const ArrayShape *shape) {
    size_t size = shape->width > shape->height ? shape->width : shape->height;
    if (!(shape->flags & (ARRAY_LAYERED | ARRAY_CUBEMAP)) && shape->depth > size)
        size = shape->depth;
    unsigned levels = 1;
    while (size >>= 1)
        levels++;
    return levels;
}

static void mipmapped_free(MipmappedArray *mipmapped) {
    for (unsigned i = 0; i < mipmapped->count; i++) {
        if (mipmapped->levels[i])
            array_free(mipmapped->levels[i]);
    }
    handle_free(KIND_MIPMAPPED_ARRAY, mipmapped);
}

/* "This value is clamped to the range [1, 1 + floor(log2(max(width, height, depth)))]." */
DRIVER_FUNCTION(cuMipmappedArrayCreate, 5000,
                (MipmappedArray **out, const ArrayShape *shape, unsigned levels),
                (out, shape, levels)) {
    CUresult result = check_creation(out, shape);
    if (result != CUDA_SUCCESS)
        return result;
    unsigned most = most_levels(shape);
    MipmappedArray *mipmapped = handle_new(KIND_MIPMAPPED_ARRAY);
    mipmapped->context = context_current();
    mipmapped->shape = *shape;
    mipmapped->count = levels < 1 ? 1 : levels > most ? most : levels;
    for (unsigned i = 0; i < mipmapped->count && result == CUDA_SUCCESS; i++) {
        ArrayShape of_level = shape_of_level(shape, i);
        result = array_new(&mipmapped->levels[i], &of_level);
        if (result == CUDA_SUCCESS)
            mipmapped->levels[i]->levels_of = mipmapped;
    }
    if (result == CUDA_SUCCESS)
        *out = mipmapped;
    else
        mipmapped_free(mipmapped);
    return result;
}

DRIVER_FUNCTION(cuMipmappedArrayGetLevel, 5000,
                (Array **out, MipmappedArray *mipmapped, unsigned level),
                (out, mipmapped, level)) {
    if (!handle_is(KIND_MIPMAPPED_ARRAY, mipmapped))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || level >= mipmapped->count)
        return CUDA_ERROR_INVALID_VALUE;
    *out = mipmapped->levels[level];
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuMipmappedArrayDestroy, 5000, (MipmappedArray *mipmapped), (mipmapped)) {
    if (!handle_is(KIND_MIPMAPPED_ARRAY, mipmapped))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = capture_forbids_unsafe_call();
    if (result != CUDA_SUCCESS)
        return result;
    context_synchronize_to_free(mipmapped->context);
    if (!handle_is(KIND_MIPMAPPED_ARRAY, mipmapped))
        return CUDA_ERROR_INVALID_HANDLE;
    mipmapped_free(mipmapped);
    return CUDA_SUCCESS;
}
