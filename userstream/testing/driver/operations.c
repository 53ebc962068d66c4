/* Operations: what a stream's queue or a graph's node holds. The file of each subject makes its
 * own; fills.c is a short one. A new type also needs its word and the memory that it touches in
 * schedule.c (`describe`, `tell_step`), and for nodes a case where NODE_MEMSET has one. */
#include "driver.h"

Operation *operation_new(Run run, NodeType type) {
    Operation *operation = calloc(1, sizeof *operation);
    operation->run = run;
    operation->type = type;
    operation->references = 1;
    return operation;
}

static CUresult run_nothing(Operation *operation, Stream *stream) {
    UNUSED(operation);
    UNUSED(stream);
    return CUDA_SUCCESS;
}

Operation *operation_nothing(NodeType type) {
    Operation *operation = operation_new(run_nothing, type);
    operation->takes_no_turn = true;
    return operation;
}

Operation *operation_retain(Operation *operation) {
    operation->references++;
    return operation;
}

void operation_release(Operation *operation) {
    if (--operation->references)
        return;
    if (operation->dispose)
        operation->dispose(operation);
    point_release(operation->point);
    free(operation);
}
