/* The maker of records on a GPU: CUPTI's callbacks of the driver's domain.
 *
 * Declared here as far as they are used, so that no header of CUPTI is needed: these structures
 * have been the same since CUDA 8. */
#include "logger.h"

#include <stdbool.h>
#include <string.h>

enum { DRIVER_DOMAIN = 1, MAX_WORDS = 12, PER_THREAD = 2 };

typedef struct CallbackData {   /* CUpti_CallbackData */
    int site;
    const char *function_name;
    const void *parameters;     /* a structure of the arguments, in the order of C */
    const int *result;
    const char *symbol_name;
    const void *context;
} CallbackData;

typedef struct Signature {
    uint8_t count;
    uint8_t sizes[MAX_WORDS];   /* in bytes: 1, 2, 4 or 8 */
    uint8_t per_thread;         /* the word in which a stream 0 is the thread's own */
} Signature;

static Signature signatures[MAX_FUNCTIONS];

PUBLIC void logger_cupti_signature(unsigned function, const char *sizes, unsigned per_thread) {
    if (function >= MAX_FUNCTIONS)
        return;
    Signature *signature = &signatures[function];
    *signature = (Signature){.per_thread = (uint8_t)per_thread};
    for (; *sizes && signature->count < MAX_WORDS; sizes++)
        signature->sizes[signature->count++] = (uint8_t)(*sizes - '0');
}

static uint64_t word_at(const char *place, uint8_t size) {
    uint8_t byte;
    uint16_t half;
    uint32_t single;
    uint64_t word;
    switch (size) {
    case 1:
        memcpy(&byte, place, sizeof byte);
        return byte;
    case 2:
        memcpy(&half, place, sizeof half);
        return half;
    case 4:
        memcpy(&single, place, sizeof single);
        return single;
    default:
        memcpy(&word, place, sizeof word);
        return word;
    }
}

PUBLIC void logger_cupti(void *unused, int domain, uint32_t function, const CallbackData *data) {
    (void)unused;
    if (domain != DRIVER_DOMAIN || function >= MAX_FUNCTIONS)
        return;
    const Signature *signature = &signatures[function];
    uint64_t words[MAX_WORDS] = {0};
    size_t at = 0;
    for (size_t i = 0; i < signature->count; i++) {
        uint8_t size = signature->sizes[i];
        at = (at + size - 1) / size * size;
        words[i] = word_at((const char *)data->parameters + at, size);
        at += size;
    }
    if (signature->per_thread != NO_WORD && !words[signature->per_thread])
        words[signature->per_thread] = PER_THREAD;
    int result = data->site == LEAVE && data->result ? *data->result : 0;
    logger_call(data->site, function, words, signature->count, result, data->context);
}
