/* The log: chunks, so that who reads it never holds up who writes. */
#define _GNU_SOURCE

#include "parts.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHUNK = 1 << 18, MAX_CHUNKS = 512, GAP_SIZE = sizeof(Record) + 8 };

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
static uint64_t gap;            /* records that are missing behind the newest one */

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

/* Under the lock: writes a record into room that was made for it. */
static void put(char *room, Record *record, const uint64_t *words, const Part *parts,
                size_t count) {
    record->number = ++records;
    memcpy(room, record, sizeof *record);
    room += sizeof *record;
    if (record->words)
        memcpy(room, words, record->words * sizeof *words);
    room += record->words * sizeof *words;
    for (size_t i = 0; i < count; i++) {
        memcpy(room, &(uint64_t){parts[i].bytes}, 8);
        if (parts[i].bytes)
            memcpy(room + 8, parts[i].data, parts[i].bytes);
        room += 8 + padded(parts[i].bytes);
    }
}

/* Under the lock: says where records are missing, before the first one that comes after them. */
static void put_gap(char *room, uint64_t thread) {
    Record record = {.function = LOST, .words = 1, .stack = -1, .thread = thread};
    record.size = GAP_SIZE;
    put(room, &record, &gap, NULL, 0);
    gap = 0;
}

uint64_t log_write(Record record, const uint64_t *words, const Part *parts, size_t count) {
    size_t size = sizeof record + record.words * sizeof *words;
    for (size_t i = 0; i < count; i++)
        size += 8 + padded(parts[i].bytes);
    if (!thread_id)
        thread_id = (uint64_t)syscall(SYS_gettid);
    record.thread = thread_id;
    record.size = (uint32_t)size;
    record.number = 0;
    pthread_mutex_lock(&log_lock);
    size_t before = gap ? GAP_SIZE : 0;
    char *room = log_room(before + size);
    if (room) {
        if (gap)
            put_gap(room, thread_id);
        put(room + before, &record, words, parts, count);
    } else {
        lost++;
        gap++;
    }
    pthread_mutex_unlock(&log_lock);
    return record.number;
}

void log_own(unsigned what, const uint64_t *words, size_t count) {
    log_write((Record){.function = (uint16_t)what, .words = (uint8_t)count, .stack = -1}, words,
              NULL, 0);
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
    lost = gap = 0;
    pthread_mutex_unlock(&log_lock);
}

void log_in_child(void) {
    pthread_mutex_init(&log_lock, NULL);
    oldest = newest = spare = NULL;
    chunks = 0;
    lost = gap = 0;
    thread_id = 0;
}
