/* Objects behind handles.
 *
 * Objects of a kind live in chunks that are never given back, so any number that a program
 * passes as a handle can be checked without being followed. Drivers reuse the handle freed last:
 * so does this one, and a stale handle may therefore name a new object. */
#include "arrays.h"
#include "kernels.h"

enum { FIRST_CHUNK = 64, MAX_CHUNKS = 24 };

typedef struct Chunk {
    char *objects;
    size_t count;
} Chunk;

static struct {
    Chunk chunks[MAX_CHUNKS];   /* each twice as long as the one before */
    int chunk_count;
    Handle *free;
    size_t live;
} kinds[KINDS];

static const size_t sizes[KINDS] = {
    [KIND_CONTEXT] = sizeof(Context),
    [KIND_STREAM] = sizeof(Stream),
    [KIND_EVENT] = sizeof(Event),
    [KIND_GRAPH] = sizeof(Graph),
    [KIND_NODE] = sizeof(Node),
    [KIND_GRAPH_EXEC] = sizeof(GraphExec),
    [KIND_GREEN_CONTEXT] = sizeof(GreenContext),
    [KIND_POOL] = sizeof(Pool),
    [KIND_USER_OBJECT] = sizeof(UserObject),
    [KIND_LIBRARY] = sizeof(Library),
    [KIND_KERNEL] = sizeof(Kernel),
    [KIND_MODULE] = sizeof(Module),
    [KIND_ENTRY] = sizeof(Entry),
    [KIND_ARRAY] = sizeof(Array),
    [KIND_MIPMAPPED_ARRAY] = sizeof(MipmappedArray),
    [KIND_TEXTURE] = sizeof(Texture),
    [KIND_SURFACE] = sizeof(Texture),
    [KIND_PHYSICAL] = sizeof(Physical),
};

static void add_chunk(Kind kind) {
    size_t count = (size_t)FIRST_CHUNK << kinds[kind].chunk_count;
    char *objects = calloc(count, sizes[kind]);
    if (!objects || kinds[kind].chunk_count == MAX_CHUNKS)
        abort();
    kinds[kind].chunks[kinds[kind].chunk_count++] = (Chunk){objects, count};
    for (size_t i = count; i-- > 0;) {
        Handle *handle = (Handle *)(objects + i * sizes[kind]);
        handle->next_free = kinds[kind].free;
        kinds[kind].free = handle;
    }
}

void *handle_new(Kind kind) {
    if (!kinds[kind].free)
        add_chunk(kind);
    Handle *handle = kinds[kind].free;
    kinds[kind].free = handle->next_free;
    kinds[kind].live++;
    memset(handle, 0, sizes[kind]);
    handle->live = true;
    return handle;
}

void handle_free(Kind kind, void *object) {
    Handle *handle = object;
    handle->live = false;
    handle->next_free = kinds[kind].free;
    kinds[kind].free = handle;
    kinds[kind].live--;
}

void handle_hide(void *object) {
    ((Handle *)object)->live = false;
}

bool handle_is(Kind kind, const void *object) {
    uintptr_t address = (uintptr_t)object;
    for (int i = 0; i < kinds[kind].chunk_count; i++) {
        uintptr_t begin = (uintptr_t)kinds[kind].chunks[i].objects;
        if (address < begin || address >= begin + kinds[kind].chunks[i].count * sizes[kind])
            continue;
        return (address - begin) % sizes[kind] == 0 && ((const Handle *)object)->live;
    }
    return false;
}

size_t handle_count(Kind kind) {
    return kinds[kind].live;
}
