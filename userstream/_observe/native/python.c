/* Offsets in CPython's structures, by which a thread reads its own frames without the GIL.
 *
 * The structures of a minor version do not change. A build that is not known here, or whose objects
 * are of other types than expected, has no stacks: reports say so, and are the same but for the
 * lines. */
#define _GNU_SOURCE

#include "parts.h"

#include <dlfcn.h>
#include <stdlib.h>

Python python;

/* What `offsetof` says with the headers of each version, for 64 bits and a build with the GIL. */
#define COMMON \
    .code_filename = 112, .code_name = 128, .code_lines = 136, .frame_instruction = 56, \
    .text_length = 16, .text_state = 32, .bytes_length = 16, .bytes_data = 32

static const Layout layout_3_11 = {
    COMMON, .state_frame = 56, .indirect_frame = 8, .frame_code = 32, .frame_previous = 48,
    .frame_owner = 69, .owner_c_stack = 255, .code_first_line = 72, .code_version = -1,
    .code_instructions = 184, .text_ascii = 48, .text_compact = 72};
static const Layout layout_3_12 = {
    COMMON, .state_frame = 56, .indirect_frame = 0, .frame_code = 0, .frame_previous = 8,
    .frame_owner = 70, .owner_c_stack = 3, .code_first_line = 68, .code_version = 92,
    .code_instructions = 192, .text_ascii = 40, .text_compact = 56};
static const Layout layout_3_13 = {
    COMMON, .state_frame = 72, .indirect_frame = -1, .frame_code = 0, .frame_previous = 8,
    .frame_owner = 70, .owner_c_stack = 3, .code_first_line = 68, .code_version = 92,
    .code_instructions = 200, .text_ascii = 40, .text_compact = 56};

/* CPython 3.14 says itself where most is: `_Py_DebugOffsets`, at the start of `_PyRuntime`. */
static bool layout_3_14(Layout *layout) {
    const char *runtime = dlsym(RTLD_DEFAULT, "_PyRuntime");
    if (!runtime || memcmp(runtime, "xdebugpy", 8) || FIELD(uint64_t, runtime, 8) >> 16 != 0x030E ||
        FIELD(uint64_t, runtime, 16))   /* free-threaded */
        return false;
    *layout = (Layout){
        COMMON, .indirect_frame = -1, .owner_c_stack = 3, .code_tag = 7, .code_version = -1,
        .text_ascii = 40, .text_compact = 56};
    const struct {
        int32_t *offset;
        int size, at;           /* of the structure, and its member: where they are told */
    } told[] = {
        {&layout->state_frame, 176, 208},       {&layout->frame_previous, 248, 256},
        {&layout->frame_code, 248, 264},        {&layout->frame_instruction, 248, 272},
        {&layout->frame_owner, 248, 288},       {&layout->code_filename, 312, 320},
        {&layout->code_name, 312, 336},         {&layout->code_lines, 312, 344},
        {&layout->code_first_line, 312, 352},   {&layout->code_instructions, 312, 384},
    };
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        uint64_t offset = FIELD(uint64_t, runtime, told[i].at);
        if (offset + 4 > FIELD(uint64_t, runtime, told[i].size))
            return false;
        *told[i].offset = (int32_t)offset;
    }
    return true;
}

static bool find_layout(Layout *layout) {
    const unsigned long *version = dlsym(RTLD_DEFAULT, "Py_Version");
    const char *text = python.version ? python.version() : NULL;
    enum { FINAL = 0xF0 };
    if (!version || (*version & 0xF0) != FINAL || !text || strstr(text, "free-threading"))
        return false;
    switch (*version >> 16) {
    case 0x030B:
        *layout = layout_3_11;
        return true;
    case 0x030C:
        *layout = layout_3_12;
        return true;
    case 0x030D:
        *layout = layout_3_13;
        return true;
    default:
        return *version >> 16 == 0x030E && layout_3_14(layout);
    }
}

/* ---- whether it is right --------------------------------------------------------------------- */

enum { UNKNOWN, CHECKING, RIGHT, WRONG };
static atomic_int state;

static bool read_word(const char *object, int32_t offset, const char **out) {
    return host_read((uint64_t)(uintptr_t)object + (uint64_t)offset, out, sizeof *out);
}

static bool is_of_type(const char *object, const void *type) {
    const char *found;
    return object && read_word(object, sizeof(void *), &found) && found == type;
}

/* The bits of a text that say how wide its characters are have moved within minor versions. */
static bool find_shift(const char *text, Layout *layout) {
    static const int32_t shifts[] = {2, 8, 16};
    uint32_t bits;
    if (!host_read((uint64_t)(uintptr_t)text + (uint64_t)layout->text_state, &bits, sizeof bits))
        return false;
    for (size_t i = 0; i < sizeof shifts / sizeof *shifts; i++) {
        uint32_t width = bits >> shifts[i] & 7, is_compact = bits >> shifts[i] >> 3 & 1;
        if ((width == 1 || width == 2 || width == 4) && is_compact) {
            layout->text_shift = shifts[i];
            return true;
        }
    }
    return false;
}

static bool is_code(const char *code, Layout *layout) {
    const char *file, *name, *lines;
    return is_of_type(code, python.code_type) && read_word(code, layout->code_filename, &file) &&
           read_word(code, layout->code_name, &name) &&
           read_word(code, layout->code_lines, &lines) && is_of_type(file, python.text_type) &&
           is_of_type(name, python.text_type) && is_of_type(lines, python.bytes_type) &&
           find_shift(name, layout);
}

/* Follows the frames of the calling thread, and reads nothing that is not there. */
static int check(const char *thread_state, Layout *layout) {
    const char *frame, *code;
    int codes = 0;
    if (!read_word(thread_state, layout->state_frame, &frame))
        return WRONG;
    if (layout->indirect_frame >= 0 && !read_word(frame, layout->indirect_frame, &frame))
        return WRONG;
    for (int i = 0; frame && i < 1000; i++) {
        uint8_t owner;
        if (!host_read((uint64_t)(uintptr_t)frame + (uint64_t)layout->frame_owner, &owner, 1) ||
            !read_word(frame, layout->frame_code, &code))
            return WRONG;
        if (owner < layout->owner_c_stack) {
            if (!is_code(code - ((uintptr_t)code & (uintptr_t)layout->code_tag), layout))
                return WRONG;
            codes++;
        }
        if (!read_word(frame, layout->frame_previous, &frame))
            return WRONG;
    }
    return codes ? RIGHT : UNKNOWN;
}

static void settle(const char *thread_state) {
    int unknown = UNKNOWN;
    Layout layout;
    if (!atomic_compare_exchange_strong(&state, &unknown, CHECKING))
        return;
    int found = python.code_type && python.text_type && python.bytes_type && find_layout(&layout)
                    ? check(thread_state, &layout)
                    : WRONG;
    if (found == RIGHT)
        python.layout = layout;
    atomic_store(&state, found);
}

/* ---- for the others -------------------------------------------------------------------------- */

static void *symbol(const char *name) {
    return dlsym(RTLD_DEFAULT, name);
}

/* Python may be loaded later than the recorder. */
void python_find(void) {
    if (python.thread_state)
        return;
    python.version = (const char *(*)(void))symbol("Py_GetVersion");
    python.is_finalizing = (int (*)(void))symbol("Py_IsFinalizing");
    if (!python.is_finalizing)
        python.is_finalizing = (int (*)(void))symbol("_Py_IsFinalizing");
    python.code_type = symbol("PyCode_Type");
    python.text_type = symbol("PyUnicode_Type");
    python.bytes_type = symbol("PyBytes_Type");
    python.thread_state = (void *(*)(void))symbol("PyGILState_GetThisThreadState");
}

const char *python_frame(void) {
    if (!python.thread_state || (python.is_finalizing && python.is_finalizing()))
        return NULL;
    const char *thread_state = python.thread_state();
    if (!thread_state)
        return NULL;
    int now_is = atomic_load_explicit(&state, memory_order_acquire);
    if (now_is == UNKNOWN) {
        settle(thread_state);
        now_is = atomic_load(&state);
    }
    if (now_is != RIGHT)
        return NULL;
    const char *frame = FIELD(char *, thread_state, python.layout.state_frame);
    if (frame && python.layout.indirect_frame >= 0)
        frame = FIELD(char *, frame, python.layout.indirect_frame);
    return frame;
}

bool python_has_stacks(void) {
    if (python.thread_state)
        python_frame();         /* settles it, if a thread of Python asks */
    return atomic_load(&state) == RIGHT;
}
