/* Pinned memory that copies still have to read: who writes it meanwhile changes what they copy. */
#include "parts.h"

#include <string.h>

static pthread_mutex_t sources_lock = PTHREAD_MUTEX_INITIALIZER;

enum { SOURCES = 64, SAMPLES = 64, SAMPLE = 64 };

typedef struct Source {
    uint64_t address, size, hash;
    uint64_t number;            /* of the record of the copy; 0: a free place */
} Source;

static Source sources[SOURCES];
static size_t next_source;

__attribute__((no_sanitize("thread", "address")))
static uint64_t hash_more(uint64_t hash, const char *bytes, uint64_t count) {
    uint64_t i = 0, word;
    for (; i + sizeof word <= count; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        hash = mixed(hash, word);
    }
    for (; i < count; i++)
        hash = mixed(hash, (unsigned char)bytes[i]);
    return hash;
}

/* The device may write there at this moment: whatever is read then is judged elsewhere. */
__attribute__((no_sanitize("thread", "address")))
uint64_t hash_of(uint64_t address, uint64_t size) {
    const char *bytes = (const char *)(uintptr_t)address;
    uint64_t step = size <= SAMPLES * SAMPLE ? SAMPLE : size / SAMPLES;
    uint64_t hash = size;
    for (uint64_t at = 0; at < size; at += step)
        hash = hash_more(hash, bytes + at, at + SAMPLE < size ? SAMPLE : size - at);
    return size > SAMPLE ? hash_more(hash, bytes + size - SAMPLE, SAMPLE) : hash;
}

/* Tells of every source that has changed since its copy was queued, and forgets it. Whether it was
 * allowed to is worked out later. */
void compare_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < SOURCES; i++) {
        Source *source = &sources[i];
        if (!source->number || source->address >= end || begin >= source->address + source->size)
            continue;
        if (hash_of(source->address, source->size) == source->hash)
            continue;
        uint64_t words[] = {source->number};
        source->number = 0;
        Record record = {.function = SOURCE_CHANGED, .words = 1, .stack = stack_index()};
        log_write(record, words, NULL, 0);
    }
    pthread_mutex_unlock(&sources_lock);
}

void remember_source(uint64_t address, uint64_t size, uint64_t hash, uint64_t number) {
    pthread_mutex_lock(&sources_lock);
    size_t place = SOURCES;
    for (size_t i = 0; i < SOURCES && place == SOURCES; i++) {
        if (!sources[i].number || (sources[i].address == address && sources[i].size == size))
            place = i;
    }
    if (place == SOURCES)
        place = next_source++ % SOURCES;
    sources[place] = (Source){address, size, hash, number};
    pthread_mutex_unlock(&sources_lock);
}

void forget_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < SOURCES; i++) {
        if (sources[i].address < end && begin < sources[i].address + sources[i].size)
            sources[i].number = 0;
    }
    pthread_mutex_unlock(&sources_lock);
}

void sources_clear(void) {
    pthread_mutex_lock(&sources_lock);
    memset(sources, 0, sizeof sources);
    pthread_mutex_unlock(&sources_lock);
}

void sources_in_child(void) {
    pthread_mutex_init(&sources_lock, NULL);
}
