/* The Python frames of a thread, which it reads itself, without the GIL.
 *
 * They stay as they are while it is in the call. What they are made of is copied when it is seen
 * for the first time, as a code object may be gone when somebody asks for its lines. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

typedef struct Code {           /* a code object as it was when it was seen first */
    const char *object;
    const void *filename, *name, *lines;    /* what tells it from another at its address */
    int32_t first_line;
    char *text[3];              /* file, name, lines: copies */
    uint32_t bytes[3];
    uint8_t width[3];           /* bytes of a character */
} Code;

typedef struct Frame {
    uint32_t code;
    uint32_t instruction;
} Frame;

typedef struct Stack {
    uint64_t hash;
    uint32_t count;
    Frame *frames;
} Stack;

enum { FRAMES = 48, MAX_CODES = 1 << 14, MAX_STACKS = 1 << 16 };

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static Code codes[MAX_CODES];
static uint32_t code_count;
static uint32_t code_at[MAX_CODES * 2];         /* by hash; 0: none, else the index and 1 */
static Stack stacks[MAX_STACKS];
static uint32_t stack_count;
static uint32_t stack_at[MAX_STACKS * 2];

static void *copy_of(const void *data, size_t bytes) {
    char *copy = malloc(bytes ? bytes : 1);
    if (copy)
        memcpy(copy, data, bytes);
    return copy;
}

static void copy_text(Code *code, int which, const void *text) {
    uint32_t state = FIELD(uint32_t, text, layout.text_state) >> layout.text_shift;
    uint32_t width = state & 7, compact = state >> 3 & 1, ascii = state >> 4 & 1;
    size_t length = FIELD(size_t, text, layout.text_length);
    if (!compact || (width != 1 && width != 2 && width != 4) || length > 4096)
        return;
    int32_t data = ascii ? layout.text_ascii : layout.text_compact;
    code->text[which] = copy_of((const char *)text + data, length * width);
    code->bytes[which] = code->text[which] ? (uint32_t)(length * width) : 0;
    code->width[which] = (uint8_t)width;
}

/* MAX_CODES: there are too many. */
static uint32_t code_index(const char *object) {
    const void *filename = FIELD(void *, object, layout.code_filename);
    const void *name = FIELD(void *, object, layout.code_name);
    const void *lines = FIELD(void *, object, layout.code_lines);
    int32_t first_line = FIELD(int32_t, object, layout.code_first_line);
    uint64_t hash = mixed(mixed((uintptr_t)object, (uintptr_t)lines), (uint64_t)first_line);
    uint32_t place = (uint32_t)(hash >> 32) % (MAX_CODES * 2);
    for (; code_at[place]; place = (place + 1) % (MAX_CODES * 2)) {
        const Code *code = &codes[code_at[place] - 1];
        if (code->object == object && code->filename == filename && code->name == name &&
            code->lines == lines && code->first_line == first_line)
            return code_at[place] - 1;
    }
    if (code_count == MAX_CODES)
        return MAX_CODES;
    Code *code = &codes[code_count];
    *code = (Code){object, filename, name, lines, first_line, {0}, {0}, {0}};
    copy_text(code, 0, filename);
    copy_text(code, 1, name);
    size_t length = FIELD(size_t, lines, layout.bytes_length);
    code->text[2] = copy_of((const char *)lines + layout.bytes_data, length);
    code->bytes[2] = code->text[2] ? (uint32_t)length : 0;
    code_at[place] = ++code_count;
    return code_count - 1;
}

/* The frames of the calling thread, the innermost first; -1: it has none, or there are too many. */
int32_t stack_index(void) {
    const char *state = layout.thread_state ? layout.thread_state() : NULL;
    if (!state)
        return -1;
    const char *frame = FIELD(char *, state, layout.state_frame);
    if (frame && layout.indirect_frame >= 0)
        frame = FIELD(char *, frame, layout.indirect_frame);
    Frame frames[FRAMES];
    uint32_t count = 0;
    uint64_t hash = 1;
    int32_t index = -1;
    pthread_mutex_lock(&stacks_lock);
    for (; frame && count < FRAMES; frame = FIELD(char *, frame, layout.frame_previous)) {
        if (FIELD(uint8_t, frame, layout.frame_owner) >= layout.owner_c_stack)
            continue;
        uintptr_t tagged = FIELD(uintptr_t, frame, layout.frame_code);
        const char *code = (const char *)(tagged & ~(uintptr_t)layout.code_tag);
        if (!code || FIELD(void *, code, offsetof(struct { intptr_t count; void *type; }, type)) !=
                         layout.code_type)
            continue;
        const char *instruction = FIELD(char *, frame, layout.frame_instruction);
        uint32_t which = code_index(code);
        if (which == MAX_CODES)
            continue;
        frames[count].code = which;
        frames[count].instruction = (uint32_t)(instruction - (code + layout.code_instructions));
        hash = mixed(mixed(hash, which), frames[count++].instruction);
    }
    if (!count)
        goto done;
    uint32_t place = (uint32_t)(hash >> 32) % (MAX_STACKS * 2);
    for (; stack_at[place]; place = (place + 1) % (MAX_STACKS * 2)) {
        const Stack *stack = &stacks[stack_at[place] - 1];
        if (stack->hash == hash && stack->count == count) {
            index = (int32_t)stack_at[place] - 1;
            goto done;
        }
    }
    if (stack_count == MAX_STACKS)
        goto done;
    stacks[stack_count] = (Stack){hash, count, copy_of(frames, count * sizeof *frames)};
    if (!stacks[stack_count].frames)
        goto done;
    index = (int32_t)stack_count;
    stack_at[place] = ++stack_count;
done:
    pthread_mutex_unlock(&stacks_lock);
    return index;
}

/* What is known of a stack: pairs of a code and the place in it. Returns how many. */
PUBLIC uint32_t logger_stack(int32_t index, uint32_t *out) {
    uint32_t count = 0;
    pthread_mutex_lock(&stacks_lock);
    if (index >= 0 && (uint32_t)index < stack_count) {
        count = stacks[index].count;
        memcpy(out, stacks[index].frames, count * sizeof(Frame));
    }
    pthread_mutex_unlock(&stacks_lock);
    return count;
}

/* Its file (0), name (1) or table of lines (2). What it points to stays. */
PUBLIC const char *logger_code(uint32_t index, int which, uint32_t *bytes, uint32_t *width,
                               int32_t *first_line) {
    pthread_mutex_lock(&stacks_lock);
    const Code *code = &codes[index];
    *bytes = code->bytes[which];
    *width = code->width[which];
    *first_line = code->first_line;
    const char *text = code->text[which];
    pthread_mutex_unlock(&stacks_lock);
    return text;
}

/* The stack of who calls this: to see whether the layout is right. */
PUBLIC int32_t logger_own_stack(void) {
    return stack_index();
}

void stacks_in_child(void) {
    pthread_mutex_init(&stacks_lock, NULL);
}
