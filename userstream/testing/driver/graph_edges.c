/* Edges of graphs: what the nodes depend on, asked for and changed. */
#include "driver.h"

/* ---- what there is -------------------------------------------------------------------------- */

/* The way of all these functions: without an array only the count is answered; with a longer array
 * than needed the rest is NULL. */
static void answer_nodes(const NodeSet *found, Node **out, size_t *count) {
    for (size_t i = 0; out && i < *count; i++)
        out[i] = i < found->count ? found->nodes[i] : NULL;
    if (!out || *count > found->count)
        *count = found->count;
}

/* All edges are plain ones: CUgraphEdgeData of zeros. */
enum { EDGE_DATA = 8 };

static void answer_edges(void *edges, size_t count) {
    if (edges)
        memset(edges, 0, count * EDGE_DATA);
}

static CUresult dependencies_of(Node *node, Node **out, void *edges, size_t *count) {
    if (!handle_is(KIND_NODE, node) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    answer_nodes(&node->dependencies, out, count);
    answer_edges(out ? edges : NULL, *count);
    return CUDA_SUCCESS;
}

static CUresult dependents_of(Node *node, Node **out, void *edges, size_t *count) {
    if (!handle_is(KIND_NODE, node) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    NodeSet found = {0};
    for (size_t i = 0; i < node->graph->nodes.count; i++) {
        Node *other = node->graph->nodes.nodes[i];
        if (nodes_contain(&other->dependencies, node))
            nodes_append(&found, other);
    }
    answer_nodes(&found, out, count);
    answer_edges(out ? edges : NULL, *count);
    nodes_clear(&found);
    return CUDA_SUCCESS;
}

static CUresult edges_of(Graph *graph, Node **from, Node **to, void *edges, size_t *count) {
    if (!handle_is(KIND_GRAPH, graph) || !count || !from != !to)
        return CUDA_ERROR_INVALID_VALUE;
    NodeSet sources = {0};
    NodeSet targets = {0};
    for (size_t i = 0; i < graph->nodes.count; i++) {
        Node *node = graph->nodes.nodes[i];
        for (size_t k = 0; k < node->dependencies.count; k++) {
            nodes_append(&sources, node->dependencies.nodes[k]);
            nodes_append(&targets, node);
        }
    }
    size_t room = *count;
    answer_nodes(&sources, from, &room);
    answer_nodes(&targets, to, count);
    answer_edges(from ? edges : NULL, *count);
    nodes_clear(&sources);
    nodes_clear(&targets);
    return CUDA_SUCCESS;
}

#define NODE_LIST(name, list) \
    DRIVER_FUNCTION(name, 10000, (Node *node, Node **out, size_t *count), (node, out, count)) { \
        return list(node, out, NULL, count); \
    } \
    DRIVER_FUNCTION_AS(name##_v2, name, 12030, \
                       (Node *node, Node **out, void *edges, size_t *count), \
                       (node, out, edges, count)) { \
        return list(node, out, edges, count); \
    }

NODE_LIST(cuGraphNodeGetDependencies, dependencies_of)
NODE_LIST(cuGraphNodeGetDependentNodes, dependents_of)

DRIVER_FUNCTION(cuGraphGetEdges, 10000, (Graph *graph, Node **from, Node **to, size_t *count),
                (graph, from, to, count)) {
    return edges_of(graph, from, to, NULL, count);
}

DRIVER_FUNCTION_AS(cuGraphGetEdges_v2, cuGraphGetEdges, 12030,
                   (Graph *graph, Node **from, Node **to, void *edges, size_t *count),
                   (graph, from, to, edges, count)) {
    return edges_of(graph, from, to, edges, count);
}

DRIVER_FUNCTION(cuGraphGetRootNodes, 10000, (Graph *graph, Node **out, size_t *count),
                (graph, out, count)) {
    if (!handle_is(KIND_GRAPH, graph) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    NodeSet found = {0};
    for (size_t i = 0; i < graph->nodes.count; i++) {
        if (!graph->nodes.nodes[i]->dependencies.count)
            nodes_append(&found, graph->nodes.nodes[i]);
    }
    answer_nodes(&found, out, count);
    nodes_clear(&found);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphGetNodes, 10000, (Graph *graph, Node **out, size_t *count),
                (graph, out, count)) {
    if (!handle_is(KIND_GRAPH, graph) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    answer_nodes(&graph->nodes, out, count);
    return CUDA_SUCCESS;
}

/* ---- changes -------------------------------------------------------------------------------- */

static bool is_edge(const Node *from, const Node *to) {
    return nodes_contain(&to->dependencies, from);
}

/* "If an edge already exists" it cannot be added; "specifying a non-existing dependency" to remove
 * is an error: nothing is changed then. */
static CUresult change(Graph *graph, Node **from, Node **to, size_t count, bool add) {
    if (!handle_is(KIND_GRAPH, graph) || !nodes_are_in(from, count, graph) ||
        !nodes_are_in(to, count, graph))
        return CUDA_ERROR_INVALID_VALUE;
    /* cuGraphAddMemAllocNode: "Nodes and edges of the graph cannot be deleted." */
    if (!add && count && graph_has_memory(graph))
        return CUDA_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; i < count; i++) {
        if (from[i] == to[i] || is_edge(from[i], to[i]) == add)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        if (add)
            nodes_add(&to[i]->dependencies, from[i]);
        else
            nodes_remove(&to[i]->dependencies, from[i]);
    }
    return CUDA_SUCCESS;
}

#define EDGE_CHANGE(name, add) \
    DRIVER_FUNCTION(name, 10000, (Graph *graph, Node **from, Node **to, size_t count), \
                    (graph, from, to, count)) { \
        return change(graph, from, to, count, add); \
    } \
    DRIVER_FUNCTION_AS(name##_v2, name, 12030, \
                       (Graph *graph, Node **from, Node **to, const void *edges, size_t count), \
                       (graph, from, to, edges, count)) { \
        UNUSED(edges); \
        return change(graph, from, to, count, add); \
    }

EDGE_CHANGE(cuGraphAddDependencies, true)
EDGE_CHANGE(cuGraphRemoveDependencies, false)

/* A capture may have to come after it. */
DRIVER_FUNCTION(cuGraphDestroyNode, 10000, (Node *node), (node)) {
    if (!handle_is(KIND_NODE, node) || capture_is_into(node->graph))
        return CUDA_ERROR_INVALID_VALUE;
    if (graph_has_memory(node->graph))
        return CUDA_ERROR_NOT_SUPPORTED;
    graph_remove(node);
    return CUDA_SUCCESS;
}
