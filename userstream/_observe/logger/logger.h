/* What the makers of records call. */
#ifndef USERSTREAM_LOGGER_H
#define USERSTREAM_LOGGER_H

#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { ENTER = 0, LEAVE = 1 };
enum { NO_WORD = 255, MAX_FUNCTIONS = 4096 };

/* One call, when it begins and when it ends: its arguments in the order of C, each extended to 64
 * bits. `result` counts at the end. */
PUBLIC void logger_call(int site, unsigned function, const uint64_t *words, size_t count,
                        int result, const void *context);

#endif
