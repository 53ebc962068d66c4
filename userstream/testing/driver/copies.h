/* What copies and fills share. */
#ifndef USERSTREAM_COPIES_H
#define USERSTREAM_COPIES_H

#include "driver.h"

/* Which operands must be memory that the driver knows. */
enum { ANYTHING = 0, KNOWN_DESTINATION = 1, KNOWN_SOURCE = 2, KNOWN_BOTH = 3 };

typedef struct Layout {
    size_t width;
    size_t height;
    size_t depth;
    size_t pitch[2];            /* of the destination and the source */
    size_t slice[2];
} Layout;

CUresult copy_submit(Stream *stream, CUdeviceptr destination, CUdeviceptr source,
                     const Layout *layout, int needs, bool synchronous);

/* Memory that the driver knows must contain the whole operand. */
CUresult copy_check_operand(CUdeviceptr address, size_t size, bool must_be_known);

/* The stream on which synchronous copies and fills run. */
CUresult copy_check_synchronous(Stream **stream);

/* Both must be contexts. */
CUresult copy_check_peers(const Context *destination, const Context *source);

#endif
