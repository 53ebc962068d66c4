/* Attributes of streams: kept and given back, without effect. */
#include "driver.h"

enum {                          /* CUstreamAttrID */
    ACCESS_POLICY_WINDOW = 1,
    SYNCHRONIZATION_POLICY = 3,
    PRIORITY = 8,
    MEM_SYNC_DOMAIN_MAP = 9,
    MEM_SYNC_DOMAIN = 10,
};

enum { SYNC_POLICY_AUTO = 1, SYNC_POLICY_BLOCKING_SYNC = 4 };

static StreamAttribute *slot_of(Stream *stream, int attribute) {
    switch (attribute) {
    case ACCESS_POLICY_WINDOW:
        return &stream->attributes[0];
    case SYNCHRONIZATION_POLICY:
        return &stream->attributes[1];
    case MEM_SYNC_DOMAIN_MAP:
        return &stream->attributes[2];
    case MEM_SYNC_DOMAIN:
        return &stream->attributes[3];
    default:
        return NULL;
    }
}

void stream_attributes_initialize(Stream *stream) {
    static const unsigned char default_map[2] = {0, 1};     /* default and remote domain */
    /* H200: not the automatic one, but none; cuda-bindings have no name for it. */
    slot_of(stream, SYNCHRONIZATION_POLICY)->number = -1;
    memcpy(slot_of(stream, MEM_SYNC_DOMAIN_MAP)->bytes, default_map, sizeof default_map);
}

DRIVER_FUNCTION(cuStreamGetAttribute, 11000,
                (Stream *handle, int attribute, StreamAttribute *value),
                (handle, attribute, value)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    const StreamAttribute *slot = slot_of(stream, attribute);
    if (!value || (!slot && attribute != PRIORITY))
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == PRIORITY)
        value->number = stream->priority;
    else
        *value = *slot;
    return CUDA_SUCCESS;
}

static bool is_valid(int attribute, const StreamAttribute *value) {
    if (attribute == SYNCHRONIZATION_POLICY)
        return value->number >= SYNC_POLICY_AUTO && value->number <= SYNC_POLICY_BLOCKING_SYNC;
    return true;
}

DRIVER_FUNCTION(cuStreamSetAttribute, 11000,
                (Stream *handle, int attribute, const StreamAttribute *value),
                (handle, attribute, value)) {
    Stream *stream;
    CUresult result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    StreamAttribute *slot = slot_of(stream, attribute);
    if (!value || !slot || !is_valid(attribute, value))
        return CUDA_ERROR_INVALID_VALUE;
    *slot = *value;
    return CUDA_SUCCESS;
}

/* "Both streams must have the same context." */
DRIVER_FUNCTION(cuStreamCopyAttributes, 11000, (Stream *destination, Stream *source),
                (destination, source)) {
    Stream *to;
    Stream *from;
    CUresult result = stream_find(destination, &to);
    if (result == CUDA_SUCCESS)
        result = stream_find(source, &from);
    if (result != CUDA_SUCCESS)
        return result;
    if (to->context != from->context)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(to->attributes, from->attributes, sizeof to->attributes);
    return CUDA_SUCCESS;
}
