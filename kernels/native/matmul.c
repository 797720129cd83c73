/* Packed weights times quantised activations, tile by tile.
 *
 * AVX2: unsigned 4-bit codes times signed 8-bit activations, adjacent pairs added by maddubs; 8
 * such sums fit in 16 bits (8 * 2 * 15 * 127 = 30480), so a group of 32 is summed before widening.
 * 8-bit codes are processed as two nibble planes. VNNI accumulates in 32 bits directly. Each group
 * then takes a few float operations: dot * (weight scale * activation scale), and either the
 * integer offset or the zero point times the group's sum of codes.
 */
#include "parley.h"

#define INLINE static inline __attribute__((always_inline))

#ifdef PN_AVX2

enum { PREFETCH_BYTES = 2048 };

/* Multiply-accumulate of bytes: in 32 bits with VNNI, else in 16, which WIDEN extends to 32. */
#ifdef PN_VNNI
#define ADD_PRODUCTS(sum, codes, x) ((sum) = PN_DPBUSD(sum, codes, x))
#define WIDEN(sum, factor) (sum)
#else
/* The empty asm keeps the sum in a register: GCC would reassociate the additions, and spill. */
#define ADD_PRODUCTS(sum, codes, x)                                              \
    do {                                                                         \
        (sum) = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));           \
        __asm__("" : "+x"(sum));                                                 \
    } while (0)
#define WIDEN(sum, factor) _mm256_madd_epi16(sum, _mm256_set1_epi16(factor))
#endif

INLINE __m256i four_inputs(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm256_set1_epi32(four);
}

/* Float accumulation of one group of one row; `dot` int32, 8 outputs. */
INLINE f8 add_group(f8 sum, __m256i dot, f8 scale, f8 zero, const float *meta, float offset,
                    int has_zero) {
    f8 value = _mm256_cvtepi32_ps(dot);
    if (has_zero) {
        sum = _mm256_fmadd_ps(zero, f8_splat(meta[2]), sum);
    } else { /* exact: integers below 2^24 */
        value = _mm256_fnmadd_ps(f8_splat(offset), f8_splat(meta[1]), value);
    }
    return _mm256_fmadd_ps(value, scale * f8_splat(meta[0]), sum);
}

INLINE __m256i low_halves(__m256i codes) {
    return _mm256_and_si256(codes, _mm256_set1_epi8(15));
}
INLINE __m256i high_halves(__m256i codes) {
    return _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
}

INLINE void prefetch_record(const uint8_t *w, int record_bytes) {
    for (int at = 0; at < record_bytes; at += 64)
        _mm_prefetch((const char *)w + PREFETCH_BYTES + at, _MM_HINT_T0);
}

INLINE void block_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                       int pitch, int num_rows, int num_tiles, f8 *result, int has_zero) {
    f8 sums[8];
    const int num_groups = m->num_groups, record_bytes = has_zero ? 160 : 144;
    const float offset = m->offset;
    for (int i = 0; i < num_tiles * num_rows; i++) sums[i] = f8_splat(0);
    for (int g = 0; g < num_groups; g++) {
        __m256i dot[4][2];
        for (int r = 0; r < num_rows; r++)
            for (int t = 0; t < num_tiles; t++) dot[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m256i low[2], high[2];
            for (int t = 0; t < num_tiles; t++) {
                const uint8_t *from = w + t * record_bytes + 32 * v;
                __m256i codes = _mm256_loadu_si256((const __m256i *)from);
                low[t] = low_halves(codes);
                high[t] = high_halves(codes);
            }
            for (int r = 0; r < num_rows; r++) {
                __m256i first = four_inputs(q + r * PN_GROUP + 8 * v);
                __m256i second = four_inputs(q + r * PN_GROUP + 8 * v + 4);
                for (int t = 0; t < num_tiles; t++) {
                    ADD_PRODUCTS(dot[r][t], low[t], first);
                    ADD_PRODUCTS(dot[r][t], high[t], second);
                }
            }
        }
        f8 scale[2], zero[2];
        for (int t = 0; t < num_tiles; t++) {
            const uint16_t *scales = (const uint16_t *)(w + t * record_bytes + 128);
            scale[t] = f8_from_half(scales);
            zero[t] = has_zero ? f8_from_half(scales + PN_TILE) : f8_splat(0);
        }
        prefetch_record(w, num_tiles * record_bytes);
        for (int r = 0; r < num_rows; r++)
            for (int t = 0; t < num_tiles; t++)
                sums[r * num_tiles + t] =
                    add_group(sums[r * num_tiles + t], WIDEN(dot[r][t], 1), scale[t], zero[t],
                              meta + 4 * r, offset, has_zero);
        w += num_tiles * record_bytes;
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
    for (int i = 0; i < num_tiles * num_rows; i++) result[i] = sums[i];
}

/* One tile; low and high nibbles need a sum each. */
INLINE void block_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                       int pitch, int num_rows, f8 *result, int has_zero) {
    f8 sums[4];
    const int num_groups = m->num_groups, record_bytes = m->record_bytes;
    const float offset = m->offset;
    for (int i = 0; i < num_rows; i++) sums[i] = f8_splat(0);
    for (int g = 0; g < num_groups; g++) {
        __m256i low[4], high[4];
        for (int r = 0; r < num_rows; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
#ifdef PN_VNNI
            for (int r = 0; r < num_rows; r++)
                low[r] = PN_DPBUSD(low[r], codes, four_inputs(q + r * PN_GROUP + 4 * v));
#else
            __m256i lower = low_halves(codes), upper = high_halves(codes);
            for (int r = 0; r < num_rows; r++) {
                __m256i x = four_inputs(q + r * PN_GROUP + 4 * v);
                ADD_PRODUCTS(low[r], lower, x);
                ADD_PRODUCTS(high[r], upper, x);
            }
#endif
        }
        f8 scale = f8_from_half((const uint16_t *)(w + 256));
        f8 zero = has_zero ? f8_from_half((const uint16_t *)(w + 272)) : f8_splat(0);
        prefetch_record(w, 288);
        for (int r = 0; r < num_rows; r++) {
            __m256i dot = WIDEN(low[r], 1);
#ifndef PN_VNNI
            dot = _mm256_add_epi32(dot, WIDEN(high[r], 16));
#endif
            sums[r] = add_group(sums[r], dot, scale, zero, meta + 4 * r, offset, has_zero);
        }
        w += record_bytes;
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
    for (int i = 0; i < num_rows; i++) result[i] = sums[i];
}

#else /* portable */

INLINE void block_any(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, int num_tiles, f8 *sums, int has_zero) {
    int is_4bit = m->bits == 4, code_bytes = is_4bit ? 128 : 256;
    for (int r = 0; r < num_rows; r++) sums[r * num_tiles] = f8_splat(0);
    for (int g = 0; g < m->num_groups; g++) {
        f8 scale = f8_from_half((const uint16_t *)(w + code_bytes));
        f8 zero = has_zero ? f8_from_half((const uint16_t *)(w + code_bytes + 16)) : f8_splat(0);
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
            f8 value = __builtin_convertvector(dot, f8), *sum = sums + r * num_tiles;
            if (has_zero) {
                *sum += zero * f8_splat(row_meta[2]);
            } else {
                value -= f8_splat(m->offset * row_meta[1]);
            }
            *sum += value * (scale * f8_splat(row_meta[0]));
        }
        w += num_tiles * m->record_bytes;
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
}

INLINE void block_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                       int pitch, int num_rows, int num_tiles, f8 *sums, int has_zero) {
    for (int t = 0; t < num_tiles; t++)
        block_any(m, w + t * m->record_bytes, q, meta, pitch, num_rows, num_tiles, sums + t,
                  has_zero);
}

INLINE void block_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                       int pitch, int num_rows, f8 *sums, int has_zero) {
    block_any(m, w, q, meta, pitch, num_rows, 1, sums, has_zero);
}

#endif

/* Specialised for each small number of rows, so that sums stay in registers. */
#define FOR_ROWS(call, has_zero)       \
    switch (num_rows) {                \
    case 1: call(1, has_zero); return; \
    case 2: call(2, has_zero); return; \
    case 3: call(3, has_zero); return; \
    default: call(4, has_zero); return;\
    }
#define CALL_PAIR(n, has_zero) block_4bit(m, w, q, meta, pitch, n, 2, sums, has_zero)
#define CALL_SINGLE(n, has_zero) block_4bit(m, w, q, meta, pitch, n, 1, sums, has_zero)
#define CALL_8BIT(n, has_zero) block_8bit(m, w, q, meta, pitch, n, sums, has_zero)

static void pair_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                      int pitch, int num_rows, f8 *sums) {
    if (m->flags & PN_HAS_ZERO) FOR_ROWS(CALL_PAIR, 1)
    FOR_ROWS(CALL_PAIR, 0)
}

static void single_4bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                        int pitch, int num_rows, f8 *sums) {
    if (m->flags & PN_HAS_ZERO) FOR_ROWS(CALL_SINGLE, 1)
    FOR_ROWS(CALL_SINGLE, 0)
}

static void single_8bit(const pn_matrix *m, const uint8_t *w, const int8_t *q, const float *meta,
                        int pitch, int num_rows, f8 *sums) {
    if (m->flags & PN_HAS_ZERO) FOR_ROWS(CALL_8BIT, 1)
    FOR_ROWS(CALL_8BIT, 0)
}

/* sums[r][t] of up to PN_ROWS_AT_ONCE rows of block `block` from row `row` on, and of one or two
 * tiles. A pair starts at an even tile; a single tile is the last. */
static void multiply_tiles(const pn_matrix *m, int tile, int num_tiles, const pn_activations *x,
                           int64_t block, int row, int num_rows, f8 sums[][2]) {
    const uint8_t *w = pn_first_record(m, tile);
    int64_t record = block * m->num_groups * x->pitch + row;
    const int8_t *q = x->codes + record * PN_GROUP;
    const float *meta = x->meta + record * 4;
#ifdef PN_AVX512
    if (num_tiles == 2) {
        pn_two_tiles(m, tile, q, meta, x->pitch, num_rows, sums);
        return;
    }
    if (num_rows > 4) { /* a single last tile, rare: the narrow kernel takes 4 rows */
        multiply_tiles(m, tile, 1, x, block, row + 4, num_rows - 4, sums + 4);
        num_rows = 4;
    }
#endif
    f8 flat[8];
    if (m->bits == 4 && num_tiles == 2) {
        pair_4bit(m, w, q, meta, x->pitch, num_rows, flat);
        for (int r = 0; r < num_rows; r++) sums[r][0] = flat[2 * r], sums[r][1] = flat[2 * r + 1];
        return;
    }
    for (int t = 0; t < num_tiles; t++, w += (int64_t)m->num_groups * m->record_bytes) {
        if (m->bits == 4) {
            single_4bit(m, w, q, meta, x->pitch, num_rows, flat);
        } else {
            single_8bit(m, w, q, meta, x->pitch, num_rows, flat);
        }
        for (int r = 0; r < num_rows; r++) sums[r][t] = flat[r];
    }
}

INLINE f8 activate(f8 x, int activation) {
    if (activation == PN_SILU) return x / (1.0f + f8_exp(-x));
    f8 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + f8_tanh(inner));
}

/* Stores one row of one tile, outputs [first, first + 8) up to num_out. */
static void store_tile(const pn_matrix *m, f8 value, int first, const pn_epilogue *e, float *row) {
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

/* Tiles [first_tile, end_tile) for all rows; first_tile is even. PN_GATED: tiles alternate gate and
 * up, and activation(gate) * up is stored, num_out outputs in all. */
void pn_matmul_tiles(const pn_matrix *m, const pn_activations *x, int num_rows, int first_tile,
                     int end_tile, const pn_epilogue *e) {
    f8 sums[PN_ROWS_AT_ONCE][2];
    for (int start = 0; start < num_rows; start += PN_ROW_BLOCK) {
        int end = num_rows - start < PN_ROW_BLOCK ? num_rows : start + PN_ROW_BLOCK;
        for (int tile = first_tile; tile < end_tile; tile += 2) {
            int num_tiles = end_tile - tile < 2 ? 1 : 2;
            for (int row = start; row < end; row += PN_ROWS_AT_ONCE) {
                int rows = min_int(end - row, PN_ROWS_AT_ONCE);
                multiply_tiles(m, tile, num_tiles, x, start / PN_ROW_BLOCK, row - start, rows,
                               sums);
                for (int r = 0; r < rows; r++) {
                    float *out = e->out + (row + r) * e->stride;
                    if (e->mode == PN_GATED) {
                        f8 gate = activate(scaled(m, sums[r][0], tile), e->activation);
                        f8 value = gate * scaled(m, sums[r][1], tile + 1);
                        store_tile(m, value, tile / 2 * PN_TILE, e, out);
                        continue;
                    }
                    for (int t = 0; t < num_tiles; t++)
                        store_tile(m, scaled(m, sums[r][t], tile + t), (tile + t) * PN_TILE, e,
                                   out);
                }
            }
        }
    }
}

/* ---- a single product, for tests ------------------------------------------------------------- */

typedef struct {
    const pn_matrix *matrix;
    const float *x;
    const pn_epilogue *epilogue;
    pn_activations input;
    int num_rows, tiles_per_task;
} product_call;

static void run_product(void *context, int phase, int task, int thread) {
    product_call *call = context;
    const pn_matrix *m = call->matrix;
    (void)thread;
    int first = task * (phase == 0 ? PN_ROW_BLOCK : call->tiles_per_task);
    if (phase == 0) {
        int end = first + PN_ROW_BLOCK < call->num_rows ? first + PN_ROW_BLOCK : call->num_rows;
        pn_quantize_rows(call->x, m->num_in, m->num_in, NULL, 0, first, end, &call->input);
        return;
    }
    int end = first + call->tiles_per_task;
    pn_matmul_tiles(m, &call->input, call->num_rows, first, end < m->num_tiles ? end : m->num_tiles,
                    call->epilogue);
}

/* x [num_rows][num_in] times the matrix, stored by `epilogue`. Returns a pn_result. */
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
        if (num_rows > PN_ROW_BLOCK && tiles > 16) tiles = 16; /* stay within the L2 cache */
        tiles += tiles % 2; /* pairs stay together */
        product_call call = {matrix, x, epilogue, input, num_rows, tiles};
        int32_t num_tasks[2] = {(num_rows + PN_ROW_BLOCK - 1) / PN_ROW_BLOCK,
                                (matrix->num_tiles + tiles - 1) / tiles};
        pn_pool_run(pool, 2, num_tasks, run_product, &call, NULL);
    }
    pn_result result = input.codes && input.meta ? PN_OK : PN_NO_MEMORY;
    free(input.codes);
    free(input.meta);
    return result;
}
