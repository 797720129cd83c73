/* An EAGLE-3 head over rows of several sequences, optionally drafting whole chains, in one call.
 *
 * The first pass runs the given rows; each of num_steps further passes runs one row per sequence,
 * the token that the previous pass drafted. All passes form one list of phases, so threads
 * synchronise between phases but never return to the caller. Attention and all later phases run
 * only for rows whose outputs are wanted; the other rows just write their keys and values.
 */
#include "parley.h"

typedef enum {
    PREPARE, NORM_FEATURES, QUANTIZE, MULTIPLY, JOIN, ROTATE, ATTEND, GATHER, CHOOSE
} phase_kind;

enum { PHASES_PER_PASS = 21 };

typedef struct {
    phase_kind kind;
    int32_t pass, num_rows, tiles_per_task;
    const pn_matrix *matrix;
    pn_input input;
    pn_epilogue epilogue;
} phase;

typedef struct { /* rows of an attention task, for one KV head */
    int32_t segment, row, num_rows, offset, position;
} query_block;

typedef struct {
    int32_t segment, depth, position;
    int64_t slot, token;
} row_state;

typedef struct {
    pn_pool *pool;
    const pn_draft_model *model;
    const pn_cache *cache;
    const pn_draft_batch *batch;
    int32_t row_capacity, phase_capacity;
    int32_t num_capacity; /* of row states and query blocks */
    int32_t num_phases, num_blocks, num_active;
    int64_t first_phase;
    int64_t qkv_stride, attended_stride, inner_stride;
    int32_t max_inputs;
    float *normed_features, *embedded, *hidden, *joined, *qkv, *attended, *inner;
    float *output_hidden, *output_attended, *logits;
    pn_activations shared;
    row_state *rows; /* [num_rows + num_steps * num_segments] */
    query_block *blocks;
    int32_t *depths, *chain_lengths;
    float *products; /* product of each chain's probabilities */
    phase *phases;
    int32_t *num_tasks;
    pn_thread_state *threads;
} pn_draft_session;

/* ---- sessions ---------------------------------------------------------------------------- */

static void release(pn_draft_session *s) {
    void *all[] = {s->normed_features, s->embedded, s->hidden, s->joined, s->qkv, s->attended,
                   s->inner, s->output_hidden, s->output_attended, s->logits, s->shared.codes,
                   s->shared.meta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    s->normed_features = s->embedded = s->hidden = s->joined = s->qkv = s->attended = NULL;
    s->inner = s->output_hidden = s->output_attended = s->logits = s->shared.meta = NULL;
    s->shared.codes = NULL;
    s->row_capacity = 0;
}

static int reserve_rows(pn_draft_session *s, int num_rows) {
    if (num_rows <= s->row_capacity) return 1;
    release(s);
    const pn_draft_model *m = s->model;
    int64_t rows = round_up(num_rows, PN_ROW_BLOCK), hidden = m->hidden_size;
    int groups = s->max_inputs / PN_GROUP;
    struct { float **to; int64_t width; } all[] = {
        {&s->normed_features, m->num_features}, {&s->embedded, hidden}, {&s->hidden, hidden},
        {&s->joined, 2 * hidden}, {&s->qkv, s->qkv_stride}, {&s->attended, s->attended_stride},
        {&s->inner, s->inner_stride}, {&s->output_hidden, hidden},
        {&s->output_attended, s->attended_stride}, {&s->logits, m->draft_vocab_size}};
    int is_complete = 1;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].to = allocate(rows * all[i].width * 4);
        is_complete &= *all[i].to != NULL;
    }
    s->shared.codes = allocate(pn_code_bytes((int)rows, groups));
    s->shared.meta = allocate(pn_meta_floats((int)rows, groups) * 4);
    if (!is_complete || !s->shared.codes || !s->shared.meta) {
        release(s);
        return 0;
    }
    s->row_capacity = (int32_t)rows;
    return 1;
}

static void release_states(pn_draft_session *s) {
    void *all[] = {s->rows, s->blocks, s->depths, s->chain_lengths, s->products};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    s->rows = NULL;
    s->blocks = NULL;
    s->products = NULL;
    s->depths = s->chain_lengths = NULL;
    s->num_capacity = 0;
}

static int reserve_states(pn_draft_session *s, int num) {
    if (num <= s->num_capacity) return 1;
    release_states(s);
    num *= 2;
    s->rows = allocate(num * (int64_t)sizeof *s->rows);
    s->blocks = allocate(num * (int64_t)sizeof *s->blocks);
    s->depths = allocate(num * 4LL);
    s->chain_lengths = allocate(num * 4LL);
    s->products = allocate(num * 4LL);
    if (!s->rows || !s->blocks || !s->depths || !s->chain_lengths || !s->products) {
        release_states(s);
        return 0;
    }
    s->num_capacity = num;
    return 1;
}

static int reserve_phases(pn_draft_session *s, int num_passes) {
    if (num_passes * PHASES_PER_PASS <= s->phase_capacity) return 1;
    free(s->phases);
    free(s->num_tasks);
    int num = 2 * num_passes * PHASES_PER_PASS;
    s->phases = allocate(num * (int64_t)sizeof *s->phases);
    s->num_tasks = allocate(num * (int64_t)sizeof *s->num_tasks);
    s->phase_capacity = s->phases && s->num_tasks ? num : 0;
    return s->phase_capacity > 0;
}

PN_EXPORT void pn_draft_session_destroy(pn_draft_session *s) {
    if (!s) return;
    release(s);
    release_states(s);
    pn_threads_destroy(s->threads, pn_pool_threads(s->pool));
    free(s->phases);
    free(s->num_tasks);
    free(s);
}

/* `pool` and `model` must outlive the session. NULL if out of memory. */
PN_EXPORT pn_draft_session *pn_draft_session_create(pn_pool *pool, const pn_draft_model *m) {
    pn_draft_session *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->pool = pool;
    s->model = m;
    int query_size = m->num_heads * m->head_dim, kv_size = m->num_kv_heads * m->head_dim;
    s->qkv_stride = round_up(query_size + 2 * kv_size, PN_TILE);
    s->attended_stride = query_size;
    s->inner_stride = round_up(m->inner_size, PN_TILE);
    int max = max_int(max_int(m->num_features, 2 * m->hidden_size),
                          max_int(query_size, m->inner_size));
    s->max_inputs = round_up(max, PN_GROUP);
    s->threads = pn_threads_create(pn_pool_threads(pool), s->max_inputs, m->head_dim);
    if (s->threads) return s;
    pn_draft_session_destroy(s);
    return NULL;
}

/* ---- tasks ------------------------------------------------------------------------------- */

/* Row states of a pass: the given rows, then one per segment for each further pass. */
static row_state *rows_of(const pn_draft_session *s, int pass) {
    const pn_draft_batch *batch = s->batch;
    return s->rows + (pass == 0 ? 0 : batch->num_rows + (pass - 1) * batch->num_segments);
}

/* A row's embedding, and its residual stream unless a product computes that. */
static void prepare(pn_draft_session *s, const phase *p, int row) {
    const pn_draft_model *m = s->model;
    int64_t at = (int64_t)row * m->hidden_size;
    pn_embed(m->target, rows_of(s, p->pass)[row].token, s->embedded + at);
    if (p->input.rows)
        memcpy(s->hidden + at, p->input.rows + at, sizeof(float) * m->hidden_size);
}

/* RMS-normalises each layer's part of a row's features. */
static void norm_features(pn_draft_session *s, int row) {
    const pn_draft_model *m = s->model;
    for (int part = 0; part < m->num_features; part += m->hidden_size) {
        int64_t at = (int64_t)row * m->num_features + part;
        pn_rms_norm(s->batch->features + at, NULL, m->hidden_size, m->rms_eps,
                    s->normed_features + at);
    }
}

static void join(pn_draft_session *s, int row) {
    const pn_draft_model *m = s->model;
    int64_t size = m->hidden_size, at = row * size;
    float *to = s->joined + 2 * at;
    pn_rms_norm(s->embedded + at, m->embedding_norm, m->hidden_size, m->rms_eps, to);
    pn_rms_norm(s->hidden + at, m->hidden_norm, m->hidden_size, m->rms_eps, to + size);
}

static void rotate(pn_draft_session *s, const phase *p, int row) {
    const pn_draft_model *m = s->model;
    const row_state *state = rows_of(s, p->pass) + row;
    const float *rotation = m->rotations + (int64_t)state->position * m->head_dim;
    float *query = s->qkv + row * s->qkv_stride, *key = query + m->num_heads * m->head_dim;
    pn_rotate_row(query, m->num_heads, m->head_dim, rotation, NULL, m->rms_eps, m->score_scale);
    pn_rotate_row(key, m->num_kv_heads, m->head_dim, rotation, NULL, m->rms_eps, 1.0f);
    pn_store_kv(s->cache, 0, m->num_kv_heads, m->head_dim, state->slot, key);
}

static void attend(pn_draft_session *s, const phase *p, int task, int thread) {
    const pn_draft_model *m = s->model;
    int kv_head = task % m->num_kv_heads, group = m->num_heads / m->num_kv_heads;
    const query_block *block = &s->blocks[task / m->num_kv_heads];
    query_block step;
    if (p->pass > 0) { /* one row per segment, after all earlier ones */
        int i = task / m->num_kv_heads;
        step = (query_block){i, i, 1, 0, rows_of(s, p->pass)[i].position};
        block = &step;
    }
    const pn_segment *segment = &s->batch->segments[block->segment];
    pn_attention call = {
        .cache = s->cache, .block_ids = s->batch->block_ids + segment->first_block, .layer = 0,
        .kv_head = kv_head, .num_kv_heads = m->num_kv_heads, .num_heads = m->num_heads,
        .head_dim = m->head_dim,
    };
    int64_t head = (int64_t)kv_head * group * m->head_dim;
    pn_query_rows rows = {
        .query = s->qkv + block->row * s->qkv_stride + head,
        .out = s->attended + block->row * s->attended_stride + head,
        .query_stride = s->qkv_stride, .out_stride = s->attended_stride,
        .position = block->position, .num_rows = block->num_rows,
    };
    float *scratch = s->threads[thread].attention;
    if (p->pass > 0 || !segment->is_tree) {
        pn_attend(&call, &rows, scratch);
        return;
    }
    rows.depths = s->depths + block->row;
    const int32_t *parents = s->batch->parents + block->row - block->offset;
    pn_attend_tree(&call, &rows, parents, block->offset, scratch);
}

static void gather(pn_draft_session *s, const phase *p) {
    int64_t hidden = s->model->hidden_size, width = s->attended_stride;
    for (int i = 0; i < p->num_rows; i++) {
        int64_t row = p->pass == 0 ? s->batch->output_rows[i] : i;
        memcpy(s->output_hidden + i * hidden, s->hidden + row * hidden, sizeof(float) * hidden);
        memcpy(s->output_attended + i * width, s->attended + row * width, sizeof(float) * width);
    }
}

static void multiply(pn_draft_session *s, int number, int task, int thread) {
    const phase *p = &s->phases[number];
    pn_activations input = pn_prepare_input(&p->input, s->model->rms_eps, p->num_rows, s->shared,
                                            &s->threads[thread], s->first_phase + number);
    int first = task * p->tiles_per_task;
    pn_matmul_tiles(p->matrix, &input, p->num_rows, first,
                    min_int(first + p->tiles_per_task, p->matrix->num_tiles), &p->epilogue);
}

/* Is a segment's chain extended in this pass? */
static int is_active(const pn_draft_session *s, int segment, int pass) {
    const pn_draft_choice *choice = &s->batch->choices[segment];
    return s->chain_lengths[segment] >= pass && choice->max_drafts > pass &&
           (pass == 0 || s->products[segment] >= choice->min_extend_probability);
}

static int has_active(const pn_draft_session *s, int pass) {
    for (int i = 0; i < s->batch->num_segments; i++)
        if (is_active(s, i, pass)) return 1;
    return 0;
}

/* Drafts the token after a segment's last row, and makes it the next pass's row. */
static void choose(pn_draft_session *s, const phase *p, int segment) {
    const pn_draft_batch *batch = s->batch;
    const pn_draft_choice *choice = &batch->choices[segment];
    int64_t at = (int64_t)p->pass * batch->num_segments + segment;
    if (!is_active(s, segment, p->pass)) return;
    float *probs = s->logits + (int64_t)segment * s->model->draft_vocab_size;
    int choice_id = pn_choose_draft(probs, s->model->draft_vocab_size, batch->u_values[at],
                                    batch->u_bandwidth, choice);
    s->products[segment] *= probs[choice_id];
    if (!(s->products[segment] >= choice->min_probability)) return; /* also stops at NaN */
    s->chain_lengths[segment] = p->pass + 1;
    batch->out_tokens[at] = s->model->target_ids[choice_id];
    batch->out_probabilities[at] = probs[choice_id];
    int siblings[PN_MAX_SIBLINGS], count = batch->num_siblings;
    if (count > 0) pn_find_siblings(probs, s->model->draft_vocab_size, choice_id, count, siblings);
    for (int i = 0; i < count; i++) {
        batch->out_siblings[at * count + i] = s->model->target_ids[siblings[i]];
        batch->out_sibling_probabilities[at * count + i] = probs[siblings[i]];
    }
    if (p->pass < batch->num_steps)
        rows_of(s, p->pass + 1)[segment].token = s->model->target_ids[choice_id];
}

static void run_task(void *context, int number, int task, int thread) {
    pn_draft_session *s = context;
    const phase *p = &s->phases[number];
    if (p->pass > 0 && !has_active(s, p->pass)) return;
    int first = task * PN_ROW_BLOCK, end = min_int(first + PN_ROW_BLOCK, p->num_rows);
    switch (p->kind) {
    case PREPARE:
        for (int row = first; row < end; row++) prepare(s, p, row);
        break;
    case NORM_FEATURES:
        for (int row = first; row < end; row++) norm_features(s, row);
        break;
    case QUANTIZE:
        pn_quantize_input(&p->input, s->model->rms_eps, p->num_rows, first, end, s->shared);
        break;
    case MULTIPLY: multiply(s, number, task, thread); break;
    case JOIN:
        for (int row = first; row < end; row++) join(s, row);
        break;
    case ROTATE:
        for (int row = first; row < end; row++) rotate(s, p, row);
        break;
    case ATTEND: attend(s, p, task, thread); break;
    case GATHER: gather(s, p); break;
    case CHOOSE: choose(s, p, task); break;
    }
}

/* ---- the list of phases ------------------------------------------------------------------ */

static phase *add_phase(pn_draft_session *s, phase_kind kind, int pass, int num_rows) {
    phase *p = &s->phases[s->num_phases];
    *p = (phase){.kind = kind, .pass = pass, .num_rows = num_rows};
    int32_t *num_tasks = &s->num_tasks[s->num_phases++];
    *num_tasks = (num_rows + PN_ROW_BLOCK - 1) / PN_ROW_BLOCK;
    if (kind == GATHER) *num_tasks = 1;
    if (kind == CHOOSE) *num_tasks = num_rows;
    if (kind == ATTEND)
        *num_tasks = (pass == 0 ? s->num_blocks : num_rows) * s->model->num_kv_heads;
    return p;
}

static void add_product(pn_draft_session *s, int pass, int num_rows, const pn_matrix *matrix,
                        pn_input input, pn_epilogue epilogue) {
    if (num_rows > PN_THREAD_LOCAL_ROWS) add_phase(s, QUANTIZE, pass, num_rows)->input = input;
    phase *p = add_phase(s, MULTIPLY, pass, num_rows);
    /* Tile pairs (gate and up) stay together. */
    p->tiles_per_task = pn_tiles_per_task(matrix->num_tiles, num_rows, pn_pool_threads(s->pool), 2);
    s->num_tasks[s->num_phases - 1] =
        (matrix->num_tiles + p->tiles_per_task - 1) / p->tiles_per_task;
    p->matrix = matrix;
    p->input = input;
    p->epilogue = epilogue;
}

static void list_pass(pn_draft_session *s, int pass) {
    const pn_draft_model *m = s->model;
    const pn_draft_batch *batch = s->batch;
    int num_rows = pass == 0 ? batch->num_rows : batch->num_segments;
    int64_t size = m->hidden_size;
    const float *states = pass == 0 ? batch->states : s->output_hidden;
    int is_real = pass == 0 && batch->features, has_proj = !is_real && m->hidden_proj.data;
    pn_epilogue to_hidden = {s->hidden, size, PN_STORE, 0, 0};
    add_phase(s, PREPARE, pass, num_rows)->input.rows = is_real || has_proj ? NULL : states;
    if (is_real) {
        pn_input input = {batch->features, NULL, m->num_features, m->num_features};
        if (m->normalises_features) {
            add_phase(s, NORM_FEATURES, pass, num_rows);
            input.rows = s->normed_features;
        }
        add_product(s, pass, num_rows, &m->features, input, to_hidden);
    } else if (has_proj) {
        pn_input input = {states, NULL, size, m->hidden_size};
        add_product(s, pass, num_rows, &m->hidden_proj, input, to_hidden);
    }
    if (m->embedding_proj.data) {
        pn_epilogue add = {s->hidden, size, PN_ADD, 0, 0};
        pn_input input = {s->embedded, NULL, size, m->hidden_size};
        add_product(s, pass, num_rows, &m->embedding_proj, input, add);
    }
    add_phase(s, JOIN, pass, num_rows);
    add_product(s, pass, num_rows, &m->query_key_value,
                (pn_input){s->joined, NULL, 2 * size, 2 * m->hidden_size},
                (pn_epilogue){s->qkv, s->qkv_stride, PN_STORE, 0, 0});
    add_phase(s, ROTATE, pass, num_rows);
    num_rows = pass == 0 ? batch->num_outputs : batch->num_segments;
    if (num_rows == 0) return;
    add_phase(s, ATTEND, pass, num_rows);
    add_phase(s, GATHER, pass, num_rows);
    pn_epilogue to_picked = {s->output_hidden, size, PN_ADD, 0, 0};
    add_product(s, pass, num_rows, &m->attention_output,
                (pn_input){s->output_attended, NULL, s->attended_stride,
                                m->num_heads * m->head_dim},
                to_picked);
    add_product(s, pass, num_rows, &m->gate_up,
                (pn_input){s->output_hidden, m->ffn_norm, size, m->hidden_size},
                (pn_epilogue){s->inner, s->inner_stride, PN_GATED, PN_SILU, 0});
    add_product(s, pass, num_rows, &m->down,
                (pn_input){s->inner, NULL, s->inner_stride, m->inner_size}, to_picked);
    float *logits = batch->choices ? s->logits : batch->logits;
    add_product(s, pass, num_rows, &m->head,
                (pn_input){s->output_hidden, m->final_norm, size, m->hidden_size},
                (pn_epilogue){logits, m->draft_vocab_size, PN_STORE, 0, 0});
    if (batch->choices) add_phase(s, CHOOSE, pass, num_rows);
}

/* Computes slots and positions for the rows of all passes, and the attention tasks of the first. */
static void assign_slots(pn_draft_session *s) {
    const pn_draft_batch *batch = s->batch;
    int block_size = s->cache->block_size, row = 0, wanted = 0;
    int rows_per_block = pn_attention_rows(s->model->num_heads / s->model->num_kv_heads);
    s->num_blocks = 0;
    for (int i = 0; i < batch->num_segments; i++) {
        const pn_segment *segment = &batch->segments[i];
        const int32_t *ids = batch->block_ids + segment->first_block;
        int first = row, end = row + segment->length;
        for (; row < end; row++) {
            int at = segment->start + row - first;
            s->depths[row] = row - first;
            if (segment->is_tree) {
                int parent = batch->parents[row];
                s->depths[row] = parent < 0 ? 0 : s->depths[first + parent] + 1;
            }
            s->rows[row] = (row_state){
                i, s->depths[row], segment->start + s->depths[row],
                (int64_t)ids[at / block_size] * block_size + at % block_size,
                batch->token_ids[row]};
        }
        for (int step = 1; step <= batch->num_steps; step++) {
            int at = segment->start + segment->length - 1 + step;
            rows_of(s, step)[i] = (row_state){
                i, 0, at, (int64_t)ids[at / block_size] * block_size + at % block_size, 0};
        }
        s->chain_lengths[i] = 0;
        s->products[i] = 1.0f;
        if (wanted == batch->num_outputs || batch->output_rows[wanted] >= end) continue;
        int from = (int)batch->output_rows[wanted];
        while (wanted < batch->num_outputs && batch->output_rows[wanted] < end) wanted++;
        end = (int)batch->output_rows[wanted - 1] + 1;
        for (; from < end; from += rows_per_block) {
            int rows = min_int(rows_per_block, end - from), offset = from - first;
            int position = segment->start + (segment->is_tree ? 0 : offset);
            s->blocks[s->num_blocks++] = (query_block){i, from, rows, offset, position};
        }
    }
}

/* Runs one call. Returns a pn_result; writes nothing unless it is PN_OK. */
PN_EXPORT int pn_draft(pn_draft_session *s, const pn_cache *cache, const pn_draft_batch *batch) {
    pn_result result = pn_check_draft_batch(s->model, cache, batch);
    if (result != PN_OK) return result;
    s->cache = cache;
    s->batch = batch;
    int num_states = batch->num_rows + batch->num_segments * (batch->num_steps + 1);
    if (!reserve_rows(s, batch->num_rows) || !reserve_states(s, num_states) ||
        !reserve_phases(s, batch->num_steps + 1))
        return PN_NO_MEMORY;
    assign_slots(s);
    s->num_phases = 0;
    for (int pass = 0; pass <= batch->num_steps; pass++) list_pass(s, pass);
    pn_pool_run(s->pool, s->num_phases, s->num_tasks, run_task, s, NULL);
    s->first_phase += s->num_phases;
    if (batch->out_states && batch->num_outputs > 0)
        memcpy(batch->out_states, s->output_hidden,
               sizeof(float) * batch->num_outputs * (size_t)s->model->hidden_size);
    if (batch->choices)
        memcpy(batch->out_lengths, s->chain_lengths, sizeof(int32_t) * (size_t)batch->num_segments);
    return PN_OK;
}
