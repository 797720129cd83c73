/* Whether every index that a call will follow lies within its array. */
#include "parley.h"

pn_result pn_check_batch(const pn_model *m, const pn_cache *cache, const pn_batch *batch) {
    int64_t num_rows = 0, num_blocks = cache->num_positions / cache->block_size;
    for (int i = 0; i < batch->num_segments; i++) {
        const int32_t *segment = batch->segments + PN_SEGMENT_FIELDS * i;
        int32_t start = segment[0], length = segment[1];
        const int32_t *ids = batch->block_ids + segment[2];
        if (start < 0 || length < 1 || segment[4] < 0 ||
            (int64_t)start + length + segment[4] > m->max_context)
            return PN_BAD_SEGMENT;
        for (int b = 0; b <= (start + length - 1) / cache->block_size; b++)
            if (ids[b] < 0 || ids[b] >= num_blocks) return PN_BAD_BLOCK;
        if (segment[3] && (length > PN_MAX_TREE_ROWS || !batch->parents)) return PN_BAD_TREE;
        num_rows += length;
        if (num_rows > batch->num_rows) return PN_BAD_SEGMENT;
        const int32_t *parents = batch->parents + num_rows - length;
        for (int r = 0; segment[3] && r < length; r++)
            if (parents[r] < -1 || parents[r] >= r) return PN_BAD_TREE;
    }
    if (num_rows != batch->num_rows || num_rows == 0) return PN_BAD_SEGMENT;
    for (int i = 0; i < batch->num_rows; i++)
        if (batch->token_ids[i] < 0 || batch->token_ids[i] >= m->vocab_size) return PN_BAD_TOKEN;
    for (int i = 0; i < batch->num_logits; i++)
        if (batch->logit_rows[i] < 0 || batch->logit_rows[i] >= num_rows) return PN_BAD_LOGIT_ROW;
    for (int i = 0; i < batch->num_taps; i++)
        if (batch->taps[i] < 0 || batch->taps[i] > m->num_layers) return PN_BAD_TAP;
    return PN_DONE;
}

pn_result pn_check_draft_batch(const pn_draft_model *m, const pn_cache *cache,
                               const pn_draft_batch *batch) {
    int64_t num_rows = 0, num_blocks = cache->num_positions / cache->block_size;
    for (int i = 0; i < batch->num_segments; i++) {
        const int32_t *segment = batch->segments + PN_SEGMENT_FIELDS * i;
        const int32_t *ids = batch->block_ids + segment[2];
        int64_t start = segment[0], length = segment[1];
        int64_t end = start + length + batch->num_steps;
        if (start < 0 || length < 1 || batch->num_steps < 0 || end > m->max_context)
            return PN_BAD_SEGMENT;
        for (int b = 0; b <= (end - 1) / cache->block_size; b++)
            if (ids[b] < 0 || ids[b] >= num_blocks) return PN_BAD_BLOCK;
        if (segment[3] && (length > PN_MAX_TREE_ROWS || !batch->parents || batch->choices))
            return PN_BAD_TREE;
        num_rows += length;
        if (num_rows > batch->num_rows) return PN_BAD_SEGMENT;
        const int32_t *parents = batch->parents + num_rows - length;
        for (int r = 0; segment[3] && r < length; r++)
            if (parents[r] < -1 || parents[r] >= r) return PN_BAD_TREE;
        if (batch->choices &&
            (i >= batch->num_outputs || batch->output_rows[i] != num_rows - 1))
            return PN_BAD_LOGIT_ROW;
    }
    if (num_rows != batch->num_rows || num_rows == 0) return PN_BAD_SEGMENT;
    if (batch->choices && batch->num_outputs != batch->num_segments) return PN_BAD_LOGIT_ROW;
    if (!batch->choices && batch->num_steps > 0) return PN_BAD_SEGMENT;
    if (batch->num_siblings < 0 || batch->num_siblings > PN_MAX_SIBLINGS ||
        batch->num_siblings >= m->num_words)
        return PN_BAD_TREE;
    for (int i = 0; i < batch->num_rows; i++)
        if (batch->token_ids[i] < 0 || batch->token_ids[i] >= m->target->vocab_size)
            return PN_BAD_TOKEN;
    for (int64_t i = 0, before = -1; i < batch->num_outputs; before = batch->output_rows[i++])
        if (batch->output_rows[i] <= before || batch->output_rows[i] >= num_rows)
            return PN_BAD_LOGIT_ROW;
    return PN_DONE;
}
