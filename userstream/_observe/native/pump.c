/* The pump: the thread that puts the records of all threads in order, and sends them to the file of
 * the log and to a judge.
 *
 * The pump is no thread of Python, has all signals blocked, and calls no driver. Records that a
 * slow judge has not taken stay in the file of the log. Without that file they stay in the pool,
 * and in a temporary file once the pool is half full: threads never wait for a judge. */
#define _GNU_SOURCE

#include "parts.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WINDOW = 1 << 14, BUFFER = 1 << 18, MUCH = 1 << 16 };
static const uint64_t MILLISECOND = 1000000;

/* ---- descriptors ---------------------------------------------------------------------------- */

typedef struct Output {
    int descriptor;             /* -1: none, or it is gone */
    dev_t device;
    ino_t inode;
    int error;                  /* 0, or why it is gone */
    char path[4096];            /* empty: none */
} Output;

/* Returns a duplicate with a number that no program gives its own files, or closes one by one. */
static int duplicate(int descriptor) {
    enum { LEAST_NUMBER = 500 };
    int high = fcntl(descriptor, F_DUPFD_CLOEXEC, LEAST_NUMBER);
    return high >= 0 ? high : fcntl(descriptor, F_DUPFD_CLOEXEC, 3);    /* fewer are allowed */
}

static Output output_open(int descriptor) {
    struct stat status;
    Output output = {.descriptor = -1};
    char link[64];
    if (descriptor < 0)
        return output;
    output.descriptor = duplicate(descriptor);
    if (fstat(descriptor, &status))
        return output;
    output.device = status.st_dev;
    output.inode = status.st_ino;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (!S_ISREG(status.st_mode) || readlink(link, output.path, sizeof output.path - 1) < 0)
        *output.path = 0;
    return output;
}

static bool is_there(const Output *output) {
    struct stat status;
    return output->descriptor >= 0 && !fstat(output->descriptor, &status) &&
           status.st_dev == output->device && status.st_ino == output->inode;
}

/* A program that closes all descriptors may have a file of its own there by now. A file that has a
 * name is opened again. */
static bool is_ours(Output *output) {
    if (output->descriptor < 0)
        return false;
    if (is_there(output))
        return true;
    int again = *output->path ? open(output->path, O_RDWR | O_CLOEXEC) : -1;
    output->descriptor = again < 0 ? -1 : duplicate(again);
    if (again >= 0)
        close(again);
    if (is_there(output))
        return true;
    if (output->descriptor >= 0)        /* another file has the name */
        close(output->descriptor);
    output->descriptor = -1;
    output->error = EBADF;
    return false;
}

static void output_close(Output *output) {
    if (is_there(output))
        close(output->descriptor);
    output->descriptor = -1;
}

/* ---- where the records go ------------------------------------------------------------------- */

static Output file, judge, spill;
static atomic_bool ends;        /* no more records come */
static bool judges_here;        /* a thread of this process */
static bool awaits_answer;      /* of a judge in another process */
static off_t file_size;         /* of whole records */
/* What the judge has not taken is in a file from `first` to `last`. */
static Output *backlog;
static off_t first, last;

static bool append(Output *to, off_t at, const char *data, size_t size) {
    if (!is_ours(to))
        return false;
    while (size) {
        ssize_t written = pwrite(to->descriptor, data, size, at);
        if (written <= 0) {
            to->error = written ? errno : ENOSPC;
            return false;
        }
        data += written;
        at += written;
        size -= (size_t)written;
    }
    return true;
}

/* Makes the file for what the judge has not taken. It has no name. */
static bool open_spill(void) {
    if (spill.descriptor >= 0 || spill.error)
        return spill.descriptor >= 0;
    const char *directory = getenv("TMPDIR");
    char name[4096];
    snprintf(name, sizeof name, "%s/userstream-XXXXXX", directory ? directory : "/tmp");
    int descriptor = mkostemp(name, O_CLOEXEC);
    if (descriptor < 0) {
        spill.error = errno;
        return false;
    }
    unlink(name);
    spill = output_open(descriptor);
    close(descriptor);
    return spill.descriptor >= 0;
}

static bool has_judge(void) {
    return judges_here || judge.descriptor >= 0;
}

static void lose_judge(int error) {
    output_close(&judge);
    judge.error = error;
    awaits_answer = false;
    if (judges_here)
        recorder_hang_up();
}

/* Returns how many bytes the judge has taken; it is gone after an error. */
static size_t offer(const char *data, size_t size) {
    if (judges_here)
        return mailbox_put(data, size);
    if (!is_ours(&judge))
        return 0;
    ssize_t sent = send(judge.descriptor, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0)
        return (size_t)sent;
    if (errno != EAGAIN && errno != EWOULDBLOCK)
        lose_judge(errno);
    return 0;
}

static void wait_for_judge(void) {
    enum { MILLISECONDS = 5 };
    struct pollfd wanted = {.fd = judge.descriptor, .events = POLLOUT};
    if (judges_here)
        mailbox_wait(MILLISECONDS);
    else
        poll(&wanted, 1, MILLISECONDS);
}

static size_t answer_size, answer_given;    /* bytes that were received, and passed on */

/* Takes the answers of a judge in another process. */
static void listen_to_judge(void) {
    static char answer[MUCH];
    while (judge.descriptor >= 0) {
        answer_given += mailbox_put(answer + answer_given, answer_size - answer_given);
        if (answer_given < answer_size)
            return;
        answer_size = answer_given = 0;
        ssize_t got = is_ours(&judge) ? recv(judge.descriptor, answer, MUCH, MSG_DONTWAIT) : 0;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            lose_judge(got ? errno : EPIPE);
            return;
        }
        answer_size = (size_t)got;
        awaits_answer = false;
    }
}

/* Gives the judge what waits in a file, as far as it takes that now. */
static void feed(void) {
    static char buffer[MUCH];
    while (has_judge() && first < last) {
        size_t size = last - first < MUCH ? (size_t)(last - first) : MUCH;
        ssize_t got = is_ours(backlog) ? pread(backlog->descriptor, buffer, size, first) : 0;
        if (got <= 0) {         /* what comes later makes no sense without it */
            lose_judge(got ? errno : EIO);
            return;
        }
        size_t sent = offer(buffer, (size_t)got);
        if (!sent)
            return;
        first += (off_t)sent;
    }
    if (first < last)
        return;
    if (backlog == &spill && last && !ftruncate(spill.descriptor, 0))
        first = last = 0;
    if (backlog == &file && file.error) {   /* from here on there is nothing in it */
        backlog = &spill;
        first = last = 0;
    }
}

static void send_to_judge(const char *data, size_t size) {
    while (size && has_judge()) {
        size_t sent = first == last ? offer(data, size) : 0;
        data += sent;
        size -= sent;
        if (!size || sent)
            continue;
        if (backlog == &spill && (pool_is_low() || atomic_load(&ends)) && open_spill() &&
            append(&spill, last, data, size)) {
            last += (off_t)size;
            return;
        }
        wait_for_judge();
        listen_to_judge();
        feed();
    }
}

static void send_on(const char *data, size_t size) {
    if (file.descriptor >= 0 && !file.error) {
        if (append(&file, file_size, data, size)) {
            file_size += (off_t)size;
            if (backlog == &file) {
                last = file_size;
                return;
            }
        } else {                /* what is there remains a log, up to its last record */
            (void)!ftruncate(file.descriptor, file_size);
        }
    }
    send_to_judge(data, size);
}

/* ---- the order of the records --------------------------------------------------------------- */

typedef struct Found {
    const Record *record;
    Chunk *chunk;
} Found;

static Found window[WINDOW];    /* records that are whole, by their numbers */
static uint64_t expected;       /* the number of the next record */
static Chunk *emptied;          /* chunks whose records were all taken, and not yet sent on */

static void chunk_is_empty(Chunk *chunk) {
    if (chunk->log != atomic_load(&log_current))
        return;                 /* a thread was in the recorder for longer than its log */
    chunk->next_free = emptied;
    emptied = chunk;
}

static void gather_from(Written *written) {
    if (!written->reading) {
        written->reading = atomic_load_explicit(&written->first, memory_order_acquire);
        written->read = 0;
    }
    while (written->reading) {
        Chunk *chunk = written->reading;
        /* In this order: with a next chunk, the end of this one is final. */
        Chunk *next = atomic_load_explicit(&chunk->next, memory_order_acquire);
        uint32_t used = atomic_load_explicit(&chunk->used, memory_order_acquire);
        while (written->read < used) {
            const Record *record = (const Record *)(chunk->data + written->read);
            if (record->number >= expected + WINDOW)
                return;
            if (record->number >= expected) {   /* else it is of an earlier log */
                window[record->number % WINDOW] = (Found){record, chunk};
                chunk->waiting++;
            }
            written->read += record->size;
        }
        if (!next)
            return;
        chunk->is_complete = true;
        if (!chunk->waiting)
            chunk_is_empty(chunk);
        written->reading = next;
        written->read = 0;
    }
}

static void gather(void) {
    pthread_mutex_lock(&threads_lock);
    for (Thread *each = threads; each; each = each->next)
        gather_from(&each->written);
    pthread_mutex_unlock(&threads_lock);
}

/* Under the lock of the threads: whether all that one has written was sent on. Its last chunk is
 * free again. */
bool log_is_read(const Written *written) {
    Chunk *chunk = written->chunk;
    if (!chunk || written->log != atomic_load(&log_current))
        return true;
    if (written->reading != chunk || chunk->waiting ||
        written->read < atomic_load_explicit(&chunk->used, memory_order_acquire))
        return false;
    chunk_free(chunk);
    return true;
}

/* Copies records in the order of their numbers, as far as there are some. */
static size_t take(char *out) {
    uint32_t log = atomic_load(&log_current);
    size_t size = 0;
    for (Found *found; (found = &window[expected % WINDOW])->record; expected++) {
        const Record *record = found->record;
        Chunk *chunk = found->chunk;
        if (size + record->size > BUFFER)
            break;
        if (chunk->log == log) {
            memcpy(out + size, record, record->size);
            size += record->size;
        }
        found->record = NULL;
        if (!--chunk->waiting && chunk->is_complete)
            chunk_is_empty(chunk);
    }
    return size;
}

/* Sends on what there is. Returns whether there was anything. */
static bool pass_on(void) {
    static char buffer[BUFFER];
    bool any = false;
    for (size_t size; gather(), size = take(buffer); any = true) {
        send_on(buffer, size);
        while (emptied) {
            Chunk *chunk = emptied;
            emptied = chunk->next_free;
            chunk_free(chunk);
        }
    }
    return any;
}

/* ---- the thread ----------------------------------------------------------------------------- */

static pthread_t thread;
static atomic_bool is_running, has_ended;
static _Atomic uint32_t bell;
static atomic_bool asked, sleeps;
static uint64_t patience;       /* at the end, with a slow judge */

static void sleep_until_rung(uint32_t seen, uint64_t nanoseconds) {
    struct timespec time = {.tv_nsec = (long)nanoseconds};
    syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, seen, &time, NULL, 0);
}

static void ring(void) {
    atomic_fetch_add(&bell, 1);
    syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* For a thread that has taken a chunk: called often. */
void pump_wake(void) {
    if (pool_is_low() && atomic_exchange(&sleeps, false))
        ring();
}

/* For a thread that waits for an answer of the judge. */
void pump_hurry(void) {
    atomic_store(&asked, true);
    ring();
}

/* Whether it is time to send records on. A judge in this process takes the GIL: it is not given a
 * few at a time. */
static bool is_due(bool hurry, uint64_t *since) {
    enum { PATIENCE = 100 };    /* milliseconds */
    uint64_t records = log_newest() + 1 - expected;
    if (!records)
        return false;
    if (hurry || !judges_here || holds_are_on() || file.descriptor >= 0 ||
        records * sizeof(Record) > MUCH)
        return true;
    if (!*since)
        *since = now();
    return now() - *since > PATIENCE * MILLISECOND;
}

static void *run(void *unused) {
    enum { BUSY = 2, IDLE = 20 };       /* milliseconds between two looks */
    Thread *me = thread_me();
    uint64_t due_since = 0, idle_since = now(), ended_at = 0;
    uint64_t until = 0;         /* the last record that somebody waits for */
    off_t wanted = 0;           /* of the backlog, for the same reason */
    for (;;) {
        uint32_t seen = atomic_load(&bell);
        bool is_last = atomic_load(&ends);
        if (me)
            look_at_results(me);
        bool is_asked = atomic_exchange(&asked, false) || is_last;
        if (is_asked) {
            until = log_newest();
            awaits_answer = judge.descriptor >= 0;
        }
        bool hurry = is_asked || expected <= until;
        if (is_due(hurry, &due_since) && pass_on()) {
            idle_since = now();
            due_since = 0;
        }
        if (hurry || !judges_here || holds_are_on() || backlog == &spill)
            wanted = last;
        if (first < wanted || last - first > MUCH)
            feed();
        listen_to_judge();
        threads_free_ended();
        kernels_free();
        if (is_last) {
            ended_at = ended_at ? ended_at : now();
            bool sent = !has_judge() || (first == last && answer_given == answer_size);
            /* A record of a thread that does not come out of the recorder never comes. */
            if (now() - ended_at > patience)
                break;
            if (sent && (expected > log_newest() || now() - ended_at > 1000 * MILLISECOND))
                break;
            if (first < last)
                wait_for_judge();
            else
                sleep_until_rung(seen, MILLISECOND / 10);
        } else {
            uint64_t pause = now() - idle_since > 1000 * MILLISECOND ? IDLE : BUSY;
            atomic_store(&sleeps, true);
            sleep_until_rung(seen, awaits_answer ? MILLISECOND / 5 : pause * MILLISECOND);
            atomic_store(&sleeps, false);
        }
    }
    atomic_store(&has_ended, true);
    recorder_ring();
    return unused;
}

void pump_open(int to_file, int to_judge, bool to_thread) {
    file = output_open(to_file);
    judge = output_open(to_judge);
    spill = output_open(-1);
    judges_here = to_thread;
    file_size = first = last = 0;
    answer_size = answer_given = 0;
    awaits_answer = false;
    backlog = file.descriptor >= 0 ? &file : &spill;
    expected = log_newest() + 1;
    emptied = NULL;
    memset(window, 0, sizeof window);
    mailbox_open();
    atomic_store(&ends, false);
    atomic_store(&has_ended, false);
    atomic_store(&asked, false);
}

const char *pump_begin(void) {
    sigset_t all, before;
    send_on(LOG_MAGIC, sizeof LOG_MAGIC - 1);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool failed = pthread_create(&thread, NULL, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    atomic_store(&is_running, !failed);
    return failed ? "no thread can be created" : NULL;
}

void pump_end(uint64_t how_long) {
    patience = how_long;
    atomic_store(&ends, true);
    ring();
}

bool pump_has_ended(void) {
    return atomic_load(&has_ended);
}

void pump_close(void) {
    if (!atomic_exchange(&is_running, false))
        return;
    pthread_join(thread, NULL);
    output_close(&file);
    output_close(&judge);
    output_close(&spill);
}

int pump_log_error(void) {
    return file.error;
}

/* The thread of the parent does not exist here. A judge would wait for this process as well. */
void pump_in_child(void) {
    atomic_store(&is_running, false);
    output_close(&file);
    output_close(&judge);
    output_close(&spill);
    memset(window, 0, sizeof window);
    mailbox_in_child();
}
