/* Whether a kernel writes what a parameter points to.
 *
 * The first bytes there are copied before and after a launch, on its stream, into pinned memory,
 * and compared when the stream has got there: nobody waits for it. What writes the value that was
 * there looks like a reader, hence several looks. Where several parameters of a launch point, one
 * of them wrote, and nobody can say which: that counts for such launches alone. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

enum { LOOKS = 3, TOGETHER = 16 };  /* in one counter: looks, and those that were such, times 16 */
enum { LOOKED_AT = 16, LOOK_BYTES = 512, LOOKINGS = 32 };

typedef struct Looking {        /* one launch */
    uint32_t *done;             /* the stream writes `turn` there; it lies in pinned memory */
    char *before, *after;
    uint32_t turn;
    uint32_t count;
    bool taken, queued, ok;
    uint64_t kernel;
    uint32_t offsets[LOOKED_AT];
    uint32_t sizes[LOOKED_AT];
    bool together[LOOKED_AT];   /* with what another parameter points to */
    uint64_t addresses[LOOKED_AT];
} Looking;

static Looking lookings[LOOKINGS];
static atomic_int looking;      /* how many are taken */
static char *look_memory;
static atomic_int look_state;   /* 0: not pinned yet; 1: somebody does; 2: pinned; 3: impossible */
static __thread Looking *my_looking;

static bool looks_possible(void) {
    enum { SIZE = LOOKINGS * (2 * LOOKED_AT * LOOK_BYTES + 64), PORTABLE = 1, DEVICEMAP = 2 };
    enum { RELAXED = 2 };
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
    for (size_t i = 0; pinned && i < LOOKINGS; i++) {
        char *mine = memory + i * (2 * LOOKED_AT * LOOK_BYTES + 64);
        lookings[i] = (Looking){.done = (uint32_t *)mine, .before = mine + 64};
        lookings[i].after = lookings[i].before + LOOKED_AT * LOOK_BYTES;
        *lookings[i].done = 0;
    }
    look_memory = memory;
    atomic_store(&look_state, pinned ? 2 : 3);
    return pinned;
}

static bool looked_enough(uint8_t looks, bool together) {
    return looks % TOGETHER >= LOOKS || (together && looks / TOGETHER >= LOOKS);
}

static bool is_together(const Pointer *pointers, uint32_t count, uint32_t which) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t apart = pointers[i].value - pointers[which].value;
        if (i != which && (apart < LOOK_BYTES || -apart < LOOK_BYTES))
            return true;
    }
    return false;
}

/* Compares what has been copied; forgets what it was for. */
void look_at_results(void) {
    if (!atomic_load_explicit(&looking, memory_order_relaxed))
        return;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < LOOKINGS; i++) {
        Looking *each = &lookings[i];
        if (!each->taken || !each->queued ||
            __atomic_load_n(each->done, __ATOMIC_ACQUIRE) != each->turn)
            continue;
        Kernel *kernel = kernel_known(each->kernel);
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
                now = LOOKS;
            else if (!looked_enough(so_far, together))
                now = (uint8_t)(so_far + (together ? TOGETHER : 1));
            __atomic_store_n(looks, now, __ATOMIC_RELAXED);
            /* What was settled while this launch was queued is not settled again by it. */
            bool settled = looked_enough(now, false) && !looked_enough(so_far, false);
            uint64_t words[] = {each->kernel, each->offsets[k], (uint64_t)wrote + together,
                                settled};
            log_write((Record){.function = LEARNED, .words = 4, .stack = -1}, words, NULL, 0);
        }
        each->taken = false;
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

static bool wants_look(const Kernel *kernel, const Pointer *pointers, uint32_t count,
                       uint32_t which) {
    uint8_t *counter = &kernel->looks[pointers[which].offset / 8];
    uint8_t looks = __atomic_load_n(counter, __ATOMIC_RELAXED);
    return !looked_enough(looks, false) &&
           !(looked_enough(looks, true) && is_together(pointers, count, which));
}

void look_before(const Kernel *kernel, uint64_t stream, const Pointer *pointers,
                        const Range *memory, uint32_t count) {
    bool wanted = false;
    for (uint32_t i = 0; i < count; i++) {
        wanted |= !memory[i].pinned && wants_look(kernel, pointers, count, i);
    }
    if (!wanted || !may_look(stream))
        return;
    Looking *mine = NULL;
    pthread_mutex_lock(&kernels_lock);
    for (size_t i = 0; i < LOOKINGS && !mine; i++) {
        if (!lookings[i].taken)
            mine = &lookings[i];
    }
    if (mine) {
        mine->taken = true;
        mine->queued = false;
        atomic_fetch_add(&looking, 1);
    }
    pthread_mutex_unlock(&kernels_lock);
    if (!mine)
        return;
    mine->kernel = kernel->handle;
    mine->count = 0;
    mine->ok = true;
    mine->turn++;
    for (uint32_t i = 0; i < count && mine->count < LOOKED_AT; i++) {
        if (memory[i].pinned || !wants_look(kernel, pointers, count, i))
            continue;
        uint64_t left = memory[i].end - pointers[i].value;
        uint32_t k = mine->count++;
        mine->offsets[k] = (uint32_t)pointers[i].offset;
        mine->sizes[k] = (uint32_t)(left < LOOK_BYTES ? left : LOOK_BYTES);
        mine->addresses[k] = pointers[i].value;
        mine->together[k] = is_together(pointers, count, i);
        mine->ok &= !driver.copy_out(mine->before + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    }
    my_looking = mine;
}

void look_after(uint64_t stream, int result) {
    Looking *mine = my_looking;
    my_looking = NULL;
    if (!mine)
        return;
    mine->ok &= !result;
    for (uint32_t k = 0; mine->ok && k < mine->count; k++)
        mine->ok &= !driver.copy_out(mine->after + k * LOOK_BYTES, mine->addresses[k],
                                     mine->sizes[k], stream);
    /* Should this fail, what was queued may still write there: it is not used again. */
    if (driver.write_value(stream, (uint64_t)(uintptr_t)mine->done, mine->turn, 0))
        return;
    pthread_mutex_lock(&kernels_lock);
    mine->queued = true;
    pthread_mutex_unlock(&kernels_lock);
}

void learning_in_child(void) {
    atomic_store(&look_state, 3);
}
