/* What a device, its multiprocessors and their blocks can hold: an H100 or an H200. */
#ifndef USERSTREAM_DEVICE_LIMITS_H
#define USERSTREAM_DEVICE_LIMITS_H

enum {
    COMPUTE_CAPABILITY = 90,
    WARP = 32,
    LARGEST_BLOCK = 1024,       /* threads */
    THREADS_OF_A_MULTIPROCESSOR = 2048,
    BLOCKS_OF_A_MULTIPROCESSOR = 32,
    REGISTERS_OF_A_BLOCK = 65536,
    REGISTERS_OF_A_MULTIPROCESSOR = 65536,
    REGISTERS_AT_ONCE = 256,    /* that a warp gets */
    PARTITIONS = 4,             /* of a multiprocessor, each with its registers */
    SHARED_BYTES_BY_DEFAULT = 49152,
    SHARED_BYTES_OPT_IN = 232448,
    SHARED_BYTES_OF_A_MULTIPROCESSOR = 233472,
    SHARED_BYTES_RESERVED = 1024,       /* of each block, by the system */
    SHARED_BYTES_AT_ONCE = 128,
    LARGEST_CLUSTER = 8,        /* blocks */
    LARGEST_CLUSTER_ALLOWED = 16,       /* of kernels with an attribute for it */
};

#endif
