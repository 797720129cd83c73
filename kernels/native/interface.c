/* What a caller over a foreign function interface checks when it loads the library: sizes of
 * structures, values of constants, names of phases; and which instruction set it was compiled for.
 */
#include "parley.h"

/* sizeof the structure of that name; -1 if unknown. */
PN_EXPORT int64_t pn_struct_size(const char *name) {
#define STRUCT(type) {#type, sizeof(type)}
    static const struct { const char *name; int64_t size; } table[] = {
        STRUCT(pn_matrix), STRUCT(pn_layer), STRUCT(pn_model), STRUCT(pn_cache),
        STRUCT(pn_segment), STRUCT(pn_batch), STRUCT(pn_epilogue), STRUCT(pn_draft_model),
        STRUCT(pn_draft_choice), STRUCT(pn_draft_batch), STRUCT(pn_sample_params)};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0) return table[i].size;
    return -1;
}

/* Value of the macro or enumerator of that name; -1 if unknown. */
PN_EXPORT int64_t pn_constant(const char *name) {
#define CONSTANT(name) {#name, name}
    static const struct { const char *name; int64_t value; } table[] = {
        CONSTANT(PN_GROUP), CONSTANT(PN_TILE), CONSTANT(PN_MAX_THREADS), CONSTANT(PN_MAX_QUERIES),
        CONSTANT(PN_MAX_TREE_ROWS), CONSTANT(PN_MAX_SIBLINGS), CONSTANT(PN_MAXIMA_BLOCK),
        CONSTANT(PN_TAIL_DEPTH), CONSTANT(PN_HAS_ZERO),
        CONSTANT(PN_F32), CONSTANT(PN_BF16), CONSTANT(PN_INT8), CONSTANT(PN_F16),
        CONSTANT(PN_STORE), CONSTANT(PN_ADD), CONSTANT(PN_GATED),
        CONSTANT(PN_SILU), CONSTANT(PN_GELU_TANH),
        CONSTANT(PN_OK), CONSTANT(PN_NO_MEMORY), CONSTANT(PN_BAD_TOKEN), CONSTANT(PN_BAD_LOGIT_ROW),
        CONSTANT(PN_BAD_BLOCK), CONSTANT(PN_BAD_SEGMENT), CONSTANT(PN_BAD_AUX_LAYER),
        CONSTANT(PN_BAD_TREE)};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0) return table[i].value;
    return -1;
}

/* The instruction set of the matrix products. */
PN_EXPORT const char *pn_instructions(void) {
#if defined(PN_AVX512)
    return "AVX512 with VNNI";
#elif defined(PN_VNNI)
    return "AVX2 with VNNI";
#elif defined(PN_AVX2)
    return "AVX2";
#else
    return "portable C";
#endif
}
