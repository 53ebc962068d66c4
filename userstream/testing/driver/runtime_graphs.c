/* The runtime's functions for graphs, which take the driver's handles and structures. */
#include "copies.h"
#include "runtime.h"

#define EDGES "cudaGraphEdgeData"       /* in the signatures of CUDA 13, and in those of "_v2" */

/* ---- captures ------------------------------------------------------------------------------- */

SAME(cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2,
     (Stream *stream, int *status, uint64_t *id, Graph **graph, Node ***nodes, size_t *count),
     (stream, status, id, graph, nodes, count))
SAME_IF(cudaStreamGetCaptureInfo, EDGES, cuStreamGetCaptureInfo_v3,
        (Stream *stream, int *status, uint64_t *id, Graph **graph, Node ***nodes,
         const void **edges, size_t *count),
        (stream, status, id, graph, nodes, edges, count))
ALSO(cuStreamGetCaptureInfo_v3_as_cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_v3)
SAME(cudaStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies,
     (Stream *stream, Node **nodes, size_t count, unsigned flags), (stream, nodes, count, flags))
SAME_IF(cudaStreamUpdateCaptureDependencies, EDGES, cuStreamUpdateCaptureDependencies_v2,
        (Stream *stream, Node **nodes, const void *edges, size_t count, unsigned flags),
        (stream, nodes, edges, count, flags))
ALSO(cuStreamUpdateCaptureDependencies_v2_as_cudaStreamUpdateCaptureDependencies,
     cudaStreamUpdateCaptureDependencies_v2)
SAME(cudaStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph,
     (Stream *stream, Graph *graph, Node **nodes, const void *edges, size_t count, int mode),
     (stream, graph, nodes, edges, count, mode))

/* ---- graphs --------------------------------------------------------------------------------- */

SAME(cudaGraphCreate, cuGraphCreate, (Graph **out, unsigned flags), (out, flags))
SAME(cudaGraphDestroy, cuGraphDestroy, (Graph *graph), (graph))
SAME(cudaGraphClone, cuGraphClone, (Graph **out, Graph *graph), (out, graph))
SAME(cudaGraphNodeFindInClone, cuGraphNodeFindInClone, (Node **out, Node *node, Graph *clone),
     (out, node, clone))
SAME(cudaGraphGetNodes, cuGraphGetNodes, (Graph *graph, Node **out, size_t *count),
     (graph, out, count))
SAME(cudaGraphGetRootNodes, cuGraphGetRootNodes, (Graph *graph, Node **out, size_t *count),
     (graph, out, count))
SAME(cudaGraphDebugDotPrint, cuGraphDebugDotPrint,
     (Graph *graph, const char *path, unsigned flags), (graph, path, flags))
SAME(cudaUserObjectCreate, cuUserObjectCreate,
     (void **out, void *object, HostFunction destroy, unsigned references, unsigned flags),
     (out, object, destroy, references, flags))
SAME(cudaUserObjectRetain, cuUserObjectRetain, (void *object, unsigned count), (object, count))
SAME(cudaUserObjectRelease, cuUserObjectRelease, (void *object, unsigned count), (object, count))
SAME(cudaGraphRetainUserObject, cuGraphRetainUserObject,
     (Graph *graph, void *object, unsigned count, unsigned flags), (graph, object, count, flags))
SAME(cudaGraphReleaseUserObject, cuGraphReleaseUserObject,
     (Graph *graph, void *object, unsigned count), (graph, object, count))

CUresult cuGraphConditionalHandleCreate(uint64_t *out, Graph *graph, Context *context,
                                        unsigned value, unsigned flags);
CUresult cuCtxGetCurrent(Context **out);

static Context *current(void) {
    Context *context = NULL;
    cuCtxGetCurrent(&context);
    return context;
}

RUNTIME_FUNCTION(cudaGraphConditionalHandleCreate, runtime_start_with_context,
                 (uint64_t *out, Graph *graph, unsigned value, unsigned flags),
                 (out, graph, value, flags)) {
    return cuGraphConditionalHandleCreate(out, graph, current(), value, flags);
}

/* ---- edges ---------------------------------------------------------------------------------- */

SAME(cudaGraphGetEdges, cuGraphGetEdges, (Graph *graph, Node **from, Node **to, size_t *count),
     (graph, from, to, count))
SAME_IF(cudaGraphGetEdges, EDGES, cuGraphGetEdges_v2,
        (Graph *graph, Node **from, Node **to, void *edges, size_t *count),
        (graph, from, to, edges, count))
ALSO(cuGraphGetEdges_v2_as_cudaGraphGetEdges, cudaGraphGetEdges_v2)

#define EDGE_CHANGE(name, driver_function) \
    SAME(name, driver_function, (Graph *graph, Node **from, Node **to, size_t count), \
         (graph, from, to, count)) \
    SAME_IF(name, EDGES, driver_function##_v2, \
            (Graph *graph, Node **from, Node **to, const void *edges, size_t count), \
            (graph, from, to, edges, count)) \
    ALSO(driver_function##_v2_as_##name, name##_v2)

EDGE_CHANGE(cudaGraphAddDependencies, cuGraphAddDependencies)
EDGE_CHANGE(cudaGraphRemoveDependencies, cuGraphRemoveDependencies)

#define NEIGHBORS(name, driver_function) \
    SAME(name, driver_function, (Node *node, Node **out, size_t *count), (node, out, count)) \
    SAME_IF(name, EDGES, driver_function##_v2, \
            (Node *node, Node **out, void *edges, size_t *count), (node, out, edges, count)) \
    ALSO(driver_function##_v2_as_##name, name##_v2)

NEIGHBORS(cudaGraphNodeGetDependencies, cuGraphNodeGetDependencies)
NEIGHBORS(cudaGraphNodeGetDependentNodes, cuGraphNodeGetDependentNodes)

/* ---- nodes ---------------------------------------------------------------------------------- */

SAME(cudaGraphDestroyNode, cuGraphDestroyNode, (Node *node), (node))
SAME(cudaGraphNodeGetType, cuGraphNodeGetType, (Node *node, int *type), (node, type))
SAME(cudaGraphAddEmptyNode, cuGraphAddEmptyNode,
     (Node **out, Graph *graph, Node **dependencies, size_t count),
     (out, graph, dependencies, count))

/* A node of one argument. */
#define ADD(name, driver_function, argument_type) \
    SAME(name, driver_function, \
         (Node **out, Graph *graph, Node **dependencies, size_t count, argument_type argument), \
         (out, graph, dependencies, count, argument))

/* A function of a node that takes or answers its parameters. */
#define OF_NODE(name, driver_function, argument_type) \
    SAME(name, driver_function, (Node *node, argument_type argument), (node, argument))

#define OF_EXEC(name, driver_function, argument_type) \
    SAME(name, driver_function, (GraphExec *exec, Node *node, argument_type argument), \
         (exec, node, argument))

ADD(cudaGraphAddHostNode, cuGraphAddHostNode, const void *)
OF_NODE(cudaGraphHostNodeGetParams, cuGraphHostNodeGetParams, void *)
OF_NODE(cudaGraphHostNodeSetParams, cuGraphHostNodeSetParams, const void *)
OF_EXEC(cudaGraphExecHostNodeSetParams, cuGraphExecHostNodeSetParams, const void *)

ADD(cudaGraphAddChildGraphNode, cuGraphAddChildGraphNode, Graph *)
OF_NODE(cudaGraphChildGraphNodeGetGraph, cuGraphChildGraphNodeGetGraph, Graph **)
OF_EXEC(cudaGraphExecChildGraphNodeSetParams, cuGraphExecChildGraphNodeSetParams, Graph *)

ADD(cudaGraphAddEventRecordNode, cuGraphAddEventRecordNode, Event *)
OF_NODE(cudaGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeGetEvent, Event **)
OF_NODE(cudaGraphEventRecordNodeSetEvent, cuGraphEventRecordNodeSetEvent, Event *)
OF_EXEC(cudaGraphExecEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent, Event *)
ADD(cudaGraphAddEventWaitNode, cuGraphAddEventWaitNode, Event *)
OF_NODE(cudaGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeGetEvent, Event **)
OF_NODE(cudaGraphEventWaitNodeSetEvent, cuGraphEventWaitNodeSetEvent, Event *)
OF_EXEC(cudaGraphExecEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent, Event *)

ADD(cudaGraphAddMemAllocNode, cuGraphAddMemAllocNode, void *)
OF_NODE(cudaGraphMemAllocNodeGetParams, cuGraphMemAllocNodeGetParams, void *)
ADD(cudaGraphAddMemFreeNode, cuGraphAddMemFreeNode, CUdeviceptr)
OF_NODE(cudaGraphMemFreeNodeGetParams, cuGraphMemFreeNodeGetParams, CUdeviceptr *)

/* cudaKernelNodeParams are CUDA_KERNEL_NODE_PARAMS_v1. */
ADD(cudaGraphAddKernelNode, cuGraphAddKernelNode, const void *)
OF_NODE(cudaGraphKernelNodeGetParams, cuGraphKernelNodeGetParams, void *)
OF_NODE(cudaGraphKernelNodeSetParams, cuGraphKernelNodeSetParams, const void *)
OF_EXEC(cudaGraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams, const void *)
SAME(cudaGraphKernelNodeGetAttribute, cuGraphKernelNodeGetAttribute,
     (Node *node, int attribute, void *value), (node, attribute, value))
SAME(cudaGraphKernelNodeSetAttribute, cuGraphKernelNodeSetAttribute,
     (Node *node, int attribute, const void *value), (node, attribute, value))
SAME(cudaGraphKernelNodeCopyAttributes, cuGraphKernelNodeCopyAttributes, (Node *to, Node *from),
     (to, from))

/* ---- fills and copies, for which the driver wants a context --------------------------------- */

CUresult cuGraphAddMemsetNode(Node **out, Graph *graph, Node **dependencies, size_t count,
                              const void *parameters, Context *context);
CUresult cuGraphExecMemsetNodeSetParams(GraphExec *exec, Node *node, const void *parameters,
                                        Context *context);
CUresult cuGraphAddMemcpyNode(Node **out, Graph *graph, Node **dependencies, size_t count,
                              const void *copy, Context *context);
CUresult cuGraphMemcpyNodeSetParams(Node *node, const void *copy);
CUresult cuGraphExecMemcpyNodeSetParams(GraphExec *exec, Node *node, const void *copy,
                                        Context *context);

OF_NODE(cudaGraphMemsetNodeGetParams, cuGraphMemsetNodeGetParams, void *)
OF_NODE(cudaGraphMemsetNodeSetParams, cuGraphMemsetNodeSetParams, const void *)

RUNTIME_FUNCTION(cudaGraphAddMemsetNode, runtime_start_with_context,
                 (Node **out, Graph *graph, Node **dependencies, size_t count,
                  const void *parameters),
                 (out, graph, dependencies, count, parameters)) {
    return cuGraphAddMemsetNode(out, graph, dependencies, count, parameters, current());
}

RUNTIME_FUNCTION(cudaGraphExecMemsetNodeSetParams, runtime_start_with_context,
                 (GraphExec *exec, Node *node, const void *parameters), (exec, node, parameters)) {
    return cuGraphExecMemsetNodeSetParams(exec, node, parameters, current());
}

static CUDA_MEMCPY3D line(CUdeviceptr destination, CUdeviceptr source, size_t size, int kind) {
    return (CUDA_MEMCPY3D){
        .source = {.type = runtime_memory_type(kind, SOURCE), .host = source, .device = source},
        .destination = {.type = runtime_memory_type(kind, DESTINATION), .host = destination,
                        .device = destination},
        .width = size, .height = 1, .depth = 1};
}

RUNTIME_FUNCTION(cudaGraphAddMemcpyNode1D, runtime_start_with_context,
                 (Node **out, Graph *graph, Node **dependencies, size_t count,
                  CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (out, graph, dependencies, count, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size, kind);
    CUresult result = runtime_check_kind(kind);
    if (result != CUDA_SUCCESS)
        return result;
    return cuGraphAddMemcpyNode(out, graph, dependencies, count, &copy, current());
}

RUNTIME_FUNCTION(cudaGraphMemcpyNodeSetParams1D, runtime_start_with_context,
                 (Node *node, CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (node, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size, kind);
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? cuGraphMemcpyNodeSetParams(node, &copy) : result;
}

RUNTIME_FUNCTION(cudaGraphExecMemcpyNodeSetParams1D, runtime_start_with_context,
                 (GraphExec *exec, Node *node, CUdeviceptr destination, CUdeviceptr source,
                  size_t size, int kind),
                 (exec, node, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size, kind);
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? cuGraphExecMemcpyNodeSetParams(exec, node, &copy, current())
                                  : result;
}

CUresult cuGraphMemcpyNodeGetParams(Node *node, CUDA_MEMCPY3D *out);

RUNTIME_FUNCTION(cudaGraphAddMemcpyNode, runtime_start_with_context,
                 (Node **out, Graph *graph, Node **dependencies, size_t count, const void *given),
                 (out, graph, dependencies, count, given)) {
    CUDA_MEMCPY3D copy;
    CUresult result = runtime_copy_3d(&copy, given);
    if (result != CUDA_SUCCESS)
        return result;
    return cuGraphAddMemcpyNode(out, graph, dependencies, count, &copy, current());
}

RUNTIME_FUNCTION(cudaGraphMemcpyNodeGetParams, runtime_start_with_context,
                 (Node *node, void *out), (node, out)) {
    CUDA_MEMCPY3D copy;
    CUresult result = out ? cuGraphMemcpyNodeGetParams(node, &copy) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS ? runtime_describe_copy(out, &copy) : result;
}

RUNTIME_FUNCTION(cudaGraphMemcpyNodeSetParams, runtime_start_with_context,
                 (Node *node, const void *given), (node, given)) {
    CUDA_MEMCPY3D copy;
    CUresult result = runtime_copy_3d(&copy, given);
    return result == CUDA_SUCCESS ? cuGraphMemcpyNodeSetParams(node, &copy) : result;
}

RUNTIME_FUNCTION(cudaGraphExecMemcpyNodeSetParams, runtime_start_with_context,
                 (GraphExec *exec, Node *node, const void *given), (exec, node, given)) {
    CUDA_MEMCPY3D copy;
    CUresult result = runtime_copy_3d(&copy, given);
    return result == CUDA_SUCCESS ? cuGraphExecMemcpyNodeSetParams(exec, node, &copy, current())
                                  : result;
}

/* ---- nodes of any type ---------------------------------------------------------------------- */

/* cudaGraphNodeParams and CUgraphNodeParams: the type, and 29 words that it gives a meaning. */
typedef struct NodeParameters {
    int type;
    int reserved[3];
    uint64_t words[29];
    uint64_t reserved_word;
} NodeParameters;

enum { INVALID_DEVICE_FUNCTION = 98 };
enum { KERNEL_CONTEXT = 7, FILL_CONTEXT = 5, COPY_CONTEXT = 1, CONDITION_CONTEXT = 3, COPY = 2 };

/* For the driver, which wants contexts, and describes copies and kernels in other ways. */
static CUresult node_of(NodeParameters *out, const NodeParameters *given) {
    if (!given)
        return CUDA_ERROR_INVALID_VALUE;
    *out = *given;
    CUresult result = CUDA_SUCCESS;
    CUDA_MEMCPY3D copy = {0};
    uint64_t context = (uint64_t)current();
    switch (given->type) {
    case NODE_KERNEL:           /* CUDA_KERNEL_NODE_PARAMS_v3 has a kernel before the context */
        if (!given->words[0])
            return (CUresult)INVALID_DEVICE_FUNCTION;
        out->words[KERNEL_CONTEXT] = 0;
        out->words[KERNEL_CONTEXT + 1] = given->words[KERNEL_CONTEXT];
        break;
    case NODE_MEMCPY:
        if (!given->words[COPY_CONTEXT])
            out->words[COPY_CONTEXT] = context;
        result = runtime_copy_3d(&copy, &given->words[COPY]);
        memcpy(&out->words[COPY], &copy, sizeof copy);
        break;
    case NODE_MEMSET:
        if (!given->words[FILL_CONTEXT])
            out->words[FILL_CONTEXT] = context;
        break;
    case NODE_CONDITIONAL:
        if (!given->words[CONDITION_CONTEXT])
            out->words[CONDITION_CONTEXT] = context;
        break;
    default:
        break;
    }
    return result;
}

CUresult cuGraphAddNode_v2(Node **out, Graph *graph, Node **dependencies, const void *edges,
                           size_t count, void *parameters);
CUresult cuGraphNodeSetParams(Node *node, void *parameters);
CUresult cuGraphExecNodeSetParams(GraphExec *exec, Node *node, void *parameters);

static CUresult add(Node **out, Graph *graph, Node **dependencies, const void *edges, size_t count,
                    NodeParameters *given) {
    NodeParameters wanted;
    CUresult result = node_of(&wanted, given);
    if (result == CUDA_SUCCESS)
        result = cuGraphAddNode_v2(out, graph, dependencies, edges, count, &wanted);
    /* What these answer is in the same place for both: an address, or the bodies. */
    bool answers = given && (given->type == NODE_MEM_ALLOC || given->type == NODE_CONDITIONAL);
    if (result == CUDA_SUCCESS && answers)
        memcpy(given->words, wanted.words, sizeof given->words);
    return result;
}

RUNTIME_FUNCTION(cudaGraphAddNode, runtime_start_with_context,
                 (Node **out, Graph *graph, Node **dependencies, size_t count,
                  NodeParameters *given),
                 (out, graph, dependencies, count, given)) {
    return add(out, graph, dependencies, NULL, count, given);
}

RUNTIME_FUNCTION_AS(add_with_edges, cudaGraphAddNode, EDGES, runtime_start_with_context,
                    (Node **out, Graph *graph, Node **dependencies, const void *edges,
                     size_t count, NodeParameters *given),
                    (out, graph, dependencies, edges, count, given)) {
    return add(out, graph, dependencies, edges, count, given);
}

ALSO(add_with_edges, cudaGraphAddNode_v2)

RUNTIME_FUNCTION(cudaGraphNodeSetParams, runtime_start_with_context,
                 (Node *node, const NodeParameters *given), (node, given)) {
    NodeParameters wanted;
    CUresult result = node_of(&wanted, given);
    return result == CUDA_SUCCESS ? cuGraphNodeSetParams(node, &wanted) : result;
}

RUNTIME_FUNCTION(cudaGraphExecNodeSetParams, runtime_start_with_context,
                 (GraphExec *exec, Node *node, const NodeParameters *given), (exec, node, given)) {
    NodeParameters wanted;
    CUresult result = node_of(&wanted, given);
    return result == CUDA_SUCCESS ? cuGraphExecNodeSetParams(exec, node, &wanted) : result;
}

SAME_FUNCTION(cudaGraphNodeGetParams, cuGraphNodeGetParams, runtime_start_13_2,
              (Node *node, void *out), (node, out))

#define IDENTITY(name, driver_function, handle_type, identity_type) \
    SAME_FUNCTION(name, driver_function, runtime_start_13_1, \
                  (handle_type handle, identity_type out), (handle, out))

IDENTITY(cudaGraphNodeGetContainingGraph, cuGraphNodeGetContainingGraph, Node *, Graph **)
IDENTITY(cudaGraphNodeGetLocalId, cuGraphNodeGetLocalId, Node *, unsigned *)
IDENTITY(cudaGraphNodeGetToolsId, cuGraphNodeGetToolsId, Node *, uint64_t *)
IDENTITY(cudaGraphGetId, cuGraphGetId, Graph *, unsigned *)
IDENTITY(cudaGraphExecGetId, cuGraphExecGetId, GraphExec *, unsigned *)

/* ---- executables ---------------------------------------------------------------------------- */

SAME(cudaGraphInstantiate, cuGraphInstantiateWithFlags,
     (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags))
SAME(cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,
     (GraphExec **out, Graph *graph, uint64_t flags), (out, graph, flags))
SAME(cudaGraphInstantiateWithParams, cuGraphInstantiateWithParams,
     (GraphExec **out, Graph *graph, void *parameters), (out, graph, parameters))
SAME(cudaGraphUpload, cuGraphUpload, (GraphExec *exec, Stream *stream), (exec, stream))
SAME(cudaGraphLaunch, cuGraphLaunch, (GraphExec *exec, Stream *stream), (exec, stream))
SAME(cudaGraphExecDestroy, cuGraphExecDestroy, (GraphExec *exec), (exec))
SAME(cudaGraphExecGetFlags, cuGraphExecGetFlags, (GraphExec *exec, uint64_t *flags),
     (exec, flags))
SAME(cudaGraphExecUpdate, cuGraphExecUpdate_v2, (GraphExec *exec, Graph *graph, void *info),
     (exec, graph, info))
OF_EXEC(cudaGraphNodeSetEnabled, cuGraphNodeSetEnabled, unsigned)
OF_EXEC(cudaGraphNodeGetEnabled, cuGraphNodeGetEnabled, unsigned *)
