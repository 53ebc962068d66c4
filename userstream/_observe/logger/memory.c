/* Memory that was seen. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Memory *memories;
static size_t memory_count, memory_capacity;

/* The first one that ends behind the address. Under the lock. */
static size_t memory_place(uint64_t address) {
    size_t low = 0, high = memory_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool memory_known(uint64_t address, Memory *found) {
    pthread_mutex_lock(&memory_lock);
    size_t place = memory_place(address);
    bool known = place < memory_count && memories[place].begin <= address;
    *found = known ? memories[place] : (Memory){0, 0, false};
    pthread_mutex_unlock(&memory_lock);
    return known;
}

void memory_forget(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&memory_lock);
    size_t first = memory_place(begin), after = first;
    while (after < memory_count && memories[after].begin < end)
        after++;
    memmove(memories + first, memories + after, (memory_count - after) * sizeof *memories);
    memory_count -= after - first;
    pthread_mutex_unlock(&memory_lock);
}

static void memory_add(uint64_t begin, uint64_t end, bool pinned) {
    memory_forget(begin, end);
    pthread_mutex_lock(&memory_lock);
    if (memory_count == memory_capacity) {
        size_t capacity = memory_capacity ? memory_capacity * 2 : 256;
        Memory *more = realloc(memories, capacity * sizeof *memories);
        if (!more) {
            pthread_mutex_unlock(&memory_lock);
            return;
        }
        memories = more;
        memory_capacity = capacity;
    }
    size_t place = memory_place(begin);
    memmove(memories + place + 1, memories + place, (memory_count - place) * sizeof *memories);
    memories[place] = (Memory){begin, end, pinned};
    memory_count++;
    pthread_mutex_unlock(&memory_lock);
}

/* Tells of memory when it is used first. Returns whether it is pinned: who copies from it must not
 * write it before the copy has run. */
bool see_memory(uint64_t address) {
    enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
    enum { HOST = 1 };
    Memory known;
    if (!address || memory_known(address, &known))
        return address && known.pinned;
    const int attributes[] = {MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE};
    unsigned type = 0;
    uint8_t managed[8] = {0};
    int device = -1;
    uint64_t start = 0;
    size_t size = 0;
    void *out[] = {&type, managed, &device, &start, &size};
    if (driver.pointer_attributes(5, attributes, out, address) || !type)
        return false;
    if (!(start <= address && address < start + size)) {    /* an offset: host memory of a pool */
        start = address;
        size = 1;
    }
    bool pinned = type == HOST && !managed[0];
    memory_add(start, start + size, pinned);
    uint64_t words[] = {start, size, type, managed[0], (uint64_t)(int64_t)device};
    log_write((Record){.function = SEEN_MEMORY, .words = 5, .stack = -1}, words, NULL, 0);
    return pinned;
}

void memory_forget_at(uint64_t address) {
    pthread_mutex_lock(&memory_lock);
    size_t place = memory_place(address);
    Memory memory = {address, address + 1, false};
    if (place < memory_count && memories[place].begin <= address)
        memory = memories[place];
    pthread_mutex_unlock(&memory_lock);
    forget_sources(memory.begin, memory.end);
    memory_forget(memory.begin, memory.end);
}

void memory_clear(void) {
    pthread_mutex_lock(&memory_lock);
    memory_count = 0;
    pthread_mutex_unlock(&memory_lock);
}

void memory_in_child(void) {
    pthread_mutex_init(&memory_lock, NULL);
}
