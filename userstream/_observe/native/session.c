/* The begin and the end of an observation: for Python, and for a process that the driver loads the
 * recorder into (CUDA_INJECTION64_PATH). */
#define _GNU_SOURCE

#include "parts.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

typedef struct Options {
    const char *cupti;          /* the path of CUPTI; NULL: the simulated driver or the usual one */
    int32_t file, judge;        /* descriptors, of which duplicates are used; -1: none */
    uint32_t judges_here;       /* the judge is a thread of this process */
    uint64_t memory;            /* in bytes: the most that waits to be sent on */
    unsigned char *(*account)(void);
    uint32_t holds;             /* how often a stream may be held, to make races happen */
    uint32_t holds_of_pair;     /* how often for the same pair of lines */
    uint32_t reported_count;
    const Reported *reported;   /* pairs to hold from the first time on */
} Options;

static pthread_mutex_t session_lock = PTHREAD_MUTEX_INITIALIZER;
static enum { NONE, RECORDS, ENDS } state;
static bool alone;              /* no thread was in the recorder at the end */
static uint64_t stacks_lost_before;
static bool is_injected;        /* by the driver: no Python ends the observation */

/* ---- the header ------------------------------------------------------------------------------ */

enum { HEADER_SIZE = 32 << 10 };

typedef struct Header {         /* pairs of texts that end in 0 */
    char data[HEADER_SIZE];
    size_t size;
} Header;

/* Without the last part of what is too long. */
static void add(Header *header, const char *name, const char *value, size_t length) {
    size_t name_size = strlen(name) + 1;
    if (header->size + name_size + 1 > HEADER_SIZE)
        return;
    memcpy(header->data + header->size, name, name_size);
    header->size += name_size;
    if (length > HEADER_SIZE - header->size - 1)
        length = HEADER_SIZE - header->size - 1;
    memcpy(header->data + header->size, value, length);
    header->size += length;
    header->data[header->size++] = 0;
}

static void add_text(Header *header, const char *name, const char *value) {
    if (value)
        add(header, name, value, strlen(value));
}

static void add_command(Header *header) {
    char text[HEADER_SIZE / 2];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text);
    if (file >= 0)
        close(file);
    for (ssize_t begin = 0, length; begin < size; begin += length + 1) {
        length = (ssize_t)strnlen(text + begin, (size_t)(size - begin));
        add(header, "command", text + begin, (size_t)length);
    }
}

/* The folder of the package: two above the one of the recorder. */
static void add_package(Header *header) {
    Dl_info info;
    if (!dladdr((void *)recorder_call, &info) || !info.dli_fname)
        return;
    char *path = realpath(info.dli_fname, NULL);
    for (int i = 0; path && i < 2; i++) {
        char *slash = strrchr(path, '/');
        if (slash)
            *slash = 0;
    }
    add_text(header, "package", path);
    free(path);
}

static void write_header(Thread *me, bool confirms) {
    static Header header;
    struct timespec wall;
    struct utsname system;
    char text[512];
    int version = 0;
    header.size = 0;
    add_text(&header, "userstream", recorder_version);
    if (python.version)
        add(&header, "python", python.version(), strcspn(python.version(), " "));
    if (!uname(&system)) {
        snprintf(text, sizeof text, "%s-%s-%s", system.sysname, system.release, system.machine);
        add_text(&header, "platform", text);
    }
    if (driver.version && !driver.version(&version)) {
        snprintf(text, sizeof text, "%d.%d%s", version / 1000, version % 1000 / 10,
                 maker_is_simulated() ? " (simulated)" : "");
        add_text(&header, "driver", text);
    }
    add_text(&header, "rank", getenv("RANK"));
    add_text(&header, "local rank", getenv("LOCAL_RANK"));
    if (getcwd(text, sizeof text))
        add_text(&header, "directory", text);
    add_package(&header);
    add_text(&header, "stacks", python_has_stacks() ? "yes" : python.thread_state ? "no" : "");
    add_text(&header, "confirm", confirms ? "yes" : "");
    add_command(&header);
    clock_gettime(CLOCK_REALTIME, &wall);
    uint64_t words[] = {LOG_MINOR, (uint64_t)getpid(), now(),
                        (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec};
    Part part = {header.data, (uint32_t)header.size};
    Record record = {.type = HEADER, .words = 4, .stack = -1};
    record.began = record.ended = words[2];
    log_write(me, record, words, &part, 1);
}

/* ---- begin and end --------------------------------------------------------------------------- */

static const char *begin(const Options *options) {
    Thread *me = thread_me();
    if (!me)
        return "there is no memory";
    const char *error = makers_begin(options->cupti);
    if (error)
        return error;
    python_find();
    kernels_prepare();
    bool is_alone = threads_wait(); /* also of one that only had to be guarded */
    if (!pool_open(options->memory, atomic_load(&log_current) + 1)) {
        makers_end();
        return "there is no memory for what is recorded";
    }
    log_begin();
    stacks_look_for(options->reported, options->reported_count);
    pump_open(options->file, options->judge, options->judges_here);
    error = pump_begin();
    if (error) {
        makers_end();
        pool_close(true);
        return error;
    }
    stacks_lost_before = stacks_lost();
    write_header(me, options->holds);
    makers_define();
    holds_begin(options->holds, options->holds_of_pair, options->reported,
                options->reported_count);
    calls_begin(options->account, is_alone);
    return NULL;
}

/* Begins to record. Returns NULL, or what was wrong. */
PUBLIC const char *recorder_begin(const Options *options) {
    pthread_mutex_lock(&session_lock);
    const char *error = state == NONE ? begin(options) : "this process is recorded already";
    if (!error)
        state = RECORDS;
    pthread_mutex_unlock(&session_lock);
    return error;
}

static void write_end(const char *reason, uint64_t patience) {
    Thread *me = thread_me();
    uint64_t words[] = {stacks_lost() - stacks_lost_before};
    Part part = {reason, (uint32_t)strlen(reason)};
    Record record = {.type = END, .words = 1, .stack = -1};
    record.began = record.ended = now();
    if (me)
        log_write(me, record, words, &part, 1);
    pump_end(patience);
}

/* Records no more. What was recorded is still being sent on: see recorder_close. */
PUBLIC void recorder_end(const char *reason) {
    pthread_mutex_lock(&session_lock);
    if (state == RECORDS) {
        holds_end();
        alone = calls_end();
        stacks_look_for(NULL, 0);
        makers_end();
        write_end(reason, UINT64_MAX);
        state = ENDS;
    }
    pthread_mutex_unlock(&session_lock);
}

/* Returns whether everything was sent on, after which another observation may begin. */
PUBLIC bool recorder_close(void) {
    pthread_mutex_lock(&session_lock);
    if (state == ENDS && pump_has_ended()) {
        pump_close();
        pool_close(alone);
        state = NONE;
    }
    bool is_closed = state != ENDS;
    pthread_mutex_unlock(&session_lock);
    return is_closed;
}

/* ---- while it records ------------------------------------------------------------------------ */

/* Writes down what is no driver call, in the order of those of the calling thread. Returns false if
 * nothing is recorded, or there is no room. */
PUBLIC bool recorder_note(unsigned type, const uint64_t *words, unsigned count, const void *data,
                          uint32_t bytes) {
    Thread *me = is_recording() ? thread_enter() : NULL;
    bool written = false;
    if (!me)
        return false;
    if (is_recording()) {
        Record record = {.type = (uint16_t)type, .words = (uint16_t)count};
        record.stack = stack_index(me);
        record.began = record.ended = now();
        written = log_write(me, record, words, &(Part){data, bytes}, 1);
    }
    thread_leave(me);
    if (type == QUESTION)
        pump_hurry();
    return written;
}

/* Whether the frames of this interpreter can be read. */
PUBLIC bool recorder_has_stacks(void) {
    python_find();
    return python_has_stacks();
}

/* Changes when another thread is recorded for the first time. */
PUBLIC unsigned recorder_threads(void) {
    return threads_seen();
}

/* Why the log could not be written any more, a number of `errno`; 0: it could. */
PUBLIC int recorder_log_error(void) {
    return pump_log_error();
}

PUBLIC const char *recorder_numbers(void) {
#define NUMBERED(name, number) #name "=" #number " "
    return OWN_RECORDS(NUMBERED);
}

PUBLIC uint32_t recorder_options_size(void) {
    return sizeof(Options);
}

static void in_child(void) {
    pthread_mutex_init(&session_lock, NULL);
    state = NONE;
    is_injected = false;
    calls_in_child();
    threads_in_child();
    pump_in_child();
    pool_in_child();
    stacks_in_child();
    streams_in_child();
    memory_in_child();
    sources_in_child();
    kernels_in_child();
    learning_in_child();
    holds_in_child();
}

__attribute__((constructor)) static void initialize(void) {
    pthread_atfork(holds_before_fork, NULL, in_child);
}

/* ---- without Python -------------------------------------------------------------------------- */

static const size_t DEFAULT_MEMORY = 256u << 20;

static uint64_t start_time(void) {
    char text[1024];
    int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[size > 0 ? size : 0] = 0;
    char *at = strrchr(text, ')');      /* behind the name, which may have anything in it */
    for (int field = 2; at && field < 22; field++) {
        at = strchr(at, ' ');
        at = at ? at + 1 : NULL;
    }
    return at ? strtoull(at, NULL, 10) : 0;
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0)
        return;
    (void)!write(file, text, strlen(text));
    close(file);
}

/* Whether this process is one that is to be recorded. */
static bool is_wanted(void) {
    const char *only = getenv("USERSTREAM_RECORD_ONLY");
    return !only || !*only || strtol(only, NULL, 10) == getpid();
}

/* Whether a descriptor of this process refers to a file. */
static bool is_open(const char *path) {
    struct stat wanted, status;
    DIR *directory = opendir("/proc/self/fd");
    bool found = false;
    if (directory && !stat(path, &wanted)) {
        for (struct dirent *each; !found && (each = readdir(directory));)
            found = !fstatat(dirfd(directory), each->d_name, &status, 0) &&
                    status.st_dev == wanted.st_dev && status.st_ino == wanted.st_ino;
    }
    if (directory)
        closedir(directory);
    return found;
}

/* Creates the log of this process. Returns its descriptor; -1: there is an error, or one already. A
 * program that replaces itself by exec keeps its process: the next one has a log of its own. */
static int create_log(char *path, size_t size, const char *directory, unsigned long long started) {
    snprintf(path, size, "%s/%d-%llu.uslog", directory, (int)getpid(), started);
    for (unsigned number = 2;; number++) {
        int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file >= 0 || errno != EEXIST)
            return file;
        if (is_open(path)) {
            errno = EEXIST;
            return -1;
        }
        snprintf(path, size, "%s/%d-%llu-%u.uslog", directory, (int)getpid(), started, number);
    }
}

static bool is_directory(const char *path) {
    struct stat status;
    return path && !stat(path, &status) && S_ISDIR(status.st_mode);
}

/* The driver calls this in cuInit. Why a process is not recorded is a file beside the logs. */
PUBLIC int InitializeInjection(void) {
    const char *directory = getenv("USERSTREAM_RECORD");
    const char *memory = getenv("USERSTREAM_RECORD_MEMORY");
    char path[4096], reason[4096];
    if (state != NONE || !is_wanted() || !is_directory(directory))
        return 1;
    unsigned long long started = start_time();
    snprintf(reason, sizeof reason, "%s/%d-%llu.why", directory, (int)getpid(), started);
    int file = create_log(path, sizeof path, directory, started);
    if (file < 0) {
        if (errno != EEXIST)    /* else it is recorded already */
            write_text(reason, strerror(errno));
        return 1;
    }
    Options options = {.cupti = getenv("USERSTREAM_CUPTI"), .file = file, .judge = -1};
    options.memory = memory ? strtoull(memory, NULL, 10) : 0;
    if (!options.memory)
        options.memory = DEFAULT_MEMORY;
    const char *error = recorder_begin(&options);
    close(file);
    if (error) {
        unlink(path);
        write_text(reason, error);
    }
    is_injected = !error;
    return 1;
}

/* Threads may be in the recorder, and the driver may be gone: nothing is taken apart. */
__attribute__((destructor)) static void at_exit(void) {
    enum { NANOSECONDS = 500000000 };
    if (!is_injected || state != RECORDS)
        return;
    calls_end();
    write_end("exit", NANOSECONDS);
    pump_close();
}
