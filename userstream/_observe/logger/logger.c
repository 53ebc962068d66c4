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
static atomic_bool guarding;    /* sources may still be read: memory that goes must be forgotten */
static atomic_uint epoch;       /* of the observation; 0: there was none */
static __thread bool busy;      /* what these files call is not logged */

static unsigned char *(*account)(void);    /* where the account of the calling thread is */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

bool is_logging(void) {
    return atomic_load(&logging);
}

enum { MAX_FETCHED = 16384 };

/* ---- one call ------------------------------------------------------------------------------- */

enum { NESTED = 2, MOST_SOURCES = 64 };

typedef struct Call {           /* what the begin of a call leaves for its end */
    uint32_t epoch;             /* in which it began */
    uint32_t function;
    uint64_t began;
    uint64_t value;             /* that was there before the one that is written */
    bool has_value;
    uint32_t source_count;
    Source sources[MOST_SOURCES];
    Launch launch;
} Call;

/* Calls in progress on this thread, the outermost first. Those of an earlier observation do not
 * count, as their ends were not seen. */
static __thread Call calls[NESTED];
static __thread uint32_t call_count;

static Call *call_begin(uint32_t now_in, unsigned function) {
    if (call_count && calls[call_count - 1].epoch != now_in)
        call_count = 0;
    if (call_count == NESTED)
        return NULL;
    Call *call = &calls[call_count++];
    call->epoch = now_in;
    call->function = function;
    call->began = now();
    call->has_value = false;
    call->source_count = 0;
    call->launch.looking = NULL;
    call->launch.pointer_count = 0;
    return call;
}

/* NULL: the begin of this call was not seen. */
static Call *call_end(uint32_t now_in, unsigned function) {
    while (call_count) {
        Call *call = &calls[--call_count];
        if (call->epoch == now_in && call->function == function)
            return call;
        if (call->epoch == now_in && call->launch.looking)
            look_abandon(call->launch.looking);
    }
    return NULL;
}

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

static uint64_t write_call(const Rule *rule, int site, const Call *call, const uint64_t *words,
                           int result, const void *context) {
    Part parts[1 + FETCHES];
    size_t count = 0;
    if (rule->kernel != NO_WORD)
        parts[count++] = (Part){call->launch.pointers,
                                call->launch.pointer_count * (uint32_t)sizeof(Pointer)};
    if (rule->written != NO_WORD)
        parts[count++] = (Part){&call->value, call->has_value ? sizeof call->value : 0};
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
        .function = (uint16_t)call->function,
        .site = (uint8_t)site,
        .words = rule->words,
        .result = (int16_t)result,
        .account = account ? *account() : 0,
        .stack = stack_index(),
        .began = call->began,
        .ended = now(),
        .context = (uint64_t)(uintptr_t)context,
    };
    return log_write(record, words, parts, count);
}

/* The driver has not looked at the arguments yet: they may be anything. */
static void see_source(Call *call, uint64_t address, uint64_t size) {
    Source source = {.address = address, .size = size};
    compare_sources(address, address + size < address ? UINT64_MAX : address + size);
    if (call->source_count == MOST_SOURCES)
        log_own(NOT_COMPARED, (uint64_t[]){1}, 1);
    else if (source_read(&source))
        call->sources[call->source_count++] = source;
}

static void see_batch(const Rule *rule, const uint64_t *words, Call *call) {
    const uint64_t *to = (const uint64_t *)(uintptr_t)words[0];
    const uint64_t *from = (const uint64_t *)(uintptr_t)words[1];
    const uint64_t *sizes = (const uint64_t *)(uintptr_t)words[2];
    uint64_t count = words[rule->batch];
    if (!to || !from || !sizes || count > MAX_FETCHED / sizeof *sizes)
        return;
    for (uint64_t i = 0; i < count; i++) {
        see_memory(to[i]);
        if (see_memory(from[i]))
            see_source(call, from[i], sizes[i]);
    }
}

static void see_operands(const Rule *rule, const uint64_t *words, Call *call) {
    for (int i = 0; i < 2; i++) {
        const Address *address = &rule->addresses[i];
        if (address->word == NO_WORD)
            continue;
        uint64_t at = operand(address, words);
        if (see_memory(at) && i == 1 && rule->source_size != NO_WORD)
            see_source(call, at, words[rule->source_size]);
    }
}

static void see_stream_of(const Rule *rule, const uint64_t *words, const void *context) {
    uint64_t current = (uint64_t)(uintptr_t)context;
    if (rule->stream != NO_WORD)
        see_stream(words[rule->stream], current);
    else if (rule->configuration != NO_WORD)
        see_stream(launch_stream(rule, words), current);
}

static void forget_freed(const Rule *rule, const uint64_t *words) {
    if (rule->frees == NO_WORD)
        return;
    memory_gone_at(words[rule->frees]);
    if (rule->freed != NO_WORD)
        memory_gone(words[rule->frees], words[rule->frees] + words[rule->freed]);
}

static void forget_all(const Rule *rule) {
    if (rule->forgets & MEMORY)
        memory_gone(0, UINT64_MAX);
}

static void enter(const Rule *rule, Call *call, const uint64_t *words, const void *context) {
    see_stream_of(rule, words, context);
    if (rule->kernel != NO_WORD)
        launch_enter(rule, words, &call->launch);
    if (rule->batch != NO_WORD)
        see_batch(rule, words, call);
    see_operands(rule, words, call);
    if (rule->written != NO_WORD && see_memory(words[rule->written])) {
        call->value = 0;
        call->has_value = host_read(words[rule->written], &call->value, rule->written_bytes);
    }
    if (rule->frees != NO_WORD) {
        see_memory(words[rule->frees]);
        compare_sources(0, UINT64_MAX);
        forget_freed(rule, words);
    }
    if (rule->sites >> ENTER & 1)
        write_call(rule, ENTER, call, words, 0, context);
    if (rule->ends_stream)
        forget_stream(words[rule->stream]);
    forget_all(rule);
    if (rule->forgets & KERNELS)
        kernels_forget();
}

static void leave(const Rule *rule, const Call *call, const uint64_t *words, int result,
                  const void *context) {
    if (call->launch.looking)
        look_after(call->launch.looking, launch_stream(rule, words), result);
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
    uint64_t number = write_call(rule, LEAVE, call, words, result, context);
    for (uint32_t i = 0; !result && number && i < call->source_count; i++) {
        Source source = call->sources[i];
        source.number = number;
        remember_source(source);
    }
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
    uint32_t now_in = atomic_load(&epoch);
    Call *call = site == ENTER ? call_begin(now_in, function) : call_end(now_in, function);
    if (!call && site == LEAVE && rule->allocates != NO_WORD) {
        /* The address may be that of memory whose free was seen: the judge has to know of both. */
        see_stream_of(rule, words, context);
        call_begin(now_in, function);
        call = call_end(now_in, function);
    }
    if (call && site == ENTER)
        enter(rule, call, words, context);
    else if (call)
        leave(rule, call, words, result, context);
    busy = false;
}

void logger_call(int site, unsigned function, const uint64_t *words, size_t count, int result,
                 const void *context) {
    (void)count;
    if (busy || function >= MAX_FUNCTIONS ||
        !atomic_load_explicit(&guarding, memory_order_relaxed))
        return;
    atomic_int *mine = my_count();
    atomic_fetch_add(mine, 1);  /* and then look again, in this order: see wait_for_calls */
    if (atomic_load(&logging)) {
        write_down(site, function, words, result, context);
    } else if (atomic_load(&guarding) && site == ENTER && rules[function].sites) {
        forget_freed(&rules[function], words);
        forget_all(&rules[function]);
    }
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
    bool alone = wait_for_calls();
    atomic_fetch_add(&epoch, 1);
    log_clear();                /* of an earlier observation */
    stacks_begin();
    streams_clear();
    memory_clear();
    sources_clear();
    kernels_forget();
    if (alone)                  /* else a thread may still queue copies to the place of a look */
        looks_abandon();
    driver = *functions;
    layout = *python;
    atomic_store(&guarding, true);
    atomic_store(&logging, true);
}

/* A thread that is in a call may still read the source of a copy. Until it has left, other threads
 * do not free that memory under it: they wait for the lock of the sources. */
PUBLIC void logger_end(void) {
    atomic_store(&logging, false);
    wait_for_calls();
    atomic_store(&guarding, false);
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

static void in_child(void) {
    atomic_store(&logging, false);
    atomic_store(&guarding, false);
    memset(inside, 0, sizeof inside);
    log_in_child();
    stacks_in_child();
    streams_in_child();
    memory_in_child();
    sources_in_child();
    kernels_in_child();
    learning_in_child();
}

/* What Python compares with its own declarations: the members of a structure in their order, and
 * the records that no driver function makes. */
#define NUMBERED(name, number) #name "=" #number " "

PUBLIC const char *logger_numbers(void) {
    return OWN_RECORDS(NUMBERED);
}

PUBLIC void logger_sizes(uint32_t *out) {
    const uint32_t sizes[] = {sizeof(Rule), sizeof(Driver), sizeof(Layout), sizeof(Record)};
    memcpy(out, sizes, sizeof sizes);
}

__attribute__((constructor)) static void initialize(void) {
    pthread_atfork(NULL, NULL, in_child);
}
