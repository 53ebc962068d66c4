/* A stand-in of libcupti over the simulated driver, as far as the recorder uses CUPTI. Its numbers
 * of functions are others than the driver's. `signatures` is put before this text by the test. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FIRST = 100, MOST = 2048, DOMAIN = 1, NOT_FOUND = 1 };

typedef struct CallbackData {   /* as cupti_callbacks.h declares it */
    int site;
    const char *function_name;
    const void *parameters;
    void *result;
    const char *symbol_name;
    void *context;
    uint32_t context_number;
    uint64_t *correlation_data;
    uint32_t correlation;
} CallbackData;

typedef struct Options {
    size_t size;
    const char *name;
    char *other;
    size_t other_size;
    uint8_t allows_others;
} Options;

typedef void (*Callback)(void *, int, uint32_t, const CallbackData *);

static Callback callback;
static char enabled[MOST];
static int refusal;             /* what the next subscriptions answer */
static const char *holder = "";

static const char *symbol(unsigned number) {
    void *found = dlsym(RTLD_DEFAULT, "userstream_symbol");
    const char *(*find)(unsigned) = (const char *(*)(unsigned))found;
    return number >= FIRST ? find(number - FIRST) : NULL;
}

static int observe(void *observer) {
    _Bool (*begin)(void *) = (_Bool(*)(void *))dlsym(RTLD_DEFAULT, "userstream_observe");
    return begin(observer);
}

static const char *signature_of(const char *name) {
    for (size_t i = 0; i < sizeof signatures / sizeof *signatures; i++) {
        if (!strcmp(signatures[i][0], name))
            return signatures[i][1];
    }
    return "";
}

static void told(int site, unsigned number, const uint64_t *words, size_t count, int result,
                 void *context) {
    unsigned function = number + FIRST;
    char packed[256] __attribute__((aligned(8)));
    if (function >= MOST || !enabled[function])
        return;
    const char *sizes = signature_of(symbol(function));
    size_t at = 0;
    for (size_t i = 0; sizes[i] && i < count; i++) {
        size_t size = (size_t)(sizes[i] - '0');
        at = (at + size - 1) / size * size;
        memcpy(packed + at, &words[i], size);
        at += size;
    }
    CallbackData data = {site, "", packed, &result, "", context, 0, NULL, 0};
    callback(NULL, DOMAIN, function, &data);
}

int cuptiSubscribe(void **subscriber, Callback wanted, void *user) {
    (void)user;
    if (refusal)
        return refusal;
    callback = wanted;
    *subscriber = &callback;
    return observe((void *)told) ? 0 : 39;
}

#ifdef SEVERAL    /* the size of the structure: 40 from CUDA 13.2, 32 in 13.0 */
int cuptiSubscribe_v2(void **subscriber, Callback wanted, void *user, Options *options) {
    if (options->size != SEVERAL || strcmp(options->name, "userstream") || !options->allows_others)
        return 1;
    strncpy(options->other, holder, options->other_size);
    return cuptiSubscribe(subscriber, wanted, user);
}
#endif

int cuptiUnsubscribe(void *subscriber) {
    memset(enabled, 0, sizeof enabled);
    observe(NULL);
    return subscriber != &callback;
}

int cuptiEnableCallback(uint32_t enable, void *subscriber, int domain, uint32_t function) {
    if (subscriber != &callback || domain != DOMAIN || function >= MOST)
        return NOT_FOUND;
    enabled[function] = (char)enable;
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t function, const char **name) {
    *name = domain == DOMAIN ? symbol(function) : NULL;
    return *name ? 0 : NOT_FOUND;
}

int cuptiGetResultString(int result, const char **text) {
    *text = "CUPTI_ERROR_OF_THE_TEST";
    return result == 0;
}

/* ---- for tests ------------------------------------------------------------------------------ */

void stand_in_refuse(int result, const char *name) {
    refusal = result;
    holder = name;
}

int stand_in_enabled(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++)
        count += enabled[i];
    return count;
}

/* A call of a function with arguments as C lays them out. */
void stand_in_call(int domain, unsigned function, const void *parameters, int result,
                   void *context) {
    CallbackData data = {0, "", parameters, &result, "", context, 0, NULL, 0};
    callback(NULL, domain, function, &data);
    data.site = 1;
    callback(NULL, domain, function, &data);
}
