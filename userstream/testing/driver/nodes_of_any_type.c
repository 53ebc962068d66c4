/* Nodes of any type: cuGraphAddNode and what goes with it. */
#include "driver.h"

typedef struct NodeParameters {     /* CUgraphNodeParams */
    int type;
    int reserved0[3];
    union {
        struct {                    /* CUDA_MEMCPY_NODE_PARAMS */
            int flags;
            int reserved;
            Context *context;
            char copy[200];         /* CUDA_MEMCPY3D */
        } copy;
        struct {                    /* CUDA_MEMSET_NODE_PARAMS_v2 */
            char fill[40];          /* CUDA_MEMSET_NODE_PARAMS */
            Context *context;
        } fill;
        int64_t room[29];           /* that of its type */
    };
    int64_t reserved2;
} NodeParameters;

static CUresult make(const Graph *graph, NodeParameters *parameters, Operation **operation) {
    switch (parameters->type) {
    case NODE_KERNEL:
        return kernel_node_operation(parameters->room, operation);
    case NODE_MEMCPY:
        return copy_node_operation(parameters->copy.copy, parameters->copy.context, operation);
    case NODE_MEMSET:
        return fill_node_operation(parameters->fill.fill, parameters->fill.context, operation);
    case NODE_CONDITIONAL:
        return conditional_node_operation(graph, parameters->room, operation);
    default:
        return node_operation_of((NodeType)parameters->type, graph, parameters->room, operation);
    }
}

/* ---- adding --------------------------------------------------------------------------------- */

static CUresult add(Node **out, Graph *graph, Node **dependencies, size_t count,
                    NodeParameters *parameters) {
    Operation *operation;
    if (!out || !parameters || !handle_is(KIND_GRAPH, graph) ||
        !nodes_are_in(dependencies, count, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = make(graph, parameters, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    return graph_add_checked(out, graph, dependencies, count, operation);
}

DRIVER_FUNCTION(cuGraphAddNode, 12020,
                (Node **out, Graph *graph, Node **dependencies, size_t count,
                 NodeParameters *parameters),
                (out, graph, dependencies, count, parameters)) {
    return add(out, graph, dependencies, count, parameters);
}

DRIVER_FUNCTION_AS(cuGraphAddNode_v2, cuGraphAddNode, 12030,
                   (Node **out, Graph *graph, Node **dependencies, const void *edges, size_t count,
                    NodeParameters *parameters),
                   (out, graph, dependencies, edges, count, parameters)) {
    UNUSED(edges);
    return add(out, graph, dependencies, count, parameters);
}

static CUresult check_context(const NodeParameters *parameters) {
    bool is_kernel = parameters && parameters->type == NODE_KERNEL;
    return is_kernel ? kernel_node_check_context(parameters->room) : CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuGraphAddNode_v3, cuGraphAddNode, 13040,
                   (Node **out, Graph *graph, Node **dependencies, const void *edges, size_t count,
                    NodeParameters *parameters),
                   (out, graph, dependencies, edges, count, parameters)) {
    UNUSED(edges);
    CUresult result = check_context(parameters);
    return result == CUDA_SUCCESS ? add(out, graph, dependencies, count, parameters) : result;
}

/* ---- changing ------------------------------------------------------------------------------- */

/* Executable graphs share operations: a node gets another one. */
CUresult node_set(Node *node, Operation *operation) {
    operation_release(node->operation);
    node->operation = operation;
    return CUDA_SUCCESS;
}

/* The node of an executable graph that was made of this one of a graph. */
static Node *instantiated(const GraphExec *exec, const Node *node) {
    const NodeSet *nodes = &exec->plan->graph->nodes;
    for (size_t i = 0; i < nodes->count; i++) {
        if (nodes->nodes[i]->original == node->id)
            return nodes->nodes[i];
    }
    return NULL;
}

/* A launch that is queued keeps the plan of its time, so the graph gets another one: of a copy, in
 * which the node was changed. */
static CUresult take_changed(GraphExec *exec, Graph *changed) {
    Plan *plan;
    if (plan_new(&plan, changed) != PLAN_SUCCESS) {
        graph_free(changed);
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < changed->nodes.count; i++)
        plan->graph->nodes.nodes[i]->original = exec->plan->graph->nodes.nodes[i]->original;
    plan_release(exec->plan);
    exec->plan = plan;
    graph_free(changed);
    return CUDA_SUCCESS;
}

CUresult node_set_instantiated(GraphExec *exec, const Node *node, Operation *operation) {
    const Node *old = instantiated(exec, node);
    /* "Both the instantiation-time memory operands and the memory operands in copyParams must be
     * 1-dimensional." */
    if (!old || !copy_is_line(old->operation) || !copy_is_line(operation)) {
        operation_release(operation);
        return CUDA_ERROR_INVALID_VALUE;
    }
    Graph *changed = graph_copy(exec->plan->graph);
    node_set(changed->nodes.nodes[old->index], operation);
    return take_changed(exec, changed);
}

/* "Currently only kernel, memset and memcpy nodes are supported." */
static Node *find_switched(const GraphExec *exec, const Node *node) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || !handle_is(KIND_NODE, node))
        return NULL;
    NodeType type = node->operation->type;
    bool has_switch = type == NODE_KERNEL || type == NODE_MEMSET || type == NODE_MEMCPY;
    return has_switch ? instantiated(exec, node) : NULL;
}

DRIVER_FUNCTION(cuGraphNodeSetEnabled, 11060, (GraphExec *exec, Node *node, unsigned enabled),
                (exec, node, enabled)) {
    const Node *found = find_switched(exec, node);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    Graph *changed = graph_copy(exec->plan->graph);
    changed->nodes.nodes[found->index]->is_disabled = !enabled;
    return take_changed(exec, changed);
}

DRIVER_FUNCTION(cuGraphNodeGetEnabled, 11060, (GraphExec *exec, Node *node, unsigned *enabled),
                (exec, node, enabled)) {
    const Node *found = find_switched(exec, node);
    if (!found || !enabled)
        return CUDA_ERROR_INVALID_VALUE;
    *enabled = !found->is_disabled;
    return CUDA_SUCCESS;
}

static bool can_change(NodeType type) {
    return type == NODE_KERNEL || type == NODE_MEMCPY || type == NODE_MEMSET ||
           type == NODE_HOST || type == NODE_EVENT_RECORD || type == NODE_WAIT_EVENT ||
           type == NODE_BATCH_MEM_OP || type == NODE_EMPTY;
}

static CUresult make_other(const Node *node, NodeParameters *parameters, Operation **operation) {
    if (!parameters || !handle_is(KIND_NODE, node) ||
        (int)node->operation->type != parameters->type)
        return CUDA_ERROR_INVALID_VALUE;
    if (!can_change(node->operation->type))
        return CUDA_ERROR_NOT_SUPPORTED;
    return make(node->graph, parameters, operation);
}

static CUresult set(Node *node, NodeParameters *parameters) {
    Operation *operation;
    CUresult result = make_other(node, parameters, &operation);
    return result == CUDA_SUCCESS ? node_set(node, operation) : result;
}

DRIVER_FUNCTION(cuGraphNodeSetParams, 12020, (Node *node, NodeParameters *parameters),
                (node, parameters)) {
    return set(node, parameters);
}

DRIVER_FUNCTION_AS(cuGraphNodeSetParams_v2, cuGraphNodeSetParams, 13040,
                   (Node *node, NodeParameters *parameters), (node, parameters)) {
    CUresult result = check_context(parameters);
    return result == CUDA_SUCCESS ? set(node, parameters) : result;
}

DRIVER_FUNCTION(cuGraphExecNodeSetParams, 12020,
                (GraphExec *exec, Node *node, NodeParameters *parameters),
                (exec, node, parameters)) {
    Operation *operation;
    if (!handle_is(KIND_GRAPH_EXEC, exec))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = make_other(node, parameters, &operation);
    return result == CUDA_SUCCESS ? node_set_instantiated(exec, node, operation) : result;
}

/* ---- asking --------------------------------------------------------------------------------- */

/* Of other nodes the functions for their type tell. */
DRIVER_FUNCTION(cuGraphNodeGetParams, 13020, (Node *node, NodeParameters *out), (node, out)) {
    if (!out || !handle_is(KIND_NODE, node))
        return CUDA_ERROR_INVALID_VALUE;
    if (node->operation->type != NODE_CONDITIONAL)
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = (NodeParameters){.type = NODE_CONDITIONAL};
    conditional_describe(node->operation, out->room);
    return CUDA_SUCCESS;
}
