/* Launches of kernels as nodes of graphs. */
#include "kernels.h"

typedef struct KernelNode {     /* CUDA_KERNEL_NODE_PARAMS_v1 */
    Entry *function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void **parameters;
    void **extra;
} KernelNode;

typedef struct KernelNode2 {    /* CUDA_KERNEL_NODE_PARAMS_v2 */
    KernelNode node;
    Kernel *kernel;             /* "will only be referenced if func is NULL" */
    Context *context;           /* "NULL will indicate the current context" */
} KernelNode2;

static KernelNode2 widened(const KernelNode *node) {
    return (KernelNode2){.node = *node};
}

/* The parameters are copied: the caller's may change afterwards. */
CUresult kernel_node_operation(const void *parameters, Operation **operation) {
    const KernelNode2 *wanted = parameters;
    if (!wanted)
        return CUDA_ERROR_INVALID_VALUE;
    const KernelNode *node = &wanted->node;
    void *kernel = node->function ? (void *)node->function : (void *)wanted->kernel;
    const Context *context = NULL;
    /* A function has its own. Programs also cast a kernel to one. */
    if (!handle_is(KIND_ENTRY, kernel)) {
        context = wanted->context ? wanted->context : context_current();
        CUresult result = context_usable(context);
        if (result != CUDA_SUCCESS)
            return result;
    }
    Shape shape = {.shared_bytes = node->shared_bytes};
    memcpy(shape.grid, node->grid, sizeof shape.grid);
    memcpy(shape.block, node->block, sizeof shape.block);
    return launch_new(operation, kernel, context, &shape, node->parameters, node->extra);
}

/* CUDA 13.4: "the underlying device context of ctx must match the device context that the
 * CUfunction was loaded into". */
CUresult kernel_node_check_context(const void *parameters) {
    const KernelNode2 *wanted = parameters;
    const Entry *function = wanted->node.function;
    const Context *context = wanted->context;
    if (!context || !handle_is(KIND_ENTRY, function))
        return CUDA_SUCCESS;
    const GreenContext *green = context_green(context);
    bool same = (green ? green->primary : context) == function->module->context;
    return same ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult add(Node **out, Graph *graph, Node **dependencies, size_t count,
                    const KernelNode2 *wanted) {
    Operation *operation;
    CUresult result = kernel_node_operation(wanted, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    return graph_add_checked(out, graph, dependencies, count, operation);
}

static CUresult get(Node *node, KernelNode2 *out) {
    const Operation *operation = node_operation(node, NODE_KERNEL);
    if (!operation)
        return CUDA_ERROR_INVALID_VALUE;
    const Launch *launch = operation->launch;
    *out = (KernelNode2){.node.shared_bytes = launch->shape.shared_bytes,
                         .node.parameters = launch->addresses};
    memcpy(out->node.grid, launch->shape.grid, sizeof out->node.grid);
    memcpy(out->node.block, launch->shape.block, sizeof out->node.block);
    if (handle_is(KIND_ENTRY, launch->kernel)) {
        out->node.function = launch->kernel;
    } else {
        out->kernel = launch->kernel;
        out->context = (Context *)launch->context;
    }
    return CUDA_SUCCESS;
}

static CUresult set(Node *node, const KernelNode2 *wanted) {
    Operation *operation;
    if (!node_operation(node, NODE_KERNEL))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = kernel_node_operation(wanted, &operation);
    return result == CUDA_SUCCESS ? node_set(node, operation) : result;
}

static CUresult set_instantiated(GraphExec *exec, Node *node, const KernelNode2 *wanted) {
    Operation *operation;
    if (!handle_is(KIND_GRAPH_EXEC, exec) || !node_operation(node, NODE_KERNEL))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = kernel_node_operation(wanted, &operation);
    return result == CUDA_SUCCESS ? node_set_instantiated(exec, node, operation) : result;
}

DRIVER_FUNCTION(cuGraphAddKernelNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count,
                 const KernelNode *node),
                (out, graph, dependencies, count, node)) {
    if (!node)
        return CUDA_ERROR_INVALID_VALUE;
    KernelNode2 wanted = widened(node);
    return add(out, graph, dependencies, count, &wanted);
}

DRIVER_FUNCTION_AS(cuGraphAddKernelNode_v2, cuGraphAddKernelNode, 12000,
                   (Node **out, Graph *graph, Node **dependencies, size_t count,
                    const KernelNode2 *node),
                   (out, graph, dependencies, count, node)) {
    return add(out, graph, dependencies, count, node);
}

DRIVER_FUNCTION(cuGraphKernelNodeGetParams, 10000, (Node *node, KernelNode *out), (node, out)) {
    KernelNode2 found;
    CUresult result = out ? get(node, &found) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = found.node;
    return result;
}

DRIVER_FUNCTION_AS(cuGraphKernelNodeGetParams_v2, cuGraphKernelNodeGetParams, 12000,
                   (Node *node, KernelNode2 *out), (node, out)) {
    return out ? get(node, out) : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_FUNCTION(cuGraphKernelNodeSetParams, 10000, (Node *node, const KernelNode *wanted),
                (node, wanted)) {
    if (!wanted)
        return CUDA_ERROR_INVALID_VALUE;
    KernelNode2 wide = widened(wanted);
    return set(node, &wide);
}

DRIVER_FUNCTION_AS(cuGraphKernelNodeSetParams_v2, cuGraphKernelNodeSetParams, 12000,
                   (Node *node, const KernelNode2 *wanted), (node, wanted)) {
    return set(node, wanted);
}

DRIVER_FUNCTION(cuGraphExecKernelNodeSetParams, 10010,
                (GraphExec *exec, Node *node, const KernelNode *wanted), (exec, node, wanted)) {
    if (!wanted)
        return CUDA_ERROR_INVALID_VALUE;
    KernelNode2 wide = widened(wanted);
    return set_instantiated(exec, node, &wide);
}

DRIVER_FUNCTION_AS(cuGraphExecKernelNodeSetParams_v2, cuGraphExecKernelNodeSetParams, 12000,
                   (GraphExec *exec, Node *node, const KernelNode2 *wanted),
                   (exec, node, wanted)) {
    return set_instantiated(exec, node, wanted);
}

/* ---- attributes: kept and given back, without effect ---------------------------------------- */

enum { FIRST_ATTRIBUTE = 1, LAST_ATTRIBUTE = 16 };      /* CUlaunchAttributeID */

typedef struct AttributeValue { /* CUlaunchAttributeValue */
    uint64_t words[8];
} AttributeValue;

struct KernelAttributes {
    AttributeValue values[LAST_ATTRIBUTE + 1];
};

/* Those that a node may have: access policy window, cooperative, cluster dimension and scheduling,
 * priority, memory synchronization domains, preferred shared memory carve-out. */
static bool is_of_nodes(int attribute) {
    enum { ALLOWED = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 14 };
    return attribute >= FIRST_ATTRIBUTE && attribute <= LAST_ATTRIBUTE && ALLOWED >> attribute & 1;
}

void kernel_attributes_copy(Node *to, const Node *from) {
    free(to->attributes);
    to->attributes = NULL;
    if (from->attributes) {
        to->attributes = malloc(sizeof *to->attributes);
        *to->attributes = *from->attributes;
    }
}

DRIVER_FUNCTION(cuGraphKernelNodeGetAttribute, 11000,
                (Node *node, int attribute, AttributeValue *value), (node, attribute, value)) {
    if (!node_operation(node, NODE_KERNEL) || !value || !is_of_nodes(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    *value = node->attributes ? node->attributes->values[attribute] : (AttributeValue){0};
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphKernelNodeSetAttribute, 11000,
                (Node *node, int attribute, const AttributeValue *value),
                (node, attribute, value)) {
    if (!node_operation(node, NODE_KERNEL) || !value || !is_of_nodes(attribute))
        return CUDA_ERROR_INVALID_VALUE;
    if (!node->attributes)
        node->attributes = calloc(1, sizeof *node->attributes);
    node->attributes->values[attribute] = *value;
    return CUDA_SUCCESS;
}

/* "Both nodes must have the same context." */
DRIVER_FUNCTION(cuGraphKernelNodeCopyAttributes, 11000, (Node *to, Node *from), (to, from)) {
    const Operation *target = node_operation(to, NODE_KERNEL);
    const Operation *source = node_operation(from, NODE_KERNEL);
    if (!target || !source || target->launch->context != source->launch->context)
        return CUDA_ERROR_INVALID_VALUE;
    if (to != from)
        kernel_attributes_copy(to, from);
    return CUDA_SUCCESS;
}
