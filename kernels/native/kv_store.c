/* RoPE of a row's queries and keys, and storing keys and values in the KV pool. */
#include "parley.h"

/* heads [num_heads][head_dim]: RMS-normed over head_dim if `norm`, each pair (2j, 2j + 1) rotated
 * by rotation [head_dim / 2][cos, sin], scaled by `scale`. head_dim % 8 == 0. */
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

/* Stores key_value [2 * num_kv_heads][head_dim] of one row in its slot of the pool. */
void pn_store_kv(const pn_cache *cache, int layer, int num_kv_heads, int head_dim, int64_t slot,
                 const float *key_value) {
    for (int h = 0; h < 2 * num_kv_heads; h++, key_value += head_dim) {
        int64_t head = (int64_t)layer * 2 * num_kv_heads + h;
        int64_t row = head * cache->num_positions + slot;
        if (cache->type == PN_F32) {
            memcpy((float *)cache->data + row * head_dim, key_value, sizeof(float) * head_dim);
        } else if (cache->type == PN_BF16) {
            uint16_t *to = (uint16_t *)cache->data + row * head_dim;
            for (int d = 0; d < head_dim; d++) to[d] = float_to_bf16(key_value[d]);
        } else {
            int8_t *to = (int8_t *)cache->data + row * head_dim;
            s8 max = {0};
            for (int d = 0; d < head_dim; d += 8)
                max = s8_max(max, f8_magnitude(f8_load(key_value + d)));
            float scale = largest_magnitude(max) / 127.0f;
            float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
            cache->scales[row] = scale;
            for (int d = 0; d < head_dim; d++) to[d] = (int8_t)rintf(key_value[d] * inverse);
        }
    }
}
