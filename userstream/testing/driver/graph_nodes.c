/* cuGraphAdd...Node: nodes that are added one by one, and what can be asked about them. */
#include "driver.h"

CUresult graph_add_checked(Node **out, Graph *graph, Node **dependencies, size_t count,
                           Operation *operation) {
    if (!out || !handle_is(KIND_GRAPH, graph) || !nodes_are_in(dependencies, count, graph)) {
        operation_release(operation);
        return CUDA_ERROR_INVALID_VALUE;
    }
    NodeSet set = {dependencies, count, count};
    *out = graph_add(graph, operation, &set);
    return CUDA_SUCCESS;
}

/* Defines cuGraphAdd...Node, whose body makes the operation. */
#define ADD_NODE(name, since, parameters) \
    static CUresult make_##name(const Graph *graph, parameters, Operation **operation); \
    DRIVER_FUNCTION(name, since, \
                    (Node **out, Graph *graph, Node **dependencies, size_t count, parameters), \
                    (out, graph, dependencies, count, argument)) { \
        Operation *operation; \
        if (!handle_is(KIND_GRAPH, graph)) \
            return CUDA_ERROR_INVALID_VALUE; \
        CUresult result = make_##name(graph, argument, &operation); \
        if (result != CUDA_SUCCESS) \
            return result; \
        return graph_add_checked(out, graph, dependencies, count, operation); \
    } \
    static CUresult make_##name(const Graph *graph, parameters, Operation **operation)

Operation *node_operation(const Node *node, NodeType type) {
    bool is_one = handle_is(KIND_NODE, node) && node->operation->type == type;
    return is_one ? node->operation : NULL;
}

DRIVER_FUNCTION(cuGraphAddEmptyNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count),
                (out, graph, dependencies, count)) {
    Operation *operation = operation_nothing(NODE_EMPTY);
    return graph_add_checked(out, graph, dependencies, count, operation);
}

/* ---- host functions ------------------------------------------------------------------------- */

typedef struct HostNode {       /* CUDA_HOST_NODE_PARAMS */
    HostFunction function;
    void *argument;
} HostNode;

ADD_NODE(cuGraphAddHostNode, 10000, const HostNode *argument) {
    UNUSED(graph);
    if (!argument || !argument->function)
        return CUDA_ERROR_INVALID_VALUE;
    *operation = host_function_operation(argument->function, argument->argument);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphHostNodeGetParams, 10000, (Node *node, HostNode *out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_HOST);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (HostNode){operation->host.function, operation->host.argument};
    return CUDA_SUCCESS;
}

/* ---- child graphs --------------------------------------------------------------------------- */

/* Launches run what a child consists of in its place. */
static CUresult run_in_parent(Operation *operation, Stream *stream) {
    UNUSED(operation);
    UNUSED(stream);
    return CUDA_ERROR_UNKNOWN;
}

static void dispose_child(Operation *operation) {
    graph_free(operation->child);
}

Operation *child_operation(Graph *child) {
    Operation *operation = operation_new(run_in_parent, NODE_GRAPH);
    operation->child = child;
    operation->dispose = dispose_child;
    return operation;
}

size_t operation_graphs(const Operation *operation, Graph *const **graphs) {
    if (operation->type == NODE_GRAPH) {
        *graphs = &operation->child;
        return 1;
    }
    if (operation->type == NODE_CONDITIONAL) {
        *graphs = operation->conditional->bodies;
        return operation->conditional->count;
    }
    return 0;
}

/* "The childGraph is cloned": the caller keeps its own. "The graph must not contain conditional
 * nodes." */
ADD_NODE(cuGraphAddChildGraphNode, 10000, Graph *argument) {
    if (!handle_is(KIND_GRAPH, argument) || argument == graph || graph_has_conditionals(argument))
        return CUDA_ERROR_INVALID_VALUE;
    if (graph_has_memory(argument))
        return CUDA_ERROR_NOT_SUPPORTED;
    *operation = child_operation(graph_copy(argument));
    return CUDA_SUCCESS;
}

/* "Changes to the graph will be reflected in the node, and the node retains ownership." */
DRIVER_FUNCTION(cuGraphChildGraphNodeGetGraph, 10000, (Node *node, Graph **out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_GRAPH);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = operation->child;
    return CUDA_SUCCESS;
}

/* ---- events --------------------------------------------------------------------------------- */

#define EVENT_NODE(added, asked, type, make) \
    ADD_NODE(added, 11010, Event *argument) { \
        UNUSED(graph); \
        if (!handle_is(KIND_EVENT, argument)) \
            return CUDA_ERROR_INVALID_VALUE; \
        *operation = make(argument); \
        return CUDA_SUCCESS; \
    } \
    DRIVER_FUNCTION(asked, 11010, (Node *node, Event **out), (node, out)) { \
        const Operation *operation = node_operation(node, type); \
        if (!operation || !out) \
            return CUDA_ERROR_INVALID_VALUE; \
        *out = operation->event.handle; \
        return CUDA_SUCCESS; \
    }

EVENT_NODE(cuGraphAddEventRecordNode, cuGraphEventRecordNodeGetEvent, NODE_EVENT_RECORD,
           event_record_operation)
EVENT_NODE(cuGraphAddEventWaitNode, cuGraphEventWaitNodeGetEvent, NODE_WAIT_EVENT,
           event_wait_operation)

/* ---- memory --------------------------------------------------------------------------------- */

typedef struct AllocationNode {     /* CUDA_MEM_ALLOC_NODE_PARAMS */
    int allocation_type;
    int handle_types;
    int location_type;
    int location;
    void *security;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
    const void *access;
    size_t access_count;
    size_t size;
    CUdeviceptr address;
} AllocationNode;

enum { PINNED_ALLOCATION = 1, MANAGED_ALLOCATION = 2 };

/* Of a device, or managed memory wherever it is preferred. */
ADD_NODE(cuGraphAddMemAllocNode, 11040, AllocationNode *argument) {
    UNUSED(graph);
    if (!argument || !argument->size || argument->handle_types)
        return CUDA_ERROR_INVALID_VALUE;
    bool managed = argument->allocation_type == MANAGED_ALLOCATION;
    bool of_device = argument->location_type == LOCATION_DEVICE;
    if (!managed && (argument->allocation_type != PINNED_ALLOCATION || !of_device))
        return CUDA_ERROR_INVALID_VALUE;
    CUdevice device = of_device ? argument->location : 0;
    CUresult result = device_check(device);
    if (result == CUDA_SUCCESS)
        result = graph_memory_allocation(argument->size, managed ? MEMORY_MANAGED : MEMORY_DEVICE,
                                         device, operation);
    if (result == CUDA_SUCCESS)
        argument->address = (*operation)->graph_memory->address;
    return result;
}

ADD_NODE(cuGraphAddMemFreeNode, 11040, CUdeviceptr argument) {
    return graph_memory_free(argument, graph, operation);
}

DRIVER_FUNCTION(cuGraphMemAllocNodeGetParams, 11040, (Node *node, AllocationNode *out),
                (node, out)) {
    const Operation *operation = node_operation(node, NODE_MEM_ALLOC);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    bool managed = operation->graph_memory->kind == MEMORY_MANAGED;
    *out = (AllocationNode){.allocation_type = managed ? MANAGED_ALLOCATION : PINNED_ALLOCATION,
                            .location_type = LOCATION_DEVICE,
                            .location = operation->graph_memory->device,
                            .size = operation->graph_memory->size,
                            .address = operation->graph_memory->address};
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphMemFreeNodeGetParams, 11040, (Node *node, CUdeviceptr *out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_MEM_FREE);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = operation->graph_memory->address;
    return CUDA_SUCCESS;
}

/* ---- any of these --------------------------------------------------------------------------- */

CUresult node_operation_of(NodeType type, const Graph *graph, void *parameters,
                           Operation **operation) {
    enum { OWNERSHIP_CLONE = 0 };
    union {
        struct {                    /* CUDA_CHILD_GRAPH_NODE_PARAMS */
            Graph *graph;
            int ownership;
        } child;
        Event *event;
        CUdeviceptr address;
    } *handle = parameters;
    switch (type) {
    case NODE_EMPTY:
        *operation = operation_nothing(NODE_EMPTY);
        return CUDA_SUCCESS;
    case NODE_HOST:
        return make_cuGraphAddHostNode(graph, parameters, operation);
    case NODE_GRAPH:
        if (handle->child.ownership != OWNERSHIP_CLONE)
            return CUDA_ERROR_NOT_SUPPORTED;
        return make_cuGraphAddChildGraphNode(graph, handle->child.graph, operation);
    case NODE_EVENT_RECORD:
        return make_cuGraphAddEventRecordNode(graph, handle->event, operation);
    case NODE_WAIT_EVENT:
        return make_cuGraphAddEventWaitNode(graph, handle->event, operation);
    case NODE_MEM_ALLOC:
        return make_cuGraphAddMemAllocNode(graph, parameters, operation);
    case NODE_MEM_FREE:
        return make_cuGraphAddMemFreeNode(graph, handle->address, operation);
    case NODE_BATCH_MEM_OP:
        return batch_node_operation(parameters, operation);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}
