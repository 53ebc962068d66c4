/* Graphs: nodes and what they depend on. */
#include "driver.h"

/* ---- sets of nodes -------------------------------------------------------------------------- */

bool nodes_contain(const NodeSet *set, const Node *node) {
    for (size_t i = 0; i < set->count; i++) {
        if (set->nodes[i] == node)
            return true;
    }
    return false;
}

void nodes_append(NodeSet *set, Node *node) {
    if (set->count == set->capacity) {
        set->capacity = set->capacity ? 2 * set->capacity : 4;
        set->nodes = realloc(set->nodes, set->capacity * sizeof *set->nodes);
    }
    set->nodes[set->count++] = node;
}

void nodes_add(NodeSet *set, Node *node) {
    if (!nodes_contain(set, node))
        nodes_append(set, node);
}

void nodes_set(NodeSet *set, const NodeSet *from) {
    set->count = 0;
    for (size_t i = 0; i < from->count; i++)
        nodes_add(set, from->nodes[i]);
}

void nodes_clear(NodeSet *set) {
    free(set->nodes);
    *set = (NodeSet){0};
}

/* ---- graphs and nodes ----------------------------------------------------------------------- */

Graph *graph_new(void) {
    Graph *graph = handle_new(KIND_GRAPH);
    graph->id = new_id();
    return graph;
}

/* Nodes are added after those that they depend on, so their order in the graph is a valid one to
 * run. */
Node *graph_add(Graph *graph, Operation *operation, const NodeSet *dependencies) {
    Node *node = handle_new(KIND_NODE);
    node->graph = graph;
    node->operation = operation;
    nodes_set(&node->dependencies, dependencies);
    node->index = graph->nodes.count;
    nodes_append(&graph->nodes, node);
    return node;
}

bool nodes_are_in(Node *const *nodes, size_t count, const Graph *graph) {
    for (size_t i = 0; i < count; i++) {
        if (!nodes || !handle_is(KIND_NODE, nodes[i]) || nodes[i]->graph != graph)
            return false;
    }
    return true;
}

/* Each node is visited once, without recursion: graphs may be long and have many branches. */
uint64_t nodes_mark_back(const NodeSet *set) {
    uint64_t mark = new_id();
    NodeSet open = {0};
    for (size_t i = 0; i < set->count; i++)
        nodes_append(&open, set->nodes[i]);
    while (open.count) {
        Node *node = open.nodes[--open.count];
        if (node->mark == mark)
            continue;
        node->mark = mark;
        for (size_t i = 0; i < node->dependencies.count; i++)
            nodes_append(&open, node->dependencies.nodes[i]);
    }
    nodes_clear(&open);
    return mark;
}

void graph_free(Graph *graph) {
    for (size_t i = 0; i < graph->nodes.count; i++) {
        Node *node = graph->nodes.nodes[i];
        operation_release(node->operation);
        nodes_clear(&node->dependencies);
        handle_free(KIND_NODE, node);
    }
    nodes_clear(&graph->nodes);
    retained_release(graph->retained);
    handle_free(KIND_GRAPH, graph);
}

DRIVER_FUNCTION(cuGraphCreate, 10000, (Graph **out, unsigned flags), (out, flags)) {
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph_new();
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphDestroy, 10000, (Graph *graph), (graph)) {
    /* A capture still adds nodes to it. */
    if (!handle_is(KIND_GRAPH, graph) || capture_is_into(graph))
        return CUDA_ERROR_INVALID_VALUE;
    graph_free(graph);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphGetNodes, 10000, (Graph *graph, Node **out, size_t *count),
                (graph, out, count)) {
    if (!handle_is(KIND_GRAPH, graph) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; out && i < *count; i++)
        out[i] = i < graph->nodes.count ? graph->nodes.nodes[i] : NULL;
    if (!out || *count > graph->nodes.count)
        *count = graph->nodes.count;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphNodeGetType, 10000, (Node *node, int *type), (node, type)) {
    if (!handle_is(KIND_NODE, node) || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = (int)node->operation->type;
    return CUDA_SUCCESS;
}

static CUresult add_node(Node **out, Graph *graph, Node **dependencies, size_t count,
                         Operation *operation) {
    NodeSet set = {dependencies, count, count};
    *out = graph_add(graph, operation, &set);
    return CUDA_SUCCESS;
}

static CUresult check_addition(Node **out, Graph *graph, Node **dependencies, size_t count) {
    bool possible = out && handle_is(KIND_GRAPH, graph) && nodes_are_in(dependencies, count, graph);
    return possible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DRIVER_FUNCTION(cuGraphAddEmptyNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count),
                (out, graph, dependencies, count)) {
    CUresult result = check_addition(out, graph, dependencies, count);
    if (result != CUDA_SUCCESS)
        return result;
    return add_node(out, graph, dependencies, count, operation_nothing(NODE_EMPTY));
}

typedef struct HostNode {       /* CUDA_HOST_NODE_PARAMS */
    HostFunction function;
    void *argument;
} HostNode;

DRIVER_FUNCTION(cuGraphAddHostNode, 10000,
                (Node **out, Graph *graph, Node **dependencies, size_t count, const HostNode *host),
                (out, graph, dependencies, count, host)) {
    CUresult result = check_addition(out, graph, dependencies, count);
    if (result == CUDA_SUCCESS && (!host || !host->function))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = host_function_operation(host->function, host->argument);
    return add_node(out, graph, dependencies, count, operation);
}
