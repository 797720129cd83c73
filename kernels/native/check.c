/* Bounds checks: every index that a call follows must lie within its array. */
#include "parley.h"

typedef struct { /* rows of a decoder or draft batch */
    const int64_t *token_ids;
    const pn_segment *segments;
    const int32_t *parents, *block_ids;
    int32_t num_rows, num_segments;
    int32_t num_more; /* positions that the call appends to each segment */
    int32_t max_context, vocab_size;
} call_rows;

static pn_result check_rows(const call_rows *call, const pn_cache *cache) {
    int64_t num_rows = 0, num_blocks = cache->num_positions / cache->block_size;
    for (int i = 0; i < call->num_segments; i++) {
        const pn_segment *segment = &call->segments[i];
        const int32_t *ids = call->block_ids + segment->first_block;
        int64_t start = segment->start, length = segment->length, skipped = segment->skipped;
        int64_t end = start + length + call->num_more;
        if (start < 0 || length < 1 || skipped < 0 || end + skipped > call->max_context)
            return PN_BAD_SEGMENT;
        for (int b = 0; b <= (end - 1) / cache->block_size; b++)
            if (ids[b] < 0 || ids[b] >= num_blocks) return PN_BAD_BLOCK;
        if (num_rows + length > call->num_rows) return PN_BAD_SEGMENT;
        if (segment->is_tree && (length > PN_MAX_TREE_ROWS || !call->parents)) return PN_BAD_TREE;
        for (int r = 0; segment->is_tree && r < length; r++) {
            int parent = call->parents[num_rows + r];
            if (parent < -1 || parent >= r) return PN_BAD_TREE;
        }
        num_rows += length;
    }
    if (num_rows != call->num_rows || num_rows == 0) return PN_BAD_SEGMENT;
    for (int i = 0; i < call->num_rows; i++)
        if (call->token_ids[i] < 0 || call->token_ids[i] >= call->vocab_size) return PN_BAD_TOKEN;
    return PN_OK;
}

pn_result pn_check_batch(const pn_model *m, const pn_cache *cache, const pn_batch *batch) {
    call_rows call = {
        batch->token_ids, batch->segments, batch->parents, batch->block_ids, batch->num_rows,
        batch->num_segments, 0, m->max_context, m->vocab_size,
    };
    pn_result result = check_rows(&call, cache);
    if (result != PN_OK) return result;
    for (int i = 0; i < batch->num_logits; i++)
        if (batch->logit_rows[i] < 0 || batch->logit_rows[i] >= batch->num_rows)
            return PN_BAD_LOGIT_ROW;
    for (int i = 0; i < batch->num_aux_layers; i++)
        if (batch->aux_layers[i] < 0 || batch->aux_layers[i] > m->num_layers)
            return PN_BAD_AUX_LAYER;
    return PN_OK;
}

/* Chains extend the last row of each segment, which must not be a tree. */
static pn_result check_chains(const pn_draft_batch *batch) {
    if (batch->num_outputs != batch->num_segments) return PN_BAD_LOGIT_ROW;
    int64_t num_rows = 0;
    for (int i = 0; i < batch->num_segments; i++) {
        num_rows += batch->segments[i].length;
        if (batch->segments[i].is_tree) return PN_BAD_TREE;
        if (batch->output_rows[i] != num_rows - 1) return PN_BAD_LOGIT_ROW;
    }
    return PN_OK;
}

pn_result pn_check_draft_batch(const pn_draft_model *m, const pn_cache *cache,
                               const pn_draft_batch *batch) {
    if (batch->num_steps < 0 || (batch->num_steps > 0 && !batch->choices)) return PN_BAD_SEGMENT;
    if (batch->num_siblings < 0 || batch->num_siblings > PN_MAX_SIBLINGS ||
        batch->num_siblings >= m->draft_vocab_size)
        return PN_BAD_TREE;
    call_rows call = {
        batch->token_ids, batch->segments, batch->parents, batch->block_ids, batch->num_rows,
        batch->num_segments, batch->num_steps, m->max_context, m->target->vocab_size,
    };
    pn_result result = check_rows(&call, cache);
    if (result == PN_OK && batch->choices) result = check_chains(batch);
    if (result != PN_OK) return result;
    for (int64_t i = 0, before = -1; i < batch->num_outputs; before = batch->output_rows[i++])
        if (batch->output_rows[i] <= before || batch->output_rows[i] >= batch->num_rows)
            return PN_BAD_LOGIT_ROW;
    return PN_OK;
}
