/* Learns whether a kernel writes to the memory behind a parameter.
 *
 * The first bytes there are copied to pinned memory before and after a launch, on its stream, and
 * compared once the stream has passed: no thread waits. A kernel that writes the old value again
 * looks like a reader, hence several comparisons. If several parameters point to the changed bytes,
 * the writer among them is unknown: the result counts for launches with such parameters alone. */
#include "parts.h"

#include <stdlib.h>

/* One counter has both: looks, and, times `TOGETHER`, those at several parameters together. */
enum { ENOUGH_LOOKS = 3, TOGETHER = 16 };
enum { MOST_PARAMETERS = 16, LOOK_BYTES = 512, MOST_LAUNCHES = 32 };

struct Looking {                /* one launch */
    uint32_t *done;             /* page-locked; the stream writes an odd number there when it has
                                 * copied what was there before the launch, `turn` at the end */
    char *before, *after;
    uint32_t turn;              /* even */
    uint32_t count;
    bool taken, queued, ok;
    bool began;                 /* the stream will write the odd number */
    bool abandoned;             /* nothing is queued after the launch */
    bool lost;                  /* nothing tells when the stream has run what is queued: */
    uint64_t stream;            /* the next look there asks it once more to say so */
    uint64_t kernel;
    uint32_t offsets[MOST_PARAMETERS];
    uint32_t sizes[MOST_PARAMETERS];
    bool together[MOST_PARAMETERS]; /* with what another parameter points to */
    bool whole[MOST_PARAMETERS];    /* all of the memory is compared */
    uint64_t addresses[MOST_PARAMETERS];
};

static Looking lookings[MOST_LAUNCHES];
static atomic_int looking;      /* how many are taken */
static char *look_memory;
static atomic_int look_state;   /* 0: not pinned yet; 1: somebody does; 2: pinned; 3: impossible */

static bool looks_possible(void) {
    enum { SIZE = MOST_LAUNCHES * (2 * MOST_PARAMETERS * LOOK_BYTES + 64) };
    enum { PORTABLE = 1, DEVICEMAP = 2, RELAXED = 2 };
    int state = 0;
    if (!driver.copy_out || !driver.write_value || !driver.host_register || !driver.capture_mode)
        return false;
    if (!atomic_compare_exchange_strong(&look_state, &state, 1))
        return state == 2;
    int mode = RELAXED;         /* to pin memory breaks the captures of other threads */
    char *memory = aligned_alloc(4096, (SIZE + 4095) / 4096 * 4096);
    bool pinned = false;
    if (memory && !driver.capture_mode(&mode)) {
        pinned = !driver.host_register(memory, (SIZE + 4095) / 4096 * 4096, PORTABLE | DEVICEMAP);
        driver.capture_mode(&mode);
    }
    for (size_t i = 0; pinned && i < MOST_LAUNCHES; i++) {
        char *mine = memory + i * (2 * MOST_PARAMETERS * LOOK_BYTES + 64);
        lookings[i] = (Looking){.done = (uint32_t *)mine, .before = mine + 64};
        lookings[i].after = lookings[i].before + MOST_PARAMETERS * LOOK_BYTES;
        *lookings[i].done = 0;
    }
    look_memory = memory;
    atomic_store(&look_state, pinned ? 2 : 3);
    return pinned;
}

static bool looked_enough(uint8_t looks, bool together) {
    return looks % TOGETHER >= ENOUGH_LOOKS || (together && looks / TOGETHER >= ENOUGH_LOOKS);
}

static bool is_near(const Pointer *pointers, uint32_t one, uint32_t other) {
    uint64_t apart = pointers[one].value - pointers[other].value;
    return apart < LOOK_BYTES || -apart < LOOK_BYTES;
}

/* From the nearest parameters on: of thousands that are together, not all are compared. */
static bool is_together(const Pointer *pointers, uint32_t count, uint32_t which) {
    for (uint32_t i = 1; i < count; i++) {
        if ((i <= which && is_near(pointers, which, which - i)) ||
            (i < count - which && is_near(pointers, which, which + i)))
            return true;
    }
    return false;
}

/* Compares what has been copied; forgets what it was for. */
void look_at_results(Thread *me) {
    if (!atomic_load_explicit(&looking, memory_order_relaxed))
        return;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MOST_LAUNCHES; i++) {
        Looking *each = &lookings[i];
        uint32_t done = each->taken ? __atomic_load_n(each->done, __ATOMIC_ACQUIRE) : 0;
        bool copied = each->queued && done == each->turn;
        if (!copied && !(each->abandoned && done == each->turn - 1))
            continue;
        Kernel *kernel = copied ? kernel_known(each->kernel) : NULL;
        for (uint32_t k = 0; kernel && each->ok && k < each->count; k++) {
            if (each->offsets[k] >= kernel->bytes)
                continue; /* another kernel has the handle by now */
            bool wrote = memcmp(each->before + k * LOOK_BYTES, each->after + k * LOOK_BYTES,
                                each->sizes[k]);
            uint8_t *looks = &kernel->looks[each->offsets[k] / 8];
            uint8_t so_far = *looks; /* written here alone, and read without the lock */
            bool together = wrote && each->together[k];
            uint8_t now = so_far;
            if (wrote && !together)
                now = ENOUGH_LOOKS;
            else if (!looked_enough(so_far, together))
                now = (uint8_t)(so_far + (together ? TOGETHER : 1));
            __atomic_store_n(looks, now, __ATOMIC_RELAXED);
            /* What was settled while this launch was queued is not settled again by it. */
            bool settled = looked_enough(now, false) && !looked_enough(so_far, false);
            uint64_t words[] = {each->kernel, each->offsets[k], (uint64_t)wrote + together,
                                settled, each->whole[k]};
            log_own(me, LEARNED, words, 5);
        }
        each->taken = each->queued = each->abandoned = false;
        atomic_fetch_sub(&looking, 1);
    }
    pthread_mutex_unlock(&kernels_lock);
}

/* A stream that is captured is left alone, and so is the legacy default stream while another one is
 * captured: to ask it answers an error then, and harms no capture (H200). */
static bool may_look(uint64_t stream) {
    int status = 0;
    return !driver.stream_status(stream, &status) && !status && looks_possible();
}

/* `memory` is then what the parameter points to. Nobody looks at memory of the host, or at memory
 * that was freed in stream order. */
static bool wants_look(Thread *me, const Kernel *kernel, const Pointer *pointers, uint32_t count,
                       uint32_t which, Range *memory) {
    uint8_t *counter = &kernel->looks[pointers[which].offset / 8];
    uint8_t looks = __atomic_load_n(counter, __ATOMIC_RELAXED);
    return !looked_enough(looks, false) &&
           !(looked_enough(looks, true) && is_together(pointers, count, which)) &&
           memory_known(me, pointers[which].value, memory) && !memory->pinned;
}

/* Under the lock. No launch has to look at the results. */
static void lose(Looking *mine) {
    mine->lost = true;
    atomic_fetch_sub(&looking, 1);
}

/* Lets the stream say when it has run what is queued for a look. Should this fail, that may still
 * write to its place, which stays taken. */
static void mark_end(Looking *mine) {
    bool failed = driver.write_value(mine->stream, (uint64_t)(uintptr_t)mine->done, mine->turn, 0);
    pthread_mutex_lock(&kernels_lock);
    mine->queued = !failed;
    if (failed)
        lose(mine);
    pthread_mutex_unlock(&kernels_lock);
}

/* Returns a place that no look has. `*lost`: one of which the end is still to be marked on the
 * stream. */
static Looking *take_place(uint64_t stream, Looking **lost) {
    Looking *mine = NULL;
    *lost = NULL;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MOST_LAUNCHES; i++) {
        Looking *each = &lookings[i];
        if (!each->taken && !mine) {
            mine = each;
            mine->taken = true;
            mine->turn += 2;
            atomic_fetch_add(&looking, 1);
        } else if (each->lost && each->stream == stream && !*lost) {
            *lost = each;
            each->lost = false;
            atomic_fetch_add(&looking, 1);
        }
    }
    pthread_mutex_unlock(&kernels_lock);
    return mine;
}

Looking *look_before(Thread *me, const Kernel *kernel, uint64_t stream, const Pointer *pointers,
                     uint32_t count) {
    Range memory;
    bool wanted = false;
    for (uint32_t i = 0; i < count; i++) {
        wanted |= wants_look(me, kernel, pointers, count, i, &memory);
    }
    if (!wanted || !may_look(stream))
        return NULL;
    Looking *lost, *mine = take_place(stream, &lost);
    if (lost)
        mark_end(lost);
    if (!mine)
        return NULL;
    mine->kernel = kernel->handle;
    mine->stream = stream;
    mine->count = 0;
    mine->ok = true;
    for (uint32_t i = 0; i < count && mine->count < MOST_PARAMETERS; i++) {
        if (!wants_look(me, kernel, pointers, count, i, &memory))
            continue;
        uint64_t left = memory.end - pointers[i].value;
        uint32_t bytes = (uint32_t)(left < LOOK_BYTES ? left : LOOK_BYTES);
        if (!memory_is_there(pointers[i].value, bytes))
            continue;
        uint32_t k = mine->count++;
        mine->offsets[k] = (uint32_t)pointers[i].offset;
        mine->sizes[k] = bytes;
        mine->whole[k] = bytes == memory.end - memory.begin;
        mine->addresses[k] = pointers[i].value;
        mine->together[k] = is_together(pointers, count, i);
        mine->ok &= !driver.copy_out(mine->before + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    }
    mine->began = !driver.write_value(stream, (uint64_t)(uintptr_t)mine->done, mine->turn - 1, 0);
    mine->ok &= mine->began;
    return mine;
}

void look_after(Looking *mine, uint64_t stream, int result) {
    mine->ok &= !result;
    for (uint32_t k = 0; mine->ok && k < mine->count; k++)
        mine->ok &= !driver.copy_out(mine->after + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    mark_end(mine);
}

/* Under the lock. The place is free again when the stream has run the copies that precede the
 * launch. */
static void abandon(Looking *mine) {
    if (mine->began)
        mine->abandoned = true;
    else
        lose(mine);
}

void look_abandon(Looking *mine) {
    pthread_mutex_lock(&kernels_lock);
    abandon(mine);
    pthread_mutex_unlock(&kernels_lock);
}

void looks_abandon(void) {
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < MOST_LAUNCHES; i++) {
        Looking *each = &lookings[i];
        if (each->taken && !each->queued && !each->lost && !each->abandoned)
            abandon(each);
    }
    pthread_mutex_unlock(&kernels_lock);
}

void learning_in_child(void) {
    atomic_store(&look_state, 3);
    atomic_store(&looking, 0);
}
