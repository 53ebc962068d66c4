/* Plans: what the launch of a graph does, and in which order. */
#include "driver.h"

/* ---- making --------------------------------------------------------------------------------- */

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

static void append(Steps *steps, Operation *operation) {
    /* A power of two is full. */
    if ((steps->count & (steps->count - 1)) == 0)
        steps->operations =
            realloc(steps->operations, (2 * steps->count + 1) * sizeof *steps->operations);
    steps->operations[steps->count++] = operation;
}

/* "Allowed node types are kernel nodes, empty nodes, child graphs, memsets, memcopies, and
 * conditionals. This applies recursively to child graphs and conditional bodies." */
static bool is_allowed_in_body(NodeType type) {
    return type == NODE_KERNEL || type == NODE_EMPTY || type == NODE_GRAPH ||
           type == NODE_MEMSET || type == NODE_MEMCPY || type == NODE_CONDITIONAL;
}

static bool add_graph(Plan *plan, Steps *steps, const Graph *graph, bool in_body);

static bool add_conditional(Plan *plan, Conditional *conditional) {
    Condition *condition = condition_find(&plan->conditions, conditional->condition);
    bool possible = condition != NULL;
    if (condition)
        condition->is_used = true;
    conditional->steps = calloc(conditional->count, sizeof *conditional->steps);
    for (unsigned i = 0; i < conditional->count && possible; i++)
        possible = add_graph(plan, &conditional->steps[i], conditional->bodies[i], true);
    return possible;
}

/* What children consist of comes in their place. */
static bool add_operation(Plan *plan, Steps *steps, Operation *operation, bool in_body) {
    if (in_body && !is_allowed_in_body(operation->type))
        return false;
    if (operation->type == NODE_GRAPH)
        return add_graph(plan, steps, operation->child, in_body);
    append(steps, operation);
    if (operation->type == NODE_MEM_ALLOC || operation->type == NODE_MEM_FREE)
        plan->memory_operations++;
    return operation->type != NODE_CONDITIONAL || add_conditional(plan, operation->conditional);
}

static bool add_graph(Plan *plan, Steps *steps, const Graph *graph, bool in_body) {
    NodeSet order = {0};
    for (size_t i = 0; i < graph->conditions.count; i++) {
        Condition condition = graph->conditions.conditions[i];
        condition.is_used = false;      /* its node may be gone */
        conditions_append(&plan->conditions, condition);
    }
    bool possible = put_in_order(graph, &order);
    for (size_t i = 0; i < order.count && possible; i++) {
        if (!order.nodes[i]->is_disabled)
            possible = add_operation(plan, steps, order.nodes[i]->operation, in_body);
    }
    nodes_clear(&order);
    return possible;
}

/* "Handles not associated with a conditional node may cause graph instantiation to fail." */
static bool all_are_used(const ConditionSet *set) {
    for (size_t i = 0; i < set->count; i++) {
        if (!set->conditions[i].is_used)
            return false;
    }
    return true;
}

static void hide(Graph *graph) {
    for (size_t i = 0; i < graph->nodes.count; i++) {
        Graph *const *inside;
        size_t count = operation_graphs(graph->nodes.nodes[i]->operation, &inside);
        for (size_t k = 0; k < count; k++)
            hide(inside[k]);
        handle_hide(graph->nodes.nodes[i]);
    }
    handle_hide(graph);
}

PlanResult plan_new(Plan **out, const Graph *graph) {
    Plan *plan = calloc(1, sizeof *plan);
    plan->references = 1;
    plan->graph = graph_copy(graph);
    hide(plan->graph);
    PlanResult result = PLAN_SUCCESS;
    if (!add_graph(plan, &plan->steps, plan->graph, false))
        result = PLAN_INVALID_STRUCTURE;
    else if (!all_are_used(&plan->conditions))
        result = PLAN_CONDITION_UNUSED;
    if (result == PLAN_SUCCESS)
        *out = plan;
    else
        plan_release(plan);
    return result;
}

Plan *plan_retain(Plan *plan) {
    plan->references++;
    return plan;
}

void plan_release(Plan *plan) {
    if (--plan->references)
        return;
    graph_free(plan->graph);
    free(plan->steps.operations);
    conditions_clear(&plan->conditions);
    free(plan);
}

/* ---- running -------------------------------------------------------------------------------- */

static CUresult run_steps(const Plan *plan, const Steps *steps, const MemoryEffect *effect,
                          Stream *stream);

static CUresult run_body(const Plan *plan, const Conditional *conditional, unsigned index,
                         Stream *stream) {
    if (index >= conditional->count)
        return CUDA_SUCCESS;
    return run_steps(plan, &conditional->steps[index], NULL, stream);
}

/* Lets go of the lock each time: nothing else may do so in a body, and it may never end. */
static CUresult run_loop(const Plan *plan, const Conditional *conditional,
                         const Condition *condition, Stream *stream) {
    CUresult result = CUDA_SUCCESS;
    while (condition->value && result == CUDA_SUCCESS && !shut_down &&
           !stream_work_is_lost(stream)) {
        result = run_body(plan, conditional, 0, stream);
        wait_for_progress_or(1);
    }
    return result;
}

static CUresult run_conditional(const Plan *plan, const Conditional *conditional, Stream *stream) {
    const Condition *condition = condition_find(&plan->conditions, conditional->condition);
    switch (conditional->type) {
    case CONDITIONAL_IF:
        return run_body(plan, conditional, condition->value ? 0 : 1, stream);
    case CONDITIONAL_WHILE:
        return run_loop(plan, conditional, condition, stream);
    case CONDITIONAL_SWITCH:
        return run_body(plan, conditional, condition->value, stream);
    }
    return CUDA_ERROR_UNKNOWN;
}

static CUresult run_steps(const Plan *plan, const Steps *steps, const MemoryEffect *effect,
                          Stream *stream) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < steps->count && result == CUDA_SUCCESS; i++) {
        Operation *next = steps->operations[i];
        schedule_node_begins(stream, next, i == 0);
        if (stream_work_is_lost(stream))
            break;
        if (next->type == NODE_MEM_ALLOC || next->type == NODE_MEM_FREE)
            graph_memory_run(next, effect++);
        else if (next->type == NODE_CONDITIONAL)
            result = run_conditional(plan, next->conditional, stream);
        else
            result = next->run(next, stream);
    }
    return result;
}

CUresult plan_run(Plan *plan, const MemoryEffect *effects, Stream *stream) {
    for (size_t i = 0; i < plan->conditions.count; i++) {
        Condition *condition = &plan->conditions.conditions[i];
        if (condition->has_default)
            condition->value = condition->default_value;
    }
    return run_steps(plan, &plan->steps, effects, stream);
}
