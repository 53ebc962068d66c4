/* Makes suspected races happen: the stream of the first operation is held until the second has run.
 *
 * A stream is held by a wait for a word in page-locked memory. A thread of this file writes the
 * word after LONGEST at the latest: it needs neither the GIL nor the driver, and nothing that the
 * program does can stop it. The word is released earlier at calls that would block the host, at the
 * end of the observation, and before a fork. One stream is held at a time.
 *
 * Whether the second operation ran meanwhile is known from a mark: a word that its stream writes
 * behind it. That nothing of the hardware held up the second as well is known from a canary: small
 * operations on its stream, queued when the hold begins or, if the stream is not known by then,
 * before the first operation there. That it is not slow anyway is known from a turn between two
 * trials, in which nothing is held: its pace. The judge decides what that says.
 *
 * What is queued here is not recorded, since the thread is inside the recorder. */
#define _GNU_SOURCE

#include "parts.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

enum { PAIRS = 64, PLACES = 16, CANARIES = 8, BYTES = 64 };
enum { RELAXED = 2, LEGACY = 1, PER_THREAD = 2 };
enum { HOST = -1, BY_LINE = -2 }; /* in place of a stack */
enum { REPORTED = 1 << 30 };    /* and above: numbers of pairs of an earlier report */
static const uint64_t LONGEST = 20000000, GRACE = 1000000, PAUSE = 50000;   /* nanoseconds */
static const uint64_t FAIR = 5000000;   /* beyond the pace: it has waited */

/* Why a hold has ended; `trials.py` has the same numbers. */
enum { TIMER = 0, SECOND = 1, CALL = 2, OBSERVATION = 3 };

typedef struct Pair {           /* two operations that race, as far as the judge knows */
    uint32_t number;            /* 0: a free place */
    int32_t first, second;      /* their stacks */
    uint64_t line;              /* of the first BY_LINE, a bit as of `stack_lines` */
    uint64_t stream, context;   /* of the second; stream 0: none is known */
    bool adds_edge;             /* tries whether the missing edge orders them */
    uint32_t left;              /* how many more times it may be held */
    uint64_t pace;              /* until its mark passes if nothing is held; 0: not known yet */
} Pair;

typedef struct Words {          /* page-locked */
    _Alignas(64) _Atomic uint32_t released;     /* holds up to this number are over */
    _Alignas(64) uint32_t passed;               /* the newest mark that a stream has passed */
    uint32_t canaries[CANARIES];                /* the newest hold whose canary got through */
    _Alignas(64) char bytes[BYTES];             /* that canaries copy */
} Words;

typedef struct Place {          /* of a context: what canaries and edges need */
    uint64_t context, memory, event;
    uint64_t identity;          /* of the memory: no other memory of the process has it */
} Place;

typedef struct Limit {          /* of a hold: what its end needs */
    uint32_t number;            /* of the hold; 0: there is none */
    uint64_t began;
    Source source;              /* of a copy that the host overwrites */
} Limit;

typedef struct Hold {
    Pair pair;
    Limit limit;
    uint64_t stream, context;
    const Thread *thread;       /* of the stream, if that is the thread's own */
    int device;                 /* -1: not known */
    uint64_t second_stream, marked_at;
    const Thread *second_thread;
    uint32_t marks;             /* that were queued, up to `last_mark` */
    uint32_t canary_count;
    uint64_t canary_streams[CANARIES];
    bool is_recorded, is_ordered;   /* the edge that was added */
    bool is_free;               /* nothing is held: it measures the pace */
} Hold;

typedef struct Seen {           /* just before a stream was released */
    uint32_t passed;
    uint32_t canaries;          /* those that got through, a bit each */
    bool changed;
    bool is_late;               /* the stream had gone on before: it says nothing */
    uint64_t at;
} Seen;

/* Whoever has it may be in the driver, which may wait for the end of a hold. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Of who makes what holds need, in the driver. It is taken before `lock`. */
static pthread_mutex_t prepare_lock = PTHREAD_MUTEX_INITIALIZER;
/* Nobody who has this one waits for anything. */
static pthread_mutex_t limit_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Limit next_limit;        /* for the thread of this file */
static pthread_t watcher;
static bool is_watching, ends;
static Words *words_of_holds;
static uint64_t identity_of_words;
static Place places[PLACES];
static Pair pairs[PAIRS];
static uint64_t reported_lines; /* of the firsts of an earlier report: bits of `stack_lines` */
static atomic_int armed;        /* pairs */
static atomic_uint held;        /* the number of the hold; 0: there is none */
static Hold hold;               /* valid while there is one */
static unsigned endings;        /* calls that may end a context, and have not returned */
static bool is_off;             /* a context has ended, and memory of this file with it */
static uint32_t last_hold, last_mark;
static atomic_uint holds_left;
static uint32_t holds_of_pair;
static Ranges collectives = NO_RANGES;  /* streams on which other processes may wait */

bool holds_wanted(void) {
    return atomic_load_explicit(&armed, memory_order_relaxed) || holds_one();
}

/* Whether an observation may hold streams: a race is to be known soon. */
bool holds_are_on(void) {
    return atomic_load_explicit(&holds_left, memory_order_relaxed);
}

bool holds_one(void) {
    return atomic_load_explicit(&held, memory_order_relaxed);
}

/* ---- the end of a hold ----------------------------------------------------------------------- */

static uint32_t word(const uint32_t *at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

static bool source_changed(const Limit *of) {
    Source read = of->source;
    return read.size && source_read(&read) && read.hash != of->source.hash;
}

/* Lets the stream go on. This needs no lock. The word only grows: the stream of a later hold may
 * not have seen its number yet. */
static Seen release(const Limit *of) {
    Seen seen = {.passed = word(&words_of_holds->passed), .at = now()};
    for (unsigned i = 0; i < CANARIES; i++)
        seen.canaries |= (uint32_t)(word(&words_of_holds->canaries[i]) == of->number) << i;
    seen.changed = source_changed(of);
    uint32_t newest = atomic_load(&words_of_holds->released);
    while (newest < of->number &&
           !atomic_compare_exchange_weak(&words_of_holds->released, &newest, of->number))
        continue;
    seen.is_late = newest >= of->number;
    return seen;
}

/* Returns the number of the canary on a stream; the count of canaries: there is none. */
static uint32_t canary_on(uint64_t stream) {
    uint32_t i = 0;
    while (i < hold.canary_count && hold.canary_streams[i] != stream)
        i++;
    return i;
}

static Pair *pair_of(uint32_t number) {
    for (size_t i = 0; i < PAIRS; i++) {
        if (pairs[i].number == number)
            return &pairs[i];
    }
    return NULL;
}

/* Whether the second has waited for longer than it takes. */
static bool has_waited(uint64_t waited) {
    return hold.pair.adds_edge || !hold.marks ||
           (hold.pair.pace && waited >= hold.pair.pace + FAIR);
}

/* Under the lock. `me` is NULL if nothing can be recorded. */
static void record_end(Thread *me, unsigned why, Seen seen) {
    uint32_t missing = last_mark - seen.passed;
    uint64_t passed = missing < hold.marks && !seen.is_late ? hold.marks - missing : 0;
    uint64_t waited = hold.marks && hold.marked_at < seen.at ? seen.at - hold.marked_at : 0;
    Pair *pair = pair_of(hold.pair.number);
    if (hold.is_free) {
        if (pair)
            pair->pace = why == SECOND ? waited : LONGEST;
        atomic_store(&held, 0);
        return;
    }
    bool is_ordered = hold.is_recorded && hold.is_ordered;
    uint32_t canary = canary_on(hold.second_stream ? hold.second_stream : hold.pair.stream);
    bool got_through = canary < hold.canary_count && seen.canaries >> canary & 1;
    uint64_t told[] = {hold.limit.number, why, seen.at, passed, waited,
                       got_through && has_waited(waited), seen.changed && !seen.is_late,
                       is_ordered};
    atomic_store(&held, 0);
    if (me)
        log_own(me, RELEASED, told, 8);
}

/* Under the lock. */
static void end_hold(Thread *me, unsigned why) {
    record_end(me, why, release(&hold.limit));
}

/* Under the lock. A line may have queued several operations: the hold ends when the marks of all
 * have passed, and no further one came for some time. */
static bool second_has_run(void) {
    if (hold.pair.second == HOST)
        return source_changed(&hold.limit);
    return hold.marks && word(&words_of_holds->passed) == last_mark &&
           now() - hold.marked_at > GRACE;
}

/* It never waits for the lock: a thread that has the lock may wait in the driver for the end of
 * this hold, or of the next one. */
static void watch_one(Thread *me, const Limit *limit) {
    bool is_released = false;
    Seen seen = {0};
    while (atomic_load(&held) == limit->number) {
        if (!is_released && now() - limit->began >= LONGEST) {
            seen = release(limit);
            is_released = true;
        }
        if (!pthread_mutex_trylock(&lock)) {
            if (atomic_load(&held) != limit->number) {
                /* It has ended. */
            } else if (is_released) {
                record_end(me, TIMER, seen);
            } else if (second_has_run()) {
                end_hold(me, SECOND);
            }
            pthread_mutex_unlock(&lock);
        }
        nanosleep(&(struct timespec){.tv_nsec = (long)PAUSE}, NULL);
    }
}

static void *watch(void *unused) {
    Thread *me = thread_me();
    pthread_mutex_lock(&limit_lock);
    while (!ends) {
        Limit limit = next_limit;
        if (!limit.number) {
            pthread_cond_wait(&changed, &limit_lock);
            continue;
        }
        next_limit.number = 0;
        pthread_mutex_unlock(&limit_lock);
        watch_one(me, &limit);
        pthread_mutex_lock(&limit_lock);
    }
    pthread_mutex_unlock(&limit_lock);
    return unused;
}

/* ---- what holds need ------------------------------------------------------------------------- */

/* 0: there is no memory at an address. */
static uint64_t identity_of(uint64_t address) {
    enum { BUFFER_ID = 7 };
    const int attributes[] = {BUFFER_ID};
    uint64_t identity = 0;
    void *out[] = {&identity};
    return driver.pointer_attributes(1, attributes, out, address) ? 0 : identity;
}

static bool is_there(uint64_t address, uint64_t identity) {
    return identity && identity_of(address) == identity;
}

static Place *place_of(uint64_t context) {
    for (size_t i = 0; i < PLACES; i++) {
        if (places[i].context == context)
            return &places[i];
    }
    return NULL;
}

static bool has_driver(void) {
    return driver.wait_value && driver.write_value && driver.host_register && driver.fill &&
           driver.memory_allocate && driver.event_create && driver.event_record &&
           driver.wait_event && driver.copy_in && driver.copy_out && driver.context_push;
}

/* Without the lock, and with the context current. Both are NULL if they are there already. */
static bool make(Words **words, Place *place) {
    enum { PORTABLE = 1, DEVICEMAP = 2, NO_TIMING = 2, PAGE = 4096 };
    if (words) {
        *words = aligned_alloc(PAGE, PAGE);
        if (!*words || driver.host_register(*words, PAGE, PORTABLE | DEVICEMAP)) {
            free(*words);
            *words = NULL;
            return false;
        }
        memset(*words, 0, PAGE);
    }
    return !place || (!driver.memory_allocate(&place->memory, BYTES) &&
                      !driver.event_create(&place->event, NO_TIMING));
}

/* Under `prepare_lock`. The driver may wait for the end of a hold meanwhile. */
static bool prepare(uint64_t context) {
    int mode = RELAXED;         /* to pin or allocate memory breaks the captures of other threads */
    Words *words = NULL;
    Place place = {.context = context};
    void *current;
    pthread_mutex_lock(&lock);
    bool needs_words = !words_of_holds, needs_place = !place_of(context);
    pthread_mutex_unlock(&lock);
    if (!needs_words && !needs_place)
        return true;
    if (!has_driver() || driver.context_push((void *)(uintptr_t)context))
        return false;
    bool is_relaxed = !driver.capture_mode(&mode);
    bool is_made =
        is_relaxed && make(needs_words ? &words : NULL, needs_place ? &place : NULL);
    uint64_t identity = words ? identity_of((uint64_t)(uintptr_t)words) : 0;
    place.identity = is_made && needs_place ? identity_of(place.memory) : 0;
    if (is_relaxed)
        driver.capture_mode(&mode);
    driver.context_pop(&current);
    pthread_mutex_lock(&lock);
    if (words && is_there((uint64_t)(uintptr_t)words, identity)) {
        words_of_holds = words;
        identity_of_words = identity;
    }
    Place *room = is_there(place.memory, place.identity) ? place_of(0) : NULL;
    if (room)
        *room = place;
    bool is_ready = words_of_holds && (!needs_place || room);
    pthread_mutex_unlock(&lock);
    return is_ready;
}

static bool words_are_gone(void) {
    return words_of_holds && !is_there((uint64_t)(uintptr_t)words_of_holds, identity_of_words);
}

static bool is_gone(const Place *place) {
    return place->context && !is_there(place->memory, place->identity);
}

/* Under the lock. Whether a context has ended, and memory of this file with it. */
static bool something_is_gone(void) {
    for (size_t i = 0; i < PLACES; i++) {
        if (is_gone(&places[i]))
            return true;
    }
    return words_are_gone();
}

/* Forgets what went with a context while nothing was recorded. */
static void forget_gone(void) {
    if (words_are_gone())
        words_of_holds = NULL;
    for (size_t i = 0; i < PLACES; i++) {
        if (is_gone(&places[i]))
            places[i] = (Place){0};
    }
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static void disarm(Pair *pair) {
    if (pair->number)
        atomic_fetch_sub(&armed, 1);
    *pair = (Pair){0};
}

static void disarm_all(void) {
    for (size_t i = 0; i < PAIRS; i++)
        disarm(&pairs[i]);
}

static bool start_watching(void) {
    sigset_t all, before;
    if (is_watching)
        return true;
    ends = false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    is_watching = !pthread_create(&watcher, NULL, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_watching;
}

/* Under the lock. */
static bool arm(const Pair *wanted) {
    Pair *known = pair_of(wanted->number), *pair = known ? known : pair_of(0);
    if (is_off || endings || !pair || !holds_left || !start_watching())
        return false;
    uint32_t left = known ? known->left : holds_of_pair;
    uint64_t pace = known ? known->pace : 0;
    *pair = *wanted;
    pair->left = left;
    pair->pace = pace;
    if (wanted->stream > PER_THREAD && !stream_is_seen(wanted->stream))
        pair->stream = 0;       /* it was destroyed since */
    if (!known)
        atomic_fetch_add(&armed, 1);
    return true;
}

/* Tries from now on to make a race happen, or to order its operations. For a thread that the
 * program does not wait for. Returns false if that is not possible now. */
PUBLIC bool recorder_arm(uint32_t number, int32_t first, int32_t second, uint64_t context_of_first,
                         uint64_t stream, uint64_t context, bool adds_edge) {
    Thread *me = is_recording() ? thread_enter() : NULL;
    if (!me)
        return false;
    Pair wanted = {number, first, second, 0, stream, context, adds_edge, 0, 0};
    pthread_mutex_lock(&prepare_lock);
    bool is_armed = context_of_first && prepare(context_of_first) &&
                    (!stream || (context && prepare(context)));
    pthread_mutex_unlock(&prepare_lock);
    pthread_mutex_lock(&lock);
    is_armed = is_armed && arm(&wanted);
    pthread_mutex_unlock(&lock);
    thread_leave(me);
    return is_armed;
}

PUBLIC void recorder_disarm(uint32_t number) {
    pthread_mutex_lock(&lock);
    Pair *pair = pair_of(number);
    if (number && pair)
        disarm(pair);
    pthread_mutex_unlock(&lock);
}

/* ---- the begin of a hold --------------------------------------------------------------------- */

static uint64_t stream_of(const Rule *rule, const uint64_t *words) {
    uint64_t stream = 0;
    if (rule->configuration != NO_WORD)
        stream = launch_stream(rule, words);
    else if (rule->stream != NO_WORD)
        stream = words[rule->stream];
    return stream ? stream : LEGACY;
}

/* A wait would become a part of the graph, and end whoever launches that. */
static bool may_queue(uint64_t stream) {
    int status = 0;
    return !driver.stream_status(stream, &status) && !status;
}

/* A copy from or to pageable memory would keep the host in the call. */
static bool is_pinned(Thread *me, const Rule *rule, const uint64_t *words) {
    Range found;
    for (int i = 0; i < 2; i++) {
        const Address *address = &rule->addresses[i];
        if (address->word == NO_WORD)
            continue;
        uint64_t at = operand_of(address, words);
        if (at && !see_memory(me, at, &found))
            return false;
    }
    return true;
}

/* Under the lock. Whether a stream of the calling thread is the one that is held. */
static bool is_held(const Thread *me, uint64_t stream) {
    return stream == hold.stream && (stream != PER_THREAD || me == hold.thread);
}

/* Under the lock. */
static void queue_canary(const Thread *me, uint64_t stream, uint64_t context) {
    const Place *place = place_of(context);
    uint32_t *canary = &words_of_holds->canaries[hold.canary_count];
    void *current;
    if (!stream || is_held(me, stream) || !place ||
        hold.canary_count == CANARIES || canary_on(stream) < hold.canary_count ||
        !may_queue(stream) || driver.context_push((void *)(uintptr_t)context))
        return;
    if (!driver.fill(place->memory, 0, 4, stream) &&
        !driver.copy_in(place->memory, words_of_holds->bytes, 4, stream) &&
        !driver.copy_out(words_of_holds->bytes + BYTES / 2, place->memory, 4, stream))
        driver.write_value(stream, (uint64_t)(uintptr_t)canary, hold.limit.number, 0);
    driver.context_pop(&current);
    hold.canary_streams[hold.canary_count++] = stream;
}

static Pair *pair_to_hold(int32_t first, uint64_t lines) {
    for (size_t i = 0; first >= 0 && i < PAIRS; i++) {
        if (pairs[i].number && pairs[i].left && (pairs[i].first == first || pairs[i].line & lines))
            return &pairs[i];
    }
    return NULL;
}

/* -1: not known. */
static int device_of(uint64_t context) {
    int device = -1;
    void *current = (void *)(uintptr_t)context;
    if (!context || driver.context_push(current))
        return -1;
    if (driver.context_device(&device))
        device = -1;
    driver.context_pop(&current);
    return device;
}

/* Returns the context of a stream, which may be another than the current one. */
static uint64_t context_of(uint64_t stream, uint64_t current) {
    void *context = NULL;
    bool is_known = stream > PER_THREAD && !driver.stream_context(stream, &context);
    return is_known ? (uint64_t)(uintptr_t)context : current;
}

/* Under the lock. */
static void begin_hold(Thread *me, Pair *pair, const Call *call, uint64_t stream,
                       uint64_t context) {
    enum { GREATER_OR_EQUAL = 0 };
    Range found;
    if (!holds_left || !words_of_holds || !may_queue(stream) ||
        ranges_find(&collectives, stream, &found))
        return;
    if ((pair->second == HOST && !call->source_count) || (pair->adds_edge && !place_of(context)))
        return;
    hold = (Hold){.pair = *pair, .stream = stream, .context = context, .thread = me};
    hold.is_free = pair->second != HOST && !pair->adds_edge && !pair->pace &&
                   pair->left < holds_of_pair;
    hold.device = device_of(context_of(stream, context));
    hold.limit = (Limit){.number = ++last_hold, .began = now()};
    if (pair->second == HOST)
        hold.limit.source = call->sources[0];
    atomic_store(&held, last_hold);
    pthread_mutex_lock(&limit_lock);        /* first: from here on it ends, whatever happens */
    next_limit = hold.limit;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&limit_lock);
    if (hold.is_free)
        return;
    int status = driver.wait_value(stream, (uint64_t)(uintptr_t)&words_of_holds->released,
                                   last_hold, GREATER_OR_EQUAL);
    if (status) {               /* of a device that cannot do it: no attribute says so */
        uint64_t told[] = {pair->number, (uint64_t)status};
        atomic_store(&held, 0);
        log_own(me, NOT_HELD, told, 2);
        disarm(pair);
        return;
    }
    holds_left--;
    pair->left--;
    if (pair->second != HOST)
        queue_canary(me, pair->stream, pair->context);
    if (!pair->left)
        disarm(pair);
    uint64_t told[] = {last_hold, hold.pair.number, stream, context, call->began,
                       hold.pair.adds_edge};
    log_own(me, HELD, told, 6);
}

/* Under the lock. */
static bool is_second(const Thread *me, int32_t stack, uint64_t stream) {
    if (stack < 0 || is_held(me, stream))
        return false;
    return stack == hold.pair.second ||
           (hold.pair.second == BY_LINE && stack_lines(stack) & hold.pair.line << 1);
}

/* Under the lock. Whether a call that waits may wait for the stream that is held. A context waits
 * for the green ones of its device as well. */
static bool covers(const Rule *rule, const uint64_t *words, uint64_t context) {
    uint64_t stream = stream_of(rule, words);
    if (rule->stream != NO_WORD && stream > PER_THREAD)
        return stream == hold.stream;
    if (rule->stream == NO_WORD && (!rule->ends_context || rule->frees != NO_WORD))
        return true;
    if (rule->stream == NO_WORD && rule->words && words[0])
        context = words[0];
    int device = device_of(context);
    return device < 0 || hold.device < 0 || device == hold.device;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* A pair of an earlier report is held before the judge knows its context. Where another thread is
 * at it, the pair is held the next time. */
static void prepare_reported(uint64_t lines, uint64_t stream, uint64_t context) {
    if (!lines || !context || !may_queue(stream) || pthread_mutex_trylock(&prepare_lock))
        return;
    prepare(context);
    pthread_mutex_unlock(&prepare_lock);
}

/* Under the lock. Whether the call must not be made while the stream is held. */
static bool is_hindered(const Thread *me, const Rule *rule, const Call *call,
                        const uint64_t *words, uint64_t context, int32_t stack) {
    uint64_t stream = stream_of(rule, words);
    bool blocks = rule->holds == BLOCKS_HOST && !is_second(me, stack, stream) &&
                  covers(rule, words, context);
    return ((blocks || call->launch.may_load) && !hold.marks) ||
           (call->launch.is_collective && is_held(me, stream));
}

/* Under the lock. An operation is to be queued while a stream is held. */
static void see_other(const Thread *me, const Rule *rule, int32_t stack, uint64_t stream,
                      uint64_t context) {
    const Place *place = place_of(hold.context);
    bool is_it = is_second(me, stack, stream);
    bool is_named = rule->holds == HELD_BACK && stream != PER_THREAD;  /* for all threads */
    if (hold.pair.second != HOST && (is_named || is_it))
        queue_canary(me, stream, context);
    if (!is_it)
        return;
    if (!hold.second_stream) {
        hold.second_stream = stream;
        hold.second_thread = me;
    }
    if (hold.is_recorded && place && may_queue(stream))
        hold.is_ordered = !driver.wait_event(stream, place->event, 0);
}

/* Under the lock. Whether the turn in which nothing is held is over: the first operation comes
 * again. */
static bool is_next_turn(int32_t stack) {
    return hold.is_free && hold.marks && word(&words_of_holds->passed) == last_mark && stack >= 0 &&
           (stack == hold.pair.first ||
            (hold.pair.first == BY_LINE && stack_lines(stack) & hold.pair.line));
}

/* Before the driver has the call. */
void holds_enter(Thread *me, const Rule *rule, const Call *call, const uint64_t *words,
                 uint64_t context) {
    uint64_t stream = stream_of(rule, words);
    int32_t stack = stack_index(me);
    bool may_hold =
        rule->holds == HELD_BACK && !call->launch.may_load && is_pinned(me, rule, words);
    uint64_t lines = may_hold && !holds_one() ? stack_lines(stack) & reported_lines : 0;
    prepare_reported(lines, stream, context);
    pthread_mutex_lock(&lock);
    if (holds_one() && is_next_turn(stack))
        end_hold(me, SECOND);
    if (rule->holds == ENDS_CONTEXT) {
        endings++;
        if (holds_one())
            end_hold(me, CALL);
    } else if (holds_one()) {
        if (is_hindered(me, rule, call, words, context, stack))
            end_hold(me, CALL);
        else
            see_other(me, rule, stack, stream, context);
    } else if (may_hold && !endings) {
        Pair *pair = pair_to_hold(stack, lines);
        if (pair)
            begin_hold(me, pair, call, stream, context);
    }
    pthread_mutex_unlock(&lock);
}

/* After the driver has queued it. */
void holds_leave(Thread *me, const Rule *rule, const uint64_t *words, uint64_t context) {
    uint64_t stream = stream_of(rule, words);
    int32_t stack = stack_index(me);
    pthread_mutex_lock(&lock);
    const Place *place = place_of(hold.context);
    if (!holds_one()) {
        /* It has ended meanwhile. */
    } else if (is_held(me, stream)) {
        if (hold.pair.adds_edge && stack == hold.pair.first && place && may_queue(stream))
            hold.is_recorded = !driver.event_record(place->event, stream);
    } else if (is_second(me, stack, stream) && may_queue(stream) &&
               (stream != PER_THREAD || me == hold.second_thread) &&
               (!hold.marks || stream == hold.second_stream) &&
               !driver.write_value(stream, (uint64_t)(uintptr_t)&words_of_holds->passed,
                                   last_mark + 1, 0)) {
        last_mark++;
        /* Else it was released while this thread was in the driver: what ran first is not known. */
        if (atomic_load(&words_of_holds->released) < hold.limit.number) {
            hold.marks++;
            hold.second_stream = stream;
            hold.marked_at = now();
            uint64_t told[] = {hold.limit.number, stream, context};
            log_own(me, MARKED, told, 3);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* After a call that may have ended a context. Most have not: a thread that used cuda.core gives up
 * its reference to the primary context when it ends. */
void holds_context_leaves(void) {
    pthread_mutex_lock(&lock);
    endings -= endings > 0;
    if (something_is_gone()) {
        disarm_all();
        is_off = true;
    }
    pthread_mutex_unlock(&lock);
}

/* The handle of a stream may be that of another one soon. */
void holds_stream_ends(Thread *me, uint64_t stream) {
    ranges_forget(&collectives, stream, stream + 1);
    if (!holds_wanted())
        return;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < PAIRS; i++) {
        if (pairs[i].stream == stream)
            pairs[i].stream = 0;
    }
    if (holds_one() && hold.stream == stream)
        end_hold(me, CALL);
    if (canary_on(stream) < hold.canary_count)
        hold.canary_streams[canary_on(stream)] = UINT64_MAX;
    pthread_mutex_unlock(&lock);
}

/* Other processes may wait for what the stream does from now on. */
void holds_see_collective(uint64_t stream) {
    Range found;
    stream = stream ? stream : LEGACY;
    if (!ranges_find(&collectives, stream, &found))
        ranges_add(&collectives, (Range){stream, stream + 1, false, 0});
}

/* ---- begin and end --------------------------------------------------------------------------- */

/* Under the lock. */
static void arm_reported(const Reported *reported, uint32_t count) {
    reported_lines = 0;
    for (uint32_t i = 0; i < count && i < MOST_REPORTED && start_watching(); i++) {
        pairs[i] = (Pair){.number = REPORTED + i, .first = BY_LINE, .left = holds_of_pair};
        pairs[i].second = reported[i].line[1] ? BY_LINE : HOST;
        pairs[i].line = 1ull << 2 * i;
        reported_lines |= pairs[i].line;
        atomic_fetch_add(&armed, 1);
    }
}

void holds_begin(uint32_t count, uint32_t of_pair, const Reported *reported,
                 uint32_t reported_count) {
    pthread_mutex_lock(&lock);
    holds_left = count;
    holds_of_pair = of_pair;
    is_off = false;
    endings = 0;
    ranges_forget(&collectives, 0, UINT64_MAX);
    if (count)
        forget_gone();
    arm_reported(reported, reported_count);
    pthread_mutex_unlock(&lock);
}

void holds_end(void) {
    Thread *me = thread_me();
    pthread_mutex_lock(&lock);
    disarm_all();
    holds_left = 0;
    if (holds_one())
        end_hold(me, OBSERVATION);
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&limit_lock);
    ends = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&limit_lock);
    if (is_watching)
        pthread_join(watcher, NULL);
    is_watching = false;
}

/* A child has the words in memory of its own, or shares them, by the system: it must not release
 * what the parent holds, nor wait for a thread that it has not. */
void holds_before_fork(void) {
    Thread *me = is_recording() ? thread_enter() : NULL;
    pthread_mutex_lock(&lock);
    if (holds_one())
        end_hold(me, OBSERVATION);
    pthread_mutex_unlock(&lock);
    if (me)
        thread_leave(me);
}

void holds_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&prepare_lock, NULL);
    pthread_mutex_init(&limit_lock, NULL);
    pthread_cond_init(&changed, NULL);
    next_limit.number = 0;
    collectives = (Ranges)NO_RANGES;
    memset(pairs, 0, sizeof pairs);
    memset(places, 0, sizeof places);
    atomic_store(&armed, 0);
    atomic_store(&held, 0);
    reported_lines = 0;
    is_watching = is_off = false;
    endings = 0;
    words_of_holds = NULL;
    holds_left = 0;
}
