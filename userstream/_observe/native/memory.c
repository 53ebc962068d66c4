/* Table of the device memory that the recorder has seen. */
#include "parts.h"

static Ranges memory = NO_RANGES;
static Ranges freed = NO_RANGES;        /* in stream order, and not allocated again */
enum { FREED_KEPT = 4096 };     /* the simulated driver gives no address twice */

/* What a thread remembers of memory is true until memory near it is forgotten or is told of. */
enum { NEAR = 21, AREAS = 64 };     /* addresses that agree above so many bits are near */

static Generation forgotten[AREAS];
static Generation forgotten_anywhere;

static unsigned area_of(uint64_t address) {
    return (unsigned)(address >> NEAR) % AREAS;
}

/* The area, and how often something there was forgotten. */
static uint64_t generation_at(uint64_t address) {
    return address >> NEAR << 32 | generation_of(&forgotten[area_of(address)]);
}

bool memory_was_freed(uint64_t address) {
    Range found;
    return ranges_find(&freed, address, &found);
}

/* In this order: what a thread finds after it has read the counter is not forgotten. */
static void forget_known(uint64_t begin, uint64_t end) {
    ranges_forget(&memory, begin, end);
    uint64_t first = begin >> NEAR, last = (end - (end > begin)) >> NEAR;
    for (uint64_t area = first; area <= last && area - first < AREAS; area++)
        generation_ends(&forgotten[area % AREAS]);
    generation_ends(&forgotten_anywhere);
}

void memory_forget(uint64_t begin, uint64_t end) {
    forget_known(begin, end);
    ranges_forget(&freed, begin, end);
}

bool memory_known(Thread *me, uint64_t address, Range *found) {
    uint64_t generation = generation_at(address);
    /* Large memory is found by the area of an address, small memory by its page. */
    unsigned places[] = {(unsigned)(mixed(1, address >> NEAR) >> 32) % RANGES_KEPT,
                         (unsigned)(mixed(2, address >> 12) >> 32) % RANGES_KEPT};
    for (int i = 0; i < 2; i++) {
        *found = me->memory.known[places[i]].range;
        if (found->begin <= address && address < found->end &&
            me->memory.known[places[i]].generation == generation)
            return true;
    }
    if (!ranges_find(&memory, address, found))
        return false;
    unsigned place = places[(found->end - found->begin) >> NEAR ? 0 : 1];
    me->memory.known[place].range = *found;
    me->memory.known[place].generation = generation;
    return true;
}

/* Under the lock. False: the address is of no memory that the driver knows. */
static bool tell_of(Thread *me, uint64_t address, Range *found) {
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
    *found = (Range){start, start + size, type == HOST && !managed[0], 0};
    uint64_t words[] = {start, size, type, managed[0], (uint64_t)(int64_t)device};
    log_own(me, SEEN_MEMORY, words, 5);
    forget_known(found->begin, found->end);     /* what lay there before */
    ranges_add(&memory, *found);
    return true;
}

static bool see_unknown(Thread *me, uint64_t address, Range *found) {
    pthread_mutex_lock(&seeing_lock);
    bool known = memory_known(me, address, found) || tell_of(me, address, found);
    pthread_mutex_unlock(&seeing_lock);
    return known;
}

/* Tells of memory when it is used first. Returns whether it is memory that the driver knows; the
 * host must not write to memory that is page-locked before a copy from there has run. */
bool see_memory(Thread *me, uint64_t address, Range *found) {
    *found = (Range){0};
    return address && (memory_known(me, address, found) || see_unknown(me, address, found));
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
    sources_forget(begin, end);
    memory_forget(begin, end);
}

void memory_gone_at(uint64_t address, bool in_stream_order) {
    Range found;
    if (!ranges_find(&memory, address, &found))
        found = (Range){address, address + 1, false, 0};
    memory_gone(found.begin, found.end);
    if (in_stream_order && ranges_add(&freed, found))   /* nothing of it is left there */
        ranges_limit(&freed, FREED_KEPT);
}

/* Any word may be an address from now on. */
void strangers_forget(void) {
    for (size_t i = 0; i < AREAS; i++)
        generation_ends(&forgotten[i]);
    generation_ends(&forgotten_anywhere);
}

/* Most words of large parameters are no addresses, and the same at each launch: they come first. */
static bool is_memory(Thread *me, uint64_t word) {
    enum { ADDRESS_BITS = 57 };
    Range found;
    if (word < 1 << 16 || word >> ADDRESS_BITS)
        return false;
    uint64_t generation = generation_at(word);
    size_t place = (mixed(1, word) >> 32) % STRANGERS_KEPT;
    if (me->memory.strangers[place].word == word &&
        me->memory.strangers[place].generation == generation)
        return false;
    if (memory_known(me, word, &found) || memory_was_freed(word) || see_unknown(me, word, &found))
        return true;
    me->memory.strangers[place].word = word;
    me->memory.strangers[place].generation = generation;
    return false;
}

/* Parameters are mostly the same at each launch: the answer for the same words is the same, unless
 * memory anywhere was forgotten or told of since. Where one word differs, only the BLOCK_WORDS
 * around it are looked at again. There are zeros behind the last word, up to a multiple of four. */
static uint64_t addresses_among(Thread *me, const uint64_t *words, uint32_t count) {
    uint64_t generation = generation_of(&forgotten_anywhere);
    /* The processor does not wait for one of the four, then the next. */
    uint64_t a = generation << 32 | count, b = 1, c = 2, d = 3;
    for (uint32_t i = 0; i < count; i += 4) {
        a = mixed(a, words[i]);
        b = mixed(b, words[i + 1]);
        c = mixed(c, words[i + 2]);
        d = mixed(d, words[i + 3]);
    }
    uint64_t hash = mixed(mixed(mixed(a, b), c), d);
    KnownWords *known = &me->memory.words[(hash >> 32) % WORDS_KEPT];
    if (known->hash == hash)
        return known->are_addresses;
    uint64_t are = 0;
    for (uint32_t at = 0; count > BLOCK_WORDS && at < count; at += BLOCK_WORDS) {
        uint32_t here = count - at < BLOCK_WORDS ? count - at : BLOCK_WORDS;
        are |= addresses_among(me, words + at, here) << at;
    }
    for (uint32_t i = 0; count <= BLOCK_WORDS && i < count; i++)
        are |= (uint64_t)is_memory(me, words[i]) << i;
    *known = (KnownWords){hash, are};
    return are;
}

uint32_t find_addresses(Thread *me, Parameters *words, Pointer *pointers) {
    uint32_t found = 0;
    for (uint32_t i = words->count; i % 4; i++)
        words->values[i] = 0;
    uint64_t are = addresses_among(me, words->values, words->count);
    for (; are; are &= are - 1) {
        int i = __builtin_ctzll(are);
        pointers[found++] = (Pointer){words->offsets[i], words->values[i]};
    }
    words->count = 0;
    return found;
}

void memory_clear(void) {
    memory_forget(0, UINT64_MAX);
}

void memory_in_child(void) {
    memory = freed = (Ranges)NO_RANGES;
}
