/* Writes down the driver calls of all threads, for the thread of Python that works out what they
 * mean.
 *
 * It is called by the driver (or by CUPTI) on whatever thread calls the driver, with or without the
 * GIL: it never takes it, and never waits for anybody who could have it. It calls no driver
 * function that waits. A lock is held for as long as it takes to copy a few hundred bytes. */
#define _GNU_SOURCE

#include "parts.h"

#include <string.h>
#include <time.h>

Driver driver;
Layout layout;

static Rule rules[MAX_FUNCTIONS];
static atomic_bool logging;
static __thread bool busy;      /* what these files call is not logged */
static __thread uint64_t began;

static unsigned char *(*account)(void);    /* where the account of the calling thread is */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

enum { MAX_FETCHED = 16384 };

/* ---- one call ------------------------------------------------------------------------------- */

static __thread uint64_t source_hash;
static __thread bool source_pinned;

/* In a CUDA_MEMCPY2D or 3D, the kind of memory comes before its two addresses. */
static uint64_t operand(const Address *address, const uint64_t *words) {
    enum { HOST = 1, ARRAY = 3 };
    if (!address->within || !words[address->word])
        return words[address->word];
    const char *kind = (const char *)(uintptr_t)words[address->word] + address->offset;
    switch (FIELD(int32_t, kind, 0)) {
    case HOST:
        return FIELD(uint64_t, kind, 8);
    case ARRAY:
        return 0;
    default:
        return FIELD(uint64_t, kind, 16);
    }
}

static uint64_t write_call(const Rule *rule, int site, unsigned function, const uint64_t *words,
                           int result, const void *context) {
    Part parts[1 + FETCHES];
    size_t count = 0;
    if (rule->kernel != NO_WORD)
        parts[count++] = launch_pointers();
    for (size_t i = 0; i < FETCHES && rule->fetches[i].bytes; i++) {
        const Fetch *fetch = &rule->fetches[i];
        uint64_t bytes = fetch->bytes;
        if (fetch->count_word != NO_WORD)
            bytes *= words[fetch->count_word];
        const void *data = (const void *)(uintptr_t)words[fetch->word];
        bool there = data && (fetch->sites >> site & 1) && bytes <= MAX_FETCHED;
        parts[count++] = (Part){data, there ? (uint32_t)bytes : 0};
    }
    Record record = {
        .function = (uint16_t)function,
        .site = (uint8_t)site,
        .words = rule->words,
        .result = (int16_t)result,
        .account = account ? *account() : 0,
        .stack = stack_index(),
        .began = began,
        .ended = now(),
        .context = (uint64_t)(uintptr_t)context,
    };
    return log_write(record, words, parts, count);
}

static void enter(const Rule *rule, unsigned function, const uint64_t *words, const void *context) {
    began = now();
    if (rule->stream != NO_WORD)
        see_stream(words[rule->stream]);
    else if (rule->configuration != NO_WORD)
        see_stream(launch_stream(rule, words));
    if (rule->kernel != NO_WORD)
        launch_enter(rule, words);
    source_pinned = false;
    for (int i = 0; i < 2; i++) {
        const Address *address = &rule->addresses[i];
        if (address->word == NO_WORD)
            continue;
        bool pinned = see_memory(operand(address, words));
        if (pinned && i == 1 && rule->source_size != NO_WORD) {
            uint64_t at = operand(address, words), size = words[rule->source_size];
            compare_sources(at, at + size);
            source_hash = hash_of(at, size);
            source_pinned = true;
        }
    }
    if (rule->frees != NO_WORD) {
        see_memory(words[rule->frees]);
        compare_sources(0, UINT64_MAX);
        memory_gone_at(words[rule->frees]);
        if (rule->freed != NO_WORD)
            memory_gone(words[rule->frees], words[rule->frees] + words[rule->freed]);
    }
    if (rule->sites >> ENTER & 1)
        write_call(rule, ENTER, function, words, 0, context);
    if (rule->ends_stream)
        forget_stream(words[rule->stream]);
    if (rule->forgets & MEMORY)
        memory_gone(0, UINT64_MAX);
    if (rule->forgets & KERNELS)
        kernels_forget();
}

static void leave(const Rule *rule, unsigned function, const uint64_t *words, int result,
                  const void *context) {
    if (rule->kernel != NO_WORD)
        look_after(launch_stream(rule, words), result);
    if (result && !rule->failures)
        return;
    if (!result && rule->orders_host)
        compare_sources(0, UINT64_MAX);
    if (!result && rule->allocates != NO_WORD && words[rule->allocates]) {
        uint64_t begin = *(const uint64_t *)(uintptr_t)words[rule->allocates];
        memory_forget(begin, begin + (rule->allocated == NO_WORD ? 1 : words[rule->allocated]));
        strangers_forget();
    }
    if (!(rule->sites >> LEAVE & 1))
        return;
    uint64_t number = write_call(rule, LEAVE, function, words, result, context);
    if (!result && number && source_pinned)
        remember_source(operand(&rule->addresses[1], words), words[rule->source_size], source_hash,
                        number);
}

/* Who is in a call, so that what it may hold is not taken away: each thread counts in a line of the
 * cache that few others use. */
static struct {
    _Alignas(64) atomic_int count;
} inside[64];
static atomic_uint next_place;
static __thread unsigned my_place;      /* 0: none yet */

static atomic_int *my_count(void) {
    if (!my_place)
        my_place = 1 + atomic_fetch_add(&next_place, 1) % 64;
    return &inside[my_place - 1].count;
}

static void write_down(int site, unsigned function, const uint64_t *words, int result,
                       const void *context) {
    const Rule *rule = &rules[function];
    if (!rule->sites)
        return;
    busy = true;
    if (site == ENTER)
        enter(rule, function, words, context);
    else
        leave(rule, function, words, result, context);
    busy = false;
}

void logger_call(int site, unsigned function, const uint64_t *words, size_t count, int result,
                 const void *context) {
    (void)count;
    if (busy || function >= MAX_FUNCTIONS ||
        !atomic_load_explicit(&logging, memory_order_relaxed))
        return;
    atomic_int *mine = my_count();
    atomic_fetch_add(mine, 1);  /* and then look again, in this order: see wait_for_calls */
    if (atomic_load(&logging))
        write_down(site, function, words, result, context);
    atomic_fetch_sub(mine, 1);
}

/* Waits, not without end, until no thread is in a call. Returns whether none is; none can come. */
static bool wait_for_calls(void) {
    uint64_t end = now() + 1000000000u;
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) {
        while (atomic_load(&inside[i].count)) {
            if (now() > end)
                return false;
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
    }
    return true;
}

/* ---- for Python ----------------------------------------------------------------------------- */

PUBLIC void logger_rule(unsigned function, const Rule *rule) {
    if (function < MAX_FUNCTIONS)
        rules[function] = *rule;
}

/* Without one, all calls are on the program's account. */
PUBLIC void logger_account(unsigned char *(*of_thread)(void)) {
    account = of_thread;
}

PUBLIC void logger_no_rules(void) {
    wait_for_calls();           /* of an earlier observation */
    memset(rules, 0, sizeof rules);
}

PUBLIC void logger_begin(const Driver *functions, const Layout *python) {
    bool nobody = wait_for_calls();
    log_clear();                /* of an earlier observation */
    streams_clear();
    memory_clear();
    sources_clear();
    kernels_clear(nobody);
    driver = *functions;
    layout = *python;
    atomic_store(&logging, true);
}

PUBLIC void logger_end(void) {
    atomic_store(&logging, false);
}

/* Writes down what is no driver call, in the order of those of the calling thread. */
PUBLIC void logger_note(unsigned what, const uint64_t *words, unsigned count, const void *data,
                        uint32_t bytes) {
    if (busy || !atomic_load_explicit(&logging, memory_order_relaxed))
        return;
    atomic_int *mine = my_count();
    atomic_fetch_add(mine, 1);
    if (atomic_load(&logging)) {
        Record record = {
            .function = (uint16_t)what,
            .words = (uint8_t)count,
            .stack = stack_index(),
        };
        record.began = record.ended = now();
        log_write(record, words, &(Part){data, bytes}, 1);
    }
    atomic_fetch_sub(mine, 1);
}

/* The calling thread is one of ours: nothing that it calls is the program's. */
PUBLIC void logger_ignore_this_thread(void) {
    busy = true;
}

static void in_child(void) {
    atomic_store(&logging, false);
    memset(inside, 0, sizeof inside);
    log_in_child();
    stacks_in_child();
    streams_in_child();
    memory_in_child();
    sources_in_child();
    kernels_in_child();
    learning_in_child();
}

__attribute__((constructor)) static void initialize(void) {
    pthread_atfork(NULL, NULL, in_child);
}
