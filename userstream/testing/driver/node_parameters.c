/* cuGraph...NodeSetParams and cuGraphExec...NodeSetParams: parameters of nodes, by their type. */
#include "driver.h"

/* Owns the operation. */
static CUresult set(Node *node, NodeType type, CUresult made, Operation *operation) {
    if (made != CUDA_SUCCESS)
        return made;
    if (node_operation(node, type))
        return node_set(node, operation);
    operation_release(operation);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_instantiated(GraphExec *exec, Node *node, NodeType type, CUresult made,
                                 Operation *operation) {
    if (made != CUDA_SUCCESS)
        return made;
    if (handle_is(KIND_GRAPH_EXEC, exec) && node_operation(node, type))
        return node_set_instantiated(exec, node, operation);
    operation_release(operation);
    return CUDA_ERROR_INVALID_VALUE;
}

/* ---- host functions, events and memory operations: described alike in both ------------------- */

#define SETTERS(in_graph, instantiated, since, instantiated_since, type, parameter, make) \
    DRIVER_FUNCTION(in_graph, since, (Node *node, parameter), (node, argument)) { \
        Operation *operation = NULL; \
        CUresult result = make(type, NULL, (void *)argument, &operation); \
        return set(node, type, result, operation); \
    } \
    DRIVER_FUNCTION(instantiated, instantiated_since, \
                    (GraphExec *exec, Node *node, parameter), (exec, node, argument)) { \
        Operation *operation = NULL; \
        CUresult result = make(type, NULL, (void *)argument, &operation); \
        return set_instantiated(exec, node, type, result, operation); \
    }

static CUresult event_operation(NodeType type, const Graph *graph, void *event,
                                Operation **operation) {
    return node_operation_of(type, graph, &event, operation);
}

SETTERS(cuGraphHostNodeSetParams, cuGraphExecHostNodeSetParams, 10000, 10020, NODE_HOST,
        const void *argument, node_operation_of)
SETTERS(cuGraphEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent, 11010, 11010,
        NODE_EVENT_RECORD, Event *argument, event_operation)
SETTERS(cuGraphEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent, 11010, 11010,
        NODE_WAIT_EVENT, Event *argument, event_operation)
SETTERS(cuGraphBatchMemOpNodeSetParams, cuGraphExecBatchMemOpNodeSetParams, 11070, 11070,
        NODE_BATCH_MEM_OP, const void *argument, node_operation_of)

/* ---- copies and fills: their context is given, or stays ------------------------------------- */

#define SHAPED_SETTERS(kind, type, make) \
    DRIVER_FUNCTION(cuGraph##kind##NodeSetParams, 10000, (Node *node, const void *parameters), \
                    (node, parameters)) { \
        Operation *operation = NULL; \
        CUresult result = make(parameters, context_current(), &operation); \
        return set(node, type, result, operation); \
    } \
    DRIVER_FUNCTION(cuGraphExec##kind##NodeSetParams, 10020, \
                    (GraphExec *exec, Node *node, const void *parameters, Context *context), \
                    (exec, node, parameters, context)) { \
        Operation *operation = NULL; \
        CUresult result = make(parameters, context, &operation); \
        return set_instantiated(exec, node, type, result, operation); \
    }

SHAPED_SETTERS(Memcpy, NODE_MEMCPY, copy_node_operation)
SHAPED_SETTERS(Memset, NODE_MEMSET, fill_node_operation)

/* ---- child graphs --------------------------------------------------------------------------- */

/* "The topology of childGraph, as well as the node insertion order, must match that of the graph
 * contained in hNode." */
DRIVER_FUNCTION(cuGraphExecChildGraphNodeSetParams, 11010,
                (GraphExec *exec, Node *node, Graph *child), (exec, node, child)) {
    const Operation *now = node_operation(node, NODE_GRAPH);
    if (!now || !handle_is(KIND_GRAPH, child) || !graph_can_become(now->child, child))
        return CUDA_ERROR_INVALID_VALUE;
    return set_instantiated(exec, node, NODE_GRAPH, CUDA_SUCCESS,
                            child_operation(graph_copy(child)));
}
