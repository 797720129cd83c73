/* RMS norm, and quantisation of activations to 8 bits with one scale per 32 values. */
#include "parley.h"

int64_t pn_code_bytes(int num_rows, int num_groups) {
    int64_t rows = (num_rows + PN_ROW_BLOCK - 1) / PN_ROW_BLOCK * PN_ROW_BLOCK;
    return rows * num_groups * PN_GROUP;
}

int64_t pn_meta_floats(int num_rows, int num_groups) {
    return pn_code_bytes(num_rows, num_groups) / PN_GROUP * 4;
}

static float inverse_rms(const float *x, int size, float eps) {
    f8 sums = f8_splat(0), more = f8_splat(0);
    int i = 0;
    for (; i + 16 <= size; i += 16) {
        f8 a = f8_load(x + i), b = f8_load(x + i + 8);
        sums += a * a;
        more += b * b;
    }
    float sum = f8_sum(sums + more);
    for (; i < size; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)size + eps);
}

void pn_rms_norm(const float *x, const float *weight, int size, float eps, float *out) {
    float factor = inverse_rms(x, size, eps);
    for (int i = 0; i < size; i++) out[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

/* Stores the codes of 32 values v[0..3] and returns their sum. |v * inverse| <= 127. */
static inline int32_t store_codes(const f8 *v, float inverse, int8_t *codes) {
    s8 q0 = f8_round(v[0] * inverse), q1 = f8_round(v[1] * inverse);
    s8 q2 = f8_round(v[2] * inverse), q3 = f8_round(v[3] * inverse);
    s8 sum = (q0 + q1) + (q2 + q3);
#ifdef PN_AVX2
    __m256i low = _mm256_packs_epi32((__m256i)q0, (__m256i)q1);
    __m256i high = _mm256_packs_epi32((__m256i)q2, (__m256i)q3);
    __m256i bytes = _mm256_packs_epi16(low, high);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)codes, bytes);
#else
    for (int i = 0; i < 8; i++) {
        codes[i] = (int8_t)q0[i];
        codes[8 + i] = (int8_t)q1[i];
        codes[16 + i] = (int8_t)q2[i];
        codes[24 + i] = (int8_t)q3[i];
    }
#endif
    int32_t total = 0;
    for (int i = 0; i < 8; i++) total += sum[i];
    return total;
}

/* Quantises rows [first_row, end_row) of x [.., num_in], RMS-normed first if `norm` is not NULL,
 * and padded with 0. A scale is the group's largest magnitude / 127, as in ggml's Q8 blocks. */
void pn_quantize_rows(const float *x, int64_t stride, int num_in, const float *norm, float eps,
                      int first_row, int end_row, pn_activations *to) {
    for (int row = first_row; row < end_row; row++) {
        const float *from = x + row * stride;
        float factor = norm ? inverse_rms(from, num_in, eps) : 1.0f;
        int64_t block = row / PN_ROW_BLOCK, in_block = row % PN_ROW_BLOCK;
        for (int g = 0; g < to->num_groups; g++) {
            f8 v[4];
            int first = g * PN_GROUP, left = num_in - first;
            if (left >= PN_GROUP) {
                for (int i = 0; i < 4; i++) v[i] = f8_load(from + first + 8 * i);
                if (norm)
                    for (int i = 0; i < 4; i++) v[i] *= f8_load(norm + first + 8 * i) * factor;
            } else {
                float padded[PN_GROUP] = {0};
                for (int i = 0; i < left; i++)
                    padded[i] = from[first + i] * (norm ? norm[first + i] * factor : 1.0f);
                for (int i = 0; i < 4; i++) v[i] = f8_load(padded + 8 * i);
            }
            float largest = largest_magnitude(
                s8_max(s8_max(f8_magnitude(v[0]), f8_magnitude(v[1])),
                       s8_max(f8_magnitude(v[2]), f8_magnitude(v[3]))));
            /* Below 1e-30 the inverse would overflow; such a group is treated as 0. */
            float scale = largest > 1e-30f ? largest / 127.0f : 0.0f;
            float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
            if (largest != largest) scale = inverse = largest; /* propagate NaN */
            int64_t record = (block * to->num_groups + g) * to->pitch + in_block;
            int32_t sum = store_codes(v, inverse, to->codes + record * PN_GROUP);
            float *meta = to->meta + record * 4;
            meta[0] = scale;
            meta[1] = (float)sum;
            meta[2] = scale * (float)sum;
        }
    }
}
