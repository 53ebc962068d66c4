/* The resources of a device that green contexts are given. */
#ifndef USERSTREAM_RESOURCES_H
#define USERSTREAM_RESOURCES_H

#include "driver.h"

typedef struct Resource {       /* CUdevResource */
    int type;
    int device;                 /* from here on the driver's own, to the end of `pad` */
    uint64_t split;
    unsigned char pad[80];
    struct {                    /* CUdevSmResource */
        unsigned count;
        unsigned least;         /* of a part; before CUDA 13.1 the rest is padding */
        unsigned alignment;
        unsigned flags;
    } multiprocessors;
    unsigned char rest[24];
    struct Resource *next;      /* CUDA 12: more padding */
} Resource;

/* CUdevResourceDesc: "will remain valid for the lifetime of the process". */
typedef struct Description {
    Multiprocessors part;
    struct Description *next;
} Description;

bool description_is(const Description *description);
Multiprocessors resource_of_device(CUdevice device);
/* Only the multiprocessors are simulated. */
CUresult resource_answer(const Multiprocessors *part, Resource *out, int type);

#endif
