/* The log: chunks, so that who reads it never holds up who writes. */
#define _GNU_SOURCE

#include "parts.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHUNK = 1 << 18, MAX_CHUNKS = 512 };

typedef struct Chunk {
    struct Chunk *next;
    size_t used;
    char data[CHUNK];
} Chunk;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread uint64_t thread_id;
static Chunk *oldest, *newest, *spare;
static int chunks;
static uint64_t records, lost;

/* Under the lock. NULL: whoever reads is too far behind. */
static char *log_room(size_t size) {
    if (!newest || newest->used + size > CHUNK) {
        Chunk *chunk = spare;
        if (chunk)
            spare = chunk->next;
        else if (size > CHUNK || chunks == MAX_CHUNKS || !(chunk = malloc(sizeof *chunk)))
            return NULL;
        else
            chunks++;
        chunk->next = NULL;
        chunk->used = 0;
        if (newest)
            newest->next = chunk;
        else
            oldest = chunk;
        newest = chunk;
    }
    char *room = newest->data + newest->used;
    newest->used += size;
    return room;
}

static size_t padded(size_t bytes) {
    return (bytes + 7) & ~(size_t)7;
}

uint64_t log_write(Record record, const uint64_t *words, const Part *parts, size_t count) {
    size_t size = sizeof record + record.words * sizeof *words;
    for (size_t i = 0; i < count; i++)
        size += 8 + padded(parts[i].bytes);
    if (!thread_id)
        thread_id = (uint64_t)syscall(SYS_gettid);
    record.thread = thread_id;
    record.size = (uint32_t)size;
    pthread_mutex_lock(&log_lock);
    char *room = log_room(size);
    if (room) {
        record.number = ++records;
        memcpy(room, &record, sizeof record);
        room += sizeof record;
        memcpy(room, words, record.words * sizeof *words);
        room += record.words * sizeof *words;
        for (size_t i = 0; i < count; i++) {
            memcpy(room, &(uint64_t){parts[i].bytes}, 8);
            memcpy(room + 8, parts[i].data, parts[i].bytes);
            room += 8 + padded(parts[i].bytes);
        }
    } else {
        lost++;
        record.number = 0;
    }
    pthread_mutex_unlock(&log_lock);
    return record.number;
}

/* Copies the oldest chunk. Returns its bytes, 0 if there is nothing; tells how many are left. */
PUBLIC size_t logger_read(char *out, size_t capacity, uint64_t *lost_until_now, uint32_t *left) {
    look_at_results();          /* no launch may follow that would */
    pthread_mutex_lock(&log_lock);
    *lost_until_now = lost;
    Chunk *chunk = oldest;
    *left = 0;
    for (const Chunk *each = chunk ? chunk->next : NULL; each; each = each->next)
        ++*left;
    if (chunk) {
        oldest = chunk->next;
        if (chunk == newest)
            newest = NULL;
    }
    pthread_mutex_unlock(&log_lock);
    if (!chunk)
        return 0;
    size_t used = chunk->used < capacity ? chunk->used : capacity;
    memcpy(out, chunk->data, used);
    pthread_mutex_lock(&log_lock);
    chunk->next = spare;
    spare = chunk;
    pthread_mutex_unlock(&log_lock);
    return used;
}

void log_clear(void) {
    pthread_mutex_lock(&log_lock);
    while (oldest) {
        Chunk *chunk = oldest;
        oldest = chunk->next;
        chunk->next = spare;
        spare = chunk;
    }
    newest = NULL;
    lost = 0;
    pthread_mutex_unlock(&log_lock);
}

void log_in_child(void) {
    pthread_mutex_init(&log_lock, NULL);
    thread_id = 0;
}
