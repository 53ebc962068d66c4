/* Launches: what the parameters of a kernel point to. */
#include "parts.h"

#include <string.h>

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
void launch_enter(const Rule *rule, const uint64_t *words, Launch *launch) {
    uint32_t found = 0;
    launch->looking = NULL;
    launch->pointer_count = 0;
    look_at_results();
    Kernel *kernel = kernel_acquire(words[rule->kernel]);
    if (!kernel)
        return;
    void **parameters = (void **)(uintptr_t)words[rule->parameters];
    void **extra = rule->extra == NO_WORD ? NULL : (void **)(uintptr_t)words[rule->extra];
    size_t size = 0;
    const char *buffer = parameters ? NULL : launch_buffer(extra, &size);
    Range memory[MAX_POINTERS];
    for (uint32_t i = 0; i < kernel->count; i++) {
        uint32_t offset = kernel->offsets[i], bytes = kernel->sizes[i];
        const char *data = parameters ? parameters[i] : NULL;
        if (!parameters && buffer && offset + bytes <= size)
            data = buffer + offset;
        for (uint32_t at = 0; data && at + 8 <= bytes && found < MAX_POINTERS; at += 8) {
            uint64_t word;
            memcpy(&word, data + at, sizeof word);
            if (is_memory(word, &memory[found]))
                launch->pointers[found++] = (Pointer){offset + at, word};
        }
    }
    launch->pointer_count = found;
    launch->looking =
        look_before(kernel, launch_stream(rule, words), launch->pointers, memory, found);
    kernel_release(kernel);
}
