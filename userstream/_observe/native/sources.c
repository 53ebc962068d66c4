/* Page-locked memory that pending copies still read, or for which streams wait: a write of the host
 * changes the copied bytes, or ends the wait. */
#define _GNU_SOURCE

#include "parts.h"

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t sources_lock = PTHREAD_MUTEX_INITIALIZER;

/* A source up to WHOLE bytes is compared as a whole, a larger one in samples. The judge counts the
 * larger ones (`WHOLE` in `pinned.py`). */
enum { SOURCES = 256, WHOLE = 1 << 16, SAMPLES = 256, SAMPLE = 64, PAGE = 4096 };

static Source sources[SOURCES];
static size_t source_count;     /* places at the beginning that have been used */
static atomic_bool any_sources; /* there are some */
static size_t next_source;

/* Events that were recorded while there were sources: which copies they come after. */
enum { EVENTS = 1024 };

static struct Recorded {
    uint64_t event, stream, context;
    uint64_t number;            /* of the newest record then */
} events[EVENTS];

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

/* Four hashes side by side: the processor does not wait for one step before the next one. */
__attribute__((no_sanitize("thread", "address")))
static uint64_t hash_more(uint64_t hash, const char *bytes, uint64_t count) {
    uint64_t parts[4] = {hash, 1, 2, 3}, words[4], i = 0;
    for (; i + sizeof words <= count; i += sizeof words) {
        memcpy(words, bytes + i, sizeof words);
        for (int k = 0; k < 4; k++)
            parts[k] = mixed(parts[k], words[k]);
    }
    for (; i < count; i++)
        parts[0] = mixed(parts[0], (unsigned char)bytes[i]);
    return mixed(mixed(parts[0], parts[1]), mixed(parts[2], parts[3]));
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

/* Under the lock. Reports and forgets a source that has changed since its copy was queued. The
 * judge decides whether the change is ordered after the copy. */
static void compare(Thread *me, Source *source) {
    Source read = *source;
    int32_t stack = stack_index(me);
    if (!source_read(&read)) {
        source->number = 0;
    } else if (read.hash == source->hash) {
        source->intact = stack;
    } else if (is_recording()) {
        /* After the end, calls go unseen: the memory may have another owner by now. */
        uint64_t words[] = {source->number, source->address, (uint64_t)(int64_t)source->intact, 0};
        if (source->size <= sizeof words[3])    /* a word: its value */
            host_read(source->address, &words[3], source->size);
        source->number = 0;
        Record record = {.type = SOURCE_CHANGED, .words = 4, .stack = stack};
        record.began = record.ended = now();
        log_write(me, record, words, NULL, 0);
    }
}

/* Under the lock. */
static void drop_free_places(void) {
    while (source_count && !sources[source_count - 1].number)
        source_count--;
    atomic_store(&any_sources, source_count > 0);
}

/* Compares the sources that overlap with memory. */
void sources_compare(Thread *me, uint64_t begin, uint64_t end) {
    if (!atomic_load(&any_sources))
        return;
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < source_count; i++) {
        if (overlaps(&sources[i], begin, end))
            compare(me, &sources[i]);
    }
    drop_free_places();
    pthread_mutex_unlock(&sources_lock);
}

static uint64_t stream_of(const Rule *rule, const uint64_t *words) {
    return words[rule->stream] ? words[rule->stream] : 1;
}

/* Under the lock. Whether the copy of a source is over, as the host knows that all work of a stream
 * (0: of any) and a context is that was queued up to a record. The default stream of a thread is
 * not told from that of another thread. */
static bool is_over(const Source *source, const struct Recorded *known) {
    enum { PER_THREAD = 2 };
    if (source->number > known->number || source->context != known->context)
        return false;
    return !known->stream || (known->stream == source->stream && known->stream != PER_THREAD);
}

/* Under the lock: where an event is, or would be. */
static struct Recorded *event_place(uint64_t event) {
    return &events[(mixed(1, event) >> 32) % EVENTS];
}

/* Under the lock. Compares the sources whose copies are over, and forgets them if the program hears
 * it: it may overwrite them from now on. Others may be over as well, through streams that wait for
 * each other: of these a few are compared each time, in turn. */
static void compare_ended(Thread *me, const struct Recorded *known, bool is_heard) {
    enum { OTHERS = 8 };
    static size_t turn;
    size_t others = 0;
    for (size_t k = 0; k < source_count; k++) {
        size_t i = (turn + k) % source_count;
        if (!sources[i].number)
            continue;
        bool over = is_over(&sources[i], known);
        if (!over && others++ >= OTHERS)
            continue;
        compare(me, &sources[i]);
        if (over && is_heard)
            sources[i].number = 0;
    }
    turn += OTHERS;
}

void sources_ended(Thread *me, const Rule *rule, const uint64_t *words, uint64_t context,
                   uint64_t since, bool is_heard) {
    if (!atomic_load(&any_sources))
        return;
    pthread_mutex_lock(&sources_lock);
    struct Recorded known = {0, 0, 0, 0};   /* nothing is */
    if (rule->stream != NO_WORD)
        known = (struct Recorded){0, stream_of(rule, words), context, since};
    else if (rule->ends_context)
        known = (struct Recorded){0, 0, context, since};
    if (rule->event == NO_WORD)
        compare_ended(me, &known, is_heard);
    for (unsigned i = 0; rule->event != NO_WORD && i < rule->events; i++) {
        const struct Recorded *recorded = event_place(words[rule->event + i]);
        if (recorded->event == words[rule->event + i])
            compare_ended(me, recorded, is_heard);
        else
            compare_ended(me, &known, is_heard);
    }
    drop_free_places();
    pthread_mutex_unlock(&sources_lock);
}

/* Returns the newest record; 0: there are no sources. */
uint64_t sources_until_now(void) {
    return atomic_load_explicit(&any_sources, memory_order_acquire) ? log_newest() : 0;
}

void sources_event_recorded(const Rule *rule, const uint64_t *words, uint64_t context,
                            uint64_t since) {
    if (!since)
        return;
    pthread_mutex_lock(&sources_lock);
    uint64_t event = words[rule->records];
    *event_place(event) =
        (struct Recorded){event, stream_of(rule, words), context, since};
    pthread_mutex_unlock(&sources_lock);
}

void source_remember(Thread *me, Source source) {
    size_t place = 0;
    pthread_mutex_lock(&sources_lock);
    while (place < source_count && sources[place].number &&
           (sources[place].address != source.address || sources[place].size != source.size))
        place++;
    if (place == SOURCES) {     /* full: the oldest copy may have run long ago */
        place = next_source++ % SOURCES;
        log_own(me, NOT_COMPARED, (uint64_t[]){1}, 1);
    } else if (place == source_count) {
        source_count++;
    }
    sources[place] = source;
    atomic_store(&any_sources, true);
    pthread_mutex_unlock(&sources_lock);
}

void sources_forget(uint64_t begin, uint64_t end) {
    if (!atomic_load(&any_sources))
        return;
    pthread_mutex_lock(&sources_lock);
    for (size_t i = 0; i < source_count; i++) {
        if (overlaps(&sources[i], begin, end))
            sources[i].number = 0;
    }
    drop_free_places();
    pthread_mutex_unlock(&sources_lock);
}

void sources_clear(void) {
    sources_forget(0, UINT64_MAX);
    memset(events, 0, sizeof events);
}

void sources_in_child(void) {
    pthread_mutex_init(&sources_lock, NULL);
    source_count = 0;
    atomic_store(&any_sources, false);
    memset(events, 0, sizeof events);
}
