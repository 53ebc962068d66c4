/* cuGraphDebugDotPrint: a graph as DOT, the language of Graphviz. */
#include "driver.h"

#include <stdio.h>

static const char *name_of(NodeType type) {
    switch (type) {
    case NODE_KERNEL:
        return "KERNEL";
    case NODE_MEMCPY:
        return "MEMCPY";
    case NODE_MEMSET:
        return "MEMSET";
    case NODE_HOST:
        return "HOST";
    case NODE_GRAPH:
        return "GRAPH";
    case NODE_EMPTY:
        return "EMPTY";
    case NODE_WAIT_EVENT:
        return "EVENT_WAIT";
    case NODE_EVENT_RECORD:
        return "EVENT_RECORD";
    case NODE_MEM_ALLOC:
        return "MEM_ALLOC";
    case NODE_MEM_FREE:
        return "MEM_FREE";
    case NODE_BATCH_MEM_OP:
        return "BATCH_MEM_OP";
    case NODE_CONDITIONAL:
        return "CONDITIONAL";
    }
    return "NODE";
}

DRIVER_FUNCTION(cuGraphDebugDotPrint, 11030, (Graph *graph, const char *path, unsigned flags),
                (graph, path, flags)) {
    UNUSED(flags);  /* how much is drawn of each node */
    if (!handle_is(KIND_GRAPH, graph) || !path)
        return CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "w");
    if (!file)
        return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(file, "digraph dot {\n");
    for (size_t i = 0; i < graph->nodes.count; i++) {
        const Node *node = graph->nodes.nodes[i];
        fprintf(file, "\"node_%zu\"[label=\"%s\"];\n", i, name_of(node->operation->type));
        for (size_t k = 0; k < node->dependencies.count; k++)
            fprintf(file, "\"node_%zu\" -> \"node_%zu\";\n", node->dependencies.nodes[k]->index, i);
    }
    fprintf(file, "}\n");
    fclose(file);
    return CUDA_SUCCESS;
}
