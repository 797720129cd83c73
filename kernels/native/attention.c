/* Causal attention over the blocks of the KV pool with online softmax.
 *
 * One call handles a few rows of one sequence and all query heads that share a KV head; those heads
 * are the rows of one small matrix product. Keys are visited in chunks; the largest score so far,
 * the sum of weights and the weighted values are rescaled from chunk to chunk (Milakov and
 * Gimelshein 2018; Dao et al. 2022), so the scores of a whole context are never stored. Chunks
 * begin at multiples of CHUNK and all sums have a fixed order, so a row's result does not depend on
 * the number of rows in the batch: quantising activations to 8 bits would amplify any difference.
 */
#include "parley.h"

enum { CHUNK = 64, MAX_SLOTS = CHUNK + PN_MAX_TREE_ROWS };

/* Query rows of a call, such that rows * heads of a group <= PN_MAX_QUERIES. */
int pn_attention_rows(int group_size) {
    int rows = PN_MAX_QUERIES / group_size;
    return rows < 1 ? 1 : rows;
}

/* Floats of scratch that a call needs. Models with groups above PN_MAX_QUERIES are rejected. */
int64_t pn_attention_scratch(int head_dim) {
    return (int64_t)PN_MAX_QUERIES * (2 * head_dim + CHUNK) + 2LL * MAX_SLOTS * head_dim + 64;
}

/* ---- reading ----------------------------------------------------------------------------- */

/* Pointers to one head's rows of positions [first, first + num) of the sequence. Floats are used in
 * place; int8 is dequantised to float32 in `scratch` [num][head_dim]. */
static void gather(const pn_attention *call, int head, int first, int num, const void **rows,
                   float *scratch) {
    const pn_cache *cache = call->cache;
    int head_dim = call->head_dim, block_size = cache->block_size;
    int64_t base = ((int64_t)call->layer * 2 * call->num_kv_heads + head) * cache->num_positions;
    int64_t block = first / block_size, offset = first % block_size;
    for (int j = 0; j < num; j++) {
        int64_t slot = base + (int64_t)call->block_ids[block] * block_size + offset;
        if (++offset == block_size) offset = 0, block++;
        if (cache->type == PN_F32) {
            rows[j] = (const float *)cache->data + slot * head_dim;
            continue;
        }
        if (cache->type == PN_BF16) {
            rows[j] = (const uint16_t *)cache->data + slot * head_dim;
            continue;
        }
        const int8_t *from = (const int8_t *)cache->data + slot * head_dim;
        float *to = scratch + (int64_t)j * head_dim, scale = cache->scales[slot];
        rows[j] = to;
        for (int d = 0; d < head_dim; d++) to[d] = (float)from[d] * scale;
    }
}

/* Prefetches the keys and values of positions [first, first + num): they are scattered over the
 * pool in short pieces, each of which would stall at its beginning. */
static void prefetch(const pn_attention *call, int first, int num) {
    const pn_cache *cache = call->cache;
    int size = cache->type == PN_F32 ? 4 : cache->type == PN_BF16 ? 2 : 1;
    int64_t row_bytes = (int64_t)call->head_dim * size;
    int block_size = cache->block_size;
    int heads[] = {call->kv_head, call->num_kv_heads + call->kv_head};
    for (int h = 0; h < 2; h++) {
        int64_t base = ((int64_t)call->layer * 2 * call->num_kv_heads + heads[h]) *
                       cache->num_positions;
        for (int at = first; at < first + num;) {
            int offset = at % block_size, count = min_int(block_size - offset, first + num - at);
            int64_t slot = base + (int64_t)call->block_ids[at / block_size] * block_size + offset;
            const char *from = (const char *)cache->data + slot * row_bytes;
            for (int64_t byte = 0; byte < count * row_bytes; byte += 64)
                __builtin_prefetch(from + byte);
            at += count;
        }
    }
}

/* ---- products ---------------------------------------------------------------------------- */

/* Lane sums of four vectors, each in the order of f8_sum: a, c, b, d in lanes 0, 2, 4, 6. */
static inline f8 sums_of_4(f8 a, f8 b, f8 c, f8 d) {
    f8 ab = PN_SHUFFLE_2(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
            PN_SHUFFLE_2(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 cd = PN_SHUFFLE_2(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
            PN_SHUFFLE_2(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 pairs = PN_SHUFFLE_2(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
               PN_SHUFFLE_2(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return pairs + PN_SHUFFLE(pairs, 1, 0, 3, 2, 5, 4, 7, 6);
}

#define INLINE static inline __attribute__((always_inline))

/* 8 values of a row of keys or values; `is_bf16` is a constant after inlining. */
INLINE f8 load_8(const void *row, int d, int is_bf16) {
    return is_bf16 ? f8_from_bf16((const uint16_t *)row + d) : f8_load((const float *)row + d);
}

/* scores[m][0..3] of up to 3 queries and 4 keys; `num_queries` is a constant after inlining. */
INLINE void score_tile(const float *queries, int num_queries, int head_dim, const void **keys,
                       float *scores, int is_bf16) {
    f8 sum[3][4] = {{{0}}};
    for (int d = 0; d < head_dim; d += 8) {
        f8 key[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) key[j] = load_8(keys[j], d, is_bf16);
#pragma GCC unroll 3
        for (int m = 0; m < num_queries; m++) {
            f8 query = f8_load(queries + m * head_dim + d);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[m][j] += query * key[j];
        }
    }
#pragma GCC unroll 3
    for (int m = 0; m < num_queries; m++) {
        f8 of_keys = sums_of_4(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
        float *to = scores + m * CHUNK;
        to[0] = of_keys[0], to[1] = of_keys[4], to[2] = of_keys[2], to[3] = of_keys[6];
    }
}

#ifdef PN_AVX512
/* 16 values of a row, likewise. */
INLINE __m512 load_16(const void *row, int d, int is_bf16) {
    if (!is_bf16) return _mm512_loadu_ps((const float *)row + d);
    __m256i halves = _mm256_loadu_si256((const __m256i *)((const uint16_t *)row + d));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE f8 both_halves(__m512 a) {
    return (f8)_mm512_castps512_ps256(a) + (f8)_mm512_extractf32x8_ps(a, 1);
}

/* score_tile for a head_dim that is a multiple of 16, a property of the model, not of a row. */
INLINE void score_tile_wide(const float *queries, int num_queries, int head_dim, const void **keys,
                            float *scores, int is_bf16) {
    __m512 sum[3][4];
    for (int m = 0; m < num_queries; m++)
        for (int j = 0; j < 4; j++) sum[m][j] = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += 16) {
        __m512 key[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) key[j] = load_16(keys[j], d, is_bf16);
#pragma GCC unroll 3
        for (int m = 0; m < num_queries; m++) {
            __m512 query = _mm512_loadu_ps(queries + m * head_dim + d);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[m][j] = _mm512_fmadd_ps(query, key[j], sum[m][j]);
        }
    }
#pragma GCC unroll 3
    for (int m = 0; m < num_queries; m++) {
        f8 of_keys = sums_of_4(both_halves(sum[m][0]), both_halves(sum[m][1]),
                               both_halves(sum[m][2]), both_halves(sum[m][3]));
        float *to = scores + m * CHUNK;
        to[0] = of_keys[0], to[1] = of_keys[4], to[2] = of_keys[2], to[3] = of_keys[6];
    }
}

/* add_values_tile for 16 * width dims from `d` on, with the same order of sums. */
INLINE void add_values_wide(const float *weights, int num_queries, const void **values,
                            int num_values, int head_dim, float *sums, int is_bf16, int d,
                            int width) {
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int m = 0; m < num_queries; m++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++)
            sum[m][v] = _mm512_loadu_ps(sums + m * head_dim + d + 16 * v);
    for (int j = 0; j < num_values; j++) {
        __m512 value[4];
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) value[v] = load_16(values[j], d + 16 * v, is_bf16);
#pragma GCC unroll 4
        for (int m = 0; m < num_queries; m++) {
            __m512 weight = _mm512_set1_ps(weights[m * CHUNK + j]);
#pragma GCC unroll 4
            for (int v = 0; v < width; v++)
                sum[m][v] = _mm512_fmadd_ps(weight, value[v], sum[m][v]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < num_queries; m++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++)
            _mm512_storeu_ps(sums + m * head_dim + d + 16 * v, sum[m][v]);
}
#endif

INLINE void score_all(const float *queries, int num_queries, int head_dim, const void **keys,
                      int num_keys, float *scores, int is_bf16) {
    for (int j = 0; j < num_keys; j += 4) {
        int m = 0;
#ifdef PN_AVX512
        if (head_dim % 16 == 0) {
            for (; m + 3 <= num_queries; m += 3)
                score_tile_wide(queries + m * head_dim, 3, head_dim, keys + j,
                                scores + m * CHUNK + j, is_bf16);
            for (; m < num_queries; m++)
                score_tile_wide(queries + m * head_dim, 1, head_dim, keys + j,
                                scores + m * CHUNK + j, is_bf16);
            continue;
        }
#endif
        for (; m + 3 <= num_queries; m += 3)
            score_tile(queries + m * head_dim, 3, head_dim, keys + j, scores + m * CHUNK + j,
                       is_bf16);
        for (; m < num_queries; m++)
            score_tile(queries + m * head_dim, 1, head_dim, keys + j, scores + m * CHUNK + j,
                       is_bf16);
    }
}

/* scores[m][j] = queries[m] . keys[j], summed in an order independent of the batch. Writes up to
 * the next multiple of 4 keys, for which `keys` has room. */
static void score(const float *queries, int num_queries, int head_dim, const void **keys,
                  int num_keys, float *scores, int is_bf16) {
    for (int j = num_keys; j % 4; j++) keys[j] = keys[num_keys - 1];
    if (is_bf16) {
        score_all(queries, num_queries, head_dim, keys, num_keys, scores, 1);
    } else {
        score_all(queries, num_queries, head_dim, keys, num_keys, scores, 0);
    }
}

/* sums[m] += weights[m][j] * values[j] over all j, for up to 4 queries (a constant after inlining).
 * Each sum is taken in the order of positions. */
INLINE void add_values_tile(const float *weights, int num_queries, const void **values,
                            int num_values, int head_dim, float *sums, int is_bf16) {
    int d = 0;
#ifdef PN_AVX512
    for (; d + 64 <= head_dim; d += 64)
        add_values_wide(weights, num_queries, values, num_values, head_dim, sums, is_bf16, d, 4);
    for (; d + 16 <= head_dim; d += 16)
        add_values_wide(weights, num_queries, values, num_values, head_dim, sums, is_bf16, d, 1);
#endif
    for (; d + 16 <= head_dim; d += 16) {
        f8 sum[4][2];
        for (int m = 0; m < num_queries; m++)
            for (int v = 0; v < 2; v++) sum[m][v] = f8_load(sums + m * head_dim + d + 8 * v);
        for (int j = 0; j < num_values; j++) {
            f8 low = load_8(values[j], d, is_bf16), high = load_8(values[j], d + 8, is_bf16);
#pragma GCC unroll 4
            for (int m = 0; m < num_queries; m++) {
                f8 weight = f8_splat(weights[m * CHUNK + j]);
                sum[m][0] += weight * low;
                sum[m][1] += weight * high;
            }
        }
        for (int m = 0; m < num_queries; m++)
            for (int v = 0; v < 2; v++) f8_store(sums + m * head_dim + d + 8 * v, sum[m][v]);
    }
    if (d == head_dim) return;
    for (int m = 0; m < num_queries; m++) {
        f8 sum = f8_load(sums + m * head_dim + d);
        for (int j = 0; j < num_values; j++)
            sum += f8_splat(weights[m * CHUNK + j]) * load_8(values[j], d, is_bf16);
        f8_store(sums + m * head_dim + d, sum);
    }
}

INLINE void add_values_of(const float *weights, int num_queries, const void **values,
                          int num_values, int head_dim, float *sums, int is_bf16) {
    for (; num_queries >= 4; num_queries -= 4, weights += 4 * CHUNK, sums += 4 * head_dim)
        add_values_tile(weights, 4, values, num_values, head_dim, sums, is_bf16);
    switch (num_queries) {
    case 3: add_values_tile(weights, 3, values, num_values, head_dim, sums, is_bf16); break;
    case 2: add_values_tile(weights, 2, values, num_values, head_dim, sums, is_bf16); break;
    case 1: add_values_tile(weights, 1, values, num_values, head_dim, sums, is_bf16); break;
    default: break;
    }
}

static void add_values(const float *weights, int num_queries, const void **values, int num_values,
                       int head_dim, float *sums, int is_bf16) {
    if (is_bf16) {
        add_values_of(weights, num_queries, values, num_values, head_dim, sums, 1);
    } else {
        add_values_of(weights, num_queries, values, num_values, head_dim, sums, 0);
    }
}

/* ---- online softmax ---------------------------------------------------------------------- */

typedef struct {
    float largest, total;
} softmax_state;

/* Turns the scores [CHUNK] of one query into weights; entries outside [first, end) are masked.
 * `sum` is the query's weighted sum of values so far. */
static void update_softmax(softmax_state *state, float *scores, int first, int end, float softcap,
                           float *sum, int head_dim) {
    int padded = (end + 7) / 8 * 8;
    for (int j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int j = end; j < padded; j++) scores[j] = -INFINITY;
    f8 max = f8_splat(-INFINITY);
    for (int j = 0; j < padded; j += 8) {
        f8 s = f8_load(scores + j);
        if (softcap > 0) {
            f8 capped = softcap * f8_tanh(s / softcap);
            s8 masked = s == f8_splat(-INFINITY);
            s = (f8)(((s8)s & masked) | ((s8)capped & ~masked));
            f8_store(scores + j, s);
        }
        max = f8_max(max, s);
    }
    float largest = f8_max_lane(max);
    if (largest > state->largest) {
        float correction = expf(state->largest - largest); /* 0 at the first chunk */
        state->largest = largest;
        state->total *= correction;
        for (int d = 0; d < head_dim; d += 8) f8_store(sum + d, f8_load(sum + d) * correction);
    }
    f8 total = f8_splat(0);
    for (int j = 0; j < padded; j += 8) {
        f8 weight = f8_exp(f8_load(scores + j) - state->largest);
        total += weight;
        f8_store(scores + j, weight);
    }
    state->total += f8_sum(total);
}

/* ---- attention --------------------------------------------------------------------------- */

/* State of a call between chunks, for up to PN_MAX_QUERIES query rows (rows * heads of a group). */
typedef struct {
    const pn_attention *call;
    int num_queries, is_bf16;
    float *queries, *sums, *scores, *key_space, *value_space;
    softmax_state states[PN_MAX_QUERIES];
} attention_state;

static void begin(attention_state *s, const pn_attention *call, const pn_query_rows *rows,
                  float *scratch) {
    int head_dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    s->call = call;
    s->num_queries = rows->num_rows * group;
    s->is_bf16 = call->cache->type == PN_BF16;
    s->queries = scratch;
    s->sums = s->queries + PN_MAX_QUERIES * head_dim;
    s->scores = s->sums + PN_MAX_QUERIES * head_dim;
    s->key_space = s->scores + PN_MAX_QUERIES * CHUNK;
    s->value_space = s->key_space + MAX_SLOTS * head_dim;
    memset(s->sums, 0, sizeof(float) * s->num_queries * head_dim);
    for (int m = 0; m < s->num_queries; m++) {
        memcpy(s->queries + m * head_dim,
               rows->query + m / group * rows->query_stride + m % group * head_dim,
               sizeof(float) * head_dim);
        s->states[m] = (softmax_state){-INFINITY, 0.0f};
    }
}

static void finish(const attention_state *s, const pn_query_rows *rows) {
    int head_dim = s->call->head_dim, group = s->call->num_heads / s->call->num_kv_heads;
    for (int m = 0; m < s->num_queries; m++) {
        float *to = rows->out + m / group * rows->out_stride + m % group * head_dim;
        float inverse = 1.0f / s->states[m].total;
        for (int d = 0; d < head_dim; d += 8)
            f8_store(to + d, f8_load(s->sums + m * head_dim + d) * inverse);
    }
}

/* Turns the scores of query m, at position `at`, against positions [first, first + num) into
 * weights. */
static void weigh(attention_state *s, int m, int at, int first, int num) {
    int window = s->call->window, head_dim = s->call->head_dim;
    int low = window > 0 && at + 1 > window ? at + 1 - window : 0; /* sees [low, at] */
    int seen_from = low > first ? low - first : 0, seen_to = min_int(num, at + 1 - first);
    float *row = s->scores + m * CHUNK;
    if (seen_from >= num || seen_to <= seen_from) { /* sees nothing of this chunk */
        memset(row, 0, sizeof(float) * CHUNK);
        return;
    }
    update_softmax(&s->states[m], row, seen_from, seen_to, s->call->softcap,
                   s->sums + m * head_dim, head_dim);
    for (int j = (seen_to + 7) / 8 * 8; j < num; j++) row[j] = 0.0f;
}

/* Start of the first chunk that position `at` sees. */
static int first_chunk(const pn_attention *call, int at) {
    int start = call->window > 0 && at + 1 > call->window ? at + 1 - call->window : 0;
    return start / CHUNK * CHUNK; /* chunks do not depend on the rows, nor do sums */
}

/* Processes the chunks of positions [start, end); row r is at position rows->position + depths[r],
 * or + r without depths. */
static void visit(attention_state *s, const pn_query_rows *rows, int start, int end) {
    const pn_attention *call = s->call;
    int head_dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const void *keys[CHUNK], *values[CHUNK];
    int key_head = call->kv_head, value_head = call->num_kv_heads + call->kv_head;
    if (start < end) prefetch(call, start, min_int(CHUNK, end - start));
    for (int first = start; first < end; first += CHUNK) {
        int num = min_int(CHUNK, end - first);
        int next = first + CHUNK;
        if (next < end) prefetch(call, next, min_int(CHUNK, end - next));
        gather(call, key_head, first, num, keys, s->key_space);
        gather(call, value_head, first, num, values, s->value_space);
        score(s->queries, s->num_queries, head_dim, keys, num, s->scores, s->is_bf16);
        for (int m = 0; m < s->num_queries; m++) {
            int row = m / group;
            weigh(s, m, rows->position + (rows->depths ? rows->depths[row] : row), first, num);
        }
        add_values(s->scores, s->num_queries, values, num, head_dim, s->sums, s->is_bf16);
    }
}

/* Attention of rows at positions [position, position + num_rows), whose own keys are already
 * stored; queries are rotated and scaled. */
void pn_attend(const pn_attention *call, const pn_query_rows *rows, float *scratch) {
    attention_state state;
    begin(&state, call, rows, scratch);
    visit(&state, rows, first_chunk(call, rows->position), rows->position + rows->num_rows);
    finish(&state, rows);
}

/* Tree attention: a row sees the positions before `start`, its ancestors and itself. Row r of the
 * tree is stored at position start + r, but its keys are visited in the order of depths and in the
 * chunks of an unbranched sequence, so sums are bit-identical to those. */
void pn_attend_tree(const pn_attention *call, const pn_query_rows *rows, const int32_t *parents,
                    int first_row, float *scratch) {
    attention_state state, *s = &state;
    int head_dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    int start = rows->position, tail = start / CHUNK * CHUNK;
    const void *keys[MAX_SLOTS], *values[MAX_SLOTS];
    begin(s, call, rows, scratch);
    int shallowest = rows->depths[0];
    for (int r = 1; r < rows->num_rows; r++) shallowest = min_int(shallowest, rows->depths[r]);
    int from = first_chunk(call, start + shallowest);
    visit(s, rows, from, tail);

    /* From `tail` on the rows see different keys; each is gathered once. */
    int num_slots = start - tail + first_row + rows->num_rows;
    gather(call, call->kv_head, tail, num_slots, keys, s->key_space);
    gather(call, call->num_kv_heads + call->kv_head, tail, num_slots, values, s->value_space);
    for (int r = 0; r < rows->num_rows; r++) {
        int at = start + rows->depths[r];
        const void *own_keys[MAX_SLOTS], *own_values[MAX_SLOTS];
        for (int j = 0; j < start - tail; j++) own_keys[j] = keys[j], own_values[j] = values[j];
        for (int node = first_row + r, j = at - tail; node >= 0; node = parents[node], j--) {
            own_keys[j] = keys[start - tail + node];
            own_values[j] = values[start - tail + node];
        }
        for (int first = tail; first <= at; first += CHUNK) {
            int num = min_int(CHUNK, at + 1 - first), m = r * group;
            score(s->queries + m * head_dim, group, head_dim, own_keys + first - tail, num,
                  s->scores + m * CHUNK, s->is_bf16);
            for (int i = m; i < m + group; i++) weigh(s, i, at, first, num);
            add_values(s->scores + m * CHUNK, group, own_values + first - tail, num, head_dim,
                       s->sums + m * head_dim, s->is_bf16);
        }
    }
    finish(s, rows);
}
