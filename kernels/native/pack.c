/* Packing of weights (see parley.h), and unpacking of single rows (embeddings). */
#define _GNU_SOURCE
#include "parley.h"

#include <sys/mman.h>

/* Zeroed memory for packed weights, in huge pages if available: a step streams through all of it,
 * and 4 KiB pages cost a sixth of the bandwidth. NULL if out of memory. */
PN_EXPORT void *pn_memory_map(int64_t num_bytes) {
    const uintptr_t huge = 2 << 20;
    size_t size = (size_t)num_bytes + huge;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    /* Keep the aligned part and unmap the rest on either side. */
    uintptr_t start = (uintptr_t)mapped, aligned = (start + huge - 1) / huge * huge;
    if (aligned > start) munmap(mapped, aligned - start);
    size_t tail_bytes = start + huge - aligned;
    if (tail_bytes > 0) munmap((void *)(aligned + (size_t)num_bytes), tail_bytes);
#ifdef MADV_HUGEPAGE
    madvise((void *)aligned, (size_t)num_bytes, MADV_HUGEPAGE);
#endif
    return (void *)aligned;
}

/* `num_bytes` as in pn_memory_map, a multiple of the page size. */
PN_EXPORT void pn_memory_unmap(void *memory, int64_t num_bytes) {
    munmap(memory, (size_t)num_bytes);
}

static uint16_t float_to_half(float value) { /* nearest, ties to even */
    union { float value; uint32_t bits; } u = {.value = value}, magic = {.bits = 0};
    uint32_t sign = (u.bits >> 16) & 0x8000, body = u.bits & 0x7fffffff;
    if (body >= 0x47800000) return (uint16_t)(sign | (body > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (body < 0x38800000) { /* subnormal: float addition rounds at 2^-24 */
        u.bits = body;
        magic.value = 0.5f;
        u.value += magic.value;
        return (uint16_t)(sign | (u.bits - 0x3f000000));
    }
    body += 0xfff + ((body >> 13) & 1);
    return (uint16_t)(sign | ((body - 0x38000000) >> 13));
}

/* Packs rows: codes [num_rows][num_in], scale and zero (or NULL) [num_rows][num_groups] already
 * divided by post_scale. Row r goes to packed row first_row + (r / PN_TILE * tile_step * PN_TILE) +
 * r % PN_TILE; tile_step 2 interleaves two matrices tile by tile. The matrix must be zeroed before
 * the first call. */
PN_EXPORT void pn_pack_rows(const pn_matrix *m, const uint8_t *codes, const float *scale,
                            const float *zero, int num_rows, int first_row, int tile_step) {
    int code_bytes = m->bits == 4 ? 128 : 256, num_in = m->num_in, num_groups = m->num_groups;
    for (int r = 0; r < num_rows; r++) {
        int64_t row = first_row + (int64_t)(r / PN_TILE) * tile_step * PN_TILE + r % PN_TILE;
        int lane = (int)(row % PN_TILE);
        uint8_t *record = pn_first_record(m, (int)(row / PN_TILE));
        int64_t stride = pn_record_stride(m, (int)(row / PN_TILE));
        const uint8_t *from = codes + (int64_t)r * num_in;
        for (int g = 0; g < num_groups; g++, record += stride) {
            int left = num_in - g * PN_GROUP;
            for (int k = 0; k < PN_GROUP && k < left; k++) {
                uint8_t code = from[g * PN_GROUP + k];
                if (m->bits == 4) {
                    uint8_t *byte = record + (k / 8) * 32 + lane * 4 + k % 4;
                    *byte |= (uint8_t)((code & 15) << (k & 4));
                } else {
                    record[(k / 4) * 32 + lane * 4 + k % 4] = code;
                }
            }
            uint16_t *scales = (uint16_t *)(record + code_bytes);
            int64_t at = (int64_t)r * num_groups + g;
            scales[lane] = float_to_half(scale[at]);
            if (m->flags & PN_HAS_ZERO) scales[PN_TILE + lane] = float_to_half(zero[at]);
        }
    }
}

/* Dequantises row `row` to floats [num_in]. */
PN_EXPORT void pn_matrix_row(const pn_matrix *matrix, int row, float *out) {
    int lane = row % PN_TILE, code_bytes = matrix->bits == 4 ? 128 : 256;
    const uint8_t *record = pn_first_record(matrix, row / PN_TILE);
    int64_t stride = pn_record_stride(matrix, row / PN_TILE);
    for (int g = 0; g < matrix->num_groups; g++, record += stride) {
        const uint16_t *scales = (const uint16_t *)(record + code_bytes);
        float scale = half_to_float(scales[lane]);
        float zero = matrix->flags & PN_HAS_ZERO ? half_to_float(scales[PN_TILE + lane]) : 0.0f;
        int left = matrix->num_in - g * PN_GROUP;
        for (int k = 0; k < PN_GROUP && k < left; k++) {
            int code;
            if (matrix->bits == 4) {
                code = record[(k / 8) * 32 + lane * 4 + k % 4] >> (k & 4) & 15;
            } else {
                code = record[(k / 4) * 32 + lane * 4 + k % 4];
            }
            out[g * PN_GROUP + k] =
                (((float)code - matrix->offset) * scale + zero) * matrix->post_scale;
        }
    }
}

/* Embedding of one token, out [hidden_size]. */
void pn_embed(const pn_model *m, int64_t token, float *out) {
    int64_t first = token * m->hidden_size;
    if (!m->embedding) {
        pn_matrix_row(&m->embedding_matrix, (int)token, out);
    } else if (m->embedding_type == PN_F32) {
        memcpy(out, (const float *)m->embedding + first, sizeof(float) * m->hidden_size);
    } else {
        const uint16_t *from = (const uint16_t *)m->embedding + first;
        int is_bf16 = m->embedding_type == PN_BF16;
        for (int i = 0; i < m->hidden_size; i++)
            out[i] = is_bf16 ? bf16_to_float(from[i]) : half_to_float(from[i]);
    }
    if (m->embedding_scale != 1.0f)
        for (int i = 0; i < m->hidden_size; i++) out[i] *= m->embedding_scale;
}
