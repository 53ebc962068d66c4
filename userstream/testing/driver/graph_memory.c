/* Memory that graphs allocate and free. */
#include "driver.h"

static GraphMemory *all;

/* cuDeviceGetGraphMemAttribute: memory stays with the graphs of a device until it is trimmed. */
typedef struct Usage {
    uint64_t used;
    uint64_t used_high;
    uint64_t reserved;
    uint64_t reserved_high;
} Usage;

static Usage usages[MAX_DEVICES];
static Usage idle[MAX_DEVICES];     /* the part of it that no node has any more */

enum { RESERVED_BLOCK = 2 << 20 };

static uint64_t reserved_for(const GraphMemory *memory) {
    return (memory->size + RESERVED_BLOCK - 1) / RESERVED_BLOCK * RESERVED_BLOCK;
}

static GraphMemory *find(CUdeviceptr address) {
    for (GraphMemory *memory = all; memory; memory = memory->next) {
        if (address >= memory->address && address - memory->address < memory->size)
            return memory;
    }
    return NULL;
}

bool graph_memory_contains(CUdeviceptr address, size_t size) {
    const GraphMemory *memory = find(address);
    return memory && size <= memory->size - (address - memory->address);
}

GraphMemory *graph_memory_retain(GraphMemory *memory) {
    memory->references++;
    return memory;
}

void graph_memory_release(GraphMemory *memory) {
    if (--memory->references)
        return;
    for (GraphMemory **link = &all; *link; link = &(*link)->next) {
        if (*link == memory) {
            *link = memory->next;
            break;
        }
    }
    if (memory->is_mapped) {
        idle[memory->device].used += memory->size;
        idle[memory->device].reserved += reserved_for(memory);
    }
    memory_unreserve(memory->address, memory->size);
    free(memory);
}

/* ---- the operations ------------------------------------------------------------------------- */

/* They are run by graph_memory_run, which knows the launch. */
static CUresult run_in_launch(Operation *operation, Stream *stream) {
    UNUSED(operation);
    UNUSED(stream);
    return CUDA_ERROR_UNKNOWN;
}

static void dispose(Operation *operation) {
    graph_memory_release(operation->graph_memory);
}

static Operation *operation_for(GraphMemory *memory, NodeType type) {
    Operation *operation = operation_new(run_in_launch, type);
    operation->graph_memory = memory;
    operation->dispose = dispose;
    return operation;
}

CUresult graph_memory_allocation(size_t size, MemoryKind kind, CUdevice device,
                                 Operation **operation) {
    CUdeviceptr address = memory_reserve(size);
    if (!address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    GraphMemory *memory = calloc(1, sizeof *memory);
    memory->address = address;
    memory->size = size;
    memory->kind = kind;
    memory->device = device;
    memory->references = 1;
    memory->next = all;
    all = memory;
    *operation = operation_for(memory, NODE_MEM_ALLOC);
    return CUDA_SUCCESS;
}

static bool frees_already(const Graph *graph, const GraphMemory *memory) {
    for (size_t i = 0; i < graph->nodes.count; i++) {
        const Operation *operation = graph->nodes.nodes[i]->operation;
        if (operation->type == NODE_MEM_FREE && operation->graph_memory == memory)
            return true;
    }
    return false;
}

/* "This function results in the creation of a free node and must therefore be passed the address
 * of a graph allocation", and only once in a graph. */
CUresult graph_memory_free(CUdeviceptr address, const Graph *graph, Operation **operation) {
    GraphMemory *memory = find(address);
    if (!memory || memory->address != address || frees_already(graph, memory))
        return CUDA_ERROR_INVALID_VALUE;
    *operation = operation_for(graph_memory_retain(memory), NODE_MEM_FREE);
    return CUDA_SUCCESS;
}

/* ---- launches ------------------------------------------------------------------------------- */

static bool is_there_by_then(const GraphMemory *memory) {
    return memory->checked == MADE || (memory->checked == UNTOUCHED && memory->live);
}

static GraphMemory *memory_of_operation(const Operation *operation) {
    bool has_some = operation->type == NODE_MEM_ALLOC || operation->type == NODE_MEM_FREE;
    return has_some ? operation->graph_memory : NULL;
}

static CUresult check(GraphMemory *memory, NodeType type, bool frees_what_is_left, size_t *needed) {
    bool is_there = is_there_by_then(memory);
    if (type == NODE_MEM_FREE) {
        memory->checked = FREED;
        return is_there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    if (is_there && (memory->checked == MADE || !frees_what_is_left))
        return CUDA_ERROR_INVALID_VALUE;
    memory->checked = MADE;
    *needed += is_there ? 0 : memory->size;
    bool fits = memory->kind != MEMORY_DEVICE || memory_is_there(memory->device, *needed);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* "A graph with unfreed allocations cannot be launched again", unless it was instantiated to free
 * them. What is freed has been made before, by this launch or by another. */
CUresult graph_memory_check(Operation *const *operations, size_t count, bool frees_what_is_left) {
    CUresult result = CUDA_SUCCESS;
    size_t needed[MAX_DEVICES] = {0};
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        GraphMemory *memory = memory_of_operation(operations[i]);
        if (memory)
            result = check(memory, operations[i]->type, frees_what_is_left,
                           &needed[memory->device]);
    }
    for (size_t i = 0; i < count; i++) {
        GraphMemory *memory = memory_of_operation(operations[i]);
        if (memory)
            memory->checked = UNTOUCHED;
    }
    return result;
}

void graph_memory_map(Operation *const *operations, size_t count) {
    for (size_t i = 0; i < count; i++) {
        GraphMemory *memory = operations[i]->graph_memory;
        if (operations[i]->type != NODE_MEM_ALLOC || memory->is_mapped)
            continue;
        Usage *usage = &usages[memory->device];
        memory->is_mapped = true;
        usage->used += memory->size;
        usage->reserved += reserved_for(memory);
        if (usage->used > usage->used_high)
            usage->used_high = usage->used;
        if (usage->reserved > usage->reserved_high)
            usage->reserved_high = usage->reserved;
    }
}

/* When it is queued, not when it runs: from then on programs may queue what uses the memory, and
 * its free. */
void graph_memory_take(Operation *const *operations, size_t count, MemoryEffect *effects) {
    graph_memory_map(operations, count);
    for (size_t i = 0; i < count; i++) {
        GraphMemory *node = operations[i]->graph_memory;
        if (operations[i]->type == NODE_MEM_ALLOC) {
            effects->before = node->live ? node->live->id : 0;
            if (node->live)
                memory_free_is_queued(node->live);
            node->live = memory_of_graph(node);
            (effects++)->id = node->live->id;
        } else if (operations[i]->type == NODE_MEM_FREE) {
            (effects++)->id = node->live->id;
            memory_free_is_queued(node->live);
        }
    }
}

void graph_memory_run(const Operation *operation, const MemoryEffect *effect) {
    Memory *before = effect->before ? memory_with_id(effect->before) : NULL;
    Memory *memory = memory_with_id(effect->id);
    if (before)
        memory_free(before);
    if (memory && operation->type == NODE_MEM_ALLOC)
        memory_fill_anew(memory);
    else if (memory)
        memory_free(memory);
}

/* ---- the attributes of a device ------------------------------------------------------------- */

enum {                          /* CUgraphMem_attribute */
    USED_MEM_CURRENT,
    USED_MEM_HIGH,
    RESERVED_MEM_CURRENT,
    RESERVED_MEM_HIGH,
};

DRIVER_FUNCTION(cuDeviceGetGraphMemAttribute, 11040,
                (CUdevice device, int attribute, uint64_t *value), (device, attribute, value)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || attribute < USED_MEM_CURRENT || attribute > RESERVED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    const Usage *usage = &usages[device];
    const uint64_t values[] = {usage->used, usage->used_high, usage->reserved,
                               usage->reserved_high};
    *value = values[attribute];
    return CUDA_SUCCESS;
}

/* "The high watermark ... can only be set to zero": then it is what is in use now. */
DRIVER_FUNCTION(cuDeviceSetGraphMemAttribute, 11040,
                (CUdevice device, int attribute, const uint64_t *value),
                (device, attribute, value)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!value || *value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == USED_MEM_HIGH)
        usages[device].used_high = usages[device].used;
    else if (attribute == RESERVED_MEM_HIGH)
        usages[device].reserved_high = usages[device].reserved;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* "Free unused memory that was cached on the specified device for use with graphs." */
DRIVER_FUNCTION(cuDeviceGraphMemTrim, 11040, (CUdevice device), (device)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    usages[device].used -= idle[device].used;
    usages[device].reserved -= idle[device].reserved;
    idle[device] = (Usage){0};
    for (GraphMemory *memory = all; memory; memory = memory->next) {
        if (memory->device != device || !memory->is_mapped || memory->live)
            continue;
        memory->is_mapped = false;
        usages[device].used -= memory->size;
        usages[device].reserved -= reserved_for(memory);
    }
    return CUDA_SUCCESS;
}
