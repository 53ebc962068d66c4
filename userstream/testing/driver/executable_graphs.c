/* Executable graphs. */
#include "driver.h"

/* A snapshot: later changes of the graph, and its end, do not matter. */
static CUresult instantiate(GraphExec **out, Graph *graph, uint64_t flags) {
    if (!out || !handle_is(KIND_GRAPH, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    GraphExec *exec = handle_new(KIND_GRAPH_EXEC);
    exec->flags = flags;
    exec->references = 1;
    exec->count = graph->nodes.count;
    exec->operations = calloc(exec->count + 1, sizeof *exec->operations);
    for (size_t i = 0; i < exec->count; i++)
        exec->operations[i] = operation_retain(graph->nodes.nodes[i]->operation);
    retained_add_all(&exec->retained, graph->retained);
    *out = exec;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphInstantiateWithFlags, 11040,
                (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags)) {
    return instantiate(out, graph, flags);
}

typedef struct InstantiateParameters {
    uint64_t flags;
    Stream *upload_stream;
    Node *error_node;
    int result;
} InstantiateParameters;

DRIVER_FUNCTION(cuGraphInstantiateWithParams, 12000,
                (GraphExec **out, Graph *graph, InstantiateParameters *parameters),
                (out, graph, parameters)) {
    if (!parameters)
        return CUDA_ERROR_INVALID_VALUE;
    parameters->error_node = NULL;
    parameters->result = 0;
    return instantiate(out, graph, parameters->flags);
}

static void exec_release(GraphExec *exec) {
    if (--exec->references)
        return;
    for (size_t i = 0; i < exec->count; i++)
        operation_release(exec->operations[i]);
    free(exec->operations);
    point_release(exec->last);
    retained_release(exec->retained);
    handle_free(KIND_GRAPH_EXEC, exec);
}

static CUresult run_graph(Operation *operation, Stream *stream) {
    const GraphExec *exec = operation->exec;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < exec->count && result == CUDA_SUCCESS; i++) {
        if (stream_work_is_lost(stream))
            break;
        result = exec->operations[i]->run(exec->operations[i], stream);
    }
    return result;
}

static void dispose_graph(Operation *operation) {
    exec_release(operation->exec);
}

static CUresult find_exec(GraphExec *exec, Stream *handle, Stream **stream) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || exec->destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    return stream_find(handle, stream);
}

/* "Only one instance of hGraphExec may be executing at a time": a launch waits for the one
 * before. */
DRIVER_FUNCTION(cuGraphLaunch, 10000, (GraphExec *exec, Stream *handle), (exec, handle)) {
    Stream *stream;
    CUresult result = find_exec(exec, handle, &stream);
    if (result == CUDA_SUCCESS && !stream->capture)
        result = stream_wait_for(stream, exec->last);
    if (result != CUDA_SUCCESS)
        return result;
    exec->references++;
    Operation *operation = operation_new(run_graph, NODE_GRAPH);
    operation->exec = exec;
    operation->dispose = dispose_graph;
    result = stream_submit(stream, operation);
    if (result == CUDA_SUCCESS && !stream->capture) {
        point_release(exec->last);
        exec->last = point_retain(stream->tail);
    }
    return result;
}

DRIVER_FUNCTION(cuGraphUpload, 11010, (GraphExec *exec, Stream *handle), (exec, handle)) {
    Stream *stream;
    CUresult result = find_exec(exec, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return stream_submit(stream, operation_nothing(NODE_EMPTY));
}

DRIVER_FUNCTION(cuGraphExecDestroy, 10000, (GraphExec *exec), (exec)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || exec->destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    exec->destroyed = true;
    exec_release(exec);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphExecGetFlags, 12000, (GraphExec *exec, uint64_t *flags), (exec, flags)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || exec->destroyed || !flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}
