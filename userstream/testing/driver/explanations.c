/* Explanations of errors: the traceback of a kernel, or the function that has to be registered. */
#include "driver.h"

#include <stdio.h>

static Explanation *explanations;

static const char *plain_name(CUresult result) {
    switch (result) {
#define NAME_OF(name, value, text) \
    case name: \
        return #name;
    FOR_EACH_RESULT(NAME_OF)
#undef NAME_OF
    }
    return "CUDA_ERROR_UNKNOWN";
}

static const char *plain_text(CUresult result) {
    switch (result) {
#define TEXT_OF(name, value, text) \
    case name: \
        return text;
    FOR_EACH_RESULT(TEXT_OF)
#undef TEXT_OF
    }
    return "unknown error";
}

static char *joined(const char *before, const char *between, const char *text, const char *after) {
    size_t size = strlen(before) + strlen(between) + strlen(text) + strlen(after) + 1;
    char *whole = malloc(size);
    snprintf(whole, size, "%s%s%s%s", before, between, text, after);
    return whole;
}

/* Programs keep the texts that a driver gives them, so none is ever freed; there is one of each. */
const Explanation *explanation_new(CUresult result, const char *text) {
    Explanation *explanation = malloc(sizeof *explanation);
    explanation->result = result;
    /* In the name too: it is all that cuda.core shows of what a driver says. */
    explanation->name = joined(plain_name(result), " (", text, ")");
    explanation->text = joined(plain_text(result), "\n", text, "");
    for (const Explanation *known = explanations; known; known = known->next) {
        if (known->result == result && strcmp(known->text, explanation->text) == 0) {
            free(explanation->name);
            free(explanation->text);
            free(explanation);
            return known;
        }
    }
    explanation->next = explanations;
    explanations = explanation;
    return explanation;
}

const Explanation *explanation_of(CUresult result) {
    lock();
    const Explanation *explanation = this_thread()->explanation;
    if (explanation && explanation->result != result)
        explanation = NULL;
    for (Context *context = context_first(); context && !explanation; context = context->next) {
        if (context->active && context->error == result)
            explanation = context->explanation;
    }
    unlock();
    return explanation;
}
