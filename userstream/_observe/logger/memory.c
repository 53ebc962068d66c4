/* Memory that was seen. */
#include "parts.h"

static Ranges memory = NO_RANGES;

bool memory_known(uint64_t address, Range *found) {
    return ranges_find(&memory, address, found);
}

void memory_forget(uint64_t begin, uint64_t end) {
    ranges_forget(&memory, begin, end);
}

/* Under the lock. Returns whether the memory is page-locked. */
static bool tell_of(uint64_t address) {
    enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
    enum { HOST = 1 };
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
    uint64_t words[] = {start, size, type, managed[0], (uint64_t)(int64_t)device};
    log_own(SEEN_MEMORY, words, 5);
    ranges_replace(&memory, (Range){start, start + size, pinned});
    return pinned;
}

/* Tells of memory when it is used first. Returns whether it is page-locked: the host must not write
 * it before a copy from it has run. */
bool see_memory(uint64_t address) {
    Range known;
    if (!address || memory_known(address, &known))
        return address && known.pinned;
    pthread_mutex_lock(&seeing_lock);
    bool pinned = memory_known(address, &known) ? known.pinned : tell_of(address);
    pthread_mutex_unlock(&seeing_lock);
    return pinned;
}

/* A copy from memory that is gone loses the context, and some calls that free memory go unseen. */
bool memory_is_there(uint64_t address, uint64_t bytes) {
    enum { RANGE_START = 11, RANGE_SIZE = 12 };
    const int attributes[] = {RANGE_START, RANGE_SIZE};
    uint64_t start = 0;
    size_t size = 0;
    void *out[] = {&start, &size};
    return !driver.pointer_attributes(2, attributes, out, address) && start <= address &&
           address - start <= size && bytes <= size - (address - start);
}

void memory_gone(uint64_t begin, uint64_t end) {
    forget_sources(begin, end);
    memory_forget(begin, end);
}

void memory_gone_at(uint64_t address) {
    Range found;
    if (!memory_known(address, &found))
        found = (Range){address, address + 1, false};
    memory_gone(found.begin, found.end);
}

void memory_clear(void) {
    memory_forget(0, UINT64_MAX);
}

void memory_in_child(void) {
    memory = (Ranges)NO_RANGES;
}
