/* Packed weights times quantised activations, tile by tile.
 *
 * AVX2: unsigned codes of 4 bits times signed activations of 8 bits, pairs added by maddubs; 8 of
 * those fit 16 bits (8 * 2 * 15 * 127 = 30480), so a group of 32 is summed before it is widened.
 * 8-bit codes are two such planes, low and high half. VNNI sums into 32 bits at once.
 * The few float operations a group follow: dot * (weight scale * activation scale) and either
 * the integer offset or the zero point times the group's sum.
 */
#include "parley.h"

#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef PN_AVX2

INLINE __m256i four_inputs(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm256_set1_epi32(four);
}

/* The float end of one group of one row; `dot` int32, 8 outputs. */
INLINE f8 add_group(f8 sum, __m256i dot, f8 scale, f8 zero, const float *meta, float offset,
                    int has_zero) {
    f8 value = _mm256_cvtepi32_ps(dot);
    if (has_zero) {
        sum = _mm256_fmadd_ps(zero, f8_all(meta[2]), sum);
    } else { /* integers below 2^24: exact */
        value = _mm256_fnmadd_ps(f8_all(offset), f8_all(meta[1]), value);
    }
    return _mm256_fmadd_ps(value, scale * f8_all(meta[0]), sum);
}

INLINE void tile_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums, int has_zero) {
    const __m256i half = _mm256_set1_epi8(15);
    const float offset = m->offset;
#ifndef PN_VNNI
    const __m256i ones = _mm256_set1_epi16(1);
#endif
    for (int r = 0; r < num_rows; r++) sums[r] = f8_all(0);
    for (int g = 0; g < m->num_groups; g++) {
        __m256i low[4], high[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
            low[v] = _mm256_and_si256(both, half);
            high[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), half);
        }
        f8 scale = f8_from_half((const uint16_t *)(w + 128));
        f8 zero = has_zero ? f8_from_half((const uint16_t *)(w + 144)) : f8_all(0);
        _mm_prefetch((const char *)w + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)w + 2048 + 64, _MM_HINT_T0);
        _mm_prefetch((const char *)w + 2048 + 128, _MM_HINT_T0);
        w += m->record_bytes;
        for (int r = 0; r < num_rows; r++) {
            const int8_t *x = q + r * PN_GROUP;
            __m256i dot;
#ifdef PN_VNNI
            dot = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                dot = PN_DPBUSD(dot, low[v], four_inputs(x + 8 * v));
                dot = PN_DPBUSD(dot, high[v], four_inputs(x + 8 * v + 4));
            }
#else
            __m256i even = _mm256_maddubs_epi16(low[0], four_inputs(x));
            __m256i odd = _mm256_maddubs_epi16(high[0], four_inputs(x + 4));
#pragma GCC unroll 4
            for (int v = 1; v < 4; v++) {
                even = _mm256_add_epi16(even, _mm256_maddubs_epi16(low[v], four_inputs(x + 8 * v)));
                odd = _mm256_add_epi16(odd,
                                       _mm256_maddubs_epi16(high[v], four_inputs(x + 8 * v + 4)));
            }
            dot = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
#endif
            sums[r] = add_group(sums[r], dot, scale, zero, meta + 4 * r, offset, has_zero);
        }
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
}

INLINE void tile_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums, int has_zero) {
    const float offset = m->offset;
#ifndef PN_VNNI
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
#endif
    for (int r = 0; r < num_rows; r++) sums[r] = f8_all(0);
    for (int g = 0; g < m->num_groups; g++) {
        __m256i low[4], high[4]; /* of each row; at most 4 rows */
        for (int r = 0; r < num_rows; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
#ifndef PN_VNNI
            __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), half);
            codes = _mm256_and_si256(codes, half);
#endif
            for (int r = 0; r < num_rows; r++) {
                __m256i x = four_inputs(q + r * PN_GROUP + 4 * v);
#ifdef PN_VNNI
                low[r] = PN_DPBUSD(low[r], codes, x);
#else
                low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(codes, x));
                high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(upper, x));
#endif
            }
        }
        f8 scale = f8_from_half((const uint16_t *)(w + 256));
        f8 zero = has_zero ? f8_from_half((const uint16_t *)(w + 272)) : f8_all(0);
        for (int i = 0; i < 5; i++) _mm_prefetch((const char *)w + 2048 + 64 * i, _MM_HINT_T0);
        w += m->record_bytes;
        for (int r = 0; r < num_rows; r++) {
#ifdef PN_VNNI
            __m256i dot = low[r];
#else
            __m256i dot = _mm256_add_epi32(_mm256_madd_epi16(low[r], ones),
                                           _mm256_madd_epi16(high[r], sixteens));
#endif
            sums[r] = add_group(sums[r], dot, scale, zero, meta + 4 * r, offset, has_zero);
        }
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
}

#else /* portable */

INLINE void tile_any(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                     int pitch, int num_rows, f8 *sums, int has_zero, int is_4bit) {
    int code_bytes = is_4bit ? 128 : 256;
    for (int r = 0; r < num_rows; r++) sums[r] = f8_all(0);
    for (int g = 0; g < m->num_groups; g++) {
        f8 scale = f8_from_half((const uint16_t *)(w + code_bytes));
        f8 zero = has_zero ? f8_from_half((const uint16_t *)(w + code_bytes + 16)) : f8_all(0);
        for (int r = 0; r < num_rows; r++) {
            const int8_t *x = q + r * PN_GROUP;
            s8 dot = {0};
            for (int n = 0; n < PN_TILE; n++) {
                int32_t total = 0;
                for (int k = 0; k < PN_GROUP; k++) {
                    int at = n * 4 + k % 4;
                    int code = is_4bit ? w[k / 8 * 32 + at] >> (k & 4) & 15 : w[k / 4 * 32 + at];
                    total += code * x[k];
                }
                dot[n] = total;
            }
            const float *row_meta = meta + 4 * r;
            f8 value = __builtin_convertvector(dot, f8);
            if (has_zero) {
                sums[r] += zero * f8_all(row_meta[2]);
            } else {
                value -= f8_all(m->offset * row_meta[1]);
            }
            sums[r] += value * (scale * f8_all(row_meta[0]));
        }
        w += m->record_bytes;
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
}

INLINE void tile_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums, int has_zero) {
    tile_any(m, w, q, meta, pitch, num_rows, sums, has_zero, 1);
}

INLINE void tile_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums, int has_zero) {
    tile_any(m, w, q, meta, pitch, num_rows, sums, has_zero, 0);
}

#endif

/* A form for each small row count keeps its sums in registers; above, they live in the L1 cache. */
#define FEW_ROWS(kernel, has_zero)                                           \
    switch (num_rows) {                                                      \
    case 1: kernel(m, w, q, meta, pitch, 1, sums, has_zero); return;         \
    case 2: kernel(m, w, q, meta, pitch, 2, sums, has_zero); return;         \
    case 3: kernel(m, w, q, meta, pitch, 3, sums, has_zero); return;         \
    case 4: kernel(m, w, q, meta, pitch, 4, sums, has_zero); return;         \
    default: break;                                                          \
    }

static void rows_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums) {
    if (m->flags & PN_HAS_ZERO) {
        FEW_ROWS(tile_4bit, 1)
        tile_4bit(m, w, q, meta, pitch, num_rows, sums, 1);
    } else {
        FEW_ROWS(tile_4bit, 0)
        tile_4bit(m, w, q, meta, pitch, num_rows, sums, 0);
    }
}

static void up_to_4_rows_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q,
                              const float *meta, int pitch, int num_rows, f8 *sums) {
    if (m->flags & PN_HAS_ZERO) {
        FEW_ROWS(tile_8bit, 1)
    } else {
        FEW_ROWS(tile_8bit, 0)
    }
}

static void tile_rows(const pn_matrix *m, int tile, const pn_activations *x, int64_t block,
                      int num_rows, f8 *sums) {
    const uint8_t *w = m->data + (int64_t)tile * m->num_groups * m->record_bytes;
    int64_t record = block * m->num_groups * x->pitch;
    const int8_t *q = x->codes + record * PN_GROUP;
    const float *meta = x->meta + record * 4;
    if (m->bits == 4) {
        rows_4bit(m, w, q, meta, x->pitch, num_rows, sums);
        return;
    }
    for (int r = 0; r < num_rows; r += 4) {
        int rows = num_rows - r < 4 ? num_rows - r : 4;
        up_to_4_rows_8bit(m, w, q + r * PN_GROUP, meta + r * 4, x->pitch, rows, sums + r);
    }
}

INLINE f8 activate(f8 x, int activation) {
    if (activation == PN_SILU) return x / (1.0f + f8_exp(-x));
    f8 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + f8_tanh(inner));
}

/* One row of one tile, outputs [first, first + 8) cut at num_out. */
static void leave(const pn_matrix *m, f8 value, int first, const pn_epilogue *e, float *row) {
    if (e->softcap > 0) value = e->softcap * f8_tanh(value / e->softcap);
    int left = m->num_out - first;
    if (left >= PN_TILE) {
        if (e->mode == PN_ADD) value += f8_load(row + first);
        f8_store(row + first, value);
        return;
    }
    for (int i = 0; i < left; i++) row[first + i] = e->mode == PN_ADD ? row[first + i] + value[i]
                                                                      : value[i];
}

INLINE f8 scaled(const pn_matrix *m, f8 sum, int tile) {
    f8 value = sum * m->post_scale;
    if (m->bias) value += f8_load(m->bias + tile * PN_TILE); /* padded to whole tiles */
    return value;
}

/* Tiles [first_tile, end_tile) for all rows. PN_GATED: tiles alternate gate, up; the range is
 * even, and what is stored is activation(gate) * up, num_out outputs in all. */
void pn_matmul_tiles(const pn_matrix *m, const pn_activations *x, int num_rows, int first_tile,
                     int end_tile, const pn_epilogue *e) {
    f8 sums[PN_ROW_BLOCK], ups[PN_ROW_BLOCK];
    for (int row = 0; row < num_rows; row += PN_ROW_BLOCK) {
        int rows = num_rows - row < PN_ROW_BLOCK ? num_rows - row : PN_ROW_BLOCK;
        int64_t block = row / PN_ROW_BLOCK;
        float *out = e->out + row * e->stride;
        if (e->mode == PN_GATED) {
            for (int tile = first_tile; tile < end_tile; tile += 2) {
                tile_rows(m, tile, x, block, rows, sums);
                tile_rows(m, tile + 1, x, block, rows, ups);
                for (int r = 0; r < rows; r++) {
                    f8 gate = activate(scaled(m, sums[r], tile), e->activation);
                    leave(m, gate * scaled(m, ups[r], tile + 1), tile / 2 * PN_TILE, e,
                          out + r * e->stride);
                }
            }
            continue;
        }
        for (int tile = first_tile; tile < end_tile; tile++) {
            tile_rows(m, tile, x, block, rows, sums);
            for (int r = 0; r < rows; r++)
                leave(m, scaled(m, sums[r], tile), tile * PN_TILE, e, out + r * e->stride);
        }
    }
}

/* ---- one product alone, for the torch decoder and for tests ---------------------------------- */

typedef struct {
    const pn_matrix *matrix;
    const float *x;
    const pn_epilogue *epilogue;
    pn_activations input;
    int num_rows, tiles_a_task;
} product_call;

static void run_product(void *context, int phase, int task, int thread) {
    product_call *call = context;
    const pn_matrix *m = call->matrix;
    (void)thread;
    int first = task * (phase == 0 ? PN_ROW_BLOCK : call->tiles_a_task);
    if (phase == 0) {
        int end = first + PN_ROW_BLOCK < call->num_rows ? first + PN_ROW_BLOCK : call->num_rows;
        pn_quantize_rows(call->x, m->num_in, m->num_in, NULL, 0, first, end, &call->input);
        return;
    }
    int end = first + call->tiles_a_task;
    pn_matmul_tiles(m, &call->input, call->num_rows, first, end < m->num_tiles ? end : m->num_tiles,
                    call->epilogue);
}

/* x [num_rows][num_in] -> as `epilogue` says. Returns a pn_result. */
PN_EXPORT int pn_matmul(pn_pool *pool, const pn_matrix *matrix, const float *x, int num_rows,
                        const pn_epilogue *epilogue) {
    pn_activations input = {
        .codes = malloc((size_t)pn_code_bytes(num_rows, matrix->num_groups)),
        .meta = malloc((size_t)pn_meta_floats(num_rows, matrix->num_groups) * sizeof(float)),
        .pitch = num_rows < PN_ROW_BLOCK ? num_rows : PN_ROW_BLOCK,
        .num_groups = matrix->num_groups,
    };
    if (input.codes && input.meta) {
        int tasks = pn_pool_threads(pool) * 6;
        int tiles = (matrix->num_tiles + tasks - 1) / tasks;
        if (num_rows > PN_ROW_BLOCK && tiles > 16) tiles = 16; /* stay in the L2 cache */
        if (epilogue->mode == PN_GATED) tiles += tiles % 2;
        product_call call = {matrix, x, epilogue, input, num_rows, tiles};
        int32_t num_tasks[2] = {(num_rows + PN_ROW_BLOCK - 1) / PN_ROW_BLOCK,
                                (matrix->num_tiles + tiles - 1) / tiles};
        pn_pool_run(pool, 2, num_tasks, run_product, &call, NULL);
    }
    pn_result result = input.codes && input.meta ? PN_DONE : PN_NO_MEMORY;
    free(input.codes);
    free(input.meta);
    return result;
}
