/* Copies of contiguous memory. */
#include "copies.h"

static Layout contiguous(size_t size) {
    return (Layout){.width = size, .height = 1, .depth = 1};
}

size_t copy_extent(size_t width, size_t rows, size_t pitch, size_t slices, size_t slice) {
    size_t extent = width;
    if (!width || !rows || !slices)
        return 0;
    bool possible =
        add_product(&extent, rows - 1, pitch) && add_product(&extent, slices - 1, slice);
    return possible ? extent : SIZE_MAX;
}

static size_t extent(const Layout *layout, int side) {
    return copy_extent(layout->width, layout->height, layout->pitch[side], layout->depth,
                       layout->slice[side]);
}

static void copy_bytes(const Copy *copy) {
    const Layout *layout = &copy->layout;
    for (size_t z = 0; z < layout->depth; z++) {
        for (size_t y = 0; y < layout->height; y++) {
            char *destination = (char *)copy->address[0];
            const char *source = (const char *)copy->address[1];
            destination += z * layout->slice[0] + y * layout->pitch[0];
            source += z * layout->slice[1] + y * layout->pitch[1];
            memmove(destination, source, layout->width);
        }
    }
}

static CUdeviceptr end_of(const Copy *copy, int side) {
    return copy->address[side] + extent(&copy->layout, side);
}

/* The bytes move without the lock, so the memory is marked as used. */
static CUresult run_copy(Operation *operation, Stream *stream) {
    UNUSED(stream);
    const Copy *copy = operation->copy;
    Memory *memory[2] = {NULL, NULL};
    CUdeviceptr end[2] = {end_of(copy, 0), end_of(copy, 1)};
    if (!extent(&copy->layout, 0))      /* and then maybe very many rows of nothing */
        return CUDA_SUCCESS;
    for (int side = 0; side < 2; side++) {
        if (!copy->known[side] || copy->imported[side])
            continue;
        memory[side] = memory_find(copy->address[side]);
        /* Freed since it was queued. A real device may not notice. */
        if (!memory_spans(memory[side], copy->address[side], extent(&copy->layout, side)))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    for (int side = 0; side < 2; side++)
        memory_use(memory[side], end[side]);
    unlock();
    copy_bytes(copy);
    lock();
    for (int side = 0; side < 2; side++)
        memory_unuse(memory[side], end[side]);
    return CUDA_SUCCESS;
}

void copy_touches(const Operation *operation, Touch touch) {
    const Copy *copy = operation->copy;
    touch(copy->address[0], extent(&copy->layout, 0), true);
    if (!copy->staged)
        touch(copy->address[1], extent(&copy->layout, 1), false);
}

static void dispose_copy(Operation *operation) {
    for (int side = 0; side < 2; side++)
        memory_unuse(operation->copy->imported[side], end_of(operation->copy, side));
    free(operation->copy->staged);
    free(operation->copy->described);
    free(operation->copy);
}

/* Between devices the driver stages what cuMemAlloc gave, and copies of the host's memory reach all
 * of it. Memory of a device's pool is only for the devices that have access to it. H100: that is
 * asked of the context that the copy names for the operand, else of the current one, whatever the
 * stream is ("the device primary contexts specified in the API are referenced instead of the
 * current context", CUDA Programming Guide, "Stream-Ordered Memory Allocator"). */
static bool is_reachable(const Memory *memory, CUdeviceptr end, const Context *context) {
    return !memory || memory->kind != MEMORY_DEVICE || (!memory->pool && !memory->is_mapping) ||
           memory_is_accessible_to(memory, end, context);
}

CUresult copy_check_operand(CUdeviceptr address, size_t size, bool must_be_known, bool in_graph,
                            Memory **found) {
    const Memory *memory = *found = memory_find(address);
    if (size == 0)
        return CUDA_SUCCESS;
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    if (in_graph && graph_memory_contains(address, size))
        return CUDA_SUCCESS;
    if (memory)
        return memory_spans(memory, address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    /* H200: an address that is nobody's is an error. Here it would be a crash. */
    return must_be_known || !host_has(address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* A contiguous pageable source is read before the call returns. */
static void stage(Copy *copy) {
    if (copy->layout.height * copy->layout.depth != 1 || copy->layout.width == 0)
        return;
    copy->staged = malloc(copy->layout.width);
    memcpy(copy->staged, (const void *)copy->address[1], copy->layout.width);
    copy->address[1] = (CUdeviceptr)copy->staged;
}

CUresult copy_operation(const Operands *operands, const Layout *layout, int needs, bool in_graph,
                        Operation **operation) {
    const CUdeviceptr *address = operands->address;
    Memory *memory[2];
    for (int side = 0; side < 2; side++) {
        size_t size = extent(layout, side);
        CUresult result = copy_check_operand(address[side], size, needs & (1 << side), in_graph,
                                             &memory[side]);
        if (result == CUDA_SUCCESS && size &&
            !is_reachable(memory[side], address[side] + size, operands->context[side]))
            result = CUDA_ERROR_INVALID_VALUE;
        if (result != CUDA_SUCCESS)
            return result;
    }
    Copy *copy = calloc(1, sizeof *copy);
    copy->layout = *layout;
    for (int side = 0; side < 2; side++) {
        copy->address[side] = address[side];
        copy->known[side] = memory[side] ||
                            (in_graph && graph_memory_contains(address[side], 1));
        if (memory[side] && memory[side]->is_imported && !in_graph) {
            memory_use(memory[side], end_of(copy, side));
            copy->imported[side] = memory[side];
        }
    }
    *operation = operation_new(run_copy, NODE_MEMCPY);
    (*operation)->copy = copy;
    (*operation)->dispose = dispose_copy;
    return CUDA_SUCCESS;
}

static bool is_of_host(CUdeviceptr address) {
    const Memory *memory = memory_find(address);
    return !memory || memory->kind & (MEMORY_PINNED | MEMORY_REGISTERED);
}

CUresult copy_submit(Stream *stream, Operands operands, const Layout *layout, int needs,
                     bool synchronous) {
    Operation *operation;
    bool in_graph = stream->capture;
    const Context *current = context_current();     /* on a thread without one, the stream's */
    for (int side = 0; side < 2; side++) {
        if (!operands.context[side])
            operands.context[side] = current ? current : stream->context;
    }
    CUresult result = copy_operation(&operands, layout, needs, in_graph, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    Copy *copy = operation->copy;
    bool waits = synchronous;
    if (!in_graph) {
        /* "For transfers from any host memory to any host memory, the function is fully
         * synchronous with respect to the host": page-locked memory as well. */
        waits |= is_of_host(operands.address[0]) && is_of_host(operands.address[1]);
        /* "For transfers from device memory to pageable host memory, the function will return
         * only once the copy has completed." */
        waits |= !copy->known[0];
        if (!copy->known[1])
            stage(copy);
        waits |= !copy->known[1] && !copy->staged;
    }
    result = stream_submit(stream, operation);
    if (result == CUDA_SUCCESS && waits)
        result = point_wait(stream->tail, stream->context);
    return result;
}

static CUresult copy_async(Operands operands, Layout layout, Stream *handle, int needs) {
    Stream *stream;
    CUresult result = stream_find_after_frees(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return copy_submit(stream, operands, &layout, needs, false);
}

/* Synchronous copies run on the legacy default stream. H200: a capture elsewhere survives them. */
CUresult copy_check_synchronous(Stream **stream) {
    CUresult result = context_usable_after_frees(context_current());
    if (result == CUDA_SUCCESS)
        *stream = context_current()->legacy;
    return result;
}

static CUresult copy_now(Operands operands, Layout layout, int needs) {
    Stream *stream;
    CUresult result = copy_check_synchronous(&stream);
    if (result != CUDA_SUCCESS)
        return result;
    return copy_submit(stream, operands, &layout, needs, true);
}

/* The operands of a copy that names no contexts. */
static Operands unnamed(CUdeviceptr destination, CUdeviceptr source) {
    return (Operands){.address = {destination, source}};
}

#define COPY(symbol, name, since, needs) \
    DRIVER_FUNCTION_AS(symbol, name, since, \
                       (CUdeviceptr destination, CUdeviceptr source, size_t size), \
                       (destination, source, size)) { \
        return copy_now(unnamed(destination, source), contiguous(size), needs); \
    }

#define COPY_ASYNC(symbol, name, since, needs) \
    DRIVER_FUNCTION_AS(symbol, name, since, \
                       (CUdeviceptr destination, CUdeviceptr source, size_t size, Stream *handle), \
                       (destination, source, size, handle)) { \
        return copy_async(unnamed(destination, source), contiguous(size), handle, needs); \
    }

COPY(cuMemcpy, cuMemcpy, 4000, ANYTHING)
COPY(cuMemcpyDtoD_v2, cuMemcpyDtoD, 3020, KNOWN_BOTH)
COPY(cuMemcpyHtoD_v2, cuMemcpyHtoD, 3020, KNOWN_DESTINATION)
COPY(cuMemcpyDtoH_v2, cuMemcpyDtoH, 3020, KNOWN_SOURCE)
COPY_ASYNC(cuMemcpyAsync, cuMemcpyAsync, 4000, ANYTHING)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync, 3020, KNOWN_BOTH)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync, 3020, KNOWN_DESTINATION)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync, 3020, KNOWN_SOURCE)

CUresult copy_check_peers(const Context *destination, const Context *source) {
    bool known = handle_is(KIND_CONTEXT, destination) && handle_is(KIND_CONTEXT, source);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

DRIVER_FUNCTION(cuMemcpyPeer, 4000,
                (CUdeviceptr destination, Context *to, CUdeviceptr source, Context *from,
                 size_t size),
                (destination, to, source, from, size)) {
    CUresult result = copy_check_peers(to, from);
    if (result != CUDA_SUCCESS)
        return result;
    Operands operands = {{destination, source}, {to, from}};
    return copy_now(operands, contiguous(size), KNOWN_BOTH);
}

DRIVER_FUNCTION(cuMemcpyPeerAsync, 4000,
                (CUdeviceptr destination, Context *to, CUdeviceptr source, Context *from,
                 size_t size, Stream *handle),
                (destination, to, source, from, size, handle)) {
    CUresult result = copy_check_peers(to, from);
    if (result != CUDA_SUCCESS)
        return result;
    Operands operands = {{destination, source}, {to, from}};
    return copy_async(operands, contiguous(size), handle, KNOWN_BOTH);
}

/* cuMemcpyBatchAsync: "The stream must not be the legacy NULL stream." */
static bool is_legacy(Stream *handle) {
    return (uintptr_t)handle <= LEGACY_STREAM;
}

/* Copies with attributes are not captured either: cuda.core makes plain copies of them there. */
static CUresult check_stream_of_attributes(Stream *handle) {
    Stream *stream;
    if (is_legacy(handle))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_find(handle, &stream);
    return result == CUDA_SUCCESS ? capture_forbids_use_of_stream(stream) : result;
}

DRIVER_FUNCTION(cuMemcpyWithAttributesAsync, 13020,
                (CUdeviceptr destination, CUdeviceptr source, size_t size, void *attributes,
                 Stream *handle),
                (destination, source, size, attributes, handle)) {
    UNUSED(attributes);
    CUresult result = check_stream_of_attributes(handle);
    if (result != CUDA_SUCCESS)
        return result;
    return copy_async(unnamed(destination, source), contiguous(size), handle, ANYTHING);
}

DRIVER_FUNCTION_AS(cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync, 13000,
                (CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                 void *attributes, size_t *indices, size_t attribute_count, Stream *handle),
                (destinations, sources, sizes, count, attributes, indices, attribute_count,
                 handle)) {
    UNUSED(attributes);
    UNUSED(indices);
    UNUSED(attribute_count);
    if (is_legacy(handle) || (count && (!destinations || !sources || !sizes)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        Operands operands = unnamed(destinations[i], sources[i]);
        result = copy_async(operands, contiguous(sizes[i]), handle, ANYTHING);
    }
    return result;
}

/* CUDA 12 also answers which copy has failed, or SIZE_MAX. */
DRIVER_FUNCTION(cuMemcpyBatchAsync, 12080,
                (CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                 void *attributes, size_t *indices, size_t attribute_count, size_t *failed,
                 Stream *handle),
                (destinations, sources, sizes, count, attributes, indices, attribute_count, failed,
                 handle)) {
    if (failed)
        *failed = SIZE_MAX;
    return locked_cuMemcpyBatchAsync_v2(destinations, sources, sizes, count, attributes, indices,
                                        attribute_count, handle);
}
