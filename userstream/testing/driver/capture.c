/* Capture: streams that note their work in a graph instead of doing it, and what that forbids. */
#include "driver.h"

static Capture *captures;

Capture *capture_first(void) {
    return captures;
}

Capture *capture_find(uint64_t id) {
    Capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

size_t capture_count(void) {
    size_t count = 0;
    for (Capture *capture = captures; capture; capture = capture->next)
        count++;
    return count;
}

static void capture_free(Capture *capture) {
    for (Capture **link = &captures; *link; link = &(*link)->next) {
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    }
    nodes_clear(&capture->left);
    free(capture);
}

/* ---- what streams do in a capture ----------------------------------------------------------- */

CUresult capture_add(Stream *stream, Operation *operation) {
    if (stream->capture->invalidated) {
        operation_release(operation);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    Node *node = graph_add(stream->capture->graph, operation, &stream->dependencies);
    nodes_clear(&stream->dependencies);
    nodes_add(&stream->dependencies, node);
    return CUDA_SUCCESS;
}

/* A wait for a captured event pulls the stream into the event's capture. */
CUresult capture_join(Stream *stream, Event *event) {
    Capture *capture = capture_find(event->capture);
    if (!capture)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture && stream->capture != capture) {
        stream->capture->invalidated = true;
        capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (capture->invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream == stream->context->legacy) {
        capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    stream->capture = capture;
    for (size_t i = 0; i < event->captured.count; i++)
        nodes_add(&stream->dependencies, event->captured.nodes[i]);
    return CUDA_SUCCESS;
}

static void detach(Stream *stream) {
    stream->capture = NULL;
    nodes_clear(&stream->dependencies);
}

static void detach_all(const Capture *capture) {
    for (Context *context = context_first(); context; context = context->next) {
        for (Stream *stream = context->streams; stream; stream = stream->next) {
            if (stream->capture == capture)
                detach(stream);
        }
    }
}

bool capture_is_into(const Graph *graph) {
    for (Capture *capture = captures; capture; capture = capture->next) {
        for (const Graph *into = capture->graph; into; into = into->parent) {
            if (into == graph)
                return true;
        }
    }
    return false;
}

/* A capturing stream is destroyed. H200: if it was pulled in, the capture goes on without it, and
 * what it did must have been joined. Nobody can end the capture of its origin any more. */
void capture_leave(Stream *stream) {
    Capture *capture = stream->capture;
    if (!capture)
        return;
    for (size_t i = 0; i < stream->dependencies.count; i++)
        nodes_add(&capture->left, stream->dependencies.nodes[i]);
    detach(stream);
    if (capture->origin != stream)
        return;
    detach_all(capture);
    if (!capture->graph_is_callers)
        graph_free(capture->graph);
    capture_free(capture);
}

/* ---- beginning and ending ------------------------------------------------------------------- */

static CUresult begin(Stream *handle, int mode, Graph *graph, const NodeSet *dependencies) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    /* "Stream capture cannot be used on CU_STREAM_LEGACY." */
    if (stream == stream->context->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    Capture *capture = calloc(1, sizeof *capture);
    capture->id = new_id();
    capture->mode = (CaptureMode)mode;
    capture->graph = graph ? graph : graph_new();
    capture->graph_is_callers = graph != NULL;
    capture->origin = stream;
    capture->thread = this_thread()->id;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    if (dependencies)
        nodes_set(&stream->dependencies, dependencies);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuStreamBeginCapture_v2, cuStreamBeginCapture, 10010,
                   (Stream *handle, int mode), (handle, mode)) {
    return begin(handle, mode, NULL, NULL);
}

DRIVER_FUNCTION(cuStreamBeginCaptureToGraph, 12030,
                (Stream *handle, Graph *graph, Node **dependencies, const void *edges, size_t count,
                 int mode),
                (handle, graph, dependencies, edges, count, mode)) {
    UNUSED(edges);
    if (!handle_is(KIND_GRAPH, graph) || !nodes_are_in(dependencies, count, graph))
        return CUDA_ERROR_INVALID_VALUE;
    NodeSet set = {dependencies, count, count};
    return begin(handle, mode, graph, &set);
}

static bool are_marked(const NodeSet *set, uint64_t mark) {
    for (size_t i = 0; i < set->count; i++) {
        if (set->nodes[i]->mark != mark)
            return false;
    }
    return true;
}

/* All that joined streams did must come before the end of the origin. */
static bool all_joined(const Capture *capture) {
    uint64_t before_end = nodes_mark_back(&capture->origin->dependencies);
    for (Context *context = context_first(); context; context = context->next) {
        for (Stream *stream = context->streams; stream; stream = stream->next) {
            if (stream->capture == capture && !are_marked(&stream->dependencies, before_end))
                return false;
        }
    }
    return are_marked(&capture->left, before_end);
}

DRIVER_FUNCTION(cuStreamEndCapture, 10000, (Stream *handle, Graph **out), (handle, out)) {
    Stream *stream;
    if (out)
        *out = NULL;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    Capture *capture = stream->capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    /* "If the mode argument is not RELAXED, this must be called from the same thread." */
    if (capture->mode != CAPTURE_RELAXED && capture->thread != this_thread()->id)
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD; /* and the capture is over */
    else if (capture->invalidated)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!all_joined(capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    detach_all(capture);
    /* Without `out` the graph is left to who has asked for it meanwhile. */
    if (result == CUDA_SUCCESS && out)
        *out = capture->graph;
    else if (result != CUDA_SUCCESS && !capture->graph_is_callers)
        graph_free(capture->graph);
    capture_free(capture);
    return result;
}

/* ---- questions ------------------------------------------------------------------------------ */

enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };

static int status_of(const Stream *stream) {
    if (!stream->capture)
        return STATUS_NONE;
    return stream->capture->invalidated ? STATUS_INVALIDATED : STATUS_ACTIVE;
}

static CUresult find_for_status(Stream *handle, Stream **stream) {
    CUresult result = stream_find(handle, stream);
    if (result == CUDA_SUCCESS && *stream == (*stream)->context->legacy)
        result = capture_would_forbid_legacy((*stream)->context);
    return result;
}

DRIVER_FUNCTION(cuStreamIsCapturing, 10000, (Stream *handle, int *status), (handle, status)) {
    Stream *stream;
    CUresult result =
        status ? find_for_status(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *status = status_of(stream);
    return result;
}

typedef struct EdgeData {       /* CUgraphEdgeData */
    unsigned char bytes[8];
} EdgeData;

/* All edges are plain ones. The bindings read one record for each dependency. Programs keep the
 * address, so an array that is too short stays where it is. */
static const EdgeData *plain_edges(size_t count) {
    static EdgeData *edges;
    static size_t capacity;
    if (count > capacity || !edges) {
        capacity = 2 * count + 64;
        edges = calloc(capacity, sizeof *edges);
    }
    return edges;
}

static CUresult capture_info(Stream *handle, int *status, uint64_t *id, Graph **graph,
                             Node ***dependencies, size_t *count) {
    Stream *stream;
    CUresult result = find_for_status(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    *status = status_of(stream);
    if (*status != STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id)
        *id = stream->capture->id;
    if (graph)
        *graph = stream->capture->graph;
    if (dependencies)
        *dependencies = stream->dependencies.nodes;
    if (count)
        *count = stream->dependencies.count;
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION_AS(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo, 11030,
                   (Stream *handle, int *status, uint64_t *id, Graph **graph, Node ***dependencies,
                    size_t *count),
                   (handle, status, id, graph, dependencies, count)) {
    return capture_info(handle, status, id, graph, dependencies, count);
}

DRIVER_FUNCTION_AS(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo, 12030,
                   (Stream *handle, int *status, uint64_t *id, Graph **graph, Node ***dependencies,
                    const EdgeData **edges, size_t *count),
                   (handle, status, id, graph, dependencies, edges, count)) {
    size_t needed = 0;
    CUresult result = capture_info(handle, status, id, graph, dependencies, &needed);
    if (count)
        *count = needed;
    if (edges)
        *edges = plain_edges(needed);
    return result;
}

enum { ADD_DEPENDENCIES, SET_DEPENDENCIES };

static CUresult update_dependencies(Stream *handle, Node **nodes, size_t count, unsigned flags) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture->invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!nodes_are_in(nodes, count, stream->capture->graph) || flags > SET_DEPENDENCIES)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags == SET_DEPENDENCIES)
        nodes_clear(&stream->dependencies);
    for (size_t i = 0; i < count; i++)
        nodes_add(&stream->dependencies, nodes[i]);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuStreamUpdateCaptureDependencies, 11030,
                (Stream *handle, Node **nodes, size_t count, unsigned flags),
                (handle, nodes, count, flags)) {
    return update_dependencies(handle, nodes, count, flags);
}

DRIVER_FUNCTION_AS(cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies, 12030,
                   (Stream *handle, Node **nodes, const void *edges, size_t count, unsigned flags),
                   (handle, nodes, edges, count, flags)) {
    UNUSED(edges);
    return update_dependencies(handle, nodes, count, flags);
}

DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode, 10010, (int *mode), (mode)) {
    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = this_thread()->capture_mode;
    this_thread()->capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
