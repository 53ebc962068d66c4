/* The runtime's arrays, textures, and copies and fills of two and three dimensions: the driver's,
 * with descriptions of other shapes. */
#include "arrays.h"
#include "copies.h"
#include "runtime.h"

enum {
    INVALID_CHANNEL_DESCRIPTOR = 20,
    INVALID_FILTER_SETTING = 26,
    INVALID_NORM_SETTING = 27,
};

typedef struct Extent {         /* cudaExtent */
    size_t width;               /* in elements of an array, else bytes */
    size_t height;
    size_t depth;
} Extent;

typedef struct Pitched {        /* cudaPitchedPtr */
    CUdeviceptr address;
    size_t pitch;
    size_t width;
    size_t height;
} Pitched;

/* ---- channels ------------------------------------------------------------------------------- */

typedef struct Channels {       /* cudaChannelFormatDesc */
    int bits[4];
    enum { SIGNED, UNSIGNED, FLOAT, CHANNEL_KINDS } kind;
} Channels;

enum { WIDTHS = 3 };            /* 8, 16 and 32 bits */
static const int formats[CHANNEL_KINDS][WIDTHS] = {{8, 9, 10}, {1, 2, 3}, {0, 16, 32}};

static CUresult format_of(const Channels *channels, int *format, unsigned *count) {
    *format = 0;
    *count = 0;
    if (!channels)
        return CUDA_ERROR_INVALID_VALUE;
    while (*count < 4 && channels->bits[*count])
        ++*count;
    for (unsigned i = 0; i < 4; i++) {
        if (channels->bits[i] != (i < *count ? channels->bits[0] : 0))
            return (CUresult)INVALID_CHANNEL_DESCRIPTOR;
    }
    for (int i = 0; *count && i < WIDTHS; i++) {
        if (channels->bits[0] == 8 << i && (unsigned)channels->kind < CHANNEL_KINDS)
            *format = formats[channels->kind][i];
    }
    return *format && *count != 3 ? CUDA_SUCCESS : (CUresult)INVALID_CHANNEL_DESCRIPTOR;
}

static Channels channels_of(int format, unsigned count) {
    Channels found = {0};
    for (int i = 0; i < CHANNEL_KINDS * WIDTHS; i++) {
        if (formats[i / WIDTHS][i % WIDTHS] != format)
            continue;
        found.kind = i / WIDTHS;
        for (unsigned k = 0; k < count; k++)
            found.bits[k] = 8 << i % WIDTHS;
    }
    return found;
}

/* ---- arrays --------------------------------------------------------------------------------- */

CUresult cuArray3DCreate_v2(Array **out, const ArrayShape *shape);
CUresult cuArray3DGetDescriptor_v2(ArrayShape *out, Array *array);
CUresult cuMipmappedArrayCreate(MipmappedArray **out, const ArrayShape *shape, unsigned levels);
CUresult cuArrayDestroy(Array *array);
CUresult cuMipmappedArrayDestroy(MipmappedArray *mipmapped);
CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *out, int format, unsigned channels,
                                            CUdevice device);

static CUresult shape_of(ArrayShape *shape, const Channels *channels, Extent extent,
                         unsigned flags) {
    *shape = (ArrayShape){.width = extent.width, .height = extent.height, .depth = extent.depth,
                          .flags = flags};
    return format_of(channels, &shape->format, &shape->channels);
}

RUNTIME_FUNCTION(cudaMalloc3DArray, runtime_start_with_context,
                 (Array **out, const Channels *channels, Extent extent, unsigned flags),
                 (out, channels, extent, flags)) {
    ArrayShape shape;
    CUresult result = shape_of(&shape, channels, extent, flags);
    return result == CUDA_SUCCESS ? cuArray3DCreate_v2(out, &shape) : result;
}

RUNTIME_FUNCTION(cudaMallocArray, runtime_start_with_context,
                 (Array **out, const Channels *channels, size_t width, size_t height,
                  unsigned flags),
                 (out, channels, width, height, flags)) {
    return body_runtime_cudaMalloc3DArray(out, channels, (Extent){width, height, 0}, flags);
}

RUNTIME_FUNCTION(cudaMallocMipmappedArray, runtime_start_with_context,
                 (MipmappedArray **out, const Channels *channels, Extent extent, unsigned levels,
                  unsigned flags),
                 (out, channels, extent, levels, flags)) {
    ArrayShape shape;
    CUresult result = shape_of(&shape, channels, extent, flags);
    return result == CUDA_SUCCESS ? cuMipmappedArrayCreate(out, &shape, levels) : result;
}

SAME(cudaGetMipmappedArrayLevel, cuMipmappedArrayGetLevel,
     (Array **out, MipmappedArray *mipmapped, unsigned level), (out, mipmapped, level))

RUNTIME_FUNCTION(cudaFreeArray, runtime_start_with_context, (Array *array), (array)) {
    return array ? cuArrayDestroy(array) : CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaFreeMipmappedArray, runtime_start_with_context, (MipmappedArray *mipmapped),
                 (mipmapped)) {
    return mipmapped ? cuMipmappedArrayDestroy(mipmapped) : CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaArrayGetInfo, runtime_start_with_context,
                 (Channels *channels, Extent *extent, unsigned *flags, Array *array),
                 (channels, extent, flags, array)) {
    ArrayShape shape;
    CUresult result = cuArray3DGetDescriptor_v2(&shape, array);
    if (result != CUDA_SUCCESS)
        return result;
    if (channels)
        *channels = channels_of(shape.format, shape.channels);
    if (extent)
        *extent = (Extent){shape.width, shape.height, shape.depth};
    if (flags)
        *flags = shape.flags;
    return CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaGetChannelDesc, runtime_start_with_context, (Channels *out, Array *array),
                 (out, array)) {
    return body_runtime_cudaArrayGetInfo(out, NULL, NULL, array);
}

RUNTIME_FUNCTION(cudaDeviceGetTexture1DLinearMaxWidth, runtime_start_with_context,
                 (size_t *out, const Channels *channels, CUdevice device),
                 (out, channels, device)) {
    int format;
    unsigned count;
    CUresult result = format_of(channels, &format, &count);
    return result == CUDA_SUCCESS ? cuDeviceGetTexture1DLinearMaxWidth(out, format, count, device)
                                  : result;
}

/* ---- textures and surfaces ------------------------------------------------------------------ */

typedef struct RuntimeResource {    /* cudaResourceDesc; CUDA 13 has room behind it */
    int type;
    union {
        Array *array;
        MipmappedArray *mipmapped;
        struct {
            CUdeviceptr address;
            Channels channels;
            size_t size;        /* of linear memory in bytes; else the width in elements */
            size_t height;
            size_t pitch;
        } memory;
    };
} RuntimeResource;

typedef struct RuntimeSampling {    /* cudaTextureDesc */
    int address_modes[3];
    int filter_mode;
    int is_normalized_float;    /* what is read */
    int is_srgb;
    float border[4];
    int has_normalized_coordinates;
    unsigned anisotropy;
    int mipmap_filter_mode;
    float mipmap[3];
    int without_optimization;
    int is_seamless;
} RuntimeSampling;

enum { MIPMAPPED = 1, LINEAR_MEMORY, PITCHED_MEMORY };  /* cudaResourceType */

enum {                          /* CU_TRSF_... */
    READ_AS_INTEGER = 1,
    NORMALIZED_COORDINATES = 2,
    SRGB = 16,
    WITHOUT_OPTIMIZATION = 32,
    SEAMLESS = 64,
};

CUresult cuTexObjectCreate(uint64_t *out, const TextureResource *resource,
                           const Sampling *sampling, const TextureView *view);
CUresult cuTexObjectGetResourceDesc(TextureResource *out, uint64_t number);
CUresult cuTexObjectGetTextureDesc(Sampling *out, uint64_t number);
CUresult cuTexObjectGetResourceViewDesc(TextureView *out, uint64_t number);
CUresult cuTexObjectDestroy(uint64_t number);
CUresult cuSurfObjectCreate(uint64_t *out, const TextureResource *resource);
CUresult cuSurfObjectGetResourceDesc(TextureResource *out, uint64_t number);
CUresult cuSurfObjectDestroy(uint64_t number);

static CUresult resource_of(TextureResource *out, const RuntimeResource *given) {
    *out = (TextureResource){0};
    if (!given)
        return CUDA_ERROR_INVALID_VALUE;
    out->type = given->type;
    if (given->type == LINEAR_MEMORY) {
        out->linear.address = given->memory.address;
        out->linear.size = given->memory.size;
        return format_of(&given->memory.channels, &out->linear.format, &out->linear.channels);
    }
    if (given->type == PITCHED_MEMORY) {
        out->pitched.address = given->memory.address;
        out->pitched.width = given->memory.size;
        out->pitched.height = given->memory.height;
        out->pitched.pitch = given->memory.pitch;
        return format_of(&given->memory.channels, &out->pitched.format, &out->pitched.channels);
    }
    out->array = given->array;
    return CUDA_SUCCESS;
}

static RuntimeResource resource_answer(const TextureResource *found) {
    RuntimeResource answer = {.type = found->type};
    if (found->type == LINEAR_MEMORY) {
        answer.memory.address = found->linear.address;
        answer.memory.channels = channels_of(found->linear.format, found->linear.channels);
        answer.memory.size = found->linear.size;
    } else if (found->type == PITCHED_MEMORY) {
        answer.memory.address = found->pitched.address;
        answer.memory.channels = channels_of(found->pitched.format, found->pitched.channels);
        answer.memory.size = found->pitched.width;
        answer.memory.height = found->pitched.height;
        answer.memory.pitch = found->pitched.pitch;
    } else {
        answer.array = found->array;
    }
    return answer;
}

/* The format of the elements; 0: the resource has none. */
static int format_of_resource(const TextureResource *resource) {
    ArrayShape shape;
    Array *array = resource->array;
    if (resource->type == LINEAR_MEMORY)
        return resource->linear.format;
    if (resource->type == PITCHED_MEMORY)
        return resource->pitched.format;
    if (resource->type == MIPMAPPED &&
        cuMipmappedArrayGetLevel(&array, resource->mipmapped, 0) != CUDA_SUCCESS)
        return 0;
    return cuArray3DGetDescriptor_v2(&shape, array) == CUDA_SUCCESS ? shape.format : 0;
}

static bool is_float(int format) {
    return format == formats[FLOAT][1] || format == formats[FLOAT][2];
}

/* An integer of 8 or 16 bits: a texture may read it as a number up to one. */
static bool is_small(int format) {
    return format && !is_float(format) && format != formats[SIGNED][2] &&
           format != formats[UNSIGNED][2];
}

/* "cudaReadModeNormalizedFloat ... is only supported for 8-bit and 16-bit integer formats"; linear
 * filtering "is only valid if the returned value ... is configured to be floating-point". */
static CUresult check_reading(const RuntimeSampling *sampling, int format) {
    if (sampling->is_normalized_float && !is_small(format))
        return (CUresult)INVALID_NORM_SETTING;
    if (sampling->filter_mode && !sampling->is_normalized_float && !is_float(format))
        return (CUresult)INVALID_FILTER_SETTING;
    return CUDA_SUCCESS;
}

static Sampling sampling_of(const RuntimeSampling *given, int format) {
    unsigned flags = is_small(format) && !given->is_normalized_float ? READ_AS_INTEGER : 0;
    flags |= given->has_normalized_coordinates ? NORMALIZED_COORDINATES : 0;
    flags |= given->is_srgb ? SRGB : 0;
    flags |= given->without_optimization ? WITHOUT_OPTIMIZATION : 0;
    flags |= given->is_seamless ? SEAMLESS : 0;
    Sampling sampling = {.filter_mode = given->filter_mode, .flags = flags,
                         .anisotropy = given->anisotropy,
                         .mipmap_filter_mode = given->mipmap_filter_mode};
    memcpy(sampling.address_modes, given->address_modes, sizeof sampling.address_modes);
    memcpy(sampling.mipmap, given->mipmap, sizeof sampling.mipmap);
    memcpy(sampling.border, given->border, sizeof sampling.border);
    return sampling;
}

enum { VIEW_BYTES = offsetof(TextureView, reserved) };  /* cudaResourceViewDesc of CUDA 12 */

RUNTIME_FUNCTION(cudaCreateTextureObject, runtime_start_with_context,
                 (uint64_t *out, const RuntimeResource *resource, const RuntimeSampling *sampling,
                  const void *view),
                 (out, resource, sampling, view)) {
    TextureResource wanted;
    TextureView wanted_view = {0};
    CUresult result = resource_of(&wanted, resource);
    if (result == CUDA_SUCCESS && !sampling)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    int format = format_of_resource(&wanted);
    result = format ? check_reading(sampling, format) : CUDA_ERROR_INVALID_HANDLE;
    if (result != CUDA_SUCCESS)
        return result;
    Sampling wanted_sampling = sampling_of(sampling, format);
    bool has_view = view && wanted.type < LINEAR_MEMORY;   /* H100: of memory without effect */
    if (has_view)
        memcpy(&wanted_view, view, VIEW_BYTES);
    return cuTexObjectCreate(out, &wanted, &wanted_sampling, has_view ? &wanted_view : NULL);
}

RUNTIME_FUNCTION(cudaCreateSurfaceObject, runtime_start_with_context,
                 (uint64_t *out, const RuntimeResource *resource), (out, resource)) {
    TextureResource wanted;
    CUresult result = resource_of(&wanted, resource);
    return result == CUDA_SUCCESS ? cuSurfObjectCreate(out, &wanted) : result;
}

RUNTIME_FUNCTION(cudaDestroyTextureObject, runtime_start_with_context, (uint64_t number),
                 (number)) {
    return number ? cuTexObjectDestroy(number) : CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaDestroySurfaceObject, runtime_start_with_context, (uint64_t number),
                 (number)) {
    return number ? cuSurfObjectDestroy(number) : CUDA_SUCCESS;
}

#define RESOURCE_GETTER(name, driver_function) \
    RUNTIME_FUNCTION(name, runtime_start_with_context, (RuntimeResource *out, uint64_t number), \
                     (out, number)) { \
        TextureResource found; \
        CUresult result = out ? driver_function(&found, number) : CUDA_ERROR_INVALID_VALUE; \
        if (result == CUDA_SUCCESS) \
            *out = resource_answer(&found); \
        return result; \
    }

RESOURCE_GETTER(cudaGetTextureObjectResourceDesc, cuTexObjectGetResourceDesc)
RESOURCE_GETTER(cudaGetSurfaceObjectResourceDesc, cuSurfObjectGetResourceDesc)

RUNTIME_FUNCTION(cudaGetTextureObjectTextureDesc, runtime_start_with_context,
                 (RuntimeSampling *out, uint64_t number), (out, number)) {
    Sampling found;
    TextureResource resource;
    CUresult result = out ? cuTexObjectGetTextureDesc(&found, number) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = cuTexObjectGetResourceDesc(&resource, number);
    if (result != CUDA_SUCCESS)
        return result;
    bool is_normalized = is_small(format_of_resource(&resource)) &&
                         !(found.flags & READ_AS_INTEGER);
    *out = (RuntimeSampling){.filter_mode = found.filter_mode,
                             .is_normalized_float = is_normalized,
                             .is_srgb = !!(found.flags & SRGB),
                             .has_normalized_coordinates =
                                 !!(found.flags & NORMALIZED_COORDINATES),
                             .anisotropy = found.anisotropy,
                             .mipmap_filter_mode = found.mipmap_filter_mode,
                             .without_optimization = !!(found.flags & WITHOUT_OPTIMIZATION),
                             .is_seamless = !!(found.flags & SEAMLESS)};
    memcpy(out->address_modes, found.address_modes, sizeof out->address_modes);
    memcpy(out->mipmap, found.mipmap, sizeof out->mipmap);
    memcpy(out->border, found.border, sizeof out->border);
    return CUDA_SUCCESS;
}

RUNTIME_FUNCTION(cudaGetTextureObjectResourceViewDesc, runtime_start_with_context,
                 (void *out, uint64_t number), (out, number)) {
    TextureView found;
    Sampling sampling;
    CUresult result = out ? cuTexObjectGetTextureDesc(&sampling, number) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    memset(&found, 0, sizeof found);        /* H100: it may have none */
    cuTexObjectGetResourceViewDesc(&found, number);
    memcpy(out, &found, VIEW_BYTES);
    return CUDA_SUCCESS;
}

/* ---- copies --------------------------------------------------------------------------------- */

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *copy);
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, Stream *stream);
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D *copy);
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D *copy, Stream *stream);

typedef struct Operand {        /* of cudaMemcpy3DParms and cudaMemcpy3DPeerParms */
    Array *array;
    size_t position[3];
    Pitched memory;
} Operand;

typedef struct RuntimeCopy {    /* cudaMemcpy3DParms */
    Operand source;
    Operand destination;
    Extent extent;
    int kind;
} RuntimeCopy;

typedef struct PeerCopy {       /* cudaMemcpy3DPeerParms */
    Operand source;
    CUdevice from;
    Operand destination;
    CUdevice to;
    Extent extent;
} PeerCopy;

/* The bytes of an element of an array; 0: it is none. */
static size_t element_of(Array *array) {
    ArrayShape shape;
    return cuArray3DGetDescriptor_v2(&shape, array) == CUDA_SUCCESS
               ? format_bytes(shape.format) * shape.channels : 0;
}

/* H100: the width that is compared with a pitch is in elements. */
static CUresult check_operand(const Operand *operand, Extent extent) {
    const Pitched *memory = &operand->memory;
    if (!operand->array == !memory->address)
        return CUDA_ERROR_INVALID_VALUE;
    if (operand->array)
        return CUDA_SUCCESS;
    bool has_rows = extent.height > 1 || extent.depth > 1;
    if ((has_rows && extent.width > memory->pitch) ||
        (extent.depth > 1 && extent.height > memory->height))
        return (CUresult)RUNTIME_INVALID_PITCH;
    return extent.height > memory->height ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static Side3D side_of(const Operand *operand, size_t element, int type) {
    const size_t *position = operand->position;
    return (Side3D){.x = position[0] * element, .y = position[1], .z = position[2],
                    .type = operand->array ? TYPE_ARRAY : type, .array = operand->array,
                    .host = operand->memory.address, .device = operand->memory.address,
                    .pitch = operand->memory.pitch, .height = operand->memory.height};
}

/* "If a CUDA array is participating in the copy, the extent is defined in terms of that array's
 * elements." H100: the positions in memory as well. */
static CUresult copy_of(CUDA_MEMCPY3D *out, const Operand *destination, const Operand *source,
                        Extent extent, int kind) {
    Array *array = destination->array ? destination->array : source->array;
    size_t element = array ? element_of(array) : 1;
    if (!element || (source->array && element_of(source->array) != element))
        return CUDA_ERROR_INVALID_VALUE;
    if (source->array && runtime_memory_type(kind, SOURCE) == TYPE_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_MEMCPY3D){
        side_of(source, element, runtime_memory_type(kind, SOURCE)),
        side_of(destination, element, runtime_memory_type(kind, DESTINATION)),
        extent.width * element, extent.height, extent.depth};
    CUresult result = check_operand(destination, extent);
    return result == CUDA_SUCCESS ? check_operand(source, extent) : result;
}

static bool is_empty(Extent extent) {
    return !extent.width || !extent.height || !extent.depth;
}

CUresult runtime_copy_3d(CUDA_MEMCPY3D *out, const void *given) {
    const RuntimeCopy *copy = given;
    if (!copy || is_empty(copy->extent))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = runtime_check_kind(copy->kind);
    if (result == CUDA_SUCCESS)
        result = copy_of(out, &copy->destination, &copy->source, copy->extent, copy->kind);
    return result;
}

static Operand operand_of(const Side3D *side, size_t element) {
    Operand found = {.position = {side->x / element, side->y, side->z}};
    if (side->type == TYPE_ARRAY)
        found.array = side->array;
    else
        found.memory = (Pitched){side->type == TYPE_HOST ? side->host : side->device, side->pitch,
                                 0, side->height};
    return found;
}

CUresult runtime_describe_copy(void *out, const CUDA_MEMCPY3D *copy) {
    const Side3D *sides[] = {&copy->destination, &copy->source};
    size_t element = 1;
    int kind = 0;
    for (int i = 0; i < 2; i++) {
        if (sides[i]->type == TYPE_ARRAY)
            element = element_of(sides[i]->array);
        if (sides[i]->type != TYPE_HOST)
            kind |= sides[i]->type == TYPE_UNIFIED ? KIND_DEFAULT : i ? SOURCE : DESTINATION;
    }
    if (!element)               /* its array is gone */
        return CUDA_ERROR_INVALID_HANDLE;
    *(RuntimeCopy *)out = (RuntimeCopy){
        operand_of(&copy->source, element), operand_of(&copy->destination, element),
        {copy->width / element, copy->height, copy->depth},
        kind > KIND_DEFAULT ? KIND_DEFAULT : kind};
    return CUDA_SUCCESS;
}

static CUresult peer_copy_3d(CUDA_MEMCPY3D *out, const PeerCopy *copy) {
    Context *contexts[2];
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_of(out, &copy->destination, &copy->source, copy->extent, KIND_DEFAULT);
    if (result == CUDA_SUCCESS)
        result = runtime_peers(contexts, copy->to, copy->from);
    if (result != CUDA_SUCCESS)
        return result;
    out->destination.reserved = contexts[0];
    out->source.reserved = contexts[1];
    return CUDA_SUCCESS;
}

static Side3D place(Array *array, size_t x, size_t y) {
    return (Side3D){.type = TYPE_ARRAY, .array = array, .x = x, .y = y};
}

/* Rows of bytes between arrays, or an array and memory. An array is on a device. */
static CUresult rows(CUDA_MEMCPY3D *out, Side3D destination, Side3D source, size_t width,
                     size_t height, int kind) {
    int arrays = (destination.array ? DESTINATION : 0) | (source.array ? SOURCE : 0);
    bool possible = kind == KIND_DEFAULT || (kind & arrays) == arrays;
    Side3D *memory = destination.array ? &source : &destination;
    memory->type = memory->array ? TYPE_ARRAY
        : runtime_memory_type(kind, destination.array ? SOURCE : DESTINATION);
    *out = (CUDA_MEMCPY3D){source, destination, width, height, 1};
    if (!memory->array && height > 1 && width > memory->pitch)
        return (CUresult)RUNTIME_INVALID_PITCH;
    return runtime_check_kind(possible ? kind : KIND_DEFAULT + 1);
}

static Side3D rows_at(CUdeviceptr address, size_t pitch) {
    return (Side3D){.host = address, .device = address, .pitch = pitch};
}

/* Done at once. A node for it is refused. */
static CUresult nothing(CUDA_MEMCPY3D *out) {
    *out = (CUDA_MEMCPY3D){.source.type = TYPE_UNIFIED, .destination.type = TYPE_UNIFIED};
    return CUDA_SUCCESS;
}

#define UNPACK(...) __VA_ARGS__

/* The copy that an expression describes, now or on a stream. */
#define SHAPED_COPY(name, driver_function, suffix, parameters, arguments, describe) \
    RUNTIME_FUNCTION(name, runtime_start_with_context, parameters, arguments) { \
        CUDA_MEMCPY3D copy; \
        CUresult result = describe; \
        return result == CUDA_SUCCESS ? driver_function##suffix(&copy) : result; \
    } \
    RUNTIME_FUNCTION(name##Async, runtime_start_with_context, \
                     (UNPACK parameters, Stream *stream), (UNPACK arguments, stream)) { \
        CUDA_MEMCPY3D copy; \
        CUresult result = describe; \
        return result == CUDA_SUCCESS ? driver_function##Async##suffix(&copy, stream) : result; \
    }

SHAPED_COPY(cudaMemcpy3D, cuMemcpy3D, _v2, (const RuntimeCopy *given), (given),
            given && is_empty(given->extent) ? nothing(&copy) : runtime_copy_3d(&copy, given))
SHAPED_COPY(cudaMemcpy3DPeer, cuMemcpy3DPeer, , (const PeerCopy *given), (given),
            peer_copy_3d(&copy, given))
SHAPED_COPY(cudaMemcpy2DToArray, cuMemcpy3D, _v2,
            (Array *array, size_t x, size_t y, CUdeviceptr source, size_t pitch, size_t width,
             size_t height, int kind),
            (array, x, y, source, pitch, width, height, kind),
            rows(&copy, place(array, x, y), rows_at(source, pitch), width, height, kind))
SHAPED_COPY(cudaMemcpy2DFromArray, cuMemcpy3D, _v2,
            (CUdeviceptr destination, size_t pitch, Array *array, size_t x, size_t y, size_t width,
             size_t height, int kind),
            (destination, pitch, array, x, y, width, height, kind),
            rows(&copy, rows_at(destination, pitch), place(array, x, y), width, height, kind))

RUNTIME_FUNCTION(cudaMemcpy2DArrayToArray, runtime_start_with_context,
                 (Array *destination, size_t to_x, size_t to_y, Array *source, size_t x, size_t y,
                  size_t width, size_t height, int kind),
                 (destination, to_x, to_y, source, x, y, width, height, kind)) {
    CUDA_MEMCPY3D copy;
    CUresult result = rows(&copy, place(destination, to_x, to_y), place(source, x, y), width,
                           height, kind);
    return result == CUDA_SUCCESS ? cuMemcpy3D_v2(&copy) : result;
}

/* ---- memory of several rows ----------------------------------------------------------------- */

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                            unsigned element);
CUresult cuMemsetD2D8_v2(CUdeviceptr address, size_t pitch, unsigned char value, size_t width,
                         size_t height);
CUresult cuMemsetD2D8Async(CUdeviceptr address, size_t pitch, unsigned char value, size_t width,
                           size_t height, Stream *stream);

RUNTIME_FUNCTION(cudaMalloc3D, runtime_start_with_context, (Pitched *out, Extent extent),
                 (out, extent)) {
    enum { ELEMENT = 4 };
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (Pitched){.width = extent.width, .height = extent.height};
    size_t rows_of_all = extent.height * extent.depth;
    if (!extent.width || !rows_of_all)
        return CUDA_SUCCESS;
    return cuMemAllocPitch_v2(&out->address, &out->pitch, extent.width, rows_of_all, ELEMENT);
}

RUNTIME_FUNCTION(cudaMemset2D, runtime_start_with_context,
                 (CUdeviceptr address, size_t pitch, int value, size_t width, size_t height),
                 (address, pitch, value, width, height)) {
    return cuMemsetD2D8_v2(address, pitch, (unsigned char)value, width, height);
}

RUNTIME_FUNCTION(cudaMemset2DAsync, runtime_start_with_context,
                 (CUdeviceptr address, size_t pitch, int value, size_t width, size_t height,
                  Stream *stream),
                 (address, pitch, value, width, height, stream)) {
    return cuMemsetD2D8Async(address, pitch, (unsigned char)value, width, height, stream);
}

/* One fill for each slice, which is within the memory. H100: the width of one alone may be more. */
#define FILL_SLICES(memory, extent, fill) \
    bool is_within = ((extent).depth <= 1 || (extent).width <= (memory).width) && \
                     (extent).height <= (memory).height; \
    CUresult result = is_within ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; \
    for (size_t i = 0; i < (extent).depth && result == CUDA_SUCCESS; i++) { \
        CUdeviceptr slice = (memory).address + i * (memory).pitch * (memory).height; \
        result = fill; \
    } \
    return result;

RUNTIME_FUNCTION(cudaMemset3D, runtime_start_with_context,
                 (Pitched memory, int value, Extent extent), (memory, value, extent)) {
    FILL_SLICES(memory, extent, cuMemsetD2D8_v2(slice, memory.pitch, (unsigned char)value,
                                                extent.width, extent.height))
}

RUNTIME_FUNCTION(cudaMemset3DAsync, runtime_start_with_context,
                 (Pitched memory, int value, Extent extent, Stream *stream),
                 (memory, value, extent, stream)) {
    FILL_SLICES(memory, extent, cuMemsetD2D8Async(slice, memory.pitch, (unsigned char)value,
                                                  extent.width, extent.height, stream))
}
