/* Shared declarations of the compiled decoder: data layouts, vector helpers, entry points.
 *
 * Portable C11 with the vector extensions that GCC and Clang share. Every AVX2, VNNI or AVX512 path
 * has a portable equivalent beside it; -DPARLEY_SCALAR selects the portable one.
 *
 * Packed matrix [N, K]: tiles of 8 outputs, each with one record per group of 32 inputs. 4-bit
 * kernels read two tiles at once, so the records of a pair alternate (an odd last tile stands
 * alone) and memory is read sequentially:
 *
 *   4 bits  | 128 bytes of codes | float16 scale[8] | float16 zero[8], only with PN_HAS_ZERO |
 *   8 bits  | 256 bytes of codes | float16 scale[8] | float16 zero[8], only with PN_HAS_ZERO |
 *
 * 4 bits: byte b of lane n (4 bytes per lane, 8 lanes) of vector v = 0..3 holds input 8v + b of
 * output n in its low nibble and input 8v + 4 + b in its high nibble. 8 bits: vector v = 0..7 holds
 * input 4v + b. A weight is ((code - offset) * scale + zero) * post_scale.
 *
 * Quantised activations: blocks of up to 16 rows (`pitch` rows apart), each with one record per
 * group: codes int8 [pitch][32] and meta float [pitch][4] = scale, sum of codes, their product,
 * unused. Value = code * scale.
 */
#ifndef PARLEY_H
#define PARLEY_H

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(PARLEY_SCALAR) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PN_AVX2 1
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define PN_VNNI 1
#define PN_DPBUSD _mm256_dpbusd_epi32
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define PN_AVX512 1
#endif
#elif defined(__AVXVNNI__)
#define PN_VNNI 1
#define PN_DPBUSD _mm256_dpbusd_avx_epi32
#endif
#endif

#define PN_EXPORT __attribute__((visibility("default")))
#define PN_TILE 8
#define PN_GROUP 32
#define PN_ROW_BLOCK 16
#ifdef PN_AVX512
#define PN_ROWS_AT_ONCE 8 /* in a product; divides PN_ROW_BLOCK */
#else
#define PN_ROWS_AT_ONCE 4
#endif
#define PN_ALIGNMENT 64
#define PN_MAX_THREADS 256    /* of a pool */
#define PN_MAX_QUERIES 48     /* query rows of one attention task: rows * heads of a group */
#define PN_MAX_TREE_ROWS 256  /* of one segment */
#define PN_MAX_SIBLINGS 4     /* alternatives to a draft token */
#define PN_MAXIMA_BLOCK 64    /* logits that share one block maximum */
#define PN_TAIL_DEPTH 14      /* see sample.c */

static inline int round_up(int value, int to) { return (value + to - 1) / to * to; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline void *allocate(int64_t num_bytes) { /* NULL if out of memory */
    int64_t rounded = (num_bytes + PN_ALIGNMENT) / PN_ALIGNMENT * PN_ALIGNMENT;
    return aligned_alloc(PN_ALIGNMENT, (size_t)rounded);
}

/* ---- vectors of 8 floats --------------------------------------------------------------- */

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t s8 __attribute__((vector_size(32)));
typedef float f8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t s8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define PN_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#define PN_SHUFFLE_2(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PN_SHUFFLE(v, ...) __builtin_shuffle(v, (s8){__VA_ARGS__})
#define PN_SHUFFLE_2(a, b, ...) __builtin_shuffle(a, b, (s8){__VA_ARGS__})
#endif

static inline f8 f8_load(const float *from) { return *(const f8_unaligned *)from; }
static inline void f8_store(float *to, f8 value) { *(f8_unaligned *)to = value; }
static inline f8 f8_splat(float value) {
    return (f8){value, value, value, value, value, value, value, value};
}
static inline f8 f8_max(f8 a, f8 b) { /* b if either is NaN */
#ifdef PN_AVX2
    return _mm256_max_ps(a, b);
#else
    s8 pick = a > b;
    return (f8)(((s8)a & pick) | ((s8)b & ~pick));
#endif
}
/* Magnitudes as integers order like the floats, with NaN above infinity: NaN propagates. */
static inline s8 f8_magnitude(f8 a) { return (s8)a & 0x7fffffff; }
static inline s8 s8_max(s8 a, s8 b) {
#ifdef PN_AVX2
    return (s8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    s8 pick = a > b;
    return (a & pick) | (b & ~pick);
#endif
}
static inline float largest_magnitude(s8 a) {
    a = s8_max(a, PN_SHUFFLE(a, 4, 5, 6, 7, 0, 1, 2, 3));
    a = s8_max(a, PN_SHUFFLE(a, 2, 3, 0, 1, 6, 7, 4, 5));
    a = s8_max(a, PN_SHUFFLE(a, 1, 0, 3, 2, 5, 4, 7, 6));
    return ((f8)a)[0];
}
static inline float f8_sum(f8 a) {
#ifdef PN_AVX2
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
#endif
}
static inline float f8_max_lane(f8 a) {
    f8 b = f8_max(a, PN_SHUFFLE(a, 4, 5, 6, 7, 0, 1, 2, 3));
    b = f8_max(b, PN_SHUFFLE(b, 2, 3, 0, 1, 6, 7, 4, 5));
    return f8_max(b, PN_SHUFFLE(b, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}
/* Nearest integer of |a| < 2^22, ties to even: adding 1.5 * 2^23 leaves it in the low bits. */
static inline s8 f8_round(f8 a) { return (s8)(a + 12582912.0f) - 0x4b400000; }

/* exp with an error of about 2 ulp: 2^n times a polynomial (coefficients of Cephes).
 * 0 below -87, exp(88) above 88, NaN for NaN. */
static inline f8 f8_exp(f8 x) {
    s8 is_tiny = x < -87.0f, is_huge = x > 88.0f;
    x = f8_max(f8_splat(-87.0f), x); /* this operand order propagates NaN */
    x = (f8)(((s8)x & ~is_huge) | ((s8)f8_splat(88.0f) & is_huge));
    s8 whole = f8_round(x * 1.44269504f);
    f8 n = __builtin_convertvector(whole, f8);
    f8 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    f8 power = (f8)((whole + 127) << 23);
    return (f8)((s8)(p * power) & ~is_tiny);
}
static inline f8 f8_tanh(f8 x) {
    f8 e = f8_exp(f8_max(f8_splat(-80.0f), x + x));
    s8 is_large = x > 20.0f; /* tanh rounds to 1 in float32; keeps e finite */
    f8 t = (e - 1.0f) / (e + 1.0f);
    return (f8)(((s8)t & ~is_large) | ((s8)f8_splat(1.0f) & is_large));
}

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, body = half & 0x7fff;
    union { uint32_t bits; float value; } u = {.bits = body << 13};
    if (body >= 0x7c00) {
        u.bits |= 0x7f800000;
    } else {
        u.value *= 0x1p112f; /* rebias the exponent; exact for subnormals too */
    }
    u.bits |= sign;
    return u.value;
}
static inline f8 f8_from_half(const uint16_t *from) {
#ifdef PN_AVX2
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    f8 result;
    for (int i = 0; i < 8; i++) result[i] = half_to_float(from[i]);
    return result;
#endif
}
static inline float bf16_to_float(uint16_t value) {
    union { uint32_t bits; float value; } u = {.bits = (uint32_t)value << 16};
    return u.value;
}
static inline f8 f8_from_bf16(const uint16_t *from) {
#ifdef PN_AVX2
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return (f8)_mm256_slli_epi32(wide, 16);
#else
    f8 result;
    for (int i = 0; i < 8; i++) result[i] = bf16_to_float(from[i]);
    return result;
#endif
}
static inline uint16_t float_to_bf16(float value) { /* nearest, ties to even; NaN stays NaN */
    union { float value; uint32_t bits; } u = {.value = value};
    if (value != value) return 0x7fc0;
    return (uint16_t)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}

/* ---- data ------------------------------------------------------------------------------ */

/* The caller's copies of these values and of the limits above are checked by pn_constant. */
enum { PN_HAS_ZERO = 1 };
enum { PN_F32 = 0, PN_BF16 = 1, PN_INT8 = 2, PN_F16 = 3 };
enum { PN_SILU = 0, PN_GELU_TANH = 1 };
typedef enum {
    PN_OK, PN_NO_MEMORY, PN_BAD_TOKEN, PN_BAD_LOGIT_ROW, PN_BAD_BLOCK, PN_BAD_SEGMENT,
    PN_BAD_AUX_LAYER, PN_BAD_TREE
} pn_result;

typedef struct {
    const uint8_t *data;
    const float *bias; /* [num_out] or NULL */
    int32_t num_out, num_in;
    int32_t num_tiles, num_groups;
    int32_t bits, flags;
    int32_t record_bytes;
    float offset, post_scale;
} pn_matrix;

/* Bytes from a tile's record to its record of the next group. */
static inline int64_t pn_record_stride(const pn_matrix *m, int tile) {
    return m->bits == 4 && (tile | 1) < m->num_tiles ? 2 * m->record_bytes : m->record_bytes;
}
/* A tile's record of the first group. */
static inline uint8_t *pn_first_record(const pn_matrix *m, int tile) {
    int is_paired = pn_record_stride(m, tile) > m->record_bytes;
    int64_t start = (int64_t)(is_paired ? tile & ~1 : tile) * m->num_groups * m->record_bytes;
    return (uint8_t *)m->data + start + (is_paired ? (tile & 1) * m->record_bytes : 0);
}

typedef struct {
    pn_matrix query_key_value, attention_output, gate_up, down; /* gate_up: tiles alternate */
    const float *attention_norm, *ffn_norm;
    const float *attention_post_norm, *ffn_post_norm; /* or NULL */
    const float *query_norm, *key_norm;               /* or NULL */
    const float *rotations; /* [positions][head_dim / 2][cos, sin] */
    int32_t window;         /* sliding window, 0: full attention */
    int32_t reserved;
} pn_layer;

typedef struct {
    const pn_layer *layers;
    const float *final_norm;
    const void *embedding; /* [vocab][hidden] of embedding_type; NULL: see embedding_matrix */
    pn_matrix embedding_matrix, head;
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, inner_size, vocab_size;
    int32_t max_context, embedding_type, activation;
    float rms_eps, embedding_scale, score_scale;
    float attention_softcap, logit_softcap; /* 0: none */
} pn_model;

typedef struct {
    void *data;    /* [layers][2 * kv_heads][num_positions][head_dim] */
    float *scales; /* [layers][2 * kv_heads][num_positions], int8 only */
    int64_t num_positions;
    int32_t type, block_size;
} pn_cache;

/* Consecutive rows of a batch that belong to one sequence. */
typedef struct {
    int32_t start;       /* cached positions before the first row */
    int32_t length;      /* rows */
    int32_t first_block; /* index of the sequence's first block in block_ids */
    int32_t is_tree;     /* rows are a draft tree, see `parents` of the batch */
    int32_t skipped;     /* evicted positions; they shift the RoPE position only */
} pn_segment;

typedef struct {
    const int64_t *token_ids;   /* [num_rows] */
    const int64_t *logit_rows;  /* [num_logits] rows whose logits are wanted */
    const pn_segment *segments; /* [num_segments] */
    const int32_t *parents;     /* [num_rows] rows within the segment, -1: root; or NULL */
    const int32_t *block_ids;
    const int32_t *aux_layers; /* [num_aux_layers] layer outputs; num_layers: after final norm */
    float *logits;             /* [num_logits][vocab_size] */
    float *features;           /* [num_rows][num_aux_layers][hidden_size] */
    float *block_maxima;       /* [num_logits][ceil(vocab_size / PN_MAXIMA_BLOCK)], or NULL */
    int32_t num_rows, num_logits, num_segments, num_aux_layers;
} pn_batch;

/* An EAGLE-3 draft head. Optional matrices that a head does not have have NULL data. */
typedef struct {
    pn_matrix features, hidden_proj, embedding_proj;
    pn_matrix query_key_value, attention_output, gate_up, down, head;
    const float *embedding_norm, *hidden_norm, *ffn_norm, *final_norm;
    const float *rotations;    /* [positions][head_dim / 2][cos, sin] */
    const int64_t *target_ids; /* [draft_vocab_size] token ids of the target's vocabulary */
    const pn_model *target;    /* supplies the embedding */
    int32_t num_features, normalises_features, hidden_size, num_heads, num_kv_heads, head_dim;
    int32_t inner_size, draft_vocab_size, max_context;
    float rms_eps, score_scale;
    int32_t reserved;
} pn_draft_model;

/* How one sequence drafts. */
typedef struct {
    float temperature, top_p, min_p; /* of the proposal distribution */
    float min_probability;           /* a draft is dropped if the chain's product is below this */
    float min_extend_probability;    /* a chain is not extended if its product is below this */
    int32_t top_k, max_drafts;
} pn_draft_choice;

/* Sampling parameters of one token. Token ids are valid and distinct within each list. */
typedef struct {
    const int64_t *repeated_ids; /* [num_repeated] tokens with a repetition penalty */
    const int64_t *reply_ids;    /* [num_reply_ids] generated tokens, for the other penalties */
    const int64_t *bias_ids;     /* [num_biases] */
    const float *reply_counts, *biases;
    double u; /* uniform random number in [0, 1) */
    float repetition_penalty, frequency_penalty, presence_penalty;
    float temperature, top_p, min_p;
    int32_t num_repeated, num_reply_ids, num_biases, top_k, is_greedy, reserved;
} pn_sample_params;

/* Input and output of a draft head. With `choices` the last row of each segment (the only rows in
 * output_rows) is extended num_steps times into a chain: each step drafts the most likely token, or
 * the one that u_values makes most likely, and feeds it to the next step. */
typedef struct {
    const int64_t *token_ids;   /* [num_rows] */
    const float *features;      /* [num_rows][num_features] of the target; NULL: see states */
    const float *states;        /* [num_rows][hidden_size] outputs of the head's earlier rows */
    const int64_t *output_rows; /* [num_outputs] ascending */
    const pn_segment *segments; /* [num_segments] */
    const int32_t *parents;     /* as in pn_batch */
    const int32_t *block_ids;
    const pn_draft_choice *choices; /* [num_segments] or NULL */
    const float *u_values;          /* [num_steps + 1][num_segments], < 0: greedy */
    float *logits;            /* [num_outputs][draft_vocab_size], without choices */
    float *out_states;        /* [num_outputs][hidden_size], without choices */
    int64_t *out_tokens;      /* [num_steps + 1][num_segments] ids of the target's vocabulary */
    float *out_probabilities; /* [num_steps + 1][num_segments] */
    int64_t *out_siblings;    /* [num_steps + 1][num_segments][num_siblings] runners-up */
    float *out_sibling_probabilities; /* as out_siblings */
    int32_t *out_lengths;     /* [num_segments] drafts in each chain */
    int32_t num_rows, num_outputs, num_segments, num_steps;
    float u_bandwidth; /* scale, in u, within which target and head mostly sample alike */
    int32_t num_siblings; /* 0 to PN_MAX_SIBLINGS, below draft_vocab_size */
} pn_draft_batch;

typedef struct {
    int8_t *codes;
    float *meta;
    int32_t pitch, num_groups;
} pn_activations;

/* Output stage of a matrix product. */
enum { PN_STORE = 0, PN_ADD = 1, PN_GATED = 2 };
typedef struct {
    float *out;
    int64_t stride; /* floats between rows */
    int32_t mode, activation;
    float softcap; /* 0: none */
} pn_epilogue;

/* Input of a matrix product: float rows, RMS-normed first if `norm` is not NULL. */
typedef struct {
    const float *rows;
    const float *norm;
    int64_t stride; /* floats between rows */
    int32_t num_in;
} pn_input;

/* Buffers of one thread of a session. */
enum { PN_THREAD_LOCAL_ROWS = 2 };
typedef struct {
    pn_activations own; /* of up to PN_THREAD_LOCAL_ROWS rows */
    int64_t prepared;   /* phase number (counted over all calls) whose input `own` holds */
    float *attention;
} pn_thread_state;

/* ---- functions ------------------------------------------------------------------------- */

typedef struct pn_pool pn_pool;
typedef void (*pn_task_fn)(void *context, int phase, int task, int thread);

PN_EXPORT pn_pool *pn_pool_create(int num_threads, int spin_us);
PN_EXPORT void pn_pool_destroy(pn_pool *pool);
PN_EXPORT int pn_pool_threads(const pn_pool *pool);
void pn_pool_run(pn_pool *pool, int num_phases, const int32_t *num_tasks, pn_task_fn run,
                 void *context, int64_t *phase_ns);

void pn_quantize_rows(const float *x, int64_t stride, int num_in, const float *norm, float eps,
                      int first_row, int end_row, pn_activations *to);
void pn_rms_norm(const float *x, const float *weight, int size, float eps, float *out);
int64_t pn_code_bytes(int num_rows, int num_groups);
int64_t pn_meta_floats(int num_rows, int num_groups);

void pn_matmul_tiles(const pn_matrix *matrix, const pn_activations *x, int num_rows,
                     int first_tile, int end_tile, const pn_epilogue *epilogue);
void pn_two_tiles(const pn_matrix *m, int tile, const int8_t *q, const float *meta, int pitch,
                  int num_rows, f8 sums[][2]);
pn_thread_state *pn_threads_create(int num_threads, int max_inputs, int head_dim);
void pn_threads_destroy(pn_thread_state *threads, int num_threads);
int pn_tiles_per_task(int num_tiles, int num_rows, int num_threads, int together);
void pn_quantize_input(const pn_input *input, float eps, int num_rows, int first_row, int end_row,
                       pn_activations to);
pn_activations pn_prepare_input(const pn_input *input, float eps, int num_rows,
                                pn_activations shared, pn_thread_state *thread, int64_t number);
void pn_embed(const pn_model *model, int64_t token, float *out);
void pn_block_maxima(const float *logits, float *maxima, int vocab_size, int first_tile,
                     int end_tile, int num_rows);
int pn_choose_draft(float *logits, int draft_vocab_size, float u, float bandwidth,
                    const pn_draft_choice *choice);
float pn_measure(const float *weights, int num, float least, int is_sum);
float pn_threshold(const float *weights, int num, float least, float needed, int is_sum);
PN_EXPORT int64_t pn_sample_token(float *row, const float *block_maxima, int vocab_size,
                                  const pn_sample_params *params, float *scratch);
void pn_find_siblings(const float *weights, int draft_vocab_size, int chosen, int count,
                      int *siblings);
pn_result pn_check_batch(const pn_model *m, const pn_cache *cache, const pn_batch *batch);
pn_result pn_check_draft_batch(const pn_draft_model *m, const pn_cache *cache,
                               const pn_draft_batch *batch);
PN_EXPORT void pn_matrix_row(const pn_matrix *matrix, int row, float *out);

typedef struct {
    const pn_cache *cache;
    const int32_t *block_ids;
    int32_t layer, kv_head, num_kv_heads, num_heads, head_dim, window;
    float softcap;
} pn_attention;
int64_t pn_attention_scratch(int head_dim);
int pn_attention_rows(int group_size);

/* Rows of one sequence for the query heads of one KV head; `query` and `out` point at the first of
 * these heads in the first row. */
typedef struct {
    const float *query;
    float *out;
    int64_t query_stride, out_stride;
    const int32_t *depths; /* [num_rows] offsets from `position`; NULL: 0, 1, 2, ... */
    int32_t position, num_rows;
} pn_query_rows;
void pn_attend(const pn_attention *call, const pn_query_rows *rows, float *scratch);
void pn_attend_tree(const pn_attention *call, const pn_query_rows *rows, const int32_t *parents,
                    int first_row, float *scratch);
void pn_store_kv(const pn_cache *cache, int layer, int num_kv_heads, int head_dim,
                 int64_t slot, const float *key_value);
void pn_rotate_row(float *heads, int num_heads, int head_dim, const float *rotation,
                   const float *norm, float eps, float scale);

#endif
