/* Launches: the memory to which the parameters of a kernel point. */
#include "parts.h"

uint64_t launch_stream(const Rule *rule, const uint64_t *words) {
    if (rule->configuration == NO_WORD)
        return words[rule->stream];
    const char *configuration = (const char *)(uintptr_t)words[rule->configuration];
    return configuration ? FIELD(uint64_t, configuration, 32) : 0;
}

static const char *launch_buffer(void **extra, size_t *size) {
    enum { END, BUFFER_POINTER, BUFFER_SIZE };
    const char *buffer = NULL;
    for (; extra && (uintptr_t)extra[0] != END; extra += 2) {
        if ((uintptr_t)extra[0] == BUFFER_POINTER)
            buffer = extra[1];
        else if ((uintptr_t)extra[0] == BUFFER_SIZE)
            *size = *(const size_t *)extra[1];
    }
    return buffer;
}

/* Finds what the parameters point to: each word of 8 bytes that is an address. */
static void find_pointers(Thread *me, const Kernel *kernel, void **parameters, void **extra,
                          Launch *launch) {
    Parameters words;
    uint32_t found = 0;
    size_t size = 0;
    const char *buffer = parameters ? NULL : launch_buffer(extra, &size);
    words.count = 0;
    for (uint32_t i = 0; i < kernel->count; i++) {
        uint32_t offset = kernel->offsets[i], bytes = kernel->sizes[i];
        const char *data = parameters ? parameters[i] : NULL;
        if (!parameters && buffer && offset < size) {
            data = buffer + offset;
            /* NCCL passes the begin of a large structure, as far as it has filled it. */
            bytes = bytes < size - offset ? bytes : (uint32_t)(size - offset);
        }
        for (uint32_t at = 0; data && at + 8 <= bytes && found <= MAX_POINTERS; at += 8) {
            if (words.count == MOST_WORDS)
                found += find_addresses(me, &words, launch->pointers + found);
            words.offsets[words.count] = offset + at;
            memcpy(&words.values[words.count++], data + at, sizeof *words.values);
        }
    }
    found += find_addresses(me, &words, launch->pointers + found);
    launch->pointer_count = found;
}

void launch_enter(Thread *me, const Rule *rule, const uint64_t *words, Launch *launch) {
    look_at_results(me);
    Kernel *kernel = kernel_of(me, words[rule->kernel]);
    if (!kernel)
        return;
    launch->may_load = kernel_may_load(kernel);
    launch->is_collective = kernel->is_collective;
    if (launch->is_collective)
        holds_see_collective(launch_stream(rule, words));
    void **extra = rule->extra == NO_WORD ? NULL : (void **)(uintptr_t)words[rule->extra];
    find_pointers(me, kernel, (void **)(uintptr_t)words[rule->parameters], extra, launch);
    launch->looking = look_before(me, kernel, launch_stream(rule, words), launch->pointers,
                                  launch->pointer_count);
}

void node_enter(Thread *me, const Rule *rule, const uint64_t *words, Launch *launch) {
    enum { KERNEL_NODE = 0, PARAMETERS = 16 };  /* in a CUgraphNodeParams */
    const char *node = (const char *)(uintptr_t)words[rule->node];
    if (!node || (rule->node_is_any && FIELD(int32_t, node, 0) != KERNEL_NODE))
        return;
    node += rule->node_is_any ? PARAMETERS : 0;
    uint64_t function = FIELD(uint64_t, node, 0);
    launch->kernel = function ? function : FIELD(uint64_t, node, 56);
    const Kernel *kernel = launch->kernel ? kernel_of(me, launch->kernel) : NULL;
    if (kernel)
        find_pointers(me, kernel, FIELD(void **, node, 40), FIELD(void **, node, 48), launch);
}
