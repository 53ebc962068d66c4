/* Memory that several processes have: files without names, and parts of them. */
#define _GNU_SOURCE
#include "shared_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_NAME "userstream"

int shared_file_new(void) {
    return memfd_create(FILE_NAME, MFD_CLOEXEC);
}

size_t shared_file_rounded(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

CUdeviceptr shared_file_map(int file, size_t offset, size_t size, CUdeviceptr where) {
    void *pages = mmap((void *)where, size, PROT_READ | PROT_WRITE,
                       MAP_SHARED | (where ? MAP_FIXED : 0), file, (off_t)offset);
    return pages == MAP_FAILED ? 0 : (CUdeviceptr)pages;
}

uint64_t shared_file_inode(int file) {
    struct stat status;
    return fstat(file, &status) == 0 ? status.st_ino : 0;
}

/* Only a file of shared_file_new may be opened: programs pass handles that are stale. */
static bool is_shared_file(const char *path, uint64_t inode, size_t size) {
    struct stat status;
    char target[64] = "";
    return readlink(path, target, sizeof target - 1) > 0 && strstr(target, FILE_NAME) &&
           stat(path, &status) == 0 && status.st_ino == inode && (size_t)status.st_size >= size;
}

int shared_file_open(int process, int file, uint64_t inode, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    return is_shared_file(path, inode, size) ? open(path, O_RDWR | O_CLOEXEC) : -1;
}
