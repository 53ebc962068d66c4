/* The chunks that threads write to, in memory that a judge in another process can map: what is
 * written there outlives this process, however it ends. */
#define _GNU_SOURCE

#include "parts.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LEAST_CHUNKS = 16, RESERVE = 16 };   /* one of so many chunks is for definitions */

typedef struct Head {           /* in place of the first chunk */
    char magic[8];
    uint32_t chunk_size;
    uint32_t log;
    _Atomic uint32_t used;      /* chunks, this one included: the others were never used */
} Head;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static Head *pool;              /* NULL: none */
static int descriptor = -1;
static uint32_t chunk_count;
static Chunk *free_chunks;
static uint32_t free_count;
static atomic_bool is_low;

static Chunk *chunk_at(uint32_t index) {
    return (Chunk *)pool + index;
}

/* Without a descriptor of its own, memory is still shared by nobody. */
static void *map(size_t bytes) {
    descriptor = memfd_create("userstream-recorder", MFD_CLOEXEC);
    if (descriptor >= 0 && ftruncate(descriptor, (off_t)bytes)) {
        close(descriptor);
        descriptor = -1;
    }
    int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
    if (memory == MAP_FAILED)
        return NULL;
    madvise(memory, bytes, MADV_DONTFORK);
    return memory;
}

/* Gives memory to a chunk: without this, a lack of memory is a SIGBUS in the program. */
static bool has_memory(uint32_t index) {
    int failed;
    if (descriptor < 0)
        return true;
    do
        failed = fallocate(descriptor, 0, (off_t)index * CHUNK, CHUNK);
    while (failed && errno == EINTR);
    return !failed;
}

bool pool_open(uint64_t bytes, uint32_t log) {
    chunk_count = bytes / CHUNK < LEAST_CHUNKS ? LEAST_CHUNKS : (uint32_t)(bytes / CHUNK);
    pool = map((size_t)chunk_count * CHUNK);
    if (!pool || !has_memory(0)) {
        pool_close(true);
        return false;
    }
    *pool = (Head){.magic = "uspool\r\n", .chunk_size = CHUNK, .log = log, .used = 1};
    free_chunks = NULL;
    free_count = 0;
    atomic_store(&is_low, false);
    return true;
}

/* Chunks that a thread may still write to stay where they are. */
void pool_close(bool unmap) {
    if (pool && unmap)
        munmap(pool, (size_t)chunk_count * CHUNK);
    if (descriptor >= 0)
        close(descriptor);
    pool = NULL;
    descriptor = -1;
}

int pool_descriptor(void) {
    return descriptor;
}

bool pool_is_low(void) {
    return atomic_load_explicit(&is_low, memory_order_relaxed);
}

/* Under the lock. */
static uint32_t available(void) {
    uint32_t count = free_count + chunk_count - atomic_load(&pool->used);
    atomic_store(&is_low, count < chunk_count / 2);
    return count;
}

Chunk *chunk_take(bool for_definitions) {
    Chunk *chunk = NULL;
    pthread_mutex_lock(&pool_lock);
    if (pool && (for_definitions || available() > chunk_count / RESERVE)) {
        uint32_t used = atomic_load(&pool->used);
        if (free_chunks) {
            chunk = free_chunks;
            free_chunks = chunk->next_free;
            free_count--;
        } else if (used < chunk_count && has_memory(used)) {
            chunk = chunk_at(used);
            atomic_store(&pool->used, used + 1);
        }
    }
    pthread_mutex_unlock(&pool_lock);
    if (!chunk)
        return NULL;
    atomic_store_explicit(&chunk->used, 0, memory_order_relaxed);
    atomic_store_explicit(&chunk->next, NULL, memory_order_relaxed);
    chunk->log = pool->log;
    chunk->waiting = 0;
    chunk->is_complete = false;
    return chunk;
}

void chunk_free(Chunk *chunk) {
    pthread_mutex_lock(&pool_lock);
    chunk->next_free = free_chunks;
    free_chunks = chunk;
    free_count++;
    available();
    pthread_mutex_unlock(&pool_lock);
}

/* The memory itself was not copied to the child. */
void pool_in_child(void) {
    pthread_mutex_init(&pool_lock, NULL);
    pool_close(false);
}
