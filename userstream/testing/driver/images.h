/* What an image says of its kernels and variables. */
#ifndef USERSTREAM_IMAGES_H
#define USERSTREAM_IMAGES_H

#include "driver.h"

typedef struct Parameter {
    size_t offset;
    size_t size;
} Parameter;

typedef struct ImageKernel {
    char *name;
    int max_threads;            /* of a block; 0: as many as the device allows */
    unsigned required_block[3]; /* 0: any */
    int registers;
    int shared_bytes;
    int constant_bytes;
    int local_bytes;
    size_t count;
    Parameter *parameters;
} ImageKernel;

typedef struct ImageVariable {
    char *name;
    size_t size;
    CUdeviceptr address;        /* once it is asked for */
    uint64_t memory_id;         /* gone with the context */
} ImageVariable;

/* PTX, or code for a GPU. Of anything else nothing is known: then any kernel may be in it. */
typedef struct Image {
    bool is_known;
    int ptx_version;            /* compute capabilities: 10 * major + minor */
    int binary_version;
    size_t kernel_count;
    ImageKernel *kernels;
    size_t variable_count;
    ImageVariable *variables;
} Image;

Image *image_read(const void *data);
void image_free(Image *image);
const ImageKernel *image_kernel(const Image *image, const char *name);
ImageVariable *image_variable(const Image *image, const char *name);

#endif
