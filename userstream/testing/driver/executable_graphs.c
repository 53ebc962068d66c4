/* Executable graphs: plans, their launches and their updates. */
#include "driver.h"

/* ---- plans ---------------------------------------------------------------------------------- */

/* The nodes in an order in which each comes after what it depends on; false if there is none. Depth
 * first, without recursion: a node that is met again while it is open is part of a cycle. */
static bool put_in_order(const Graph *graph, NodeSet *order) {
    uint64_t open = new_id();
    uint64_t done = new_id();
    bool possible = true;
    NodeSet stack = {0};
    for (size_t i = 0; i < graph->nodes.count && possible; i++) {
        nodes_append(&stack, graph->nodes.nodes[i]);
        while (stack.count && possible) {
            Node *node = stack.nodes[stack.count - 1];
            if (node->mark == open || node->mark == done) {
                stack.count--;
                if (node->mark == open)
                    nodes_append(order, node);
                node->mark = done;
                continue;
            }
            node->mark = open;
            for (size_t k = 0; k < node->dependencies.count; k++) {
                Node *dependency = node->dependencies.nodes[k];
                possible = possible && dependency->mark != open;
                if (dependency->mark != done)
                    nodes_append(&stack, dependency);
            }
        }
    }
    nodes_clear(&stack);
    return possible;
}

static void append(Plan *plan, Operation *operation) {
    /* A power of two is full. */
    if ((plan->count & (plan->count - 1)) == 0)
        plan->operations =
            realloc(plan->operations, (2 * plan->count + 1) * sizeof *plan->operations);
    plan->operations[plan->count++] = operation;
    if (operation->type == NODE_MEM_ALLOC || operation->type == NODE_MEM_FREE)
        plan->memory_operations++;
}

/* What children consist of comes in their place. */
static bool plan_add(Plan *plan, const Graph *graph) {
    NodeSet order = {0};
    bool possible = put_in_order(graph, &order);
    for (size_t i = 0; i < order.count && possible; i++) {
        Operation *operation = order.nodes[i]->operation;
        if (operation->type == NODE_GRAPH)
            possible = plan_add(plan, operation->child);
        else
            append(plan, operation);
    }
    nodes_clear(&order);
    return possible;
}

Plan *plan_new(const Graph *graph) {
    Plan *plan = calloc(1, sizeof *plan);
    plan->references = 1;
    plan->graph = graph_copy(graph);
    if (plan_add(plan, plan->graph))
        return plan;
    plan_release(plan);
    return NULL;
}

Plan *plan_retain(Plan *plan) {
    plan->references++;
    return plan;
}

void plan_release(Plan *plan) {
    if (--plan->references)
        return;
    graph_free(plan->graph);
    free(plan->operations);
    free(plan);
}

/* ---- instantiation -------------------------------------------------------------------------- */

enum { AUTO_FREE_ON_LAUNCH = 1 };   /* CUgraphInstantiate_flags */
enum { INSTANTIATE_SUCCESS, INSTANTIATE_ERROR, INSTANTIATE_INVALID_STRUCTURE };

/* A snapshot: later changes of the graph, and its end, do not matter. */
static CUresult instantiate(GraphExec **out, Graph *graph, uint64_t flags) {
    if (!out || !handle_is(KIND_GRAPH, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable(context_current());
    if (result != CUDA_SUCCESS)
        return result;
    Plan *plan = plan_new(graph);
    if (!plan)
        return CUDA_ERROR_INVALID_VALUE;
    GraphExec *exec = handle_new(KIND_GRAPH_EXEC);
    exec->flags = flags;
    exec->plan = plan;
    *out = exec;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphInstantiateWithFlags, 11040,
                (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags)) {
    return instantiate(out, graph, flags);
}

typedef struct InstantiateParameters {      /* CUDA_GRAPH_INSTANTIATE_PARAMS */
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
    CUresult result = instantiate(out, graph, parameters->flags);
    parameters->error_node = NULL;
    parameters->result = INSTANTIATE_SUCCESS;
    if (result != CUDA_SUCCESS)
        parameters->result = context_usable(context_current()) == CUDA_SUCCESS
            ? INSTANTIATE_INVALID_STRUCTURE : INSTANTIATE_ERROR;
    return result;
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
    const Plan *plan = operation->graph_launch->plan;
    const MemoryEffect *effect = operation->graph_launch->effects;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < plan->count && result == CUDA_SUCCESS; i++) {
        Operation *next = plan->operations[i];
        if (stream_work_is_lost(stream))
            break;
        if (next->type == NODE_MEM_ALLOC || next->type == NODE_MEM_FREE)
            graph_memory_run(next, effect++);
        else
            result = next->run(next, stream);
    }
    return result;
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
    result = graph_memory_check(plan->operations, plan->count, exec->flags & AUTO_FREE_ON_LAUNCH);
    if (result == CUDA_SUCCESS)
        result = stream_wait_for(stream, exec->last);
    if (result != CUDA_SUCCESS)
        return result;
    Operation *operation = launch_operation(plan);
    result = stream_submit(stream, operation);
    if (result != CUDA_SUCCESS)
        return result;
    graph_memory_take(plan->operations, plan->count, operation->graph_launch->effects);
    point_release(exec->last);
    exec->last = point_retain(stream->tail);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphUpload, 11010, (GraphExec *exec, Stream *handle), (exec, handle)) {
    Stream *stream;
    CUresult result = find_exec(exec, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    graph_memory_map(exec->plan->operations, exec->plan->count);
    return stream_submit(stream, operation_nothing(NODE_EMPTY));
}

/* ---- updates -------------------------------------------------------------------------------- */

enum {                          /* CUgraphExecUpdateResult */
    UPDATE_SUCCESS = 0,
    UPDATE_TOPOLOGY_CHANGED = 2,
    UPDATE_NODE_TYPE_CHANGED = 3,
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
        if (to->type == NODE_GRAPH) {
            UpdateInfo child = compare(from->child, to->child);
            if (child.result != UPDATE_SUCCESS)
                return child;
        }
    }
    return (UpdateInfo){.result = UPDATE_SUCCESS};
}

/* Launches that are queued are not affected, and a failed update leaves all as it was. */
DRIVER_FUNCTION_AS(cuGraphExecUpdate_v2, cuGraphExecUpdate, 12000,
                   (GraphExec *exec, Graph *graph, UpdateInfo *info), (exec, graph, info)) {
    if (!handle_is(KIND_GRAPH_EXEC, exec) || !handle_is(KIND_GRAPH, graph) || !info)
        return CUDA_ERROR_INVALID_VALUE;
    *info = compare(exec->plan->graph, graph);
    if (info->result != UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    Plan *plan = plan_new(graph);
    plan_release(exec->plan);
    exec->plan = plan;
    return CUDA_SUCCESS;
}
