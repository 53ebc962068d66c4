/* Tensor maps: descriptions of tensors for the copies of tiles into shared memory. */
#include "driver.h"

/* Opaque to programs. Their headers align it, Python's objects do not, and the driver does not
 * look. */
typedef struct TensorMap {      /* CUtensorMap */
    uint64_t address;
    int type;
    unsigned rank;
    uint64_t size[5];
    uint64_t stride[4];
    int kind;
    unsigned char rest[36];
} TensorMap;

_Static_assert(sizeof(TensorMap) == 128, "as programs reserve it");

enum {                          /* CUtensorMapDataType */
    FLOAT16 = 6,
    TFLOAT32_FTZ = 12,
    PACKED_4_IN_8 = 13,
    PACKED_4_IN_16 = 14,
    PACKED_6_IN_16 = 15,
    TYPES = 16,
};

enum { INTERLEAVE_NONE, INTERLEAVE_16B, INTERLEAVE_32B, INTERLEAVES };
enum { SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLES = 7 };
enum { PROMOTIONS = 4, FILLS = 2, MAX_RANK = 5, LONGEST_BOX = 256, LONGEST_STEP = 8 };

/* Of an element, in bits. */
static size_t bits_of(int type) {
    static const unsigned char bits[TYPES] = {8,  16, 32, 32, 64, 64, 16, 32,
                                              64, 16, 32, 32, 32, 4,  4,  6};
    return bits[type];
}

static bool is_padded(int type) {
    return type == PACKED_4_IN_16 || type == PACKED_6_IN_16;
}

typedef struct Common {
    int type;
    unsigned rank;
    CUdeviceptr address;
    const uint64_t *size;
    const uint64_t *stride;
    const unsigned *steps;
    int interleave;
    int swizzle;
    int promotion;
    int fill;
} Common;

static bool has_known_numbers(const Common *map) {
    bool is_float = map->type >= FLOAT16 && map->type <= TFLOAT32_FTZ;
    return map->type >= 0 && map->type < TYPES && map->rank && map->rank <= MAX_RANK &&
           map->interleave >= 0 && map->interleave < INTERLEAVES && map->swizzle >= 0 &&
           map->swizzle < SWIZZLES && map->promotion >= 0 && map->promotion < PROMOTIONS &&
           map->fill >= 0 && map->fill < FILLS && (!map->fill || is_float);
}

/* "globalAddress ... must be 16 byte aligned", strides too, and some of them 32. */
static bool is_aligned(const Common *map) {
    unsigned alignment = map->interleave == INTERLEAVE_32B || is_padded(map->type) ? 32 : 16;
    if (!map->address || map->address % alignment)
        return false;
    for (unsigned i = 0; i + 1 < map->rank; i++) {
        if (map->stride[i] % alignment || map->stride[i] >= 1ull << 40)
            return false;
    }
    return true;
}

static bool has_possible_sizes(const Common *map) {
    for (unsigned i = 0; i < map->rank; i++) {
        if (!map->size[i] || map->size[i] > 1ull << 32)
            return false;
        if (!map->steps[i] || map->steps[i] > LONGEST_STEP)
            return false;
    }
    if (is_padded(map->type))
        return map->size[0] % 128 == 0;
    return map->type != PACKED_4_IN_8 || map->size[0] % 2 == 0;
}

/* The bytes of a row of the box, which the swizzle limits. */
static bool fits_swizzle(const Common *map, size_t row) {
    static const size_t most[SWIZZLES] = {SIZE_MAX, 32, 64, 128, 128, 128, 128};
    if (map->interleave == INTERLEAVE_NONE)
        return row <= most[map->swizzle];
    return map->interleave != INTERLEAVE_32B || map->swizzle == SWIZZLE_32B;
}

static bool is_possible(const Common *map) {
    return map->size && map->steps && (map->stride || map->rank == 1) && has_known_numbers(map) &&
           (map->interleave == INTERLEAVE_NONE || map->rank >= 3) && is_aligned(map) &&
           has_possible_sizes(map);
}

static CUresult encode(TensorMap *out, const Common *map, int kind) {
    *out = (TensorMap){.address = map->address, .type = map->type, .rank = map->rank, .kind = kind};
    memcpy(out->size, map->size, map->rank * sizeof *map->size);
    if (map->rank > 1)
        memcpy(out->stride, map->stride, (map->rank - 1) * sizeof *map->stride);
    return CUDA_SUCCESS;
}

enum { TILED = 1, IM2COL, IM2COL_WIDE };

DRIVER_FUNCTION(cuTensorMapEncodeTiled, 12000,
                (TensorMap *out, int type, unsigned rank, CUdeviceptr address,
                 const uint64_t *size, const uint64_t *stride, const unsigned *box,
                 const unsigned *steps, int interleave, int swizzle, int promotion, int fill),
                (out, type, rank, address, size, stride, box, steps, interleave, swizzle,
                 promotion, fill)) {
    Common map = {type,  rank,       address, size,      stride,
                  steps, interleave, swizzle, promotion, fill};
    if (!out || !box || !is_possible(&map))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++) {
        if (!box[i] || box[i] > LONGEST_BOX)
            return CUDA_ERROR_INVALID_VALUE;
    }
    size_t row = box[0] * bits_of(type) / 8;
    if ((interleave == INTERLEAVE_NONE && row % 16) || !fits_swizzle(&map, row) ||
        (is_padded(type) && box[0] != 128))
        return CUDA_ERROR_INVALID_VALUE;
    return encode(out, &map, TILED);
}

/* "channelsPerPixel ... must be less than or equal to 256"; "pixelsPerColumn ... 1024". The rank is
 * three to five. */
static bool is_im2col(const Common *map, unsigned channels, unsigned pixels) {
    enum { LEAST_RANK = 3, MOST_CHANNELS = 256, MOST_PIXELS = 1024 };
    return is_possible(map) && map->rank >= LEAST_RANK && channels && channels <= MOST_CHANNELS &&
           pixels && pixels <= MOST_PIXELS &&
           fits_swizzle(map, channels * bits_of(map->type) / 8);
}

DRIVER_FUNCTION(cuTensorMapEncodeIm2col, 12000,
                (TensorMap *out, int type, unsigned rank, CUdeviceptr address,
                 const uint64_t *size, const uint64_t *stride, const int *lower, const int *upper,
                 unsigned channels, unsigned pixels, const unsigned *steps, int interleave,
                 int swizzle, int promotion, int fill),
                (out, type, rank, address, size, stride, lower, upper, channels, pixels, steps,
                 interleave, swizzle, promotion, fill)) {
    Common map = {type,  rank,       address, size,      stride,
                  steps, interleave, swizzle, promotion, fill};
    bool possible = out && lower && upper && is_im2col(&map, channels, pixels);
    return possible ? encode(out, &map, IM2COL) : CUDA_ERROR_INVALID_VALUE;
}

/* Devices of compute capability 10 have it. */
DRIVER_FUNCTION(cuTensorMapEncodeIm2colWide, 12080,
                (TensorMap *out, int type, unsigned rank, CUdeviceptr address,
                 const uint64_t *size, const uint64_t *stride, int lower, int upper,
                 unsigned channels, unsigned pixels, const unsigned *steps, int interleave,
                 int mode, int swizzle, int promotion, int fill),
                (out, type, rank, address, size, stride, lower, upper, channels, pixels, steps,
                 interleave, mode, swizzle, promotion, fill)) {
    UNUSED(mode);
    UNUSED(lower);
    UNUSED(upper);
    Common map = {type,  rank,       address, size,      stride,
                  steps, interleave, swizzle, promotion, fill};
    bool possible = out && is_im2col(&map, channels, pixels);
    return possible ? encode(out, &map, IM2COL_WIDE) : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_FUNCTION(cuTensorMapReplaceAddress, 12000, (TensorMap *map, CUdeviceptr address),
                (map, address)) {
    if (!map || map->kind < TILED || map->kind > IM2COL_WIDE || !address ||
        address % 16)
        return CUDA_ERROR_INVALID_VALUE;
    map->address = address;
    return CUDA_SUCCESS;
}
