/* The log: each thread writes to chunks of its own, and each record has a number. A record that was
 * made before a record of another thread has the smaller number, so sorting by number restores the
 * order. No number is missing: a record without room gets none. */
#define _GNU_SOURCE

#include "parts.h"

#include <fcntl.h>
#include <unistd.h>

static struct {
    _Alignas(64) atomic_uint_fast64_t count;
} numbers;                      /* that records have got */
static struct {
    _Alignas(64) atomic_uint_fast64_t count;
} dropped;                      /* records for which there was no room */
static atomic_uint_fast64_t dropped_before;     /* this log */
atomic_uint log_current;

/* The name of the first thread, which others have as long as nobody gives them one. */
static char program_name[16];

static void find_program_name(void) {
    int file = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, program_name, sizeof program_name - 1);
    if (file >= 0)
        close(file);
    program_name[size > 0 ? size - 1 : 0] = 0;  /* in place of the end of the line */
}

/* Starts a log in a new pool. A thread that is still in the recorder, for an earlier log, goes on
 * in the chunk that it has, which is not in this pool. */
void log_begin(void) {
    find_program_name();
    pthread_mutex_lock(&threads_lock);
    for (Thread *each = threads; each; each = each->next) {
        if (!atomic_load(&each->inside))
            each->written = (Written){0};
    }
    pthread_mutex_unlock(&threads_lock);
    atomic_store(&dropped_before, atomic_load(&dropped.count));
    atomic_fetch_add(&log_current, 1);
}

uint64_t log_newest(void) {
    return atomic_load(&numbers.count);
}

/* Returns the chunk that has room for a record. NULL: who reads is too far behind. */
static Chunk *chunk_for(Written *mine, size_t size, bool is_definition) {
    Chunk *chunk = mine->chunk;
    if (chunk && chunk->log == mine->log &&
        atomic_load_explicit(&chunk->used, memory_order_relaxed) + size <= CHUNK_DATA)
        return chunk;
    Chunk *new = size > CHUNK_DATA ? NULL : chunk_take(is_definition);
    if (!new)
        return NULL;
    mine->chunk = new;
    atomic_store_explicit(chunk ? &chunk->next : &mine->first, new, memory_order_release);
    pump_wake();
    return new;
}

static size_t padded(size_t bytes) {
    return (bytes + 7) & ~(size_t)7;
}

/* Returns the number of the record; 0: there is no room. The number comes last, so that the pump
 * never has to wait for long until the record is there. */
static uint64_t put(Written *mine, Record *record, const uint64_t *words, const Part *parts,
                    size_t count) {
    Chunk *chunk = chunk_for(mine, record->size, record->type >= FIRST_OWN);
    if (!chunk)
        return 0;
    uint32_t used = atomic_load_explicit(&chunk->used, memory_order_relaxed);
    char *at = chunk->data + used + sizeof *record;
    if (record->words)
        memcpy(at, words, record->words * sizeof *words);
    at += record->words * sizeof *words;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = padded(parts[i].bytes);
        memcpy(at, &(uint64_t){parts[i].bytes}, 8);
        if (bytes) {
            memset(at + bytes, 0, 8);   /* the last bytes of the part are at least in there */
            memcpy(at + 8, parts[i].data, parts[i].bytes);
        }
        at += 8 + bytes;
    }
    record->number = atomic_fetch_add(&numbers.count, 1) + 1;
    memcpy(chunk->data + used, record, sizeof *record);
    atomic_store_explicit(&chunk->used, used + record->size, memory_order_release);
    return record->number;
}

/* A thread's first record says which thread it is. Threads inherit the name of their process, which
 * is no name of theirs. */
static bool put_thread(Thread *me) {
    uint64_t words[] = {me->number, me->system_number};
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    Part part = {name, strcmp(name, program_name) ? (uint32_t)strlen(name) : 0};
    Record record = {.type = THREAD, .thread = me->number, .stack = -1, .words = 2};
    record.size = (uint32_t)(sizeof record + sizeof words + 8 + padded(part.bytes));
    record.began = record.ended = now();
    me->written.is_known = put(&me->written, &record, words, &part, 1);
    return me->written.is_known;
}

/* Says that records are missing, before the first one that comes after them, if there is room for
 * both: else these would fill the room for definitions. Several threads may say so: each tells how
 * many are missing until then, and who reads counts no record twice. */
static bool put_gap(Thread *me, uint64_t missing, const Record *next) {
    Record record = {.type = LOST, .thread = me->number, .stack = -1, .words = 1};
    uint64_t of_log = missing - atomic_load(&dropped_before);
    record.size = sizeof record + sizeof of_log;
    record.began = record.ended = now();
    if (!chunk_for(&me->written, record.size + next->size, next->type >= FIRST_OWN) ||
        !put(&me->written, &record, &of_log, NULL, 0))
        return false;
    me->written.dropped = missing;
    return true;
}

uint64_t log_write(Thread *me, Record record, const uint64_t *words, const Part *parts,
                   size_t count) {
    uint32_t log = atomic_load_explicit(&log_current, memory_order_relaxed);
    size_t size = sizeof record + record.words * sizeof *words;
    for (size_t i = 0; i < count; i++)
        size += 8 + padded(parts[i].bytes);
    record.thread = me->number;
    record.size = (uint32_t)size;
    uint64_t number = 0;
    if (me->written.log != log) {
        me->written.log = log;
        me->written.dropped = atomic_load(&dropped_before);
        me->written.is_known = false;
    }
    if (me->written.is_known || record.type == HEADER || put_thread(me)) {
        uint64_t missing = atomic_load_explicit(&dropped.count, memory_order_acquire);
        if (missing == me->written.dropped || put_gap(me, missing, &record))
            number = put(&me->written, &record, words, parts, count);
    }
    if (!number)
        atomic_fetch_add(&dropped.count, 1);
    return number;
}

uint64_t log_own(Thread *me, unsigned type, const uint64_t *words, size_t count) {
    Record record = {.type = (uint16_t)type, .words = (uint16_t)count, .stack = -1};
    record.began = record.ended = now();
    return log_write(me, record, words, NULL, 0);
}

void log_thread_ends(Thread *me) {
    if (me->written.log == atomic_load(&log_current))
        log_own(me, THREAD_ENDS, NULL, 0);
}
