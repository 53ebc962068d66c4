/* Sources of the driver calls: CUPTI's callbacks of the driver's domain on a GPU, or the simulated
 * driver itself.
 *
 * CUPTI is declared here as far as it is used, so that no header of it is needed: these structures
 * have been the same since CUDA 8. It needs no privilege. Before 13.2 it has one subscriber at a
 * time: while we record no profiler can, and the other way round. */
#define _GNU_SOURCE

#include "parts.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

Driver driver;

/* ---- the driver ------------------------------------------------------------------------------ */

static void *symbol_of(void *library, const char *name) {
    return library ? dlsym(library, name) : NULL;
}

/* NULL: no driver can be loaded. */
static void *find_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
#define FIND(member, symbol, arguments) *(void **)&driver.member = symbol_of(library, #symbol);
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    return library;
}

/* ---- what is recorded of a function ---------------------------------------------------------- */

/* The call may have made memory that is not followed, as cuIpcOpenMemHandle does. */
static const Rule counted = {
    .sites = 1 << LEAVE, .forgets = STRANGERS, .stream = NO_WORD, .frees = NO_WORD,
    .freed = NO_WORD, .allocates = NO_WORD, .allocated = NO_WORD, .source_size = NO_WORD,
    .records = NO_WORD, .event = NO_WORD, .kernel = NO_WORD, .parameters = NO_WORD,
    .extra = NO_WORD, .configuration = NO_WORD, .node = NO_WORD, .value = NO_WORD,
    .value_count = NO_WORD, .batch = NO_WORD,
    .addresses = {{NO_WORD, 0, 0}, {NO_WORD, 0, 0}}};

enum { NAME = 128, MAX_WORDS = 12, PER_THREAD = 2 };

typedef struct Signature {
    uint8_t count;
    uint8_t sizes[MAX_WORDS];   /* in bytes: 1, 2, 4 or 8 */
    uint8_t per_thread;         /* the word in which a stream 0 is the thread's own */
} Signature;

static Signature signatures[MAX_FUNCTIONS];

static int compare_rules(const void *name, const void *rule) {
    return strcmp(name, ((const NamedRule *)rule)->name);
}

static int compare_names(const void *name, const void *other) {
    return strcmp(name, *(const char *const *)other);
}

/* Of a program whose stream 0 is the thread's own, the names of functions end in _ptsz or _ptds.
 * Returns whether this one does; copies the name without it. */
static bool cut_ending(const char *symbol, char *name) {
    size_t length = strnlen(symbol, NAME - 1);
    bool ends = length > 5 && (!strncmp(symbol + length - 5, "_ptsz", 5) ||
                               !strncmp(symbol + length - 5, "_ptds", 5));
    length -= ends ? 5 : 0;
    memcpy(name, symbol, length);
    name[length] = 0;
    return ends;
}

static void cut_version(char *name) {
    char *at = name + strlen(name);
    while (at > name && at[-1] >= '0' && at[-1] <= '9')
        at--;
    if (*at && at > name + 2 && at[-1] == 'v' && at[-2] == '_')
        at[-2] = 0;
}

/* `name` has a version if that one alone is not followed. */
static bool is_not_followed(const char *name) {
    return bsearch(name, not_followed, not_followed_count, sizeof *not_followed, compare_names);
}

/* Records calls of a function by its symbol, as far as something is recorded of it. */
PUBLIC void recorder_watch(unsigned number, const char *symbol) {
    char name[NAME];
    bool own_stream = cut_ending(symbol, name);
    const NamedRule *named =
        bsearch(name, named_rules, named_rule_count, sizeof *named_rules, compare_rules);
    if (!named && !is_not_followed(name)) {
        cut_version(name);
        if (!is_not_followed(name))
            return;
    }
    Thread *me = thread_me();
    if (!me || number >= MAX_FUNCTIONS)
        return;
    uint64_t words[] = {number};
    Part part = {symbol, (uint32_t)strnlen(symbol, NAME)};
    Record record = {.type = FUNCTION, .words = 1, .stack = -1};
    record.began = record.ended = now();
    log_write(me, record, words, &part, 1);
    Signature signature = {.per_thread = NO_WORD};
    for (const char *at = named ? named->signature : ""; *at && signature.count < MAX_WORDS; at++)
        signature.sizes[signature.count++] = (uint8_t)(*at - '0');
    if (own_stream && named)
        signature.per_thread = named->rule.stream;
    signatures[number] = signature;
    rules[number] = named ? named->rule : counted;
}

/* ---- the simulated driver -------------------------------------------------------------------- */

static struct {
    bool (*observe)(void *);
    const char *(*symbol)(unsigned);
} simulated;

static const char *begin_simulated(void) {
    if (simulated.observe((void *)recorder_call))
        return NULL;
    return "something else is already observing the simulated driver";
}

/* ---- CUPTI ----------------------------------------------------------------------------------- */

enum { DRIVER_DOMAIN = 1, MOST_CALLBACKS = 2048 };

typedef struct CallbackData {   /* CUpti_CallbackData */
    int site;
    const char *function_name;
    const void *parameters;     /* a structure of the arguments, in the order of C */
    const int *result;
    const char *symbol_name;
    const void *context;
} CallbackData;

typedef struct SubscriberOptions {  /* CUpti_SubscriberParams */
    size_t size;
    const char *name;
    char *other;                /* the name of the one that is there */
    size_t other_size;
    uint8_t allows_others;
    uint8_t padding[7];
} SubscriberOptions;

typedef void (*Callback)(void *, int, uint32_t, const CallbackData *);

static struct {
    int (*subscribe)(void **, Callback, void *);
    int (*subscribe_v2)(void **, Callback, void *, SubscriberOptions *);    /* from 13.2 */
    int (*unsubscribe)(void *);
    int (*enable)(uint32_t, void *, int, uint32_t);
    int (*name)(int, uint32_t, const char **);
    int (*result)(int, const char **);
} cupti;

static void *subscriber;        /* NULL: none. In a forked child: of its parent */
static char message[512];

static uint64_t word_at(const char *place, uint8_t size) {
    switch (size) {
    case 1:
        return FIELD(uint8_t, place, 0);
    case 2:
        return FIELD(uint16_t, place, 0);
    case 4:
        return FIELD(uint32_t, place, 0);
    default:
        return FIELD(uint64_t, place, 0);
    }
}

static void called(void *unused, int domain, uint32_t function, const CallbackData *data) {
    (void)unused;
    if (domain != DRIVER_DOMAIN || function >= MAX_FUNCTIONS || !is_guarding())
        return;
    const Signature *signature = &signatures[function];
    uint64_t words[MAX_WORDS] = {0};
    size_t at = 0;
    for (size_t i = 0; i < signature->count; i++) {
        uint8_t size = signature->sizes[i];
        at = (at + size - 1) & ~(size_t)(size - 1);     /* a power of 2 */
        words[i] = word_at((const char *)data->parameters + at, size);
        at += size;
    }
    if (signature->per_thread != NO_WORD && !words[signature->per_thread])
        words[signature->per_thread] = PER_THREAD;
    int result = data->site == LEAVE && data->result ? *data->result : 0;
    recorder_call(data->site, function, words, signature->count, result, data->context);
}

static const char *find_cupti(const char *path) {
    void *library = path && *path ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    const char *const usual[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so"};
    for (size_t i = 0; !library && !(path && *path) && i < sizeof usual / sizeof *usual; i++)
        library = dlopen(usual[i], RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        snprintf(message, sizeof message, "CUPTI was not found: %s", dlerror());
        return message;
    }
    *(void **)&cupti.subscribe = symbol_of(library, "cuptiSubscribe");
    *(void **)&cupti.subscribe_v2 = symbol_of(library, "cuptiSubscribe_v2");
    *(void **)&cupti.unsubscribe = symbol_of(library, "cuptiUnsubscribe");
    *(void **)&cupti.enable = symbol_of(library, "cuptiEnableCallback");
    *(void **)&cupti.name = symbol_of(library, "cuptiGetCallbackName");
    *(void **)&cupti.result = symbol_of(library, "cuptiGetResultString");
    if (cupti.subscribe && cupti.unsubscribe && cupti.enable && cupti.name)
        return NULL;
    snprintf(message, sizeof message, "%s is no CUPTI", path ? path : "libcupti.so");
    return message;
}

/* CUPTI refuses a structure that is larger than it knows: before 13.2 `allows_others` is not in
 * the structure. */
static int subscribe_as(SubscriberOptions *options) {
    enum { INVALID_PARAMETER = 1 };
    if (!cupti.subscribe_v2)
        return cupti.subscribe(&subscriber, called, NULL);
    int status = cupti.subscribe_v2(&subscriber, called, NULL, options);
    if (status != INVALID_PARAMETER)
        return status;
    options->size = offsetof(SubscriberOptions, allows_others);
    return cupti.subscribe_v2(&subscriber, called, NULL, options);
}

/* Returns NULL, or who holds CUPTI, or what CUPTI says. */
static const char *subscribe(void) {
    enum { TAKEN = 12, NOT_SEVERAL = 39 };
    char other[64] = "";
    SubscriberOptions options = {.size = sizeof options, .name = "userstream", .other = other,
                                 .other_size = sizeof other, .allows_others = 1};
    const char *text = NULL;
    int status = subscribe_as(&options);
    if (!status)
        return NULL;
    subscriber = NULL;
    if (status == TAKEN || status == NOT_SEVERAL) {
        other[sizeof other - 1] = 0;
        snprintf(message, sizeof message,
                 "another tool uses CUPTI in this process (%s), which serves one at a time before "
                 "CUDA 13.2: observe() takes its turn when that has ended",
                 *other ? other : "torch.profiler, Nsight or a sanitizer");
        return message;
    }
    if (cupti.result)
        cupti.result(status, &text);
    snprintf(message, sizeof message, "nothing can be observed: cuptiSubscribe returned %s (%d)",
             text ? text : "an error", status);
    return message;
}

static const char *begin_cupti(const char *path) {
    const char *error = find_cupti(path);
    if (!error && subscriber)       /* which a forked child has inherited */
        cupti.unsubscribe(subscriber);
    subscriber = NULL;
    return error ? error : subscribe();
}

/* ---- for the others -------------------------------------------------------------------------- */

static bool is_simulated;

bool maker_is_simulated(void) {
    return is_simulated;
}

const char *makers_begin(const char *path_of_cupti) {
    void *library = find_driver();
    if (!library)
        return "there is no CUDA driver";
    *(void **)&simulated.observe = symbol_of(library, "userstream_observe");
    *(void **)&simulated.symbol = symbol_of(library, "userstream_symbol");
    is_simulated = simulated.observe && simulated.symbol && !path_of_cupti;
    return is_simulated ? begin_simulated() : begin_cupti(path_of_cupti);
}

void makers_define(void) {
    const char *name;
    memset(rules, 0, sizeof rules);
    for (unsigned i = 0; is_simulated && (name = simulated.symbol(i)); i++)
        recorder_watch(i, name);
    for (uint32_t i = 1; !is_simulated && i < MOST_CALLBACKS; i++) {
        if (cupti.name(DRIVER_DOMAIN, i, &name) || !name)
            continue;
        recorder_watch(i, name);
        if (rules[i].sites)
            cupti.enable(1, subscriber, DRIVER_DOMAIN, i);
    }
}

void makers_end(void) {
    if (is_simulated)
        simulated.observe(NULL);
    else if (subscriber)
        cupti.unsubscribe(subscriber);
    subscriber = NULL;
}
