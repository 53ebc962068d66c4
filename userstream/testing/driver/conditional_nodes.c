/* Conditional nodes: graphs that run, or run again, as a value says. Kernels set it. */
#include "driver.h"

/* ---- conditions ----------------------------------------------------------------------------- */

Condition *condition_find(const ConditionSet *set, uint64_t handle) {
    for (size_t i = 0; i < set->count; i++) {
        if (set->conditions[i].handle == handle)
            return &set->conditions[i];
    }
    return NULL;
}

void conditions_append(ConditionSet *set, Condition condition) {
    set->conditions = realloc(set->conditions, (set->count + 1) * sizeof condition);
    set->conditions[set->count++] = condition;
}

void conditions_clear(ConditionSet *set) {
    free(set->conditions);
    *set = (ConditionSet){0};
}

DRIVER_FUNCTION(cuGraphConditionalHandleCreate, 12030,
                (uint64_t *out, Graph *graph, Context *context, unsigned value, unsigned flags),
                (out, graph, context, value, flags)) {
    enum { ASSIGN_DEFAULT = 1 };
    if (!out || !handle_is(KIND_GRAPH, graph) || flags > ASSIGN_DEFAULT)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_usable(context);
    if (result != CUDA_SUCCESS)
        return result;
    *out = new_id();
    conditions_append(&graph->conditions, (Condition){.handle = *out,
                                                      .context = context,
                                                      .has_default = flags == ASSIGN_DEFAULT,
                                                      .default_value = value});
    return CUDA_SUCCESS;
}

/* "The conditional handle must be associated with a conditional node in this graph or one of its
 * children." */
static Condition *condition_for(const Graph *graph, uint64_t handle) {
    Condition *found = NULL;
    for (; graph && !found; graph = graph->parent)
        found = condition_find(&graph->conditions, handle);
    return found;
}

/* ---- nodes ---------------------------------------------------------------------------------- */

/* Plans run them, as they know the conditions. */
static CUresult run_in_plan(Operation *operation, Stream *stream) {
    UNUSED(operation);
    UNUSED(stream);
    return CUDA_ERROR_UNKNOWN;
}

static void dispose(Operation *operation) {
    Conditional *conditional = operation->conditional;
    for (unsigned i = 0; i < conditional->count; i++) {
        graph_free(conditional->bodies[i]);
        if (conditional->steps)
            free(conditional->steps[i].operations);
    }
    free(conditional->bodies);
    free(conditional->steps);
    free(conditional);
}

/* With bodies that are copies; or empty ones, for a new node. */
static Operation *operation_for(const Conditional *wanted) {
    Conditional *conditional = malloc(sizeof *conditional);
    *conditional = *wanted;
    conditional->steps = NULL;
    conditional->bodies = calloc(wanted->count, sizeof *wanted->bodies);
    for (unsigned i = 0; i < wanted->count; i++)
        conditional->bodies[i] = wanted->bodies ? graph_copy(wanted->bodies[i]) : graph_new();
    Operation *operation = operation_new(run_in_plan, NODE_CONDITIONAL);
    operation->conditional = conditional;
    operation->dispose = dispose;
    return operation;
}

Operation *conditional_copy(const Operation *operation) {
    return operation_for(operation->conditional);
}

/* "Allowed values are 1 for WHILE, 1 or 2 for IF, or any value greater than zero for SWITCH." The
 * last two came later than the others. */
static bool is_possible(const Conditional *wanted) {
    enum { ELSE_AND_SWITCH = 12080 };
    bool first_version = wanted->count == 1 && wanted->type != CONDITIONAL_SWITCH;
    switch (wanted->type) {
    case CONDITIONAL_WHILE:
        return first_version;
    case CONDITIONAL_IF:
        return first_version || (wanted->count == 2 && settings.driver_version >= ELSE_AND_SWITCH);
    case CONDITIONAL_SWITCH:
        return wanted->count > 0 && settings.driver_version >= ELSE_AND_SWITCH;
    }
    return false;
}

enum { MOST_BODIES = 1 << 16 };     /* a switch with more is a mistake, and would fill the memory */

typedef struct ConditionalNode {    /* CUDA_CONDITIONAL_NODE_PARAMS */
    uint64_t handle;
    int type;
    unsigned count;
    Graph **bodies;                 /* the answer */
    const Context *context;
} ConditionalNode;

/* "Context on which to run the node. Must match context used to create the handle." A handle is of
 * a single node. */
CUresult conditional_node_operation(const Graph *graph, void *parameters, Operation **operation) {
    ConditionalNode *node = parameters;
    Conditional wanted = {.condition = node->handle,
                          .context = node->context,
                          .type = (ConditionalType)node->type,
                          .count = node->count};
    Condition *condition = condition_for(graph, wanted.condition);
    if (!condition || condition->is_used || condition->context != wanted.context ||
        !is_possible(&wanted))
        return CUDA_ERROR_INVALID_VALUE;
    if (wanted.count > MOST_BODIES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    condition->is_used = true;
    *operation = operation_for(&wanted);
    node->bodies = (*operation)->conditional->bodies;
    return CUDA_SUCCESS;
}

void conditional_describe(const Operation *operation, void *parameters) {
    const Conditional *conditional = operation->conditional;
    *(ConditionalNode *)parameters = (ConditionalNode){.handle = conditional->condition,
                                                       .type = (int)conditional->type,
                                                       .count = conditional->count,
                                                       .bodies = conditional->bodies,
                                                       .context = conditional->context};
}
