/* Two tiles at a time in 512-bit vectors: 16 outputs for up to 8 rows, AVX512 with VNNI.
 *
 * The marginal cost of a row decides whether speculative decoding pays off: codes are unpacked once
 * for all rows, and the product broadcasts the four input bytes itself. The float operations of
 * each output are those of matmul.c in the same order, so results do not depend on the number of
 * rows.
 */
#include "parley.h"

#ifdef PN_AVX512

#define INLINE static inline __attribute__((always_inline))
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < num_rows; r++)

enum { PREFETCH_BYTES = 2048 };

INLINE __m512i four_inputs(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

/* 32 bytes from each of two tiles. */
INLINE __m512i two_tiles(const uint8_t *first, const uint8_t *second) {
    __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)second), 1);
}

INLINE __m512 two_halves(const uint8_t *first, const uint8_t *second) {
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)first));
    return _mm512_cvtph_ps(
        _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)second), 1));
}

/* Float accumulation of one group of one row. */
INLINE __m512 add_group(__m512 sum, __m512i dot, __m512 scale, __m512 zero, const float *meta,
                        float offset, int has_zero) {
    __m512 value = _mm512_cvtepi32_ps(dot);
    if (has_zero) {
        sum = _mm512_fmadd_ps(zero, _mm512_set1_ps(meta[2]), sum);
    } else { /* exact: integers below 2^24 */
        value = _mm512_fnmadd_ps(_mm512_set1_ps(offset), _mm512_set1_ps(meta[1]), value);
    }
    return _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(meta[0])), sum);
}

/* `w` and `w + apart`: first records of the two tiles; `stride`: bytes between groups. */
INLINE void block(const pn_matrix *m, const uint8_t *w, int64_t apart, int64_t stride,
                  const int8_t *q, const float *meta, int pitch, int num_rows, int bits,
                  int has_zero, f8 sums[][2]) {
    const int code_bytes = bits == 4 ? 128 : 256, record_bytes = code_bytes + (has_zero ? 32 : 16);
    const int num_groups = m->num_groups;
    const float offset = m->offset;
    __m512 total[8];
    EACH_ROW total[r] = _mm512_setzero_ps();
    for (int g = 0; g < num_groups; g++) {
        const uint8_t *other = w + apart;
        __m512i dot[8];
        EACH_ROW dot[r] = _mm512_setzero_si512();
        if (bits == 4) {
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const __m512i mask = _mm512_set1_epi8(15);
                __m512i codes = two_tiles(w + 32 * v, other + 32 * v);
                __m512i low = _mm512_and_si512(codes, mask);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
                const int8_t *x = q + 8 * v;
                EACH_ROW dot[r] = _mm512_dpbusd_epi32(dot[r], low, four_inputs(x + r * PN_GROUP));
                EACH_ROW dot[r] =
                    _mm512_dpbusd_epi32(dot[r], high, four_inputs(x + r * PN_GROUP + 4));
            }
        } else {
#pragma GCC unroll 8
            for (int v = 0; v < 8; v++) {
                __m512i codes = two_tiles(w + 32 * v, other + 32 * v);
                const int8_t *x = q + 4 * v;
                EACH_ROW dot[r] = _mm512_dpbusd_epi32(dot[r], codes, four_inputs(x + r * PN_GROUP));
            }
        }
        __m512 scale = two_halves(w + code_bytes, other + code_bytes), zero = _mm512_setzero_ps();
        if (has_zero) zero = two_halves(w + code_bytes + 16, other + code_bytes + 16);
        for (int at = 0; at < record_bytes; at += 64) {
            _mm_prefetch((const char *)w + PREFETCH_BYTES + at, _MM_HINT_T0);
            _mm_prefetch((const char *)other + PREFETCH_BYTES + at, _MM_HINT_T0);
        }
        EACH_ROW total[r] =
            add_group(total[r], dot[r], scale, zero, meta + 4 * r, offset, has_zero);
        w += stride;
        q += pitch * PN_GROUP;
        meta += pitch * 4;
    }
    EACH_ROW _mm512_storeu_ps((float *)sums[r], total[r]);
}

#define CALL(n, bits, has_zero)                                                                \
    case n: block(m, w, apart, stride, q, meta, pitch, n, bits, has_zero, sums); return;
#define FOR_ROWS(bits, has_zero)                                                               \
    switch (num_rows) {                                                                        \
        CALL(1, bits, has_zero) CALL(2, bits, has_zero) CALL(3, bits, has_zero)                \
        CALL(4, bits, has_zero) CALL(5, bits, has_zero) CALL(6, bits, has_zero)                \
        CALL(7, bits, has_zero) CALL(8, bits, has_zero)                                        \
    }

/* sums[r][t] of up to 8 rows and of tiles `tile` (even) and `tile` + 1, which must exist. `q` and
 * `meta` point at the first row's first group. */
void pn_two_tiles(const pn_matrix *m, int tile, const int8_t *q, const float *meta, int pitch,
                  int num_rows, f8 sums[][2]) {
    const uint8_t *w = pn_first_record(m, tile);
    const int64_t apart = pn_first_record(m, tile + 1) - w, stride = pn_record_stride(m, tile);
    if (m->bits == 4) {
        if (m->flags & PN_HAS_ZERO) FOR_ROWS(4, 1)
        FOR_ROWS(4, 0)
    }
    if (m->flags & PN_HAS_ZERO) FOR_ROWS(8, 1)
    FOR_ROWS(8, 0)
}

#endif
