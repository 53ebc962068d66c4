/* Files without names, through which processes share memory. */
#ifndef USERSTREAM_SHARED_MEMORY_H
#define USERSTREAM_SHARED_MEMORY_H

#include "driver.h"

int shared_file_new(void);      /* -1: there can be none */
uint64_t shared_file_inode(int file);
/* A file of another process, by the number that it has there. -1: that is another file by now. */
int shared_file_open(int process, int file, uint64_t inode, size_t size);
size_t shared_file_rounded(size_t size);    /* up to whole pages */
/* At an address where the process has memory, or at a new one. 0: that failed. */
CUdeviceptr shared_file_map(int file, size_t offset, size_t size, CUdeviceptr where);

#endif
