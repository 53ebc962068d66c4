/* Pool of the chunks to which threads write their records. */
#define _GNU_SOURCE

#include "parts.h"

#include <sys/mman.h>

enum { LEAST_CHUNKS = 16, RESERVE = 16 };   /* one of so many chunks is for definitions */

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static Chunk *pool;             /* NULL: none */
static uint32_t pool_log;       /* of which its records are */
static uint32_t chunk_count, used_count;    /* of the latter, the others were never used */
static Chunk *free_chunks;
static uint32_t free_count;
static atomic_bool is_low;

bool pool_open(uint64_t bytes, uint32_t log) {
    chunk_count = bytes / CHUNK < LEAST_CHUNKS ? LEAST_CHUNKS : (uint32_t)(bytes / CHUNK);
    size_t size = (size_t)chunk_count * CHUNK;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    madvise(memory, size, MADV_DONTFORK);
    pool = memory;
    pool_log = log;
    free_chunks = NULL;
    used_count = free_count = 0;
    atomic_store(&is_low, false);
    return true;
}

/* Chunks that a thread may still write to stay where they are. */
void pool_close(bool unmap) {
    if (pool && unmap)
        munmap(pool, (size_t)chunk_count * CHUNK);
    pool = NULL;
}

bool pool_is_low(void) {
    return atomic_load_explicit(&is_low, memory_order_relaxed);
}

/* Under the lock. */
static uint32_t available(void) {
    uint32_t count = free_count + chunk_count - used_count;
    atomic_store(&is_low, count < chunk_count / 2);
    return count;
}

Chunk *chunk_take(bool for_definitions) {
    Chunk *chunk = NULL;
    pthread_mutex_lock(&pool_lock);
    if (pool && (for_definitions || available() > chunk_count / RESERVE)) {
        if (free_chunks) {
            chunk = free_chunks;
            free_chunks = chunk->next_free;
            free_count--;
        } else if (used_count < chunk_count) {
            chunk = &pool[used_count++];
        }
    }
    pthread_mutex_unlock(&pool_lock);
    if (!chunk)
        return NULL;
    atomic_store_explicit(&chunk->used, 0, memory_order_relaxed);
    atomic_store_explicit(&chunk->next, NULL, memory_order_relaxed);
    chunk->log = pool_log;
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
