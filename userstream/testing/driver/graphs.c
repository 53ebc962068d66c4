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

void nodes_remove(NodeSet *set, const Node *node) {
    size_t kept = 0;
    for (size_t i = 0; i < set->count; i++) {
        if (set->nodes[i] != node)
            set->nodes[kept++] = set->nodes[i];
    }
    set->count = kept;
}

/* ---- graphs and nodes ----------------------------------------------------------------------- */

Graph *graph_new(void) {
    Graph *graph = handle_new(KIND_GRAPH);
    graph->id = new_id();
    return graph;
}

Node *graph_add(Graph *graph, Operation *operation, const NodeSet *dependencies) {
    Node *node = handle_new(KIND_NODE);
    node->id = new_id();
    node->graph = graph;
    node->operation = operation;
    nodes_set(&node->dependencies, dependencies);
    node->index = graph->nodes.count;
    nodes_append(&graph->nodes, node);
    Graph *const *inside;
    size_t count = operation_graphs(operation, &inside);
    for (size_t i = 0; i < count; i++)
        inside[i]->parent = graph;
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

/* Operations do not change, so copies share them; but a graph inside of one may be changed, and is
 * copied too. */
static Operation *operation_for_copy(Operation *operation) {
    if (operation->type == NODE_GRAPH)
        return child_operation(graph_copy(operation->child));
    if (operation->type == NODE_CONDITIONAL)
        return conditional_copy(operation);
    return operation_retain(operation);
}

Graph *graph_copy(const Graph *graph) {
    Graph *copy = graph_new();
    for (size_t i = 0; i < graph->nodes.count; i++) {
        const Node *node = graph->nodes.nodes[i];
        Operation *operation = operation_for_copy(node->operation);
        Node *same = graph_add(copy, operation, &(NodeSet){0});
        same->original = node->id;
        same->is_disabled = node->is_disabled;
        kernel_attributes_copy(same, node);
    }
    for (size_t i = 0; i < graph->nodes.count; i++) {
        const NodeSet *dependencies = &graph->nodes.nodes[i]->dependencies;
        for (size_t k = 0; k < dependencies->count; k++)
            nodes_append(&copy->nodes.nodes[i]->dependencies,
                         copy->nodes.nodes[dependencies->nodes[k]->index]);
    }
    for (size_t i = 0; i < graph->conditions.count; i++)
        conditions_append(&copy->conditions, graph->conditions.conditions[i]);
    retained_add_all(&copy->retained, graph->retained);
    return copy;
}

bool graph_has_conditionals(const Graph *graph) {
    for (size_t i = 0; i < graph->nodes.count; i++) {
        if (graph->nodes.nodes[i]->operation->type == NODE_CONDITIONAL)
            return true;
    }
    return false;
}

bool graph_has_memory(const Graph *graph) {
    for (size_t i = 0; i < graph->nodes.count; i++) {
        const Operation *operation = graph->nodes.nodes[i]->operation;
        Graph *const *inside;
        if (operation->type == NODE_MEM_ALLOC || operation->type == NODE_MEM_FREE)
            return true;
        size_t count = operation_graphs(operation, &inside);
        for (size_t k = 0; k < count; k++) {
            if (graph_has_memory(inside[k]))
                return true;
        }
    }
    return false;
}

static void node_free(Node *node) {
    operation_release(node->operation);
    nodes_clear(&node->dependencies);
    free(node->attributes);
    handle_free(KIND_NODE, node);
}

void graph_remove(Node *node) {
    NodeSet *nodes = &node->graph->nodes;
    nodes_remove(nodes, node);
    for (size_t i = 0; i < nodes->count; i++) {
        nodes->nodes[i]->index = i;
        nodes_remove(&nodes->nodes[i]->dependencies, node);
    }
    node_free(node);
}

void graph_free(Graph *graph) {
    for (size_t i = 0; i < graph->nodes.count; i++)
        node_free(graph->nodes.nodes[i]);
    nodes_clear(&graph->nodes);
    conditions_clear(&graph->conditions);
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
    /* A capture still adds nodes to it, or it is its parent's. */
    if (!handle_is(KIND_GRAPH, graph) || graph->parent || capture_is_into(graph))
        return CUDA_ERROR_INVALID_VALUE;
    graph_free(graph);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphNodeGetType, 10000, (Node *node, int *type), (node, type)) {
    if (!handle_is(KIND_NODE, node) || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = (int)node->operation->type;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphClone, 10000, (Graph **out, Graph *graph), (out, graph)) {
    if (!out || !handle_is(KIND_GRAPH, graph))
        return CUDA_ERROR_INVALID_VALUE;
    /* "Cloning is not supported for graphs which contain memory allocation nodes, memory free
     * nodes, or conditional nodes." */
    if (graph_has_conditionals(graph) || graph_has_memory(graph))
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = graph_copy(graph);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphNodeFindInClone, 10000, (Node **out, Node *original, Graph *clone),
                (out, original, clone)) {
    if (!out || !handle_is(KIND_NODE, original) || !handle_is(KIND_GRAPH, clone))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < clone->nodes.count; i++) {
        if (clone->nodes.nodes[i]->original == original->id) {
            *out = clone->nodes.nodes[i];
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* ---- ids ------------------------------------------------------------------------------------ */

#define ID_GETTER(name, parameter, kind, type, expression) \
    DRIVER_FUNCTION(name, 13010, (parameter, type *out), (object, out)) { \
        if (!handle_is(kind, object) || !out) \
            return CUDA_ERROR_INVALID_VALUE; \
        *out = expression; \
        return CUDA_SUCCESS; \
    }

ID_GETTER(cuGraphGetId, const Graph *object, KIND_GRAPH, unsigned, (unsigned)object->id)
ID_GETTER(cuGraphExecGetId, const GraphExec *object, KIND_GRAPH_EXEC, unsigned,
          (unsigned)object->id)
ID_GETTER(cuGraphNodeGetLocalId, const Node *object, KIND_NODE, unsigned,
          (unsigned)object->index)
ID_GETTER(cuGraphNodeGetToolsId, const Node *object, KIND_NODE, uint64_t, object->id)
ID_GETTER(cuGraphNodeGetContainingGraph, const Node *object, KIND_NODE, Graph *, object->graph)
