/* Executable graphs: their launches and their updates. */
#include "driver.h"

/* ---- instantiation -------------------------------------------------------------------------- */

enum { AUTO_FREE_ON_LAUNCH = 1 };   /* CUgraphInstantiate_flags */

/* "If hGraph contains allocation or free nodes, ... an attempt to instantiate a second executable
 * graph before destroying the first ... will result in an error." */
static bool is_instantiated(const Graph *graph) {
    return graph_has_memory(graph) && handle_is(KIND_GRAPH_EXEC, graph->instance) &&
           graph->instance->id == graph->instance_id;
}

/* A snapshot: later changes of the graph, and its end, do not matter. */
static CUresult instantiate(GraphExec **out, Graph *graph, uint64_t flags, PlanResult *reason) {
    *reason = PLAN_ERROR;
    if (!out || !handle_is(KIND_GRAPH, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    if (is_instantiated(graph))
        return CUDA_ERROR_NOT_SUPPORTED;
    Plan *plan;
    *reason = plan_new(&plan, graph);
    if (*reason != PLAN_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    GraphExec *exec = handle_new(KIND_GRAPH_EXEC);
    exec->id = new_id();
    exec->flags = flags;
    exec->plan = plan;
    graph->instance = exec;
    graph->instance_id = exec->id;
    *out = exec;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphInstantiateWithFlags, 11040,
                (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags)) {
    PlanResult reason;
    return instantiate(out, graph, flags, &reason);
}

static CUresult instantiate_with_log(GraphExec **out, Graph *graph, Node **error_node, char *log,
                                     size_t size) {
    PlanResult reason;
    if (error_node)
        *error_node = NULL;
    if (log && size)
        *log = 0;
    return instantiate(out, graph, 0, &reason);
}

DRIVER_FUNCTION(cuGraphInstantiate, 10000,
                (GraphExec **out, Graph *graph, Node **error_node, char *log, size_t size),
                (out, graph, error_node, log, size)) {
    return instantiate_with_log(out, graph, error_node, log, size);
}

DRIVER_FUNCTION_AS(cuGraphInstantiate_v2, cuGraphInstantiate, 11000,
                   (GraphExec **out, Graph *graph, Node **error_node, char *log, size_t size),
                   (out, graph, error_node, log, size)) {
    return instantiate_with_log(out, graph, error_node, log, size);
}

typedef struct InstantiateParameters {      /* CUDA_GRAPH_INSTANTIATE_PARAMS */
    uint64_t flags;
    Stream *upload_stream;
    Node *error_node;
    PlanResult result;
} InstantiateParameters;

DRIVER_FUNCTION(cuGraphInstantiateWithParams, 12000,
                (GraphExec **out, Graph *graph, InstantiateParameters *parameters),
                (out, graph, parameters)) {
    if (!parameters)
        return CUDA_ERROR_INVALID_VALUE;
    parameters->error_node = NULL;
    return instantiate(out, graph, parameters->flags, &parameters->result);
}

DRIVER_FUNCTION(cuGraphExecDestroy, 10000, (GraphExec *exec), (exec)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec))
        return CUDA_ERROR_INVALID_VALUE;
    plan_release(exec->plan);
    point_release(exec->last);
    handle_free(KIND_GRAPH_EXEC, exec);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphExecGetFlags, 12000, (GraphExec *exec, uint64_t *flags), (exec, flags)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || !flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

/* ---- launches ------------------------------------------------------------------------------- */

typedef struct GraphLaunch {
    Plan *plan;                 /* of the time of the launch: updates matter to later ones */
    MemoryEffect effects[];
} GraphLaunch;

static CUresult run_launch(Operation *operation, Stream *stream) {
    return plan_run(operation->graph_launch->plan, operation->graph_launch->effects, stream);
}

Condition *condition_of_running_plan(const Stream *stream, uint64_t handle) {
    const Operation *operation = stream->first;
    if (operation->run != run_launch)
        return NULL;
    return condition_find(&operation->graph_launch->plan->conditions, handle);
}

static void dispose_launch(Operation *operation) {
    plan_release(operation->graph_launch->plan);
    free(operation->graph_launch);
}

static Operation *launch_operation(Plan *plan) {
    Operation *operation = operation_new(run_launch, NODE_GRAPH);
    size_t effects = plan->memory_operations * sizeof(MemoryEffect);
    operation->graph_launch = calloc(1, sizeof *operation->graph_launch + effects);
    operation->graph_launch->plan = plan_retain(plan);
    operation->dispose = dispose_launch;
    return operation;
}

static CUresult find_exec(GraphExec *exec, Stream *handle, Stream **stream) {
    if (!handle_is(KIND_GRAPH_EXEC, exec))
        return CUDA_ERROR_INVALID_VALUE;
    return stream_find(handle, stream);
}

/* "Only one instance of hGraphExec may be executing at a time": a launch waits for the one
 * before. H200: a launch cannot be captured. */
DRIVER_FUNCTION(cuGraphLaunch, 10000, (GraphExec *exec, Stream *handle), (exec, handle)) {
    Stream *stream;
    CUresult result = find_exec(exec, handle, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_forbids_use_of_stream(stream);
    if (result != CUDA_SUCCESS)
        return result;
    Plan *plan = exec->plan;
    result = graph_memory_check(plan->steps.operations, plan->steps.count,
                                exec->flags & AUTO_FREE_ON_LAUNCH);
    if (result == CUDA_SUCCESS)
        result = stream_wait_for(stream, exec->last);
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = launch_operation(plan);
    result = stream_submit(stream, operation);
    if (result != CUDA_SUCCESS)
        return result;
    graph_memory_take(plan->steps.operations, plan->steps.count,
                      operation->graph_launch->effects);
    point_release(exec->last);
    exec->last = point_retain(stream->tail);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphUpload, 11010, (GraphExec *exec, Stream *handle), (exec, handle)) {
    Stream *stream;
    CUresult result = find_exec(exec, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    graph_memory_map(exec->plan->steps.operations, exec->plan->steps.count);
    return stream_submit(stream, operation_nothing(NODE_EMPTY));
}

/* ---- updates -------------------------------------------------------------------------------- */

enum {                          /* CUgraphExecUpdateResult */
    UPDATE_SUCCESS = 0,
    UPDATE_ERROR = 1,
    UPDATE_TOPOLOGY_CHANGED = 2,
    UPDATE_NODE_TYPE_CHANGED = 3,
    UPDATE_PARAMETERS_CHANGED = 5,
    UPDATE_NOT_SUPPORTED = 6,
};

typedef struct UpdateInfo {     /* CUgraphExecUpdateResultInfo */
    int result;
    Node *node;                 /* of the graph that the update is from */
    Node *depends_on;
} UpdateInfo;

static bool same_dependencies(const Node *one, const Node *other) {
    if (one->dependencies.count != other->dependencies.count)
        return false;
    for (size_t i = 0; i < one->dependencies.count; i++) {
        const Node *dependency = other->graph->nodes.nodes[one->dependencies.nodes[i]->index];
        if (!nodes_contain(&other->dependencies, dependency))
            return false;
    }
    return true;
}

static UpdateInfo compare(const Graph *old, const Graph *new);

/* "Changing node parameters is not supported": of conditional nodes, save for the handle. */
static bool same_conditional(const Operation *from, const Operation *to) {
    return from->type != NODE_CONDITIONAL ||
           (from->conditional->type == to->conditional->type &&
            from->conditional->count == to->conditional->count);
}

static UpdateInfo compare_inside(const Operation *from, const Operation *to) {
    Graph *const *old;
    Graph *const *new;
    UpdateInfo info = {.result = UPDATE_SUCCESS};
    size_t count = operation_graphs(from, &old);
    operation_graphs(to, &new);
    for (size_t i = 0; i < count && info.result == UPDATE_SUCCESS; i++)
        info = compare(old[i], new[i]);
    return info;
}

/* Nodes correspond by the order in which they were added. */
static UpdateInfo compare(const Graph *old, const Graph *new) {
    if (old->nodes.count != new->nodes.count)
        return (UpdateInfo){.result = UPDATE_TOPOLOGY_CHANGED};
    for (size_t i = 0; i < new->nodes.count; i++) {
        Node *node = new->nodes.nodes[i];
        const Operation *from = old->nodes.nodes[i]->operation;
        const Operation *to = node->operation;
        if (from->type != to->type)
            return (UpdateInfo){.result = UPDATE_NODE_TYPE_CHANGED, .node = node};
        if (!same_dependencies(old->nodes.nodes[i], node))
            return (UpdateInfo){.result = UPDATE_TOPOLOGY_CHANGED, .node = node};
        if (to->type == NODE_MEM_ALLOC || to->type == NODE_MEM_FREE)
            return (UpdateInfo){.result = UPDATE_NOT_SUPPORTED, .node = node};
        if (!same_conditional(from, to))
            return (UpdateInfo){.result = UPDATE_PARAMETERS_CHANGED, .node = node};
        UpdateInfo inside = compare_inside(from, to);
        if (inside.result != UPDATE_SUCCESS)
            return inside;
    }
    return (UpdateInfo){.result = UPDATE_SUCCESS};
}

bool graph_can_become(const Graph *old, const Graph *new) {
    return compare(old, new).result == UPDATE_SUCCESS;
}

/* Launches that are queued are not affected, and a failed update leaves all as it was. */
DRIVER_FUNCTION_AS(cuGraphExecUpdate_v2, cuGraphExecUpdate, 12000,
                   (GraphExec *exec, Graph *graph, UpdateInfo *info), (exec, graph, info)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || !handle_is(KIND_GRAPH, graph) || !info)
        return CUDA_ERROR_INVALID_VALUE;
    *info = compare(exec->plan->graph, graph);
    Plan *plan;
    if (info->result == UPDATE_SUCCESS && plan_new(&plan, graph) != PLAN_SUCCESS)
        info->result = UPDATE_ERROR;
    if (info->result != UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    plan_release(exec->plan);
    exec->plan = plan;
    return CUDA_SUCCESS;
}
