/* Page-locked memory that pending copies still have to read: a write of the host changes what they
 * copy. */
#define _GNU_SOURCE

#include "parts.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t sources_lock = PTHREAD_MUTEX_INITIALIZER;

/* A source up to WHOLE bytes is compared as a whole, a larger one in samples. The judge counts the
 * larger ones (`WHOLE` in `pinned.py`). */
enum { SOURCES = 256, WHOLE = 1 << 16, SAMPLES = 256, SAMPLE = 64, PAGE = 4096 };

static Source sources[SOURCES];
static size_t source_count;     /* places at the beginning that have been used */
static size_t next_source;

/* Returns whether a page can be read. The kernel reads the signal set before it checks the invalid
 * operation, and reports EFAULT instead of raising SIGSEGV. */
static bool is_readable(uint64_t address) {
    int saved = errno;
    uint64_t aligned = address & ~(uint64_t)7;
    long result = syscall(SYS_rt_sigprocmask, ~0L, aligned, NULL, 8);
    bool readable = result != -1 || errno != EFAULT;
    errno = saved;
    return readable;
}

static bool all_readable(uint64_t address, uint64_t size) {
    for (uint64_t page = address & ~(uint64_t)(PAGE - 1); page < address + size; page += PAGE) {
        if (!is_readable(page))
            return false;
    }
    return true;
}

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

__attribute__((no_sanitize("thread", "address")))
bool host_read(uint64_t address, void *to, uint64_t bytes) {
    if (!all_readable(address, bytes))
        return false;
    for (uint64_t i = 0; i < bytes; i++)
        ((volatile char *)to)[i] = ((const volatile char *)(uintptr_t)address)[i];
    return true;
}

/* The memory may be gone although no call that was seen has freed it (a trimmed pool, a released
 * context): each page is checked before it is read. The device may write there at this moment: the
 * judge knows of such writes. */
__attribute__((no_sanitize("thread", "address")))
bool source_read(Source *source) {
    uint64_t address = source->address, size = source->size;
    uint64_t piece = size <= WHOLE ? PAGE : SAMPLE, step = size <= WHOLE ? PAGE : size / SAMPLES;
    uint64_t hash = size;
    if (!size || address + size < address)
        return false;
    for (uint64_t at = 0; at < size; at += step) {
        uint64_t bytes = at + piece < size ? piece : size - at;
        if (!all_readable(address + at, bytes))
            return false;
        hash = hash_more(hash, (const char *)(uintptr_t)(address + at), bytes);
    }
    source->hash = hash;
    return true;
}

/* Under the lock. */
static bool overlaps(const Source *source, uint64_t begin, uint64_t end) {
    return source->number && source->address < end && begin < source->address + source->size;
}

/* Reports and forgets every source that has changed since its copy was queued. The judge decides
 * whether the change is ordered after the copy. */
void compare_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < source_count; i++) {
        Source *source = &sources[i], now = *source;
        if (!overlaps(source, begin, end))
            continue;
        if (!source_read(&now)) {
            source->number = 0;
        } else if (now.hash != source->hash && is_logging()) {
            /* After the end, calls go unseen: the memory may have another owner by now. */
            uint64_t words[] = {source->number, source->address};
            source->number = 0;
            Record record = {.function = SOURCE_CHANGED, .words = 2, .stack = stack_index()};
            log_write(record, words, NULL, 0);
        }
    }
    pthread_mutex_unlock(&sources_lock);
}

void remember_source(Source source) {
    size_t place = 0;
    pthread_mutex_lock(&sources_lock);
    while (place < source_count && sources[place].number &&
           (sources[place].address != source.address || sources[place].size != source.size))
        place++;
    if (place == SOURCES) {     /* full: the oldest copy may have run long ago */
        place = next_source++ % SOURCES;
        log_own(NOT_COMPARED, (uint64_t[]){1}, 1);
    } else if (place == source_count) {
        source_count++;
    }
    sources[place] = source;
    pthread_mutex_unlock(&sources_lock);
}

void forget_sources(uint64_t begin, uint64_t end) {
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < source_count; i++) {
        if (overlaps(&sources[i], begin, end))
            sources[i].number = 0;
    }
    while (source_count && !sources[source_count - 1].number)
        source_count--;
    pthread_mutex_unlock(&sources_lock);
}

void sources_clear(void) {
    forget_sources(0, UINT64_MAX);
}

void sources_in_child(void) {
    pthread_mutex_init(&sources_lock, NULL);
    source_count = 0;
}
