/* Sorted tables of ranges: streams by their handles, and memory by its addresses. */
#include "parts.h"

#include <stdlib.h>

/* The first one that ends behind a place. Under the lock. */
static size_t place_of(const Ranges *ranges, uint64_t at) {
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges->items[middle].end <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Under the lock. */
static void forget(Ranges *ranges, uint64_t begin, uint64_t end) {
    size_t first = place_of(ranges, begin), after = first;
    while (after < ranges->count && ranges->items[after].begin < end)
        after++;
    if (after == first)
        return;                 /* also of no ranges, which have no memory */
    memmove(ranges->items + first, ranges->items + after,
            (ranges->count - after) * sizeof *ranges->items);
    ranges->count -= after - first;
}

/* Under the lock. False: there is no memory for it. */
static bool insert(Ranges *ranges, Range range) {
    if (ranges->count == ranges->capacity) {
        size_t capacity = ranges->capacity ? ranges->capacity * 2 : 256;
        Range *more = realloc(ranges->items, capacity * sizeof *more);
        if (!more)
            return false;
        ranges->items = more;
        ranges->capacity = capacity;
    }
    size_t place = place_of(ranges, range.begin);
    memmove(ranges->items + place + 1, ranges->items + place,
            (ranges->count - place) * sizeof *ranges->items);
    range.added = ++ranges->added;
    ranges->items[place] = range;
    ranges->count++;
    return true;
}

bool ranges_find(Ranges *ranges, uint64_t at, Range *found) {
    pthread_mutex_lock(&ranges->lock);
    size_t place = place_of(ranges, at);
    bool known = place < ranges->count && ranges->items[place].begin <= at;
    *found = known ? ranges->items[place] : (Range){0};
    pthread_mutex_unlock(&ranges->lock);
    return known;
}

bool ranges_add(Ranges *ranges, Range range) {
    pthread_mutex_lock(&ranges->lock);
    size_t place = place_of(ranges, range.begin);
    bool known = place < ranges->count && ranges->items[place].begin < range.end;
    bool added = !known && insert(ranges, range);
    pthread_mutex_unlock(&ranges->lock);
    return added;
}

void ranges_limit(Ranges *ranges, size_t most) {
    pthread_mutex_lock(&ranges->lock);
    if (ranges->count > most) {
        size_t kept = 0;
        for (size_t i = 0; i < ranges->count; i++) {
            if (ranges->added - ranges->items[i].added < most / 2)
                ranges->items[kept++] = ranges->items[i];
        }
        ranges->count = kept;
    }
    pthread_mutex_unlock(&ranges->lock);
}

void ranges_forget(Ranges *ranges, uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&ranges->lock);
    forget(ranges, begin, end);
    pthread_mutex_unlock(&ranges->lock);
}
