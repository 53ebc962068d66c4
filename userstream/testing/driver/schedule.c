/* Schedules: who is next, a stream or a thread of the program.
 *
 * Without a schedule the worker of a stream runs its operations when it can, and the load of the
 * machine decides which stream is first. Under a schedule the same workers run the same operations,
 * but an actor (a stream, or a thread of the program) runs only while it has the turn, and exactly
 * one has it. Who gets it next depends on the state of the driver, the policy and its seed, and on
 * nothing else: above all not on when a worker or a thread comes along.
 *
 * - A stream keeps the turn for one operation, or one node of a graph. Event records, and waits
 *   that are over, take no turn: they pass as soon as they are first. (To delay one is the same as
 *   to delay what follows.)
 * - A thread keeps the turn between its calls of the driver. It gives way after a call that queued
 *   something, before it asks whether something is done, and while it waits.
 * - A thread that asks again, after "not ready", is passed over until another actor has done
 *   something; so no loop of queries keeps others from their turns.
 * - Whoever could go on and was passed over MOST_PASSES times goes on: another one may work until
 *   it is told to stop, by a thread with a lower priority, or by a timer. A stream goes on until it
 *   cannot, and the next time a fraction of these passes is enough, down to one: beside a thread
 *   that keeps feeding a stream, each operation of the stream and each call of a thread that waits
 *   for it would otherwise take MOST_PASSES turns of that thread.
 * - Calls that userstream makes for its own sake (account.c of its core) take no turn. What they
 *   queue, such as a free, passes like an event record.
 *
 * The policy DRAWN is PCT (Burckhardt and others, "A Randomized Scheduler with Probabilistic
 * Guarantees of Finding Bugs", ASPLOS 2010): each actor has a priority drawn from the seed, the
 * highest goes on, and at depth - 1 choices, drawn among the first `length`, whoever would go on
 * falls below all others. Only decisions between at least two actors count as choices. */
#include "kernels.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define SIDE_DOOR __attribute__((visibility("default")))

enum { MAX_DEPTH = 64, MOST_PASSES = 2000 };
enum { IDLE_MICROSECONDS = 500, BUSY_MICROSECONDS = 20000 };
enum { RARE_MICROSECONDS = 250000 };    /* less than LONGEST_STILL */

static Stream *stream_with(const Point *point);

static const double LONGEST_SETTLING = 10;  /* seconds */
static const double LONGEST_SILENCE = 0.1;  /* of a thread that has the turn */
static const double LONGEST_STILL = 0.5;    /* while nobody can go on */
static const double LONGEST_ASKING = 3;     /* of threads that ask in vain: they may have a limit */
static const double LONGEST_DEAFNESS = 1;       /* of the main thread to signals */

typedef enum Policy {
    OFF,
    LAZY,                       /* streams run only when a thread waits for them */
    EAGER,                      /* streams run whatever is queued at once */
    DRAWN,
    EXPLORED,                   /* given turns, then as LAZY */
} Policy;

typedef struct Text {
    char *text;
    size_t size;
} Text;

static struct {
    uint64_t id;                /* of the schedule: actors of earlier ones take no part */
    Policy policy;
    uint64_t seed;
    uint64_t length;            /* the choices among which change points are drawn */
    uint64_t changes;           /* bit i: change point i is in force */
    unsigned depth;
    Actor *actors;
    Actor **end;
    unsigned threads, streams;  /* numbers given */
    Actor *turn;                /* NULL: nobody can go on, or `is_deciding` */
    Actor *last;                /* thread that had the turn */
    Actor *draining;            /* the thread that ends the schedule; only streams go on */
    bool is_deciding;
    uint64_t decisions;
    uint64_t steps;             /* what actors have done */
    uint64_t choices;           /* decisions between at least two */
    uint64_t progress;          /* changes of the driver's state */
    uint64_t failures;          /* of contexts */
    unsigned outside;           /* actors that wait outside of CUDA */
    unsigned unheard;           /* points that were reached, and that the watcher has yet to see */
    unsigned generation;        /* of the points that count for that */
    bool is_looking;            /* a thread, whether the one with the turn sleeps */
    double silent;              /* since when the thread with the turn sleeps; 0: it does not */
    double still_since;         /* that nobody has done anything */
    uint64_t still;             /* the steps and changes that there were then */
    const Explanation *deadlock;
    Text trace;
    size_t last_line;           /* of the trace: where it begins */
    const char *given;          /* turns, as " s1 t2": of EXPLORED */
    Text log;                   /* of EXPLORED: see `tell` */
} schedule = {.end = &schedule.actors, .generation = 1};

static Thread *background;      /* userstream's own threads */
static atomic_bool is_active;   /* for threads outside of the driver */

/* ---- the trace ------------------------------------------------------------------------------ */

static void name_of(const Actor *actor, char *name, size_t size) {
    const Stream *stream = actor->stream;
    if (!stream)
        snprintf(name, size, "thread %u", actor->number);
    else if (stream == stream->context->legacy)
        snprintf(name, size, "default stream of device %d", stream->context->device);
    else
        snprintf(name, size, "stream %u", actor->number);
}

static bool takes_part(const Actor *actor) {
    return schedule.policy != OFF && actor->schedule == schedule.id;
}

static void append(Text *text, const char *line, size_t length) {
    text->text = realloc(text->text, text->size + length + 1);
    memcpy(text->text + text->size, line, length + 1);
    text->size += length;
}

/* Tells `testing.schedules` what orders what: a line is a verb, an actor, and more words.
 *
 *   turn A B C...       A goes on, of B, C...
 *   touches A ...       in this turn the stream runs an operation that reads or writes memory
 *   leads A P           what A has done comes before point P
 *   follows A P         what A does from now on, in this turn too, comes after point P */
__attribute__((format(printf, 1, 2)))
static void tell(const char *format, ...) {
    char words[128];
    va_list arguments;
    if (schedule.policy != EXPLORED)
        return;
    va_start(arguments, format);
    int length = vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    append(&schedule.log, words, (size_t)length);
}

static void tell_of(const char *verb, const Actor *actor) {
    tell("%s%s %c%u", schedule.log.size ? "\n" : "", verb, actor->stream ? 's' : 't',
         actor->number);
}

static void tell_point(const char *verb, const Actor *actor, const Point *point) {
    if (takes_part(actor) && point) {
        tell_of(verb, actor);
        tell(" %p", (const void *)point);
    }
}

/* A line that repeats the one before is left out: a loop of queries may be short or long. */
__attribute__((format(printf, 2, 3)))
static void note(const Actor *actor, const char *format, ...) {
    char name[64];
    char text[256];
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    name_of(actor, name, sizeof name);
    size_t length = (size_t)snprintf(line, sizeof line, "%-9s %s\n", name, text);
    if (schedule.trace.size && strcmp(schedule.trace.text + schedule.last_line, line) == 0)
        return;
    schedule.last_line = schedule.trace.size;
    append(&schedule.trace, line, length);
}

static void describe(const Operation *operation, char *text, size_t size) {
    static const char *const words[] = {
        [NODE_MEMCPY] = "copy",
        [NODE_MEMSET] = "fill",
        [NODE_HOST] = "host function",
        [NODE_GRAPH] = "graph",
        [NODE_EVENT_RECORD] = "event record",
        [NODE_WAIT_EVENT] = "wait for an event",
        [NODE_MEM_ALLOC] = "allocation",
        [NODE_MEM_FREE] = "free",
        [NODE_BATCH_MEM_OP] = "memory operation",
        [NODE_CONDITIONAL] = "conditional node",
    };
    if (operation->type == NODE_KERNEL)
        snprintf(text, size, "kernel %s", operation->launch->definition->name);
    else if (operation->type == NODE_EMPTY)
        snprintf(text, size, "error");
    else
        snprintf(text, size, "%s", words[operation->type]);
}

/* For the report of a deadlock. */
static void report_wait(FILE *text, const Actor *actor) {
    char name[64];
    const char *waits = "waits for its turn";
    const Stream *stream = actor->stream;
    const Point *awaited = actor->awaited;
    if (stream && !stream->first)
        return;
    name_of(actor, name, sizeof name);
    fprintf(text, "\n%-9s ", name);
    if (stream && !stream->is_running)
        awaited = operation_awaits(stream->first);
    if (awaited && stream_with(awaited))
        name_of(&stream_with(awaited)->actor, name, sizeof name);
    if (actor->semaphore)
        waits = "waits for a lock, a queue or a thread";
    else if (actor->is_outside)
        waits = "waits outside of CUDA";
    else if (stream && !awaited)
        waits = "waits for a value in memory";
    else if (actor->has_slept && actor->polls)
        waits = "sleeps in a loop";
    if (awaited)
        fprintf(text, "waits for %s", stream_with(awaited) ? name : "an event");
    else
        fprintf(text, "%s", waits);
}

/* ---- actors --------------------------------------------------------------------------------- */

bool schedule_is_active(void) {
    return schedule.policy != OFF;
}

static uint64_t drawn(uint64_t seed, uint64_t what) {  /* splitmix64 */
    uint64_t x = seed + (what + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Of a stream, or of a thread. */
static void enroll(Actor *actor, Stream *stream, Thread *thread) {
    unsigned number = stream ? ++schedule.streams : ++schedule.threads;
    *actor = (Actor){.stream = stream, .thread = stream ? actor->thread : thread, .number = number,
                     .schedule = schedule.id, .most_passes = MOST_PASSES,
                     .granted = stream ? &stream->work : &thread->granted};
    /* Above the priorities of those that a change point has lowered. */
    actor->priority = drawn(schedule.seed, 2 * (uint64_t)number + (stream != NULL)) | MAX_DEPTH;
    *schedule.end = actor;
    schedule.end = &actor->next;
}

static void leave(Actor *actor) {
    for (Actor **link = &schedule.actors; *link; link = &(*link)->next) {
        if (*link == actor) {
            *link = actor->next;
            if (schedule.end == &actor->next)
                schedule.end = link;
            break;
        }
    }
    point_release(actor->awaited);
    actor->awaited = NULL;
    actor->schedule = 0;
    if (actor->is_outside)
        schedule.outside--;
    actor->is_outside = false;
    if (schedule.last == actor)
        schedule.last = NULL;
}

/* NULL: the calling thread does not have the turn. */
static Actor *acting(void) {
    Actor *actor = this_thread()->acts_for;
    return actor && takes_part(actor) && schedule.turn == actor ? actor : NULL;
}

/* ---- who can go on -------------------------------------------------------------------------- */

static bool is_free(sem_t *semaphore) {
    int value = 0;
    sem_getvalue(semaphore, &value);
    return value > 0;
}

static bool can_go_on(const Actor *actor) {
    const Stream *stream = actor->stream;
    if (stream && !stream->is_running)
        return stream_can_go_on(stream);
    if (!actor->asks || (schedule.draining && !stream && actor != schedule.draining))
        return false;
    if (actor->semaphore)
        return actor->is_late || actor->is_interrupted || is_free(actor->semaphore);
    if (!actor->is_blocked)
        return true;
    if (actor->awaited)
        return !point_pending(actor->awaited) || actor->since != schedule.failures;
    return actor->since != schedule.progress;
}

static bool asks_in_vain(const Actor *actor) {
    return actor->is_late || actor->is_interrupted ||
           (actor->queries && point_pending(actor->awaited)) ||
           (actor->polls && actor->since == schedule.steps);
}

static Stream *stream_with(const Point *point) {
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        Operation *each = actor->stream ? actor->stream->first : NULL;
        for (; each; each = each->next) {
            if (each->point == point)
                return actor->stream;
        }
    }
    return NULL;
}

/* The stream that has to go on before the point is reached; NULL: another one, or none can. */
static Actor *stream_before(const Point *point) {
    Stream *stream = point_pending(point) ? stream_with(point) : NULL;
    for (unsigned i = 0; i < schedule.streams && stream; i++) {     /* they may wait in a circle */
        const Point *awaited = operation_awaits(stream->first);
        if (!awaited)
            break;
        stream = stream_with(awaited);
    }
    return stream && can_go_on(&stream->actor) ? &stream->actor : NULL;
}

/* ---- who goes on ---------------------------------------------------------------------------- */

static bool is_lazier(const Actor *one, const Actor *other) {
    if (!one->stream != !other->stream)
        return !one->stream;
    if (!one->stream && (one == schedule.last || other == schedule.last))
        return one == schedule.last;
    return one->number < other->number;
}

static bool goes_before(const Actor *one, const Actor *other) {
    switch (schedule.policy) {
    case LAZY:
    case EXPLORED:
        return is_lazier(one, other);
    case EAGER:
        return one->stream && other->stream ? one->number < other->number
                                            : is_lazier(other, one);
    default:
        return one->priority > other->priority;
    }
}

/* The first of those that can go on. */
static Actor *first_of_all(unsigned *count) {
    Actor *best = NULL;
    *count = 0;
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        if (!can_go_on(actor) || asks_in_vain(actor))
            continue;
        ++*count;
        if (!best || goes_before(actor, best))
            best = actor;
    }
    return best;
}

/* Whoever has asked in vain before all others asks again. */
static Actor *first_to_ask_again(void) {
    Actor *best = NULL;
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        if (can_go_on(actor) && (!best || actor->asked < best->asked))
            best = actor;
    }
    return best;
}

/* The order goes on as if this had not happened: a signal comes at any time. */
static Actor *first_interrupted(void) {
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        if (actor->semaphore && actor->is_interrupted)
            return actor;
    }
    return NULL;
}

static Actor *most_overdue(void) {
    Actor *most = NULL;
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        bool is_overdue = actor->passes >= actor->most_passes && can_go_on(actor);
        if (is_overdue && (!most || actor->passes > most->passes))
            most = actor;
    }
    return most;
}

/* The passes of a stream that is overdue remain while it goes on. */
static void count_passes(void) {
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        if (!can_go_on(actor))
            actor->passes = 0;
        else if (actor != schedule.turn)
            actor->passes++;
        else if (!actor->stream || actor->passes < actor->most_passes)
            actor->passes = 0;
    }
}

/* PCT. The actor falls below all that have not fallen, and below those that fell at a change point
 * with a higher number. */
static Actor *draw(Actor *best) {
    unsigned count;
    for (unsigned i = 1; i < schedule.depth; i++) {
        if (!(schedule.changes >> i & 1) ||
            drawn(~schedule.seed, i) % schedule.length != schedule.choices)
            continue;
        best->priority = i;
        best = first_of_all(&count);
    }
    return best;
}

/* Whoever has the next of the given turns, if they can go on. */
static Actor *next_given(void) {
    char kind;
    unsigned number;
    int length = 0;
    if (schedule.policy != EXPLORED ||
        sscanf(schedule.given, " %c%u%n", &kind, &number, &length) != 2)
        return NULL;
    schedule.given += length;
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        if (actor->number == number && !actor->stream == (kind == 't') && can_go_on(actor))
            return actor;
    }
    return NULL;
}

static void look_for_deadlock(void);

static Actor *choose(void) {
    unsigned count;
    Actor *best = first_of_all(&count), *overdue = most_overdue(), *given = next_given();
    if (!best)
        return first_to_ask_again();
    schedule.still_since = 0;
    if (overdue) {
        overdue->most_passes = overdue->most_passes / 16 + 1;
        return overdue;
    }
    if (count > 1) {
        if (schedule.policy == DRAWN)
            best = draw(best);
        if (given && !asks_in_vain(given))
            best = given;
        schedule.choices++;
    }
    if (schedule.policy == LAZY && best->stream) {
        for (const Actor *actor = schedule.actors; actor; actor = actor->next) {
            Actor *needed = actor->asks ? stream_before(actor->awaited) : NULL;
            if (needed)
                return needed;
        }
    }
    return best;
}

/* A turn that was not chosen has nobody else to go on. */
static void tell_turn(bool is_chosen) {
    if (!schedule.turn)
        return;
    tell_of("turn", schedule.turn);
    for (const Actor *actor = schedule.actors; actor && is_chosen; actor = actor->next) {
        if (can_go_on(actor) && !asks_in_vain(actor))
            tell(" %c%u", actor->stream ? 's' : 't', actor->number);
    }
}

/* ---- what goes on beside the schedule ------------------------------------------------------- */

/* What account.c of userstream's core says of the calling thread: the account on which it calls,
 * and the one that is the thread's own. */
enum { PROGRAM, FUTURE, HOUSEKEEPING, NOBODY };

static const unsigned char *(*account_of_thread)(void);
static const unsigned char programs_account[2] = {PROGRAM, PROGRAM};

static const unsigned char *account(void) {
    return account_of_thread ? account_of_thread() : programs_account;
}

static bool is_in_background(void) {
    return account()[1] != PROGRAM;
}

bool is_housekeeping(void) {
    const unsigned char *now = account();
    return now[0] >= HOUSEKEEPING || (now[0] == FUTURE && now[1] != PROGRAM);
}

/* No thread that was woken up is still on the way, to the driver or to sleep, except for the
 * caller. */
static bool are_asleep(void) {
    const Thread *me = this_thread_or_null();
    const Actor *actor = schedule.outside ? schedule.actors : NULL;
    for (; actor; actor = actor->next) {
        if (actor->is_outside && !outside_is_asleep(actor->thread))
            return false;
    }
    for (const Thread *thread = background; thread; thread = thread->next_in_background) {
        if (thread != me && !outside_is_asleep(thread))
            return false;
    }
    return true;
}

/* Looks twice if there are several: one that was seen asleep may have been woken up by another one
 * that was seen afterwards. Who waits for the lock sleeps too. */
static bool is_settled(void) {
    bool are_several = schedule.outside || (background && background->next_in_background);
    return !kernels_are_running() && are_asleep() && (!are_several || are_asleep()) &&
           !is_lock_wanted();
}

static void let_others_go_on(int microseconds) {
    const struct timespec time = {.tv_nsec = microseconds * 1000L};
    Thread *me = this_thread_or_null();
    unlock();
    bool is_interrupted = nanosleep(&time, NULL) && errno == EINTR;
    lock();
    if (is_interrupted && me && me->actor.semaphore)
        me->actor.is_interrupted = true;
}

/* A schedule may end, and another one begin, while a thread has given the lock up. */
static bool is_active_still(uint64_t id) {
    return schedule.policy != OFF && schedule.id == id;
}

/* Whether userstream's threads have seen what was reached before they were `begin_looking`. Who has
 * looked twice has: the first look may have begun too early. Who is in the driver, in a callback or
 * a destructor of the program, sees nothing before others go on, and looks at all points later. */
static bool have_looked(void) {
    for (const Thread *thread = background; thread; thread = thread->next_in_background) {
        bool may_see = thread->watches && thread->looks_again && !thread->inside;
        if (may_see && thread->looks < thread->looks_before + 2)
            return false;
    }
    return true;
}

static void begin_looking(void) {
    for (Thread *thread = background; thread; thread = thread->next_in_background)
        thread->looks_before = thread->looks;
}

/* A point that was reached may be one that nobody looks at any more, as its wait was given up: it
 * is forgotten. A long wait for userstream's threads is no time in which nothing happens. */
static void settle(uint64_t id) {
    double begin = now();
    begin_looking();
    while (is_active_still(id) && now() < begin + LONGEST_SETTLING) {
        bool settled = is_settled();
        if (settled && schedule.unheard && have_looked()) {
            schedule.unheard = 0;
            schedule.generation++;
        }
        if (settled && !schedule.unheard)
            break;
        let_others_go_on(20);
    }
    double seconds = now() - begin;
    if (is_active_still(id) && schedule.still_since && seconds > LONGEST_SILENCE)
        schedule.still_since += seconds;
}

/* ---- the turn ------------------------------------------------------------------------------- */

/* Runs the first operation of a stream if it is one that takes no turn. */
static bool pass_one(void) {
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        Stream *stream = actor->stream;
        if (!stream || stream->is_running || !can_go_on(actor))
            continue;
        if (!stream->first->takes_no_turn &&
            !(stream_work_is_lost(stream) && !stream->first->runs_after_error))
            continue;
        stream_pass_first(stream);
        return true;
    }
    return false;
}

/* Threads of userstream's that came during the same decision, in the order of the list. */
static void enroll_background(void) {
    for (Thread *thread = background; thread; thread = thread->next_in_background) {
        if (takes_part(&thread->actor) && !thread->actor.number) {
            enroll(&thread->actor, NULL, thread);
            thread->actor.asks = true;
        }
    }
}

static void decide(void) {
    uint64_t id = schedule.id;
    schedule.turn = NULL;
    schedule.silent = 0;
    schedule.is_deciding = true;
    settle(id);
    while (is_active_still(id) && pass_one()) {
        if (schedule.unheard)
            settle(id);
    }
    if (!is_active_still(id))
        return;
    schedule.is_deciding = false;
    enroll_background();
    schedule.turn = first_interrupted();
    if (!schedule.turn) {
        uint64_t choices = schedule.choices;
        schedule.turn = choose();
        tell_turn(schedule.choices != choices);
        schedule.decisions++;
        count_passes();
        if (schedule.turn && asks_in_vain(schedule.turn) && !schedule.draining)
            look_for_deadlock();
        if (schedule.turn)
            schedule.turn->asked = schedule.decisions;
        if (schedule.turn && !schedule.turn->stream)
            schedule.last = schedule.turn;
    }
    if (schedule.turn && schedule.turn->semaphore)
        sem_post(&schedule.turn->thread->woken);
    else if (schedule.turn)
        pthread_cond_signal(schedule.turn->granted);
}

/* Whether a thread is in Python, or in a function of the program. */
static bool is_in_program(const Thread *thread, const Actor *actor) {
    return thread->runs_kernel || thread->in_host_function || (!actor->stream && !thread->inside);
}

/* For who waits for the turn. A thread may have blocked in a function that nobody knows of: it
 * reads a pipe, say. Then it sleeps, and so do all others, once those that wait for the turn have
 * gone back to sleep. */
static void look_at_turn(void) {
    Actor *actor = schedule.turn;
    uint64_t decision = schedule.decisions;
    const Thread *thread = actor->thread;
    if (schedule.is_looking || !thread || thread->sleeps || !is_in_program(thread, actor))
        return;
    schedule.is_looking = true;
    let_others_go_on(1000);
    schedule.is_looking = false;
    if (schedule.policy == OFF || schedule.turn != actor || schedule.decisions != decision)
        return;
    if (!outside_is_asleep(thread) || !outside_are_all_asleep()) {
        schedule.silent = 0;
    } else if (!schedule.silent) {
        schedule.silent = now();
    } else if (now() - schedule.silent > LONGEST_SILENCE) {
        actor->is_outside = true;
        schedule.outside++;
        decide();
    }
}

/* A wait for another thread may end without the driver. */
static bool is_stuck(const Actor *actor) {
    bool waits = actor->stream ? actor->stream->first != NULL : actor->asks && !actor->semaphore;
    return waits && !can_go_on(actor);
}

/* How long nothing may happen; 0: for ever, as time or somebody outside of the schedule may end a
 * wait. A loop of waits with short limits is given up after a while, and a loop of sleeps if
 * something is stuck meanwhile, or was: otherwise it waits for a process, say. */
static double patience(void) {
    double seconds = schedule.turn && !schedule.deadlock ? LONGEST_ASKING : LONGEST_STILL;
    bool only_sleeps = schedule.turn && schedule.turn->has_slept && !schedule.deadlock;
    for (const Actor *actor = schedule.actors; actor; actor = actor->next) {
        only_sleeps = only_sleeps && !is_stuck(actor);
        if (actor->is_outside || (actor->semaphore && actor->has_long_limit))
            return 0;
        if (actor->semaphore && actor->has_limit)
            seconds = LONGEST_ASKING;
    }
    return only_sleeps ? 0 : seconds;
}

static void report_deadlock(FILE *text) {
    fprintf(text, "deadlock: no stream and no thread can go on");
    for (const Actor *actor = schedule.actors; actor; actor = actor->next)
        report_wait(text, actor);
}

/* Errors of the contexts end all waits for the driver. */
static void end_waits(void) {
    char *text;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    report_deadlock(stream);
    fclose(stream);
    schedule.deadlock = explanation_new(CUDA_ERROR_LAUNCH_TIMEOUT, text);
    free(text);
    for (Context *context = context_first(); context; context = context->next) {
        if (!context->active || context->error != CUDA_SUCCESS)
            continue;
        context->explanation = schedule.deadlock;
        context_fail(context, CUDA_ERROR_LAUNCH_TIMEOUT);
    }
}

/* After a deadlock, the sleeps of threads that still sleep in a loop fail. If there are none, the
 * thread that began the schedule still waits for another one: as Ctrl-C. */
static void end_other_waits(void) {
    bool some_sleep = false;
    for (Actor *actor = schedule.actors; actor; actor = actor->next) {
        actor->sleep_fails = actor->has_slept && actor->polls;
        some_sleep |= actor->sleep_fails;
    }
    for (Actor *actor = some_sleep ? NULL : schedule.actors; actor; actor = actor->next) {
        if (!actor->semaphore || actor->number != 1 || !actor->thread->is_main ||
            actor->is_interrupted)
            continue;
        actor->is_interrupted = true;   /* it may be the calling thread */
        kill(getpid(), SIGINT);
    }
}

/* Called while nobody can go on, or threads ask in vain. */
static void look_for_deadlock(void) {
    uint64_t still = schedule.steps + schedule.progress;
    if (!schedule.still_since || schedule.still != still) {
        schedule.still_since = now();
        schedule.still = still;
    }
    double longest = patience();
    if (!longest || now() - schedule.still_since < longest)
        return;
    schedule.still_since = 0;
    if (schedule.deadlock)
        end_other_waits();
    else
        end_waits();
}

/* While nobody can go on, whoever waits looks whether that has changed: the host writes words that
 * streams wait for without telling the driver. */
static void look_around(void) {
    if (schedule.is_deciding)
        return;
    if (schedule.turn)
        look_at_turn();
    else
        decide();
    if (!schedule.turn && schedule.policy != OFF)
        look_for_deadlock();
}

static void wait_a_little(const Actor *me) {
    wait_on_or(me->granted, schedule.turn ? BUSY_MICROSECONDS : IDLE_MICROSECONDS);
    if (takes_part(me) && schedule.turn != me)
        look_around();
}

static void wait_for_turn(Actor *me) {
    me->asks = true;
    if (!schedule.turn && !schedule.is_deciding)
        decide();
    while (takes_part(me) && schedule.turn != me)
        wait_a_little(me);
    me->asks = false;
}

static void give_way(Actor *me) {
    me->asks = true;
    decide();
    wait_for_turn(me);
}

/* ---- threads of the program ----------------------------------------------------------------- */

static bool is_of_program(const Thread *thread) {
    return !thread->in_host_function && !thread->runs_kernel && !thread->in_observer &&
           !is_housekeeping();
}

static void note_background(Thread *thread) {
    if (thread->is_in_background || !is_in_background())
        return;
    thread->is_in_background = true;
    outside_open(thread);
    thread->next_in_background = background;
    background = thread;
}

void schedule_enter(void) {
    Thread *thread = this_thread();
    Actor *me = &thread->actor;
    note_background(thread);
    if (schedule.policy == OFF || !is_of_program(thread))
        return;
    if (!takes_part(me)) {
        outside_open(thread);
        if (thread->is_in_background)
            *me = (Actor){.thread = thread, .schedule = schedule.id, .granted = &thread->granted};
        else
            enroll(me, NULL, thread);
    }
    thread->acts_for = me;
    me->has_slept = false;
    if (me->is_outside) {
        me->is_outside = false;
        schedule.outside--;
    }
    if (schedule.turn != me)
        wait_for_turn(me);
}

/* A thread of userstream's, in a function of the program, has the turn for the call only. */
void schedule_leave(void) {
    Thread *thread = this_thread();
    bool has_queued = thread->has_queued;
    Actor *me = acting();
    thread->has_queued = false;
    if (!me || !is_of_program(thread))
        return;
    if (thread->is_in_background)
        decide();
    else if (has_queued)
        give_way(me);
}

void schedule_thread_ends(Thread *thread) {
    for (Thread **link = &background; *link; link = &(*link)->next_in_background) {
        if (*link == thread) {
            *link = thread->next_in_background;
            break;
        }
    }
    Actor *actor = &thread->actor;
    if (!takes_part(actor))
        return;
    bool had_turn = schedule.turn == actor;
    leave(actor);
    if (had_turn)
        decide();
}

/* ---- outside of CUDA ------------------------------------------------------------------------ */

static bool may_act(void) {
    return atomic_load_explicit(&is_active, memory_order_relaxed) && this_thread_or_null() &&
           !is_housekeeping();
}

/* A thread of userstream's that looks at watched points every now and then does so more often, and
 * one that looks at others, less often: it waits for a stream to wake it up, and the clock must not
 * be sooner. */
const struct timespec *schedule_shortens(clockid_t clock, const struct timespec *until,
                                         struct timespec *sooner) {
    Thread *thread = this_thread_or_null();
    if (!thread || !thread->is_in_background)
        return until;
    thread->looks++;
    thread->looks_again = false;
    if (!until)
        return NULL;
    time_from_now(sooner, clock, 1000000);
    thread->looks_again = time_is_before(until, sooner);
    if (!thread->looks_again || !atomic_load(&is_active))
        return until;
    if (!thread->watches) {
        time_from_now(sooner, clock, RARE_MICROSECONDS);
        return sooner;
    }
    time_from_now(sooner, clock, IDLE_MICROSECONDS);
    return time_is_before(until, sooner) ? until : sooner;
}

/* By a semaphore of the thread's own: signals end the wait, so that Python sees to them. */
static bool wait_without_lock(Thread *thread) {
    struct timespec until;
    time_from_now(&until, CLOCK_REALTIME, schedule.turn ? BUSY_MICROSECONDS : IDLE_MICROSECONDS);
    unlock();
    bool is_interrupted = sem_timedwait(&thread->woken, &until) && errno == EINTR;
    lock();
    return is_interrupted;
}

/* Time is up only when nobody else can go on, as the clock must not decide on the order. While
 * nobody can, or for MOST_PASSES decisions of others, the main thread returns to Python every now
 * and then: another thread may have handled a signal, which has not interrupted the wait. */
static int wait_for_semaphore(Actor *me, clockid_t clock, const struct timespec *until) {
    Thread *thread = me->thread = this_thread();
    struct timespec soon;
    struct timespec time;
    double began = now();
    uint64_t decisions = schedule.decisions;
    time_from_now(&soon, clock, 1000000);
    me->has_limit = until;
    me->has_long_limit = until && time_is_before(&soon, until);
    me->asks = true;
    decide();
    while (takes_part(me) && schedule.turn != me) {
        bool is_interrupted = wait_without_lock(thread);
        bool is_deaf = thread->is_main && now() - began > LONGEST_DEAFNESS;
        if (is_interrupted ||
            (is_deaf && (!schedule.turn || schedule.decisions - decisions > MOST_PASSES)))
            me->is_interrupted = true;
        clock_gettime(clock, &time);
        me->is_late = until && !time_is_before(&time, until);
        if (takes_part(me) && schedule.turn != me)
            look_around();
    }
    clock_gettime(clock, &time);
    bool is_time_up = until && !time_is_before(&time, until) && !me->is_interrupted;
    me->asks = me->is_late = me->is_interrupted = false;
    if (!takes_part(me))
        return TAKES_NO_PART;
    if (me->has_long_limit)
        schedule.still_since = 0;
    if (sem_trywait(me->semaphore) == 0)
        return 0;
    errno = is_time_up ? ETIMEDOUT : EINTR;
    return -1;
}

int schedule_waits_for_semaphore(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    if (!may_act())
        return TAKES_NO_PART;
    int result = TAKES_NO_PART;
    lock();
    Actor *me = acting();
    for (bool settled = false; me && result == TAKES_NO_PART;) {
        if (sem_trywait(semaphore) == 0) {  /* Python also calls for one that is free */
            result = 0;
        } else if (settled) {
            me->semaphore = semaphore;
            result = wait_for_semaphore(me, clock, until);
            me->semaphore = NULL;
            break;
        } else if (!(settled = is_settled())) {
            let_others_go_on(20);
        }
    }
    unlock();
    return result;
}

bool schedule_gives_turn_up(bool (*is_ready)(int file), int file) {
    if (!may_act())
        return false;
    lock();
    Actor *me = acting();
    bool settled = false;
    while (me && !settled) {
        settled = is_settled();
        if (is_ready(file))
            me = NULL;
        else if (!settled)
            let_others_go_on(20);
    }
    if (me) {
        decide();
        me->thread = this_thread();
        me->is_outside = takes_part(me);
        schedule.outside += me->is_outside;
    }
    unlock();
    return me;
}

void schedule_takes_turn_back(bool is_late) {
    lock();
    Actor *me = this_thread()->acts_for;
    if (me && takes_part(me)) {
        if (me->is_outside)
            schedule.outside--;
        me->is_outside = false;
        me->is_late = is_late;
        schedule.still_since = 0;
        wait_for_turn(me);
        me->is_late = false;
    }
    unlock();
}

/* A sleep orders nothing, and the thread may go on first. But if it sleeps again and has not called
 * the driver since, it waits for something that others do. False: nobody can do it any more. */
bool schedule_sleeps(bool begins) {
    if (!may_act())
        return true;
    lock();
    Actor *me = acting();
    bool fails = false;
    this_thread()->sleeps = me && begins;
    if (me && begins) {
        me->polls = me->has_slept;
        me->since = schedule.steps;
        me->sleep_fails = false;
        give_way(me);
        me->polls = false;
        me->has_slept = true;
        fails = me->sleep_fails;
        this_thread()->sleeps = !fails;
    }
    unlock();
    return !fails;
}

Thread *schedule_new_thread(void) {
    Thread *thread = NULL;
    if (!may_act())
        return NULL;
    lock();
    Actor *me = acting();
    if (me && !me->stream) {
        thread = thread_new();
        enroll(&thread->actor, NULL, thread);
        thread->actor.asks = true;
    }
    unlock();
    return thread;
}

void schedule_thread_begins(Thread *thread) {
    thread_becomes(thread);
    lock();
    outside_open(thread);
    thread->acts_for = &thread->actor;
    if (takes_part(&thread->actor))
        wait_for_turn(&thread->actor);
    thread->actor.asks = false;
    unlock();
}

/* ---- waits and queries ---------------------------------------------------------------------- */

static void set_awaited(Actor *actor, Point *point) {
    point_retain(point);
    point_release(actor->awaited);
    actor->awaited = point;
}

static void note_awaited(const Actor *me, const char *does) {
    const Stream *stream = stream_with(me->awaited);
    char name[64] = "an event";
    if (stream && stream->internal)
        snprintf(name, sizeof name, "device %d", stream->context->device);
    else if (stream)
        name_of(&stream->actor, name, sizeof name);
    note(me, "%s %s", does, name);
}

/* Among given turns a query waits, as far as it can: its answer is no choice. */
void schedule_before_query(Point *point) {
    Actor *me = acting();
    if (!me || !is_of_program(this_thread()) || account()[0] != PROGRAM)
        return;
    if (schedule.policy == EXPLORED) {
        set_awaited(me, point);
        me->queries = true;
    }
    give_way(me);
    if (me->queries && !point_pending(me->awaited))
        tell_point("follows", me, me->awaited);
    me->queries = false;
}

/* What the watcher of userstream sees at an event it tells the program: decisions wait for that. */
void schedule_after_query(Point *point) {
    bool is_pending = point_pending(point);
    Actor *me = acting();
    if (point && point->is_watched)
        this_thread()->watches = true;
    if (!is_pending)
        schedule_forget(point);
    if (!me || !is_of_program(this_thread()) || account()[0] != PROGRAM)
        return;
    set_awaited(me, is_pending ? point : NULL);
    me->has_queried = me->polls = is_pending;
    me->since = schedule.steps;
    if (is_pending)
        note_awaited(me, "queries");
}

void schedule_recorded(Point *point) {
    if (schedule.policy != OFF && account()[0] == FUTURE && acting())
        point->is_watched = true;
}

void schedule_reached(Point *point) {
    if (point->is_watched) {
        schedule.unheard++;
        point->unheard = schedule.generation;
    }
}

void schedule_forget(Point *point) {
    if (!point)
        return;
    schedule.unheard -= point->unheard == schedule.generation;
    point->unheard = 0;
    point->is_watched = false;
}

void schedule_awaits(Point *point) {
    Actor *me = acting();
    if (!me)
        return;
    if (!point)
        tell_point("follows", me, me->awaited);
    set_awaited(me, point);
    me->has_queried = false;
    if (point)
        note_awaited(me, "waits for");
}

bool schedule_waits(bool polls) {
    Thread *thread = this_thread();
    Actor *me = acting();
    if (thread->acts_for)
        thread->acts_for->stands = true;
    if (!me) {
        if (thread->acts_for)
            thread->acts_for->since = schedule.progress;
        return false;
    }
    if (me->has_queried)
        set_awaited(me, NULL);
    me->has_queried = false;
    me->polls = polls;
    me->is_blocked = !polls;
    me->since = polls ? schedule.steps : me->awaited ? schedule.failures : schedule.progress;
    give_way(me);
    me->polls = me->is_blocked = false;
    return true;
}

void schedule_resumes(bool polls) {
    Actor *me = this_thread()->acts_for;
    if (!me)
        return;
    me->stands = false;
    if (!takes_part(me) || schedule.turn == me)
        return;
    me->polls = polls;
    me->is_blocked = false;
    wait_for_turn(me);
    me->polls = false;
}

void schedule_note_progress(void) {
    schedule.progress++;
}

void schedule_note_failure(void) {
    schedule.failures++;
}

/* ---- streams -------------------------------------------------------------------------------- */

void schedule_queued(Stream *stream, Operation *operation) {
    if (schedule.policy == OFF)
        return;
    if (!takes_part(&stream->actor))
        enroll(&stream->actor, stream, NULL);
    Thread *thread = this_thread();
    Actor *me = is_of_program(thread) ? acting() : NULL;
    if (!me)
        operation->takes_no_turn = true;
    if (operation->takes_no_turn)
        return;
    char text[128];
    char name[64];
    tell_point("leads", me, operation->point);
    describe(operation, text, sizeof text);
    name_of(&stream->actor, name, sizeof name);
    note(me, "queues %s on %s", text, name);
    thread->has_queued = true;
    me->polls = false;
    schedule.steps++;
}

bool schedule_grants(const Stream *stream) {
    return !takes_part(&stream->actor) || schedule.turn == &stream->actor;
}

/* An idle stream is woken up when it gets the turn, or has ended. */
void schedule_wait_for_work(Stream *stream) {
    if (takes_part(&stream->actor) && stream->first)
        wait_a_little(&stream->actor);
    else
        wait_on(&stream->work);
}

void schedule_operation_begins(Stream *stream) {
    tell_point("follows", &stream->actor, stream->first->point);
}

void schedule_operation_ends(Stream *stream) {
    tell_point("follows", &stream->actor, operation_awaits(stream->first));
    tell_point("leads", &stream->actor, stream->first->point);
}

static void tell_touch(CUdeviceptr address, size_t size, bool writes) {
    while (size) {              /* what is mapped side by side lies in several physical places */
        const Memory *memory = memory_find(address);
        const Memory *next = memory ? memory_behind(memory, address + size) : NULL;
        size_t part = next ? next->address - address : size;
        bool is_of_host = !memory || memory->kind != MEMORY_DEVICE;
        tell(" %s%s:%llx:%zx", is_of_host ? "h" : "", writes ? "w" : "r",
             (unsigned long long)physical_place(address), part);
        address += part;
        size -= part;
    }
}

/* A kernel may write all of the memory to which it has an address, and that of its surfaces. */
static void tell_parameters(const Launch *launch) {
    CUdeviceptr address;
    for (size_t i = 0; i + sizeof address <= launch->size; i += sizeof address) {
        memcpy(&address, launch->parameters + i, sizeof address);
        const Memory *memory = memory_find(address);
        if (memory)
            tell_touch(memory->address, memory->size, true);
        else
            texture_touches(address, tell_touch);
    }
}

static void tell_step(const Actor *actor, const Operation *operation) {
    tell_of("touches", actor);
    if (operation->type == NODE_MEMCPY)
        copy_touches(operation, tell_touch);
    else if (operation->type == NODE_MEMSET)
        fill_touches(operation, tell_touch);
    else if (operation->type == NODE_BATCH_MEM_OP)
        batch_touches(operation, tell_touch);
    else if (operation->type == NODE_KERNEL)
        tell_parameters(operation->launch);
    else
        tell(operation->type == NODE_HOST ? " host" : " anything");
}

static void note_step(Stream *stream, const Operation *operation, const char *where) {
    char text[128];
    tell_step(&stream->actor, operation);
    describe(operation, text, sizeof text);
    note(&stream->actor, "runs %s%s", text, where);
    schedule.steps++;
}

void schedule_step_begins(Stream *stream) {
    stream->is_running = true;
    if (takes_part(&stream->actor) && stream->first->type != NODE_GRAPH)
        note_step(stream, stream->first, "");
}

void schedule_step_ends(Stream *stream) {
    stream->is_running = false;
    if (takes_part(&stream->actor) && schedule.turn == &stream->actor)
        decide();
}

void schedule_node_begins(Stream *stream, const Operation *operation, bool is_first) {
    if (!takes_part(&stream->actor) || schedule.turn != &stream->actor || operation->takes_no_turn)
        return;
    if (!is_first)
        give_way(&stream->actor);
    if (takes_part(&stream->actor))
        note_step(stream, operation, " of a graph");
}

void schedule_stream_ends(Stream *stream) {
    Actor *actor = &stream->actor;
    if (!takes_part(actor))
        return;
    bool had_turn = schedule.turn == actor;
    leave(actor);
    if (had_turn)
        decide();
}

/* ---- the side door -------------------------------------------------------------------------- */

SIDE_DOOR void userstream_take_account(const unsigned char *(*function)(void));
SIDE_DOOR bool userstream_schedule_begin(int policy, uint64_t seed, unsigned depth, uint64_t length,
                                         uint64_t changes, const char *given);
SIDE_DOOR const char *userstream_schedule_log(void);
SIDE_DOOR bool userstream_schedule_end(uint64_t *choices);
SIDE_DOOR const char *userstream_schedule_trace(void);
SIDE_DOOR const char *userstream_schedule_deadlock(void);

void userstream_take_account(const unsigned char *(*function)(void)) {
    lock();
    account_of_thread = function;
    unlock();
}

/* Whether workers run operations, or are about to. */
static bool is_anything_running(void) {
    for (Context *context = context_first(); context; context = context->next) {
        for (Stream *stream = context->streams; stream; stream = stream->next) {
            const Actor *actor = &stream->actor;
            bool gave_way = actor->polls || actor->since == schedule.progress;
            if (stream->first && !(actor->stands && gave_way))
                return true;
        }
    }
    return false;
}

static void enroll_busy_streams(void) {
    for (Context *context = context_first(); context; context = context->next) {
        for (Stream *stream = context->streams; stream; stream = stream->next) {
            if (!stream->first)
                continue;
            enroll(&stream->actor, stream, NULL);
            stream->actor.asks = stream->actor.is_blocked = true;
            stream->actor.since = schedule.progress;
        }
    }
}

/* False: there is one already. What was queued before runs first, as far as it can. */
bool userstream_schedule_begin(int policy, uint64_t seed, unsigned depth, uint64_t length,
                               uint64_t changes, const char *given) {
    static const double LONGEST = 5;
    lock();
    outside_replace();
    bool is_possible = schedule.policy == OFF && !shut_down && !forked;
    double end = now() + LONGEST;
    while (is_possible && is_anything_running() && now() < end)
        wait_for_progress_or(1000);
    is_possible = is_possible && schedule.policy == OFF;
    if (is_possible) {
        Thread *me = this_thread();
        schedule.id++;
        schedule.seed = seed;
        schedule.depth = depth;
        schedule.length = length;
        schedule.changes = changes;
        schedule.threads = schedule.streams = 0;
        schedule.steps = schedule.choices = 0;
        schedule.trace.size = schedule.log.size = schedule.last_line = 0;
        schedule.given = policy == EXPLORED ? given + strlen("t1") : "";    /* it has the turn */
        schedule.actors = NULL;
        schedule.end = &schedule.actors;
        schedule.policy = (Policy)policy;
        schedule.outside = schedule.unheard = 0;
        schedule.still_since = 0;
        schedule.is_deciding = false;
        schedule.deadlock = NULL;
        schedule.generation++;
        atomic_store(&is_active, true);
        outside_open(me);
        enroll(&me->actor, NULL, me);
        me->acts_for = &me->actor;
        schedule.turn = schedule.last = &me->actor;
        enroll_busy_streams();
    }
    unlock();
    return is_possible;
}

/* From now on workers run what is queued as soon as they can. */
void schedule_stop(void) {
    if (schedule.policy == OFF)
        return;
    schedule.policy = OFF;
    atomic_store(&is_active, false);
    schedule.is_deciding = false;
    schedule.turn = schedule.draining = NULL;
    while (schedule.actors) {
        Actor *actor = schedule.actors;
        leave(actor);
        pthread_cond_broadcast(actor->granted);
        if (actor->semaphore)
            sem_post(&actor->thread->woken);
    }
    progress();
}

/* The child has none of the threads of its parent. */
void schedule_forked(void) {
    schedule_stop();
    background = NULL;
    outside_close(this_thread());
}

static void drain(Actor *me) {
    schedule.draining = me;
    do {
        me->polls = true;
        me->since = schedule.steps;
        give_way(me);
    } while (takes_part(me) && me->since != schedule.steps);
}

/* What is queued runs, as far as it can. False: the schedule has ended already. */
bool userstream_schedule_end(uint64_t *choices) {
    lock();
    Actor *me = acting();
    if (me)
        drain(me);
    bool was_active = schedule.policy != OFF;
    *choices = schedule.choices;
    Context *context = schedule.deadlock ? context_first() : NULL;
    for (; context; context = context->next) {
        if (context->active && context->explanation == schedule.deadlock) {
            context->error = CUDA_SUCCESS;
            context->explanation = NULL;
        }
    }
    schedule_stop();
    unlock();
    return was_active;
}

/* Of the last schedule, until the next one begins. */
const char *userstream_schedule_trace(void) {
    return schedule.trace.size ? schedule.trace.text : "";
}

const char *userstream_schedule_log(void) {
    return schedule.log.size ? schedule.log.text : "";
}

/* NULL: there was none. */
const char *userstream_schedule_deadlock(void) {
    const char *newline = schedule.deadlock ? strchr(schedule.deadlock->text, '\n') : NULL;
    return newline ? newline + 1 : NULL;
}
