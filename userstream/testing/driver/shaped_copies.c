/* Copies of two and three dimensions. */
#include "arrays.h"
#include "copies.h"

static bool known_type(int type) {
    return type == TYPE_HOST || type == TYPE_DEVICE || type == TYPE_UNIFIED;
}

static bool is_within(size_t begin, size_t size, size_t whole) {
    return begin <= whole && size <= whole - begin;
}

/* An array has a pitch of its own. */
static CUresult place_in_array(const Side3D *side, const CUDA_MEMCPY3D *copy, CUdeviceptr *address,
                               size_t *pitch, size_t *slice) {
    const Array *array = side->array;
    if (!array_is(array))
        return CUDA_ERROR_INVALID_HANDLE;
    if (side->level ||          /* H100: parts of elements are copied, too */
        !is_within(side->x, copy->width, array_row(array)) ||
        !is_within(side->y, copy->height, array_rows(array)) ||
        !is_within(side->z, copy->depth, array_slices(array)))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = array_row(array);
    *slice = *pitch * array_rows(array);
    *address = array->address + side->z * *slice + side->y * *pitch + side->x;
    return CUDA_SUCCESS;
}

/* "If srcPitch is less than WidthInBytes + srcXInBytes", and numbers whose product is no size, are
 * errors here. */
static CUresult place(const Side3D *side, const CUDA_MEMCPY3D *copy, CUdeviceptr *address,
                      size_t *pitch, size_t *slice) {
    size_t row = side->x;
    size_t rows = side->y;
    if (side->type == TYPE_ARRAY)
        return place_in_array(side, copy, address, pitch, slice);
    if (!known_type(side->type) || !add_product(&row, copy->width, 1) ||
        !add_product(&rows, copy->height, 1))
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = side->pitch ? side->pitch : row;
    *slice = 0;
    *address = side->type == TYPE_HOST ? side->host : side->device;
    bool possible = *pitch >= row &&
                    add_product(slice, *pitch, side->height ? side->height : rows) &&
                    add_product(address, side->z, *slice) &&
                    add_product(address, side->y, *pitch) && add_product(address, side->x, 1);
    return possible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_on_device(int type) {
    return type == TYPE_DEVICE || type == TYPE_ARRAY;
}

static int needs_of(int destination_type, int source_type) {
    int needs = is_on_device(destination_type) ? KNOWN_DESTINATION : 0;
    return needs | (is_on_device(source_type) ? KNOWN_SOURCE : 0);
}

typedef struct Placed {
    Operands operands;
    Layout layout;
} Placed;

static CUresult place_both(const CUDA_MEMCPY3D *copy, Placed *placed) {
    Layout *layout = &placed->layout;
    *layout = (Layout){.width = copy->width, .height = copy->height, .depth = copy->depth};
    const Side3D *sides[2] = {&copy->destination, &copy->source};
    CUresult result = CUDA_SUCCESS;
    for (int side = 0; side < 2 && result == CUDA_SUCCESS; side++)
        result = place(sides[side], copy, &placed->operands.address[side], &layout->pitch[side],
                       &layout->slice[side]);
    return result;
}

static CUresult submit_3d(Stream *stream, const CUDA_MEMCPY3D *copy, const Context *destination,
                          const Context *source, bool synchronous) {
    Placed placed = {.operands = {.context = {destination, source}}};
    CUresult result = place_both(copy, &placed);
    if (result != CUDA_SUCCESS)
        return result;
    int needs = needs_of(copy->destination.type, copy->source.type);
    return copy_submit(stream, placed.operands, &placed.layout, needs, synchronous);
}

static CUresult copy_3d(Stream *stream, const CUDA_MEMCPY3D *copy, bool synchronous) {
    return submit_3d(stream, copy, NULL, NULL, synchronous);
}

/* The same structure with a context in the place of `reserved`. */
static CUresult copy_3d_peer(Stream *stream, const CUDA_MEMCPY3D *copy, bool synchronous) {
    const Context *destination = copy->destination.reserved;
    const Context *source = copy->source.reserved;
    return submit_3d(stream, copy, destination, source, synchronous);
}

static Side3D flat(const Side2D *side) {
    return (Side3D){.x = side->x,
                    .y = side->y,
                    .type = side->type,
                    .host = side->host,
                    .device = side->device,
                    .array = side->array,
                    .pitch = side->pitch};
}

static CUresult copy_2d(Stream *stream, const CUDA_MEMCPY2D *copy, bool synchronous) {
    CUDA_MEMCPY3D same = {.source = flat(&copy->source),
                          .destination = flat(&copy->destination),
                          .width = copy->width,
                          .height = copy->height,
                          .depth = 1};
    return copy_3d(stream, &same, synchronous);
}

#define COPY_SHAPED(dimensions, run) \
    DRIVER_FUNCTION_AS(cuMemcpy##dimensions##_v2, cuMemcpy##dimensions, 3020, \
                       (const CUDA_MEMCPY##dimensions *copy), (copy)) { \
        Stream *stream; \
        CUresult result = copy ? copy_check_synchronous(&stream) : CUDA_ERROR_INVALID_VALUE; \
        return result == CUDA_SUCCESS ? run(stream, copy, true) : result; \
    } \
    DRIVER_FUNCTION_AS(cuMemcpy##dimensions##Async_v2, cuMemcpy##dimensions##Async, 3020, \
                       (const CUDA_MEMCPY##dimensions *copy, Stream *handle), (copy, handle)) { \
        Stream *stream; \
        CUresult result = CUDA_ERROR_INVALID_VALUE; \
        if (copy) \
            result = stream_find_after_frees(handle, &stream); \
        return result == CUDA_SUCCESS ? run(stream, copy, false) : result; \
    }

COPY_SHAPED(2D, copy_2d)
COPY_SHAPED(3D, copy_3d)

/* Pitches that a device would copy slowly are none here. */
DRIVER_FUNCTION_AS(cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned, 3020, (const CUDA_MEMCPY2D *copy),
                   (copy)) {
    return locked_cuMemcpy2D_v2(copy);
}

/* ---- copies between memory and a one-dimensional array --------------------------------------- */

static Side3D in_array(Array *array, size_t offset) {
    return (Side3D){.x = offset, .type = TYPE_ARRAY, .array = array};
}

static Side3D on_host(CUdeviceptr address) {
    return (Side3D){.type = TYPE_HOST, .host = address};
}

static Side3D on_device(CUdeviceptr address) {
    return (Side3D){.type = TYPE_DEVICE, .device = address};
}

static CUresult copy_line(Stream *stream, Side3D destination, Side3D source, size_t size,
                          bool synchronous) {
    CUDA_MEMCPY3D copy = {source, destination, size, 1, 1};
    return copy_3d(stream, &copy, synchronous);
}

static CUresult copy_line_now(Side3D destination, Side3D source, size_t size) {
    Stream *stream;
    CUresult result = copy_check_synchronous(&stream);
    return result == CUDA_SUCCESS ? copy_line(stream, destination, source, size, true) : result;
}

static CUresult copy_line_async(Side3D destination, Side3D source, size_t size, Stream *handle) {
    Stream *stream;
    CUresult result = stream_find_after_frees(handle, &stream);
    return result == CUDA_SUCCESS ? copy_line(stream, destination, source, size, false) : result;
}

#define COPY_TO_ARRAY(letter, side) \
    DRIVER_FUNCTION_AS(cuMemcpy##letter##toA_v2, cuMemcpy##letter##toA, 3020, \
                       (Array *array, size_t offset, CUdeviceptr source, size_t size), \
                       (array, offset, source, size)) { \
        return copy_line_now(in_array(array, offset), side(source), size); \
    }

#define COPY_FROM_ARRAY(letter, side) \
    DRIVER_FUNCTION_AS(cuMemcpyAto##letter##_v2, cuMemcpyAto##letter, 3020, \
                       (CUdeviceptr destination, Array *array, size_t offset, size_t size), \
                       (destination, array, offset, size)) { \
        return copy_line_now(side(destination), in_array(array, offset), size); \
    }

COPY_TO_ARRAY(H, on_host)
COPY_TO_ARRAY(D, on_device)
COPY_FROM_ARRAY(H, on_host)
COPY_FROM_ARRAY(D, on_device)

DRIVER_FUNCTION_AS(cuMemcpyAtoA_v2, cuMemcpyAtoA, 3020,
                   (Array *destination, size_t to, Array *source, size_t from, size_t size),
                   (destination, to, source, from, size)) {
    return copy_line_now(in_array(destination, to), in_array(source, from), size);
}

DRIVER_FUNCTION_AS(cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync, 3020,
                   (Array *array, size_t offset, CUdeviceptr source, size_t size, Stream *handle),
                   (array, offset, source, size, handle)) {
    return copy_line_async(in_array(array, offset), on_host(source), size, handle);
}

DRIVER_FUNCTION_AS(cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync, 3020,
                   (CUdeviceptr destination, Array *array, size_t offset, size_t size,
                    Stream *handle),
                   (destination, array, offset, size, handle)) {
    return copy_line_async(on_host(destination), in_array(array, offset), size, handle);
}

DRIVER_FUNCTION(cuMemcpy3DPeerAsync, 4000, (const CUDA_MEMCPY3D *copy, Stream *handle),
                (copy, handle)) {
    Stream *stream;
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_check_peers(copy->destination.reserved, copy->source.reserved);
    if (result == CUDA_SUCCESS)
        result = stream_find_after_frees(handle, &stream);
    return result == CUDA_SUCCESS ? copy_3d_peer(stream, copy, false) : result;
}

DRIVER_FUNCTION(cuMemcpy3DPeer, 4000, (const CUDA_MEMCPY3D *copy), (copy)) {
    Stream *stream;
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_check_peers(copy->destination.reserved, copy->source.reserved);
    if (result == CUDA_SUCCESS)
        result = copy_check_synchronous(&stream);
    return result == CUDA_SUCCESS ? copy_3d_peer(stream, copy, true) : result;
}

/* ---- nodes ---------------------------------------------------------------------------------- */

CUresult copy_node_operation(const void *parameters, const Context *context,
                             Operation **operation) {
    const CUDA_MEMCPY3D *copy = parameters;
    Placed placed = {.operands = {.context = {context, context}}};
    if (!copy || !handle_is(KIND_CONTEXT, context))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = place_both(copy, &placed);
    if (result != CUDA_SUCCESS)
        return result;
    int needs = needs_of(copy->destination.type, copy->source.type);
    result = copy_operation(&placed.operands, &placed.layout, needs, true, operation);
    if (result == CUDA_SUCCESS && (*operation)->type == NODE_MEMCPY) {
        (*operation)->copy->described = malloc(sizeof *copy);
        *(*operation)->copy->described = *copy;
    }
    return result;
}

bool copy_is_line(const Operation *operation) {
    const Layout *layout = operation->type == NODE_MEMCPY ? &operation->copy->layout : NULL;
    return !layout || (layout->height <= 1 && layout->depth <= 1);
}

DRIVER_FUNCTION(cuGraphAddMemcpyNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count,
                 const CUDA_MEMCPY3D *copy, Context *context),
                (out, graph, dependencies, count, copy, context)) {
    Operation *operation;
    CUresult result = copy_node_operation(copy, context, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    return graph_add_checked(out, graph, dependencies, count, operation);
}

static Side3D side_of(const Copy *copy, int side) {
    size_t pitch = copy->layout.pitch[side];
    return (Side3D){.type = copy->known[side] ? TYPE_DEVICE : TYPE_HOST,
                    .host = copy->known[side] ? 0 : copy->address[side],
                    .device = copy->known[side] ? copy->address[side] : 0,
                    .pitch = pitch,
                    .height = pitch ? copy->layout.slice[side] / pitch : 0};
}

DRIVER_FUNCTION(cuGraphMemcpyNodeGetParams, 10000, (Node *node, CUDA_MEMCPY3D *out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_MEMCPY);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    if (operation->copy->described) {
        *out = *operation->copy->described;
        return CUDA_SUCCESS;
    }
    const Layout *layout = &operation->copy->layout;
    *out = (CUDA_MEMCPY3D){.source = side_of(operation->copy, 1),
                           .destination = side_of(operation->copy, 0),
                           .width = layout->width,
                           .height = layout->height,
                           .depth = layout->depth};
    return CUDA_SUCCESS;
}
