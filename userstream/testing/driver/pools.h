/* What memory pools offer the files that share memory with other processes. */
#ifndef USERSTREAM_POOLS_H
#define USERSTREAM_POOLS_H

#include "driver.h"

enum { FILE_DESCRIPTOR = 1 };   /* CUmemAllocationHandleType */

enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

typedef struct Access {         /* CUmemAccessDesc */
    Location location;
    unsigned flags;
} Access;

static inline bool is_access(unsigned flags) {
    return flags == ACCESS_NONE || flags == ACCESS_READ || flags == ACCESS_READ_WRITE;
}

bool pool_is(const Pool *pool);
Pool *pool_new_imported(Location location);

/* ---- shared_pools.c ------------------------------------------------------------------------- */

/* The file in which an exportable pool has its memory. False: there can be none. */
bool pool_open_file(Pool *pool);
void pool_close(Pool *pool);

#endif
