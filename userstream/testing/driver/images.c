/* Images: PTX, cubins and fat binaries, read as far as their kernels and variables are declared. */
#include "images.h"
#include "device_limits.h"

#include <ctype.h>
#include <elf.h>

/* ---- what is found -------------------------------------------------------------------------- */

static ImageKernel *add_kernel(Image *image, const char *name, size_t length) {
    image->kernels =
        realloc(image->kernels, (image->kernel_count + 1) * sizeof *image->kernels);
    ImageKernel *kernel = &image->kernels[image->kernel_count++];
    *kernel = (ImageKernel){.name = strndup(name, length)};
    return kernel;
}

static void add_variable(Image *image, const char *name, size_t length, size_t size) {
    image->variables =
        realloc(image->variables, (image->variable_count + 1) * sizeof *image->variables);
    image->variables[image->variable_count++] =
        (ImageVariable){.name = strndup(name, length), .size = size};
}

static void set_parameter(ImageKernel *kernel, size_t index, Parameter parameter) {
    if (index >= kernel->count) {
        kernel->parameters =
            realloc(kernel->parameters, (index + 1) * sizeof *kernel->parameters);
        while (kernel->count <= index)
            kernel->parameters[kernel->count++] = (Parameter){0};
    }
    kernel->parameters[index] = parameter;
}

void image_free(Image *image) {
    for (size_t i = 0; i < image->kernel_count; i++) {
        free(image->kernels[i].name);
        free(image->kernels[i].parameters);
    }
    for (size_t i = 0; i < image->variable_count; i++)
        free(image->variables[i].name);
    free(image->kernels);
    free(image->variables);
    free(image);
}

const ImageKernel *image_kernel(const Image *image, const char *name) {
    for (size_t i = 0; i < image->kernel_count; i++) {
        if (strcmp(image->kernels[i].name, name) == 0)
            return &image->kernels[i];
    }
    return NULL;
}

ImageVariable *image_variable(const Image *image, const char *name) {
    for (size_t i = 0; i < image->variable_count; i++) {
        if (strcmp(image->variables[i].name, name) == 0)
            return &image->variables[i];
    }
    return NULL;
}

/* ---- PTX ------------------------------------------------------------------------------------ */

/* One token: a name or a number with its dots and signs, or one other character. */
typedef struct Token {
    const char *begin;
    size_t length;
} Token;

static const char *skip_blanks(const char *text) {
    for (;;) {
        while (isspace((unsigned char)*text))
            text++;
        if (strncmp(text, "//", 2) == 0) {
            text += strcspn(text, "\n");
        } else if (strncmp(text, "/*", 2) == 0) {
            const char *end = strstr(text + 2, "*/");
            text = end ? end + 2 : text + strlen(text);
        } else {
            return text;
        }
    }
}

static bool is_of_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '.' || c == '%';
}

static Token next_token(const char **text) {
    Token token = {skip_blanks(*text), 0};
    while (is_of_name(token.begin[token.length]))
        token.length++;
    if (!token.length && *token.begin == '"') {
        token.length = 1 + strcspn(token.begin + 1, "\"");
        token.length += token.begin[token.length] == '"';
    } else if (!token.length && *token.begin) {
        token.length = 1;
    }
    *text = token.begin + token.length;
    return token;
}

static bool is(Token token, const char *text) {
    return token.length == strlen(text) && strncmp(token.begin, text, token.length) == 0;
}

static long number_of(Token token) {
    return strtol(token.begin, NULL, 0);
}

/* The bytes of .u32 and its like; 0: it is no type. Predicates and textures are not in memory. */
static size_t size_of_type(Token token) {
    static const struct {
        const char *ending;
        size_t size;
    } sizes[] = {{"8", 1}, {"16", 2}, {"16x2", 4}, {"32", 4}, {"64", 8}, {"128", 16}};
    if (token.length < 3 || *token.begin != '.' || !strchr("bsuf", token.begin[1]))
        return 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (token.length == 2 + strlen(sizes[i].ending) &&
            strncmp(token.begin + 2, sizes[i].ending, token.length - 2) == 0)
            return sizes[i].size;
    }
    return 0;
}

typedef struct Declaration {
    Token name;
    size_t size;
    size_t alignment;
    Token end;                  /* the token behind it */
} Declaration;

/* What follows .param, .shared, .global or .const: .align 8 .v2 .u32 name[4][2] */
static Declaration read_declaration(const char **text) {
    Declaration found = {0};
    size_t elements = 1;
    Token token = next_token(text);
    for (; *token.begin == '.'; token = next_token(text)) {
        if (is(token, ".align"))
            found.alignment = (size_t)number_of(next_token(text));
        else if (is(token, ".v2"))
            elements = 2;
        else if (is(token, ".v4"))
            elements = 4;
        else if (is(token, ".attribute"))
            *text += strcspn(*text, ")") + (strchr(*text, ')') != NULL);
        else if (size_of_type(token))
            found.size = size_of_type(token);
    }
    found.name = token;
    token = next_token(text);
    for (; is(token, "["); token = next_token(text)) {
        token = next_token(text);
        elements *= is(token, "]") ? 0 : (size_t)number_of(token);
        if (!is(token, "]"))
            next_token(text);
    }
    if (!found.alignment)
        found.alignment = found.size;
    found.size *= elements;
    found.end = token;
    return found;
}

static void read_parameters(ImageKernel *kernel, const char **text) {
    size_t offset = 0;
    for (Token token = next_token(text); token.length && !is(token, ")");) {
        if (!is(token, ".param")) {
            token = next_token(text);
            continue;
        }
        Declaration found = read_declaration(text);
        if (found.alignment)
            offset = (offset + found.alignment - 1) / found.alignment * found.alignment;
        set_parameter(kernel, kernel->count, (Parameter){offset, found.size});
        offset += found.size;
        token = found.end;
    }
}

static void read_block(const char **text, unsigned block[3]) {
    block[0] = (unsigned)number_of(next_token(text));
    block[1] = block[2] = 1;
    for (int i = 1; i < 3 && *skip_blanks(*text) == ','; i++) {
        next_token(text);
        block[i] = (unsigned)number_of(next_token(text));
    }
}

/* The directives before the body, and the memory that the body declares. */
static void read_body(ImageKernel *kernel, const char **text) {
    int depth = 0;
    for (Token token = next_token(text); token.length; token = next_token(text)) {
        if (!depth && is(token, ".maxntid")) {
            unsigned block[3];
            read_block(text, block);
            kernel->max_threads = (int)(block[0] * block[1] * block[2]);
        } else if (!depth && is(token, ".reqntid")) {
            read_block(text, kernel->required_block);
        } else if (!depth && is(token, ";")) {
            return;             /* it was only declared */
        } else if (is(token, "{")) {
            depth++;
        } else if (is(token, "}") && --depth == 0) {
            return;
        } else if (depth && is(token, ".shared")) {
            kernel->shared_bytes =
                (int)((unsigned)kernel->shared_bytes + (unsigned)read_declaration(text).size);
        }
    }
}

static bool is_ptx(const char *text) {
    return strncmp(skip_blanks(text), ".version", strlen(".version")) == 0;
}

/* The driver compiles PTX for the device. H100: a kernel's PTX version is that of `.target`. */
static void read_ptx(Image *image, const char *text) {
    int depth = 0;
    size_t constants = 0;
    image->is_known = true;
    image->binary_version = COMPUTE_CAPABILITY;
    for (Token token = next_token(&text); token.length; token = next_token(&text)) {
        if (is(token, "{") || is(token, "}")) {
            depth += *token.begin == '{' ? 1 : -1;
        } else if (is(token, ".target")) {
            token = next_token(&text);
            image->ptx_version = atoi(token.begin + strcspn(token.begin, "0123456789"));
        } else if (is(token, ".entry")) {
            Token name = next_token(&text);
            ImageKernel *kernel = add_kernel(image, name.begin, name.length);
            if (*skip_blanks(text) == '(')
                read_parameters(kernel, &text);
            read_body(kernel, &text);
        } else if (!depth && (is(token, ".global") || is(token, ".const"))) {
            Declaration found = read_declaration(&text);
            if (is(token, ".const"))
                constants += found.size;
            if (found.size)
                add_variable(image, found.name.begin, found.name.length, found.size);
        }
    }
    for (size_t i = 0; i < image->kernel_count; i++) {
        image->kernels[i].registers = 32;   /* a compiler would choose */
        image->kernels[i].constant_bytes = (int)constants;
    }
}

/* ---- cubins --------------------------------------------------------------------------------- */

typedef struct Cubin {
    const char *data;
    const Elf64_Shdr *sections;
    const char *names;          /* of sections */
    unsigned count;
} Cubin;

enum { EM_OF_CUDA = 190, ENTRY = 0x10 };

static const char *contents(const Cubin *cubin, const Elf64_Shdr *section) {
    return cubin->data + section->sh_offset;
}

/* The section whose name is that of a kernel behind a prefix. */
static const Elf64_Shdr *section_of(const Cubin *cubin, const char *prefix, const char *name) {
    for (unsigned i = 0; i < cubin->count; i++) {
        const char *found = cubin->names + cubin->sections[i].sh_name;
        size_t length = strlen(prefix);
        if (strncmp(found, prefix, length) == 0 && strcmp(found + length, name) == 0)
            return &cubin->sections[i];
    }
    return NULL;
}

static uint32_t word_at(const char *address) {
    uint32_t word;
    memcpy(&word, address, sizeof word);
    return word;
}

enum {                          /* attributes in .nv.info */
    MAX_THREADS = 0x05,
    REQUIRED_THREADS = 0x10,
    FRAME_SIZE = 0x11,
    KERNEL_PARAMETER = 0x17,
    REGISTER_COUNT = 0x2f,
};

/* Calls a function for each attribute with a payload. */
static void for_each_attribute(const Cubin *cubin, const Elf64_Shdr *section,
                               void (*use)(ImageKernel *, int, const char *, uint32_t),
                               ImageKernel *kernel, uint32_t symbol) {
    enum { WITH_PAYLOAD = 4, HEADER = 4 };
    if (!section)
        return;
    const char *at = contents(cubin, section);
    for (const char *end = at + section->sh_size; at + HEADER <= end;) {
        uint16_t size = at[0] == WITH_PAYLOAD ? (uint16_t)(word_at(at) >> 16) : 0;
        if (at[0] == WITH_PAYLOAD)
            use(kernel, (unsigned char)at[1], at + HEADER, symbol);
        at += HEADER + size;
    }
}

static void use_own(ImageKernel *kernel, int attribute, const char *payload, uint32_t symbol) {
    UNUSED(symbol);
    if (attribute == MAX_THREADS) {
        kernel->max_threads =
            (int)(word_at(payload) * word_at(payload + 4) * word_at(payload + 8));
    } else if (attribute == REQUIRED_THREADS) {
        for (int i = 0; i < 3; i++)
            kernel->required_block[i] = word_at(payload + 4 * i);
    } else if (attribute == KERNEL_PARAMETER) {
        uint32_t place = word_at(payload + 4);
        Parameter parameter = {.offset = place >> 16, .size = word_at(payload + 8) >> 18};
        set_parameter(kernel, place & 0xffff, parameter);
    }
}

static void use_common(ImageKernel *kernel, int attribute, const char *payload, uint32_t symbol) {
    if (word_at(payload) != symbol)
        return;
    if (attribute == REGISTER_COUNT)
        kernel->registers = (int)word_at(payload + 4);
    else if (attribute == FRAME_SIZE)
        kernel->local_bytes = (int)word_at(payload + 4);
}

static void read_kernel(Image *image, const Cubin *cubin, const char *name, uint32_t symbol) {
    ImageKernel *kernel = add_kernel(image, name, strlen(name));
    for_each_attribute(cubin, section_of(cubin, ".nv.info.", name), use_own, kernel, symbol);
    for_each_attribute(cubin, section_of(cubin, ".nv.info", ""), use_common, kernel, symbol);
    /* Since compute capability 9 what the system takes of each block is in it. */
    const Elf64_Shdr *shared = section_of(cubin, ".nv.shared.", name);
    int reserved = image->binary_version >= COMPUTE_CAPABILITY ? SHARED_BYTES_RESERVED : 0;
    if (shared)
        kernel->shared_bytes = (int)shared->sh_size - reserved;
    if (kernel->shared_bytes < 0)
        kernel->shared_bytes = 0;
}

/* The constant memory of the program; that of a kernel's parameters is another one. */
static int constant_bytes(const Cubin *cubin) {
    const Elf64_Shdr *section = section_of(cubin, ".nv.constant3", "");
    return section ? (int)section->sh_size : 0;
}

static bool is_variable(const Cubin *cubin, const Elf64_Sym *symbol) {
    if (ELF64_ST_TYPE(symbol->st_info) != STT_OBJECT || symbol->st_shndx >= cubin->count ||
        !symbol->st_shndx || ELF64_ST_BIND(symbol->st_info) == STB_LOCAL)
        return false;
    const char *section = cubin->names + cubin->sections[symbol->st_shndx].sh_name;
    return strncmp(section, ".nv.global", strlen(".nv.global")) == 0 ||
           strcmp(section, ".nv.constant3") == 0;
}

static void read_cubin(Image *image, const void *data) {
    enum { SM_MOVED = 8 };      /* the version of the format since which the SM is in other bits */
    const Elf64_Ehdr *header = data;
    Cubin cubin = {.data = data, .count = header->e_shnum};
    cubin.sections = (const Elf64_Shdr *)(cubin.data + header->e_shoff);
    cubin.names = contents(&cubin, &cubin.sections[header->e_shstrndx]);
    image->is_known = true;
    bool moved = header->e_ident[EI_ABIVERSION] >= SM_MOVED;
    image->binary_version = moved ? header->e_flags >> 8 & 0xff : header->e_flags & 0xff;
    image->ptx_version = image->binary_version;
    for (unsigned i = 0; i < cubin.count; i++) {
        const Elf64_Shdr *section = &cubin.sections[i];
        if (section->sh_type != SHT_SYMTAB)
            continue;
        const char *names = contents(&cubin, &cubin.sections[section->sh_link]);
        const Elf64_Sym *symbols = (const Elf64_Sym *)contents(&cubin, section);
        for (uint32_t k = 0; k < section->sh_size / sizeof *symbols; k++) {
            const char *name = names + symbols[k].st_name;
            if (ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC && symbols[k].st_other & ENTRY)
                read_kernel(image, &cubin, name, k);
            else if (is_variable(&cubin, &symbols[k]))
                add_variable(image, name, strlen(name), symbols[k].st_size);
        }
    }
    for (size_t i = 0; i < image->kernel_count; i++)
        image->kernels[i].constant_bytes = constant_bytes(&cubin);
}

/* ---- any of them ---------------------------------------------------------------------------- */

typedef struct FatHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size;
    uint64_t size;              /* of the entries */
} FatHeader;

typedef struct FatEntry {
    uint16_t kind;
    uint16_t version;
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size;   /* 0: it is as it was */
} FatEntry;

typedef struct FatWrapper {
    uint32_t magic;
    uint32_t version;
    const void *data;
} FatWrapper;

enum { FAT_PTX = 1, FAT_CUBIN = 2 };

static void read_any(Image *image, const void *data);

/* The first entry that is not compressed. */
static void read_fat(Image *image, const FatHeader *header) {
    const char *at = (const char *)header + header->header_size;
    for (const char *end = at + header->size; at < end && !image->is_known;) {
        const FatEntry *entry = (const FatEntry *)at;
        if (!entry->compressed_size && (entry->kind == FAT_PTX || entry->kind == FAT_CUBIN))
            read_any(image, at + entry->header_size);
        at += entry->header_size + entry->size;
    }
}

static void read_any(Image *image, const void *data) {
    static const uint32_t fat_magic = 0xBA55ED50;
    static const uint32_t wrapper_magic = 0x466243B1;
    const unsigned char *bytes = data;
    /* Byte by byte: a shorter image ends before. */
    if (memcmp(&fat_magic, bytes, 1) == 0 && memcmp(&fat_magic, bytes, sizeof fat_magic) == 0)
        read_fat(image, data);
    else if (memcmp(&wrapper_magic, bytes, 1) == 0 &&
             memcmp(&wrapper_magic, bytes, sizeof wrapper_magic) == 0)
        read_any(image, ((const FatWrapper *)data)->data);
    else if (strncmp(data, ELFMAG, SELFMAG) == 0 &&
             ((const Elf64_Ehdr *)data)->e_machine == EM_OF_CUDA)
        read_cubin(image, data);
    else if (is_ptx(data))
        read_ptx(image, data);
}

static void bound(int *number, int most) {
    if (*number < 0 || *number > most)
        *number = most;
}

/* No compiler makes more: such an image is damaged, and would make nonsense of occupancy. */
static void keep_to_limits(ImageKernel *kernel) {
    enum { MOST_REGISTERS = 255 };
    bound(&kernel->max_threads, LARGEST_BLOCK);
    bound(&kernel->registers, MOST_REGISTERS);
    bound(&kernel->shared_bytes, SHARED_BYTES_BY_DEFAULT);
}

Image *image_read(const void *data) {
    Image *image = calloc(1, sizeof *image);
    if (data)
        read_any(image, data);
    for (size_t i = 0; i < image->kernel_count; i++)
        keep_to_limits(&image->kernels[i]);
    return image;
}
