/* Converts the driver calls of all threads to records.
 *
 * The simulated driver or CUPTI calls this file on each thread that calls the driver, with or
 * without the GIL. So it never takes the GIL, waits for no thread that may have the GIL, and calls
 * no driver function that waits. */
#define _GNU_SOURCE

#include "parts.h"

#include <time.h>

Rule rules[MAX_FUNCTIONS];
static atomic_bool recording;
static atomic_bool guarding;    /* sources may still be read: memory that goes must be forgotten */
static atomic_uint epoch;       /* of the observation; 0: there was none */

/* Where the account of the calling thread is. Without it, all calls are on the program's. */
static unsigned char *(*account)(void);
enum { OF_PROGRAM = 0, OF_NOBODY = 3 };

static unsigned char account_of(Thread *me) {
    if (!account)
        return OF_PROGRAM;
    if (!me->account)
        me->account = account();
    return *me->account;
}

uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Before the rules are looked at: they are written while this is false. */
bool is_guarding(void) {
    return atomic_load_explicit(&guarding, memory_order_acquire);
}

bool is_recording(void) {
    return atomic_load(&recording);
}

enum { MAX_FETCHED = 16384 };

/* ---- one call ------------------------------------------------------------------------------- */

static Call *call_begin(Thread *me, const Rule *rule, uint32_t now_in, unsigned function) {
    if (me->call_count && me->calls[me->call_count - 1].epoch != now_in)
        me->call_count = 0;
    if (me->call_count == NESTED)
        return NULL;
    Call *call = &me->calls[me->call_count++];
    call->epoch = now_in;
    call->function = function;
    call->began = now();
    call->since = rule->orders_host || rule->records != NO_WORD ? sources_until_now() : 0;
    call->value_count = 0;
    call->source_count = 0;
    call->launch.looking = NULL;
    call->launch.kernel = 0;
    call->launch.may_load = call->launch.is_collective = false;
    call->launch.pointer_count = 0;
    return call;
}

/* NULL: the begin of this call was not seen. */
static Call *call_end(Thread *me, uint32_t now_in, unsigned function) {
    while (me->call_count) {
        Call *call = &me->calls[--me->call_count];
        if (call->epoch == now_in && call->function == function)
            return call;
        if (call->epoch == now_in && call->launch.looking)
            look_abandon(call->launch.looking);
    }
    return NULL;
}

/* In a CUDA_MEMCPY2D or 3D, the kind of memory comes before its two addresses. */
uint64_t operand_of(const Address *address, const uint64_t *words) {
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

static uint64_t write_call(Thread *me, const Rule *rule, int site, const Call *call,
                           const uint64_t *words, int result, const void *context) {
    Part parts[2 + FETCHES];
    size_t count = 0;
    if (rule->kernel != NO_WORD || rule->node != NO_WORD)
        parts[count++] = (Part){call->launch.pointers,
                                call->launch.pointer_count * (uint32_t)sizeof(Pointer)};
    if (rule->node != NO_WORD)
        parts[count++] = (Part){&call->launch.kernel, call->launch.kernel ? 8 : 0};
    if (rule->value != NO_WORD)
        parts[count++] = (Part){call->values, call->value_count * (uint32_t)sizeof(Value)};
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
        .type = (uint16_t)call->function,
        .site = (uint8_t)site,
        .account = account_of(me),
        .stack = stack_index(me),
        .began = call->began,
        .ended = now(),
        .context = (uint64_t)(uintptr_t)context,
        .result = result,
        .words = rule->words,
    };
    return log_write(me, record, words, parts, count);
}

/* The driver has not looked at the arguments yet: they may be anything. */
static void see_source(Thread *me, Call *call, uint64_t address, uint64_t size, uint64_t stream) {
    Source source = {.address = address, .size = size, .stream = stream ? stream : 1};
    sources_compare(me, address, address + size < address ? UINT64_MAX : address + size);
    if (call->source_count == MOST_SOURCES)
        log_own(me, NOT_COMPARED, (uint64_t[]){1}, 1);
    else if (source_read(&source))
        call->sources[call->source_count++] = source;
}

static void see_batch(Thread *me, const Rule *rule, const uint64_t *words, Call *call) {
    const uint64_t *to = (const uint64_t *)(uintptr_t)words[0];
    const uint64_t *from = (const uint64_t *)(uintptr_t)words[1];
    const uint64_t *sizes = (const uint64_t *)(uintptr_t)words[2];
    uint64_t count = words[rule->batch];
    Range memory;
    if (!to || !from || !sizes || count > MAX_FETCHED / sizeof *sizes)
        return;
    for (uint64_t i = 0; i < count; i++) {
        see_memory(me, to[i], &memory);
        if (see_memory(me, from[i], &memory) && memory.pinned)
            see_source(me, call, from[i], sizes[i], words[rule->stream]);
    }
}

static void see_operands(Thread *me, const Rule *rule, const uint64_t *words, Call *call) {
    Range memory;
    for (int i = 0; i < 2; i++) {
        const Address *address = &rule->addresses[i];
        if (address->word == NO_WORD)
            continue;
        uint64_t at = operand_of(address, words);
        if (see_memory(me, at, &memory) && memory.pinned && i == 1 &&
            rule->source_size != NO_WORD)
            see_source(me, call, at, words[rule->source_size], words[rule->stream]);
    }
}

static void see_value(Thread *me, const Rule *rule, Call *call, const uint64_t *words,
                      uint64_t address, uint32_t bytes, bool waits) {
    Value *found = &call->values[call->value_count++];
    Range memory;
    *found = (Value){0, 0};
    if (!see_memory(me, address, &memory) || !memory.pinned ||
        !host_read(address, &found->value, bytes))
        return;
    found->is_known = 1;
    if (rule->awaits && waits)
        see_source(me, call, address, bytes, words[rule->stream]);
}

static void see_values(Thread *me, const Rule *rule, const uint64_t *words, Call *call) {
    enum { WAIT_32 = 1, WRITE_32 = 2, WAIT_64 = 4, WRITE_64 = 5, BYTES = 48 };
    if (rule->value_count == NO_WORD) {
        see_value(me, rule, call, words, words[rule->value], rule->value_bytes, true);
        return;
    }
    const char *each = (const char *)(uintptr_t)words[rule->value];
    for (uint64_t i = 0; each && i < words[rule->value_count] && i < MOST_VALUES; i++) {
        int what = FIELD(int32_t, each + i * BYTES, 0);
        uint32_t bytes = what == WAIT_32 || what == WRITE_32 ? 4 : 8;
        if (what == WAIT_32 || what == WRITE_32 || what == WAIT_64 || what == WRITE_64)
            see_value(me, rule, call, words, FIELD(uint64_t, each + i * BYTES, 8), bytes,
                      what == WAIT_32 || what == WAIT_64);
        else
            call->values[call->value_count++] = (Value){0, 0};
    }
}

static void see_stream_of(Thread *me, const Rule *rule, const uint64_t *words,
                          const void *context) {
    uint64_t current = (uint64_t)(uintptr_t)context;
    if (rule->stream != NO_WORD)
        see_stream(me, words[rule->stream], current);
    else if (rule->configuration != NO_WORD)
        see_stream(me, launch_stream(rule, words), current);
}

static void forget_freed(const Rule *rule, const uint64_t *words) {
    if (rule->frees == NO_WORD)
        return;
    memory_gone_at(words[rule->frees], rule->stream != NO_WORD);
    if (rule->freed != NO_WORD)
        memory_gone(words[rule->frees], words[rule->frees] + words[rule->freed]);
}

static void forget_all(const Rule *rule) {
    if (!(rule->forgets & MEMORY))
        return;
    memory_gone(0, UINT64_MAX);
    contexts_forget();
}

static void see_freed(Thread *me, const Rule *rule, const uint64_t *words) {
    Range memory;
    uint64_t address = words[rule->frees];
    if (see_memory(me, address, &memory))
        sources_compare(me, memory.begin, memory.end);
    forget_freed(rule, words);
}

static void enter(Thread *me, const Rule *rule, Call *call, const uint64_t *words,
                  const void *context) {
    see_context(me, (uint64_t)(uintptr_t)context);
    see_stream_of(me, rule, words, context);
    if (rule->kernel != NO_WORD)
        launch_enter(me, rule, words, &call->launch);
    if (rule->node != NO_WORD)
        node_enter(me, rule, words, &call->launch);
    if (rule->batch != NO_WORD)
        see_batch(me, rule, words, call);
    see_operands(me, rule, words, call);
    if (rule->value != NO_WORD)
        see_values(me, rule, words, call);
    if (rule->frees != NO_WORD)
        see_freed(me, rule, words);
    if (rule->holds == ENDS_CONTEXT || (rule->holds && holds_wanted()))
        holds_enter(me, rule, call, words, (uint64_t)(uintptr_t)context);
    if (rule->sites >> ENTER & 1)
        write_call(me, rule, ENTER, call, words, 0, context);
    if (rule->ends_stream) {
        forget_stream(words[rule->stream]);
        holds_stream_ends(me, words[rule->stream]);
    }
    forget_all(rule);
    if (rule->forgets & KERNELS)
        kernels_forget();
}

/* Whether a call may have made memory whose begin and end it does not tell. */
static bool makes_memory(const Rule *rule, const uint64_t *words) {
    enum { ALLOCATION_NODE = 10 };
    const char *node = rule->node_is_any ? (const char *)(uintptr_t)words[rule->node] : NULL;
    return rule->forgets & STRANGERS || (node && FIELD(int32_t, node, 0) == ALLOCATION_NODE);
}

static void leave(Thread *me, const Rule *rule, const Call *call, const uint64_t *words,
                  int result, const void *context) {
    uint64_t current = (uint64_t)(uintptr_t)context;
    if (call->launch.looking)
        look_after(call->launch.looking, launch_stream(rule, words), result);
    if (rule->holds == ENDS_CONTEXT)
        holds_context_leaves();
    if (result && !rule->failures)
        return;
    see_context(me, current);
    if (!result && rule->orders_host)
        sources_ended(me, rule, words, current, call->since, account_of(me) == OF_PROGRAM);
    if (!result && rule->records != NO_WORD)
        sources_event_recorded(rule, words, current, call->since);
    if (!result && rule->allocates != NO_WORD && words[rule->allocates]) {
        uint64_t begin = words[rule->allocates];
        if (!rule->placed)
            begin = *(const uint64_t *)(uintptr_t)begin;
        memory_forget(begin, begin + (rule->allocated == NO_WORD ? 1 : words[rule->allocated]));
        if (rule->allocated == NO_WORD)
            strangers_forget();
    }
    if (!result && makes_memory(rule, words))
        strangers_forget();
    if (!(rule->sites >> LEAVE & 1))
        return;
    uint64_t number = write_call(me, rule, LEAVE, call, words, result, context);
    for (uint32_t i = 0; !result && number && i < call->source_count; i++) {
        Source source = call->sources[i];
        source.number = number;
        source.intact = -1;
        source.context = current;
        source_remember(me, source);
    }
    if (!result && rule->holds && holds_one())
        holds_leave(me, rule, words, current);
}

static void write_down(Thread *me, int site, unsigned function, const uint64_t *words, int result,
                       const void *context) {
    const Rule *rule = &rules[function];
    uint32_t now_in = atomic_load(&epoch);
    Call *call = site == ENTER ? call_begin(me, rule, now_in, function)
                               : call_end(me, now_in, function);
    if (!call && site == LEAVE && rule->allocates != NO_WORD) {
        /* The address may be that of memory whose free was seen: the judge has to know of both. */
        see_stream_of(me, rule, words, context);
        call_begin(me, rule, now_in, function);
        call = call_end(me, now_in, function);
    }
    if (call && site == ENTER)
        enter(me, rule, call, words, context);
    else if (call)
        leave(me, rule, call, words, result, context);
}

void recorder_call(int site, unsigned function, const uint64_t *words, size_t count, int result,
                   const void *context) {
    (void)count;
    if (function >= MAX_FUNCTIONS || !is_guarding() || !rules[function].sites)
        return;
    Thread *me = thread_enter();
    if (!me)
        return;
    if (account_of(me) == OF_NOBODY) {
        thread_leave(me);
        return;
    }
    if (atomic_load(&recording)) {
        write_down(me, site, function, words, result, context);
    } else if (atomic_load(&guarding) && site == ENTER) {
        forget_freed(&rules[function], words);
        forget_all(&rules[function]);
    }
    thread_leave(me);
}

/* ---- begin and end -------------------------------------------------------------------------- */

/* `alone`: no thread is in a call of an earlier observation. */
void calls_begin(unsigned char *(*account_of_thread)(void), bool alone) {
    account = account_of_thread;
    atomic_fetch_add(&epoch, 1);
    streams_clear();
    memory_clear();
    sources_clear();
    kernels_forget();
    if (alone)                  /* else a thread may still queue copies to the place of a look */
        looks_abandon();
    atomic_store(&guarding, true);
    atomic_store(&recording, true);
}

/* A thread that is in a call may still read the source of a copy. Until it has left, other threads
 * do not free that memory under it: they wait for the lock of the sources. Returns whether all have
 * left. */
bool calls_end(void) {
    atomic_store(&recording, false);
    bool alone = threads_wait();
    atomic_store(&guarding, false);
    return alone;
}

void calls_in_child(void) {
    atomic_store(&recording, false);
    atomic_store(&guarding, false);
}
