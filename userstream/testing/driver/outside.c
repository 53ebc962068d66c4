/* Threads outside of CUDA, in a schedule.
 *
 * A thread that blocks elsewhere than in the driver, on a queue say, would keep its turn for ever.
 * So it gives the turn up; and it must not go on before it has the turn again, as the order would
 * depend on the machine if two threads ran at once (two that wait for items of one queue, say).
 * That takes to know exactly when a thread blocks, and to stop it when it comes back. Python blocks
 * by a few functions of the C library: by sem_wait and its like on a lock, and so on queues,
 * events, futures and joins, by epoll_wait in an event loop. Calls of these from Python come here
 * while a schedule is active: the addresses in its tables of imported functions are replaced.
 * (Neither a profile function nor locks of another class would see the lock in a queue that is
 * written in C.) A new thread takes part from the beginning, as Python starts it by pthread_create.
 *
 * Decisions wait until whoever was woken up beside the schedule has come to rest: threads that are
 * on their way back here, and userstream's own. Whether they run is what the kernel says of them: a
 * thread that was woken up is runnable at once, however long it waits for a processor. Only a wait
 * for the GIL looks like any other one: so it is counted as well. Time decides nothing, with one
 * exception: a thread that blocks in another function (it reads a pipe, say) is known by all
 * threads of the process being asleep for a while. */
#define _GNU_SOURCE
#include "driver.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- what the kernel says of threads -------------------------------------------------------- */

/* "number (name) state ...", where the name may have parentheses. A thread in state D runs as well:
 * it waits for a page of memory, say. */
static bool is_asleep(int file) {
    char text[256];
    ssize_t length = pread(file, text, sizeof text - 1, 0);
    if (length <= 0)
        return true;    /* it has ended */
    text[length] = 0;
    const char *end = strrchr(text, ')');
    return !end || strlen(end) < 3 || !strchr("RD", end[2]);
}

/* A thread that waits for the GIL sleeps too, but goes on soon: a thread that no schedule knows may
 * hold the GIL. If all threads sleep, so does the one that holds it. */
bool outside_is_asleep(const Thread *thread) {
    unsigned long before = atomic_load(&thread->gil_waits);
    bool asleep = is_asleep(thread->stat);
    bool waits_for_gil = before % 2 || atomic_load(&thread->gil_waits) != before;
    return asleep && (!waits_for_gil || outside_are_all_asleep());
}

/* Of the calling thread. */
void outside_open(Thread *thread) {
    char path[64];
    long number = (long)syscall(SYS_gettid);
    if (thread->stat >= 0)
        return;
    thread->is_main = number == (long)getpid();
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", number);
    thread->stat = open(path, O_RDONLY | O_CLOEXEC);
}

void outside_close(Thread *thread) {
    if (thread->stat >= 0)
        close(thread->stat);
    thread->stat = -1;
}

/* Save for the calling one. */
bool outside_are_all_asleep(void) {
    long me = (long)syscall(SYS_gettid);
    bool all = true;
    DIR *directory = opendir("/proc/self/task");
    while (directory && all) {
        char path[300];
        const struct dirent *entry = readdir(directory);
        if (!entry)
            break;
        if (entry->d_name[0] == '.' || atol(entry->d_name) == me)
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", entry->d_name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0)
            continue;
        all = is_asleep(file);
        close(file);
    }
    if (directory)
        closedir(directory);
    return all;
}

/* ---- what Python calls instead of the C library --------------------------------------------- */

/* Whoever has the turn takes the semaphore, not whoever is woken up first. So a thread that takes
 * part never waits in the C library's function. */
static int replaced_sem_wait(sem_t *semaphore) {
    schedule_shortens(CLOCK_MONOTONIC, NULL, NULL);
    int result = schedule_waits_for_semaphore(semaphore, CLOCK_MONOTONIC, NULL);
    return result == TAKES_NO_PART ? sem_wait(semaphore) : result;
}

static int replaced_sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec sooner;
    until = schedule_shortens(CLOCK_REALTIME, until, &sooner);
    int result = schedule_waits_for_semaphore(semaphore, CLOCK_REALTIME, until);
    return result == TAKES_NO_PART ? sem_timedwait(semaphore, until) : result;
}

static int replaced_sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    struct timespec sooner;
    until = schedule_shortens(clock, until, &sooner);
    int result = schedule_waits_for_semaphore(semaphore, clock, until);
    return result == TAKES_NO_PART ? sem_clockwait(semaphore, clock, until) : result;
}

/* Python itself waits for the GIL, and for nothing else, by a condition and its mutex. */
static void begin_or_end_gil_wait(void) {
    Thread *thread = this_thread_or_null();
    if (thread)
        atomic_fetch_add(&thread->gil_waits, 1);
}

static int replaced_pthread_mutex_lock(pthread_mutex_t *mutex) {
    begin_or_end_gil_wait();
    int result = pthread_mutex_lock(mutex);
    begin_or_end_gil_wait();
    return result;
}

static int replaced_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    begin_or_end_gil_wait();
    int result = pthread_cond_wait(condition, mutex);
    begin_or_end_gil_wait();
    return result;
}

static int replaced_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                                           const struct timespec *until) {
    begin_or_end_gil_wait();
    int result = pthread_cond_timedwait(condition, mutex, until);
    begin_or_end_gil_wait();
    return result;
}

/* The file of an epoll is readable when it has events. */
static bool has_events(int file) {
    struct pollfd polled = {.fd = file, .events = POLLIN};
    return poll(&polled, 1, 0) != 0;
}

static int replaced_epoll_wait(int file, struct epoll_event *events, int most, int milliseconds) {
    if (milliseconds == 0 || !schedule_gives_turn_up(has_events, file))
        return epoll_wait(file, events, most, milliseconds);
    int result = epoll_wait(file, events, most, milliseconds);
    int error = errno;
    schedule_takes_turn_back(result == 0);
    errno = error;
    return result ? result : epoll_wait(file, events, most, 0);
}

/* Others do something first, if they can. */
static int replaced_clock_nanosleep(clockid_t clock, int flags, const struct timespec *time,
                                    struct timespec *left) {
    if (!schedule_sleeps(true))
        return EDEADLK;     /* in Python, OSError */
    int result = clock_nanosleep(clock, flags, time, left);
    schedule_sleeps(false);
    return result;
}

typedef struct Start {
    Thread *thread;
    void *(*routine)(void *);
    void *argument;
} Start;

static void *start(void *given) {
    Start start = *(Start *)given;
    free(given);
    schedule_thread_begins(start.thread);
    return start.routine(start.argument);
}

static int replaced_pthread_create(pthread_t *id, const pthread_attr_t *attributes,
                                   void *(*routine)(void *), void *argument) {
    Thread *thread = schedule_new_thread();
    if (!thread)
        return pthread_create(id, attributes, routine, argument);
    Start *given = malloc(sizeof *given);
    *given = (Start){thread, routine, argument};
    int result = pthread_create(id, attributes, start, given);
    if (result) {
        thread_end(thread);
        free(given);
    }
    return result;
}

/* ---- replacing them ------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void *function;
    bool is_for_gil;            /* in Python's executable and its library; else in modules too */
} replaced[] = {
#define REPLACED(name, is_for_gil) {#name, (void *)replaced_##name, is_for_gil}
    REPLACED(sem_wait, false),
    REPLACED(sem_timedwait, false),
    REPLACED(sem_clockwait, false),
    REPLACED(epoll_wait, false),
    REPLACED(clock_nanosleep, false),
    REPLACED(pthread_create, false),
    REPLACED(pthread_mutex_lock, true),
    REPLACED(pthread_cond_wait, true),
    REPLACED(pthread_cond_timedwait, true),
#undef REPLACED
};

#if defined(__x86_64__)
enum { IMPORTED = R_X86_64_JUMP_SLOT, IMPORTED_TOO = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { IMPORTED = R_AARCH64_JUMP_SLOT, IMPORTED_TOO = R_AARCH64_GLOB_DAT };
#else
enum { IMPORTED = -1, IMPORTED_TOO = -1 };
#endif

/* The table may be for reading only (RELRO): it is again afterwards. */
static void replace_at(void **slot, void *function, bool is_read_only) {
    uintptr_t page = (uintptr_t)slot & -(uintptr_t)sysconf(_SC_PAGESIZE);
    size_t size = (uintptr_t)(slot + 1) - page;
    if (*slot == function || (is_read_only && mprotect((void *)page, size, PROT_READ | PROT_WRITE)))
        return;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    if (is_read_only)
        mprotect((void *)page, size, PROT_READ);
}

static void replace_imports(const struct dl_phdr_info *object, const ElfW(Dyn) *dynamic,
                            const ElfW(Phdr) *relro, bool has_gil) {
    const char *names = NULL;
    const ElfW(Sym) *symbols = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        void *address = (void *)dynamic->d_un.d_ptr;
        switch (dynamic->d_tag) {
        case DT_STRTAB: names = address; break;
        case DT_SYMTAB: symbols = address; break;
        case DT_JMPREL: tables[0] = address; break;
        case DT_PLTRELSZ: sizes[0] = dynamic->d_un.d_val; break;
        case DT_RELA: tables[1] = address; break;
        case DT_RELASZ: sizes[1] = dynamic->d_un.d_val; break;
        }
    }
    for (size_t i = 0; i < 2; i++) {
        for (size_t k = 0; tables[i] && k < sizes[i] / sizeof *tables[i]; k++) {
            const ElfW(Rela) *import = &tables[i][k];
            uint32_t type = ELF64_R_TYPE(import->r_info);
            if (type != IMPORTED && type != IMPORTED_TOO)
                continue;
            const char *name = names + symbols[ELF64_R_SYM(import->r_info)].st_name;
            for (size_t n = 0; n < sizeof replaced / sizeof *replaced; n++) {
                if (strcmp(name, replaced[n].name) == 0 && (has_gil || !replaced[n].is_for_gil))
                    replace_at((void **)(object->dlpi_addr + import->r_offset),
                               replaced[n].function,
                               relro && import->r_offset - relro->p_vaddr < relro->p_memsz);
            }
        }
    }
}

/* Python's executable, its library, and its modules in C: their names have "python" in them; and
 * the core of userstream. */
static int replace_in(struct dl_phdr_info *object, size_t size, void *argument) {
    const char *slash = strrchr(object->dlpi_name, '/');
    const char *file = slash ? slash + 1 : object->dlpi_name;
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Phdr) *relro = NULL;
    UNUSED(size);
    UNUSED(argument);
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(object->dlpi_addr + part->p_vaddr);
        else if (part->p_type == PT_GNU_RELRO)
            relro = part;
    }
    if (dynamic && (!*file || strstr(file, "python") || strncmp(file, "_core.", 6) == 0))
        replace_imports(object, dynamic, relro,
                        !*file || strncmp(file, "libpython", strlen("libpython")) == 0);
    return 0;
}

static int count_loads(struct dl_phdr_info *object, size_t size, void *argument) {
    UNUSED(size);
    *(unsigned long long *)argument = object->dlpi_adds;
    return 1;
}

/* Called as a schedule begins; does nothing unless something was loaded since the last one. */
void outside_replace(void) {
    static unsigned long long known;
    unsigned long long loads = 0;
    dl_iterate_phdr(count_loads, &loads);
    if (loads == known)
        return;
    known = loads;
    dl_iterate_phdr(replace_in, NULL);
}
