/* Stream memory operations: cuStreamWaitValue, cuStreamWriteValue, cuStreamBatchMemOp. */
#include "driver.h"

long waiting_for_values;        /* queued and not yet over */

enum { WAIT_GEQ, WAIT_EQ, WAIT_AND, WAIT_NOR, WAIT_COMPARISON = 3, WAIT_FLUSH = 1 << 30 };
enum { POLL_MICROSECONDS = 500 };   /* programs store to host memory without telling the driver */

typedef struct Word {
    bool is_wait;
    CUdeviceptr address;
    uint64_t value;
    unsigned width;
    unsigned flags;
} Word;

/* Operations of one batch run in order, as one. */
typedef struct Batch {
    bool is_held;               /* counted as a wait that is not over */
    Context *context;           /* of a node, like the next two: as it was described */
    unsigned described_count;
    union Parameters *described;
    size_t count;
    Word words[];
} Batch;

static uint64_t load(const Word *word) {
    if (word->width == 4)
        return __atomic_load_n((uint32_t *)word->address, __ATOMIC_ACQUIRE);
    return __atomic_load_n((uint64_t *)word->address, __ATOMIC_ACQUIRE);
}

static void store(const Word *word) {
    if (word->width == 4)
        __atomic_store_n((uint32_t *)word->address, (uint32_t)word->value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint64_t *)word->address, word->value, __ATOMIC_RELEASE);
}

/* GEQ is cyclic: "(int32_t)(*addr - value) >= 0". */
static bool satisfied(const Word *word, uint64_t now) {
    uint64_t mask = word->width == 4 ? UINT32_MAX : UINT64_MAX;
    uint64_t sign = (mask >> 1) + 1;
    switch (word->flags & WAIT_COMPARISON) {
    case WAIT_GEQ:
        return !((now - word->value) & sign);
    case WAIT_EQ:
        return (now & mask) == (word->value & mask);
    case WAIT_AND:
        return (now & word->value & mask) != 0;
    default:
        return (~(now | word->value) & mask) != 0;
    }
}

static CUresult run_wait(const Word *word, Stream *stream) {
    CUresult result = CUDA_SUCCESS;
    while (!stream_work_is_lost(stream)) {
        if (!memory_contains(word->address, word->width)) {
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
            break;
        }
        if (satisfied(word, load(word)))
            break;
        wait_for_progress_or(POLL_MICROSECONDS);
    }
    return result;
}

/* What comes behind the first word waits, if need be, in the middle of the operation. */
static bool is_ready(const Operation *operation) {
    const Word *first = operation->batch->words;
    return !operation->batch->count || !first->is_wait ||
           !memory_contains(first->address, first->width) || satisfied(first, load(first));
}

static CUresult run_batch(Operation *operation, Stream *stream) {
    const Batch *batch = operation->batch;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < batch->count && result == CUDA_SUCCESS; i++) {
        const Word *word = &batch->words[i];
        if (word->is_wait)
            result = run_wait(word, stream);
        else if (!memory_contains(word->address, word->width))
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        else
            store(word);
        progress();
    }
    return result;
}

void batch_touches(const Operation *operation, Touch touch) {
    const Batch *batch = operation->batch;
    for (size_t i = 0; i < batch->count; i++)
        touch(batch->words[i].address, batch->words[i].width, !batch->words[i].is_wait);
}

static void dispose_batch(Operation *operation) {
    waiting_for_values -= operation->batch->is_held;
    free(operation->batch->described);
    free(operation->batch);
}

static CUresult check(bool in_graph, const Word *word) {
    /* H200: writes without a barrier are refused. */
    unsigned allowed = word->is_wait ? WAIT_COMPARISON | WAIT_FLUSH : 0;
    if (word->flags & ~allowed)
        return CUDA_ERROR_INVALID_VALUE;
    if (word->address % word->width)
        return CUDA_ERROR_INVALID_VALUE;
    if (in_graph && graph_memory_contains(word->address, word->width))
        return CUDA_SUCCESS;
    const Memory *memory = memory_find(word->address);
    if (!memory_has(memory, word->address, word->width))
        return CUDA_ERROR_INVALID_VALUE;
    /* "This function cannot be used with managed memory." */
    if (memory->kind == MEMORY_MANAGED || (memory->kind == MEMORY_PINNED && memory->pool))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static bool has_wait(const Word *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (words[i].is_wait)
            return true;
    }
    return false;
}

static Operation *batch_operation(const Word *words, size_t count, bool is_held) {
    Batch *batch = calloc(1, sizeof *batch + count * sizeof *words);
    batch->count = count;
    batch->is_held = is_held;
    waiting_for_values += batch->is_held;
    memcpy(batch->words, words, count * sizeof *words);
    Operation *operation = operation_new(run_batch, NODE_BATCH_MEM_OP);
    operation->batch = batch;
    operation->is_ready = is_ready;
    operation->dispose = dispose_batch;
    return operation;
}

static CUresult submit(Stream *handle, const Word *words, size_t count) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = check(stream->capture, &words[i]);
    if (result != CUDA_SUCCESS)
        return result;
    bool is_held = !stream->capture && has_wait(words, count);
    return stream_submit(stream, batch_operation(words, count, is_held));
}

#define VALUE_FUNCTION(name, bits, waits) \
    DRIVER_FUNCTION_AS(name##bits##_v2, name##bits, 11070, \
                       (Stream *handle, CUdeviceptr address, uint##bits##_t value, \
                        unsigned flags), \
                       (handle, address, value, flags)) { \
        Word word = {waits, address, value, bits / 8, flags}; \
        return submit(handle, &word, 1); \
    }

VALUE_FUNCTION(cuStreamWaitValue, 32, true)
VALUE_FUNCTION(cuStreamWaitValue, 64, true)
VALUE_FUNCTION(cuStreamWriteValue, 32, false)
VALUE_FUNCTION(cuStreamWriteValue, 64, false)

enum {                          /* CUstreamBatchMemOpType */
    WAIT_VALUE_32 = 1,
    WRITE_VALUE_32 = 2,
    FLUSH_REMOTE_WRITES = 3,
    WAIT_VALUE_64 = 4,
    WRITE_VALUE_64 = 5,
    BARRIER = 6,
};

typedef union Parameters {      /* CUstreamBatchMemOpParams */
    int operation;
    struct {
        int operation;
        CUdeviceptr address;
        uint64_t value;
        unsigned flags;
        CUdeviceptr alias;
    } word;
    uint64_t pad[6];
} Parameters;

enum { MAX_BATCH = 256 };

/* "The number of operations in the array. Must be less than 256." */
static CUresult read_words(Word words[MAX_BATCH], size_t *used, unsigned count,
                           const Parameters *parameters, unsigned flags) {
    *used = 0;
    if (flags || count == 0 || count >= MAX_BATCH || !parameters)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        int operation = parameters[i].operation;
        bool wide = operation == WAIT_VALUE_64 || operation == WRITE_VALUE_64;
        bool waits = operation == WAIT_VALUE_32 || operation == WAIT_VALUE_64;
        if (operation == FLUSH_REMOTE_WRITES || operation == BARRIER)
            continue;
        if (operation < WAIT_VALUE_32 || operation > BARRIER)
            return CUDA_ERROR_INVALID_VALUE;
        words[(*used)++] = (Word){.is_wait = waits,
                                  .address = parameters[i].word.address,
                                  .value = parameters[i].word.value,
                                  .width = wide ? 8 : 4,
                                  .flags = parameters[i].word.flags};
    }
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuStreamBatchMemOp_v2, cuStreamBatchMemOp, 11070,
                   (Stream *handle, unsigned count, const Parameters *parameters, unsigned flags),
                   (handle, count, parameters, flags)) {
    Word words[MAX_BATCH];
    size_t used;
    CUresult result = read_words(words, &used, count, parameters, flags);
    return result == CUDA_SUCCESS ? submit(handle, words, used) : result;
}

/* ---- nodes ---------------------------------------------------------------------------------- */

typedef struct BatchNode {      /* CUDA_BATCH_MEM_OP_NODE_PARAMS */
    Context *context;
    unsigned count;
    Parameters *parameters;
    unsigned flags;
} BatchNode;

CUresult batch_node_operation(const void *parameters, Operation **operation) {
    const BatchNode *node = parameters;
    Word words[MAX_BATCH];
    size_t used;
    if (!node || !handle_is(KIND_CONTEXT, node->context))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = read_words(words, &used, node->count, node->parameters, node->flags);
    for (size_t i = 0; i < used && result == CUDA_SUCCESS; i++)
        result = check(true, &words[i]);
    if (result != CUDA_SUCCESS)
        return result;
    *operation = batch_operation(words, used, false);
    size_t size = node->count * sizeof *node->parameters;
    (*operation)->batch->context = node->context;
    (*operation)->batch->described_count = node->count;
    (*operation)->batch->described = malloc(size);
    memcpy((*operation)->batch->described, node->parameters, size);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuGraphAddBatchMemOpNode, 11070,
                (Node **out, Graph *graph, Node **dependencies, size_t count,
                 const BatchNode *node),
                (out, graph, dependencies, count, node)) {
    Operation *operation;
    CUresult result = batch_node_operation(node, &operation);
    if (result != CUDA_SUCCESS)
        return result;
    return graph_add_checked(out, graph, dependencies, count, operation);
}

/* Of a captured one nothing is described. */
DRIVER_FUNCTION(cuGraphBatchMemOpNodeGetParams, 11070, (Node *node, BatchNode *out), (node, out)) {
    const Operation *operation = node_operation(node, NODE_BATCH_MEM_OP);
    if (!operation || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (BatchNode){.context = operation->batch->context,
                       .count = operation->batch->described_count,
                       .parameters = operation->batch->described};
    return CUDA_SUCCESS;
}
