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

/* With unified addressing the addresses say where the memory is. */
static CUDA_MEMCPY3D line(CUdeviceptr destination, CUdeviceptr source, size_t size) {
    return (CUDA_MEMCPY3D){.source = {.type = TYPE_UNIFIED, .device = source, .pitch = size},
                           .destination = {.type = TYPE_UNIFIED, .device = destination,
                                           .pitch = size},
                           .width = size, .height = 1, .depth = 1};
}

RUNTIME_FUNCTION(cudaGraphAddMemcpyNode1D, runtime_start_with_context,
                 (Node **out, Graph *graph, Node **dependencies, size_t count,
                  CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (out, graph, dependencies, count, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size);
    CUresult result = runtime_check_kind(kind);
    if (result != CUDA_SUCCESS)
        return result;
    return cuGraphAddMemcpyNode(out, graph, dependencies, count, &copy, current());
}

RUNTIME_FUNCTION(cudaGraphMemcpyNodeSetParams1D, runtime_start_with_context,
                 (Node *node, CUdeviceptr destination, CUdeviceptr source, size_t size, int kind),
                 (node, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size);
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? cuGraphMemcpyNodeSetParams(node, &copy) : result;
}

RUNTIME_FUNCTION(cudaGraphExecMemcpyNodeSetParams1D, runtime_start_with_context,
                 (GraphExec *exec, Node *node, CUdeviceptr destination, CUdeviceptr source,
                  size_t size, int kind),
                 (exec, node, destination, source, size, kind)) {
    CUDA_MEMCPY3D copy = line(destination, source, size);
    CUresult result = runtime_check_kind(kind);
    return result == CUDA_SUCCESS ? cuGraphExecMemcpyNodeSetParams(exec, node, &copy, current())
                                  : result;
}

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
