/* Rotation, the KV pool, and causal attention over its blocks with a running softmax.
 *
 * One call attends with a few rows of one sequence over all query heads that share a key/value
 * head: those heads are the rows of one small product. Keys are visited in chunks; the largest
 * score so far, the sum of weights and the weighted values are corrected from chunk to chunk
 * (Milakov and Gimelshein 2018; Dao et al. 2022), so scores of a whole context are never held.
 * Chunks begin at multiples of CHUNK and all sums have one order, so a row's result does not depend
 * on how many rows come with it: 8-bit activations would turn the least difference into a large one.
 */
#include "parley.h"

enum { CHUNK = 64, MAX_QUERIES = 48 };

/* Query rows of a call, so that rows * heads of a group stay within MAX_QUERIES. */
int pn_attention_rows(int group_size) {
    int rows = MAX_QUERIES / group_size;
    return rows < 1 ? 1 : rows;
}

/* Floats of scratch of a call. A group larger than MAX_QUERIES is refused when a model is built. */
int64_t pn_attention_scratch(int head_dim) {
    return (int64_t)MAX_QUERIES * (2 * head_dim + CHUNK) + 2LL * CHUNK * head_dim + 64;
}

/* ---- rotation and storing ---------------------------------------------------------------- */

/* heads [num_heads][head_dim]: normed over head_dim if `norm`, each pair (2j, 2j + 1) turned by
 * rotation [head_dim / 2][cos, sin], all times `scale`. head_dim % 8 == 0. */
void pn_rotate_row(float *heads, int num_heads, int head_dim, const float *rotation,
                   const float *norm, float eps, float scale) {
    const f8 sign = {-1, 1, -1, 1, -1, 1, -1, 1};
    for (int h = 0; h < num_heads; h++, heads += head_dim) {
        if (norm) pn_rms_norm(heads, norm, head_dim, eps, heads);
        for (int d = 0; d < head_dim; d += 8) {
            f8 x = f8_load(heads + d), turn = f8_load(rotation + d);
            f8 cosines = PN_SHUFFLE(turn, 0, 0, 2, 2, 4, 4, 6, 6);
            f8 sines = PN_SHUFFLE(turn, 1, 1, 3, 3, 5, 5, 7, 7) * sign;
            f8 swapped = PN_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6);
            f8_store(heads + d, (x * cosines + swapped * sines) * scale);
        }
    }
}

/* key_value [2 * num_kv_heads][head_dim] of one row to its place in the pool. */
void pn_store_kv(const pn_cache *cache, int layer, int num_kv_heads, int head_dim,
                 int64_t pool_position, const float *key_value) {
    for (int h = 0; h < 2 * num_kv_heads; h++, key_value += head_dim) {
        int64_t head = (int64_t)layer * 2 * num_kv_heads + h;
        int64_t place = head * cache->num_positions + pool_position;
        if (cache->type == PN_F32) {
            memcpy((float *)cache->data + place * head_dim, key_value, sizeof(float) * head_dim);
        } else if (cache->type == PN_BF16) {
            uint16_t *to = (uint16_t *)cache->data + place * head_dim;
            for (int d = 0; d < head_dim; d++) to[d] = float_to_bf16(key_value[d]);
        } else {
            int8_t *to = (int8_t *)cache->data + place * head_dim;
            s8 most = {0};
            for (int d = 0; d < head_dim; d += 8)
                most = s8_max(most, f8_magnitude(f8_load(key_value + d)));
            float scale = largest_magnitude(most) / 127.0f;
            float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
            cache->scales[place] = scale;
            for (int d = 0; d < head_dim; d++) to[d] = (int8_t)rintf(key_value[d] * inverse);
        }
    }
}

/* ---- reading ----------------------------------------------------------------------------- */

/* Rows of one head: positions [first, first + num) of the sequence. float32 is pointed at, other
 * types are widened into `scratch` [num][head_dim]. */
static void gather(const pn_attention *call, int head, int first, int num, const float **rows,
                   float *scratch) {
    const pn_cache *cache = call->cache;
    int head_dim = call->head_dim, block_size = cache->block_size;
    int64_t base = ((int64_t)call->layer * 2 * call->num_kv_heads + head) * cache->num_positions;
    int64_t block = first / block_size, offset = first % block_size;
    for (int j = 0; j < num; j++) {
        int64_t place = base + (int64_t)call->block_ids[block] * block_size + offset;
        if (++offset == block_size) offset = 0, block++;
        if (cache->type == PN_F32) {
            rows[j] = (const float *)cache->data + place * head_dim;
            continue;
        }
        float *to = scratch + (int64_t)j * head_dim;
        rows[j] = to;
        if (cache->type == PN_BF16) {
            const uint16_t *from = (const uint16_t *)cache->data + place * head_dim;
            uint32_t *bits = (uint32_t *)to;
            for (int d = 0; d < head_dim; d++) bits[d] = (uint32_t)from[d] << 16;
        } else {
            const int8_t *from = (const int8_t *)cache->data + place * head_dim;
            float scale = cache->scales[place];
            for (int d = 0; d < head_dim; d++) to[d] = (float)from[d] * scale;
        }
    }
}

/* ---- products ---------------------------------------------------------------------------- */

/* The sums of the lanes of four vectors, each in the order of f8_sum: a, c, b, d in lanes 0, 2, 4, 6. */
static inline f8 sums_of_4(f8 a, f8 b, f8 c, f8 d) {
    f8 ab = PN_SHUFFLE_2(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
            PN_SHUFFLE_2(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 cd = PN_SHUFFLE_2(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
            PN_SHUFFLE_2(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 pairs = PN_SHUFFLE_2(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
               PN_SHUFFLE_2(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return pairs + PN_SHUFFLE(pairs, 1, 0, 3, 2, 5, 4, 7, 6);
}

/* scores[m][0..3] of up to 3 queries and 4 keys; `num_queries` is known where this is inlined. */
static inline __attribute__((always_inline)) void score_tile(const float *queries, int num_queries,
                                                             int head_dim, const float **keys,
                                                             float *scores) {
    f8 sum[3][4] = {{{0}}};
    for (int d = 0; d < head_dim; d += 8) {
        f8 key[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) key[j] = f8_load(keys[j] + d);
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

/* scores[m][j] = queries[m] . keys[j], every one summed in the same order whatever comes with it.
 * Writes up to the next multiple of 4 keys; `keys` has room for as many. */
static void score(const float *queries, int num_queries, int head_dim, const float **keys,
                  int num_keys, float *scores) {
    for (int j = num_keys; j % 4; j++) keys[j] = keys[num_keys - 1];
    for (int j = 0; j < num_keys; j += 4) {
        int m = 0;
        for (; m + 3 <= num_queries; m += 3)
            score_tile(queries + m * head_dim, 3, head_dim, keys + j, scores + m * CHUNK + j);
        for (; m < num_queries; m++)
            score_tile(queries + m * head_dim, 1, head_dim, keys + j, scores + m * CHUNK + j);
    }
}

/* sums[m] += weights[m][j] * values[j] over all j, of 4 queries. One form for any number of rows:
 * each sum is made in the order of the positions, whatever comes with it. */
static void add_values(const float *weights, const float **values, int num_values, int head_dim,
                       float *sums) {
    int d = 0;
    for (; d + 16 <= head_dim; d += 16) {
        f8 sum[4][2];
        for (int m = 0; m < 4; m++)
            for (int v = 0; v < 2; v++) sum[m][v] = f8_load(sums + m * head_dim + d + 8 * v);
        for (int j = 0; j < num_values; j++) {
            f8 low = f8_load(values[j] + d), high = f8_load(values[j] + d + 8);
#pragma GCC unroll 4
            for (int m = 0; m < 4; m++) {
                f8 weight = f8_all(weights[m * CHUNK + j]);
                sum[m][0] += weight * low;
                sum[m][1] += weight * high;
            }
        }
        for (int m = 0; m < 4; m++)
            for (int v = 0; v < 2; v++) f8_store(sums + m * head_dim + d + 8 * v, sum[m][v]);
    }
    if (d == head_dim) return;
    for (int m = 0; m < 4; m++) {
        f8 sum = f8_load(sums + m * head_dim + d);
        for (int j = 0; j < num_values; j++)
            sum += f8_all(weights[m * CHUNK + j]) * f8_load(values[j] + d);
        f8_store(sums + m * head_dim + d, sum);
    }
}

/* ---- running softmax --------------------------------------------------------------------- */

typedef struct {
    float largest, total;
} softmax_state;

/* scores [CHUNK] of one query become weights; entries outside [first, end) weigh nothing.
 * `sum` is the query's weighted values so far. */
static void update_softmax(softmax_state *state, float *scores, int first, int end, float softcap,
                           float *sum, int head_dim) {
    int padded = (end + 7) / 8 * 8;
    for (int j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int j = end; j < padded; j++) scores[j] = -INFINITY;
    f8 most = f8_all(-INFINITY);
    for (int j = 0; j < padded; j += 8) {
        f8 s = f8_load(scores + j);
        if (softcap > 0) {
            f8 capped = softcap * f8_tanh(s / softcap);
            s8 masked = s == f8_all(-INFINITY);
            s = (f8)(((s8)s & masked) | ((s8)capped & ~masked));
            f8_store(scores + j, s);
        }
        most = f8_max(most, s);
    }
    float largest = f8_largest(most);
    if (largest > state->largest) {
        float correction = expf(state->largest - largest); /* 0 at the first chunk */
        state->largest = largest;
        state->total *= correction;
        for (int d = 0; d < head_dim; d += 8) f8_store(sum + d, f8_load(sum + d) * correction);
    }
    f8 total = f8_all(0);
    for (int j = 0; j < padded; j += 8) {
        f8 weight = f8_exp(f8_load(scores + j) - state->largest);
        total += weight;
        f8_store(scores + j, weight);
    }
    state->total += f8_sum(total);
}

/* ---- attention --------------------------------------------------------------------------- */

static int least(int a, int b) { return a < b ? a : b; }

/* Rows at positions [position, position + num_rows), whose own keys are already stored. `query`
 * and `out` point at the first query head of the group in the first row; queries are rotated and
 * scaled. */
void pn_attend(const pn_attention *call, const float *query, int64_t query_stride, int position,
               int num_rows, float *out, int64_t out_stride, float *scratch) {
    int head_dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    int num_queries = num_rows * group;
    float *queries = scratch, *sums = queries + MAX_QUERIES * head_dim;
    float *scores = sums + MAX_QUERIES * head_dim, *key_space = scores + MAX_QUERIES * CHUNK;
    float *value_space = key_space + CHUNK * head_dim;
    softmax_state states[MAX_QUERIES];
    const float *keys[CHUNK], *values[CHUNK];

    int padded = (num_queries + 3) / 4 * 4;
    memset(sums, 0, sizeof(float) * padded * head_dim);
    memset(scores + num_queries * CHUNK, 0, sizeof(float) * (padded - num_queries) * CHUNK);
    for (int m = 0; m < num_queries; m++) {
        memcpy(queries + m * head_dim, query + m / group * query_stride + m % group * head_dim,
               sizeof(float) * head_dim);
        states[m] = (softmax_state){-INFINITY, 0.0f};
    }
    int end = position + num_rows, start = 0;
    if (call->window > 0 && position + 1 > call->window) start = position + 1 - call->window;
    start = start / CHUNK * CHUNK; /* the same chunks whatever the rows: the same sums */
    for (int first = start; first < end; first += CHUNK) {
        int num = least(CHUNK, end - first);
        gather(call, call->kv_head, first, num, keys, key_space);
        gather(call, call->num_kv_heads + call->kv_head, first, num, values, value_space);
        score(queries, num_queries, head_dim, keys, num, scores);
        for (int m = 0; m < num_queries; m++) {
            int at = position + m / group; /* sees [low, at] */
            int low = call->window > 0 && at + 1 > call->window ? at + 1 - call->window : 0;
            int seen_from = low > first ? low - first : 0, seen_to = least(num, at + 1 - first);
            if (seen_from >= num || seen_to <= seen_from) { /* nothing of this chunk */
                memset(scores + m * CHUNK, 0, sizeof(float) * CHUNK);
                continue;
            }
            float *row = scores + m * CHUNK;
            update_softmax(&states[m], row, seen_from, seen_to, call->softcap,
                           sums + m * head_dim, head_dim);
            for (int j = (seen_to + 7) / 8 * 8; j < num; j++) row[j] = 0.0f;
        }
        for (int m = 0; m < padded; m += 4)
            add_values(scores + m * CHUNK, values, num, head_dim, sums + m * head_dim);
    }
    for (int m = 0; m < num_queries; m++) {
        float *to = out + m / group * out_stride + m % group * head_dim;
        float inverse = 1.0f / states[m].total;
        for (int d = 0; d < head_dim; d += 8)
            f8_store(to + d, f8_load(sums + m * head_dim + d) * inverse);
    }
}
