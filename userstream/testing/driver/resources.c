/* The multiprocessors of a device: asking for them, splitting and describing them. */
#include "resources.h"

enum { TYPE_MULTIPROCESSORS = 1 };      /* CUdevResourceType */

/* Hopper: multiprocessors that may run a cluster together stay together. */
enum { LEAST = 8, ALIGNMENT = 8, LEAST_ALONE = 2, ALIGNMENT_ALONE = 2 };

enum {                          /* CUdevSmResourceSplitByCount_flags */
    IGNORE_COSCHEDULING = 1,
    MAX_POTENTIAL_CLUSTER_SIZE = 2,
};

static Description *descriptions;

Multiprocessors resource_of_device(CUdevice device) {
    return (Multiprocessors){.device = device, .count = MULTIPROCESSORS};
}

static Resource resource_of(const Multiprocessors *part) {
    return (Resource){.type = TYPE_MULTIPROCESSORS,
                      .device = part->device,
                      .split = part->split,
                      .multiprocessors = {part->count, LEAST, ALIGNMENT, 0}};
}

CUresult resource_answer(const Multiprocessors *part, Resource *out, int type) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != TYPE_MULTIPROCESSORS)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *out = resource_of(part);
    return CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDeviceGetDevResource, 12040, (CUdevice device, Resource *out, int type),
                (device, out, type)) {
    CUresult result = device_check(device);
    if (result != CUDA_SUCCESS)
        return result;
    const Multiprocessors whole = resource_of_device(device);
    return resource_answer(&whole, out, type);
}

/* H200: 10 are 16, 20 are 24, 33 are 40, 124 are 128. */
static unsigned part_of(unsigned least, unsigned flags) {
    bool alone = flags & IGNORE_COSCHEDULING;
    unsigned smallest = alone ? LEAST_ALONE : LEAST;
    unsigned alignment = alone ? ALIGNMENT_ALONE : ALIGNMENT;
    unsigned count = least > smallest ? least : smallest;
    return (count + alignment - 1) / alignment * alignment;
}

/* "A limitation of the API is that the output results cannot be split again without first creating
 * a descriptor and a green context." */
DRIVER_FUNCTION(cuDevSmResourceSplitByCount, 12040,
                (Resource *out, unsigned *groups, const Resource *input, Resource *rest,
                 unsigned flags, unsigned least),
                (out, groups, input, rest, flags, least)) {
    const unsigned known_flags = IGNORE_COSCHEDULING | MAX_POTENTIAL_CLUSTER_SIZE;
    if (!groups || !input || (flags & ~known_flags))
        return CUDA_ERROR_INVALID_VALUE;
    if (input->type != TYPE_MULTIPROCESSORS)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    unsigned whole = input->multiprocessors.count;
    if (least > whole)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned part = part_of(least, flags);
    unsigned possible = whole / part;
    if (input->split || !possible)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    *groups = !out || *groups > possible ? possible : *groups;
    Multiprocessors piece = {.device = input->device, .count = part, .split = new_id()};
    for (unsigned i = 0; out && i < *groups; i++)
        out[i] = resource_of(&piece);
    piece.count = whole - *groups * part;
    if (rest)
        *rest = resource_of(&piece);
    return CUDA_SUCCESS;
}

typedef struct Group {          /* CU_DEV_SM_RESOURCE_GROUP_PARAMS */
    unsigned count;             /* 0: as many as there are, which the answer is */
    unsigned together;
    unsigned preferred_together;
    unsigned flags;
    unsigned reserved[12];
} Group;

enum { BACKFILL = 1, MOST_TOGETHER = 32 };

/* "smCount must be a multiple of 2, as well as a multiple of coscheduledSmCount", which a backfill
 * permits not to be. */
static CUresult check_group(const Group *group, unsigned left) {
    unsigned together = group->together ? group->together : LEAST;
    bool backfill = group->flags & BACKFILL;
    if (group->flags & ~(unsigned)BACKFILL || together % 2 || together > MOST_TOGETHER)
        return CUDA_ERROR_INVALID_VALUE;
    if (group->count % 2 || (!backfill && group->count % together) || group->count == 1)
        return CUDA_ERROR_INVALID_VALUE;
    return group->count > left ? CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION : CUDA_SUCCESS;
}

DRIVER_FUNCTION(cuDevSmResourceSplit, 13010,
                (Resource *out, unsigned count, const Resource *input, Resource *rest,
                 unsigned flags, Group *groups),
                (out, count, input, rest, flags, groups)) {
    if (!input || !groups || !count || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (input->type != TYPE_MULTIPROCESSORS)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    unsigned left = input->multiprocessors.count;
    Multiprocessors piece = {.device = input->device, .split = new_id()};
    for (unsigned i = 0; i < count; i++) {
        CUresult result = check_group(&groups[i], left);
        if (result != CUDA_SUCCESS)
            return result;
        unsigned together = groups[i].together ? groups[i].together : LEAST;
        bool backfill = groups[i].flags & BACKFILL;
        if (!groups[i].count)
            groups[i].count = backfill ? left / 2 * 2 : left / together * together;
        if (out && groups[i].count < together)
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        piece.count = groups[i].count;
        left -= piece.count;
        if (out)
            out[i] = resource_of(&piece);
    }
    piece.count = left;
    if (rest)
        *rest = left ? resource_of(&piece) : (Resource){0};
    return CUDA_SUCCESS;
}

bool description_is(const Description *description) {
    const Description *known = descriptions;
    while (known && known != description)
        known = known->next;
    return known != NULL;
}

/* "The device they came from must be the same." H200: multiprocessors may be of several splits. */
DRIVER_FUNCTION(cuDevResourceGenerateDesc, 12040,
                (Description **out, const Resource *resources, unsigned count),
                (out, resources, count)) {
    if (!out || !resources || !count)
        return CUDA_ERROR_INVALID_VALUE;
    Multiprocessors part = {.device = resources->device};
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != TYPE_MULTIPROCESSORS)
            return CUDA_ERROR_INVALID_RESOURCE_TYPE;
        if (resources[i].device != part.device)
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        part.count += resources[i].multiprocessors.count;
    }
    if (!part.count || part.count > MULTIPROCESSORS)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    Description *description = malloc(sizeof *description);
    *description = (Description){part, descriptions};
    descriptions = description;
    *out = description;
    return CUDA_SUCCESS;
}
