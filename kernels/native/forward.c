/* One forward pass of the decoder: the list of its phases, and the tasks of each phase.
 *
 * Buffers belong to a session and grow to the size of the largest step.
 */
#include "parley.h"

typedef enum {
    EMBED,
    NORM_ATTENTION, QUERY_KEY_VALUE, ROTATE, ATTEND,
    GATHER,
    QUANTIZE_ATTENDED, ATTENTION_OUTPUT, ADD_ATTENTION,
    NORM_FFN, GATE_UP, QUANTIZE_INNER, DOWN, ADD_FFN, COPY_FEATURES,
    NORM_FINAL, HEAD,
    NUM_KINDS
} phase_kind;

static const char *const PHASE_NAMES[NUM_KINDS] = {
    [EMBED] = "embed", [NORM_ATTENTION] = "attention norm", [QUERY_KEY_VALUE] = "query/key/value",
    [ROTATE] = "rotate + store", [ATTEND] = "attention", [GATHER] = "gather",
    [QUANTIZE_ATTENDED] = "attention quantise", [ATTENTION_OUTPUT] = "attention output",
    [ADD_ATTENTION] = "attention post norm", [NORM_FFN] = "ffn norm", [GATE_UP] = "gate/up",
    [QUANTIZE_INNER] = "inner quantise", [DOWN] = "down", [ADD_FFN] = "ffn post norm",
    [COPY_FEATURES] = "copy features", [NORM_FINAL] = "final norm", [HEAD] = "head"};

enum { MAX_PHASES_PER_LAYER = 13 };

typedef struct {
    phase_kind kind;
    int32_t layer, num_rows, tiles_per_task;
} phase;

typedef struct { /* rows of an attention task, for one KV head */
    int32_t segment, num_rows;
    int32_t first_row, offset; /* of the first row in the batch, and in its segment */
} query_block;

typedef struct {
    pn_pool *pool;
    const pn_model *model;
    const pn_cache *cache;
    const pn_batch *batch;
    int32_t capacity, block_capacity; /* of rows; of query blocks */
    int64_t first_phase;              /* phases run by earlier steps */
    int32_t num_blocks, max_inputs;
    int64_t qkv_stride, attended_stride, inner_stride;
    float *hidden, *qkv, *attended, *inner, *block_out, *output_hidden, *output_attended;
    pn_activations shared;
    int64_t *slots; /* position of each row in the KV pool */
    int32_t *depths; /* position of each row relative to its segment's start */
    int32_t *positions; /* RoPE position of each row */
    int32_t keeps_all_rows; /* the last layer runs for all rows, as its features are wanted */
    query_block *blocks;
    phase *phases;
    int32_t *num_tasks;
    int64_t *phase_ns;
    pn_thread_state *threads;
    int is_profiling;
    int64_t kind_ns[NUM_KINDS];
} pn_session;

/* ---- sessions ---------------------------------------------------------------------------- */

static void release_rows(pn_session *s) {
    void *all[] = {s->hidden, s->qkv, s->attended, s->inner, s->block_out, s->output_hidden,
                   s->output_attended, s->shared.codes, s->shared.meta, s->slots,
                   s->depths, s->positions};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    s->hidden = s->qkv = s->attended = s->inner = s->block_out = NULL;
    s->output_hidden = s->output_attended = s->shared.meta = NULL;
    s->shared.codes = NULL;
    s->slots = NULL;
    s->depths = s->positions = NULL;
    s->capacity = 0;
}

static int reserve_rows(pn_session *s, int num_rows) {
    if (num_rows <= s->capacity) return 1;
    release_rows(s);
    int64_t rows = round_up(num_rows, PN_ROW_BLOCK);
    int64_t hidden = s->model->hidden_size, groups = s->max_inputs / PN_GROUP;
    struct { float **to; int64_t width; } all[] = {
        {&s->hidden, hidden}, {&s->output_hidden, hidden}, {&s->block_out, hidden},
        {&s->qkv, s->qkv_stride}, {&s->attended, s->attended_stride},
        {&s->output_attended, s->attended_stride}, {&s->inner, s->inner_stride}};
    int is_complete = 1;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].to = allocate(rows * all[i].width * 4);
        is_complete &= *all[i].to != NULL;
    }
    s->slots = allocate(rows * 8);
    s->depths = allocate(rows * 4);
    s->positions = allocate(rows * 4);
    s->shared.codes = allocate(pn_code_bytes((int)rows, (int)groups));
    s->shared.meta = allocate(pn_meta_floats((int)rows, (int)groups) * 4);
    if (!is_complete || !s->slots || !s->depths || !s->positions || !s->shared.codes ||
        !s->shared.meta) {
        release_rows(s);
        return 0;
    }
    s->capacity = (int32_t)rows;
    return 1;
}

static int reserve_blocks(pn_session *s, int num_blocks) {
    if (num_blocks <= s->block_capacity) return 1;
    free(s->blocks);
    s->blocks = allocate(2LL * num_blocks * (int64_t)sizeof *s->blocks);
    s->block_capacity = s->blocks ? 2 * num_blocks : 0;
    return s->blocks != NULL;
}

PN_EXPORT void pn_session_destroy(pn_session *s) {
    if (!s) return;
    release_rows(s);
    pn_threads_destroy(s->threads, pn_pool_threads(s->pool));
    free(s->blocks);
    free(s->phases);
    free(s->num_tasks);
    free(s->phase_ns);
    free(s);
}

/* `pool` and `model` must outlive the session. NULL if out of memory. */
PN_EXPORT pn_session *pn_session_create(pn_pool *pool, const pn_model *model) {
    pn_session *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->pool = pool;
    s->model = model;
    int query_size = model->num_heads * model->head_dim;
    int kv_size = model->num_kv_heads * model->head_dim;
    s->qkv_stride = round_up(query_size + 2 * kv_size, PN_TILE);
    s->attended_stride = query_size;
    s->inner_stride = round_up(model->inner_size, PN_TILE);
    s->max_inputs = round_up(
        max_int(model->hidden_size, max_int(query_size, model->inner_size)), PN_GROUP);
    int max_phases = model->num_layers * MAX_PHASES_PER_LAYER + 8;
    s->phases = calloc((size_t)max_phases, sizeof *s->phases);
    s->num_tasks = calloc((size_t)max_phases, sizeof *s->num_tasks);
    s->phase_ns = calloc((size_t)max_phases, sizeof *s->phase_ns);
    s->threads = pn_threads_create(pn_pool_threads(pool), s->max_inputs, model->head_dim);
    if (!s->phases || !s->num_tasks || !s->phase_ns || !s->threads) {
        pn_session_destroy(s);
        return NULL;
    }
    return s;
}

/* ---- tasks ------------------------------------------------------------------------------- */

static void rotate(pn_session *s, const pn_layer *layer, int layer_index, int row) {
    const pn_model *m = s->model;
    const float *rotation = layer->rotations + (int64_t)s->positions[row] * m->head_dim;
    float *query = s->qkv + row * s->qkv_stride;
    float *key = query + m->num_heads * m->head_dim;
    pn_rotate_row(query, m->num_heads, m->head_dim, rotation, layer->query_norm, m->rms_eps,
                  m->score_scale);
    pn_rotate_row(key, m->num_kv_heads, m->head_dim, rotation, layer->key_norm, m->rms_eps, 1.0f);
    pn_store_kv(s->cache, layer_index, m->num_kv_heads, m->head_dim, s->slots[row], key);
}

static void attend(pn_session *s, const pn_layer *layer, int layer_index, int task, int thread) {
    const pn_model *m = s->model;
    const query_block *block = &s->blocks[task / m->num_kv_heads];
    int kv_head = task % m->num_kv_heads, group = m->num_heads / m->num_kv_heads;
    const pn_segment *segment = &s->batch->segments[block->segment];
    pn_attention call = {
        .cache = s->cache,
        .block_ids = s->batch->block_ids + segment->first_block,
        .layer = layer_index, .kv_head = kv_head, .num_kv_heads = m->num_kv_heads,
        .num_heads = m->num_heads, .head_dim = m->head_dim, .window = layer->window,
        .softcap = m->attention_softcap,
    };
    int64_t head = (int64_t)kv_head * group * m->head_dim;
    pn_query_rows rows = {
        .query = s->qkv + block->first_row * s->qkv_stride + head,
        .out = s->attended + block->first_row * s->attended_stride + head,
        .query_stride = s->qkv_stride, .out_stride = s->attended_stride,
        .position = segment->start, .num_rows = block->num_rows,
    };
    float *scratch = s->threads[thread].attention;
    if (segment->is_tree) {
        rows.depths = s->depths + block->first_row;
        const int32_t *parents = s->batch->parents + block->first_row - block->offset;
        pn_attend_tree(&call, &rows, parents, block->offset, scratch);
    } else {
        rows.position += block->offset;
        pn_attend(&call, &rows, scratch);
    }
}

/* Copies the rows whose logits are wanted, after the last attention; or after the last layer if
 * that runs for all rows. */
static void gather_rows(pn_session *s) {
    const pn_batch *batch = s->batch;
    int64_t hidden = s->model->hidden_size;
    for (int i = 0; i < batch->num_logits; i++) {
        int64_t row = batch->logit_rows[i];
        memcpy(s->output_hidden + i * hidden, s->hidden + row * hidden, sizeof(float) * hidden);
        if (s->keeps_all_rows) continue;
        memcpy(s->output_attended + i * s->attended_stride, s->attended + row * s->attended_stride,
               sizeof(float) * s->attended_stride);
    }
}

/* Copies one row's residual stream after `layer`, and its final norm, into the features. */
static void copy_features(const pn_session *s, int layer, int row) {
    const pn_model *m = s->model;
    const pn_batch *batch = s->batch;
    const float *from = s->hidden + (int64_t)row * m->hidden_size;
    float *to = batch->features + (int64_t)row * batch->num_aux_layers * m->hidden_size;
    for (int i = 0; i < batch->num_aux_layers; i++, to += m->hidden_size) {
        if (batch->aux_layers[i] == layer) {
            memcpy(to, from, sizeof(float) * m->hidden_size);
        } else if (batch->aux_layers[i] == m->num_layers && layer == m->num_layers - 1) {
            pn_rms_norm(from, m->final_norm, m->hidden_size, m->rms_eps, to);
        }
    }
}

static int is_aux_layer(const pn_session *s, int layer) {
    const pn_batch *batch = s->batch;
    int last = s->model->num_layers - 1;
    for (int i = 0; i < batch->num_aux_layers; i++)
        if (batch->aux_layers[i] == layer || (layer == last && batch->aux_layers[i] > last))
            return 1;
    return 0;
}

static void add_normed(pn_session *s, const float *norm, int row, float *hidden) {
    int size = s->model->hidden_size;
    float *from = s->block_out + (int64_t)row * size, *to = hidden + (int64_t)row * size;
    pn_rms_norm(from, norm, size, s->model->rms_eps, from);
    for (int i = 0; i < size; i++) to[i] += from[i];
}

static int has_output_rows_only(const pn_session *s, const phase *p) {
    phase_kind last_for_all_rows = s->keeps_all_rows ? COPY_FEATURES : GATHER;
    return p->layer == s->model->num_layers - 1 && p->kind > last_for_all_rows;
}

static pn_input input_of(const pn_session *s, const phase *p) {
    const pn_model *m = s->model;
    const pn_layer *layer = &m->layers[p->layer];
    const float *hidden = has_output_rows_only(s, p) ? s->output_hidden : s->hidden;
    const float *attended = has_output_rows_only(s, p) ? s->output_attended : s->attended;
    switch (p->kind) {
    case NORM_ATTENTION: case QUERY_KEY_VALUE:
        return (pn_input){hidden, layer->attention_norm, m->hidden_size, m->hidden_size};
    case QUANTIZE_ATTENDED: case ATTENTION_OUTPUT:
        return (pn_input){attended, NULL, s->attended_stride, m->num_heads * m->head_dim};
    case NORM_FFN: case GATE_UP:
        return (pn_input){hidden, layer->ffn_norm, m->hidden_size, m->hidden_size};
    case QUANTIZE_INNER: case DOWN:
        return (pn_input){s->inner, NULL, s->inner_stride, m->inner_size};
    default:
        return (pn_input){hidden, m->final_norm, m->hidden_size, m->hidden_size};
    }
}

static const pn_matrix *matrix_of(const pn_model *m, const phase *p) {
    const pn_layer *layer = &m->layers[p->layer];
    switch (p->kind) {
    case QUERY_KEY_VALUE: return &layer->query_key_value;
    case ATTENTION_OUTPUT: return &layer->attention_output;
    case GATE_UP: return &layer->gate_up;
    case DOWN: return &layer->down;
    default: return &m->head;
    }
}

static pn_epilogue epilogue_of(const pn_session *s, const phase *p) {
    const pn_model *m = s->model;
    float *hidden = has_output_rows_only(s, p) ? s->output_hidden : s->hidden;
    const pn_layer *layer = &m->layers[p->layer];
    pn_epilogue add = {hidden, m->hidden_size, PN_ADD, 0, 0};
    pn_epilogue keep = {s->block_out, m->hidden_size, PN_STORE, 0, 0};
    switch (p->kind) {
    case QUERY_KEY_VALUE: return (pn_epilogue){s->qkv, s->qkv_stride, PN_STORE, 0, 0};
    case ATTENTION_OUTPUT: return layer->attention_post_norm ? keep : add;
    case GATE_UP:
        return (pn_epilogue){s->inner, s->inner_stride, PN_GATED, m->activation, 0};
    case DOWN: return layer->ffn_post_norm ? keep : add;
    default:
        return (pn_epilogue){s->batch->logits, m->vocab_size, PN_STORE, 0, m->logit_softcap};
    }
}

static void multiply(pn_session *s, int number, int task, int thread) {
    const phase *p = &s->phases[number];
    const pn_matrix *matrix = matrix_of(s->model, p);
    pn_input read = input_of(s, p);
    pn_activations input = pn_prepare_input(&read, s->model->rms_eps, p->num_rows, s->shared,
                                            &s->threads[thread], s->first_phase + number);
    pn_epilogue epilogue = epilogue_of(s, p);
    int first = task * p->tiles_per_task;
    int end = min_int(first + p->tiles_per_task, matrix->num_tiles);
    pn_matmul_tiles(matrix, &input, p->num_rows, first, end, &epilogue);
    if (p->kind == HEAD && s->batch->block_maxima)
        pn_block_maxima(s->batch->logits, s->batch->block_maxima, s->model->vocab_size, first, end,
                       p->num_rows);
}

static void run_task(void *context, int number, int task, int thread) {
    pn_session *s = context;
    const phase *p = &s->phases[number];
    const pn_layer *layer = &s->model->layers[p->layer];
    float *hidden = has_output_rows_only(s, p) ? s->output_hidden : s->hidden;
    int first = task * PN_ROW_BLOCK, end = min_int(first + PN_ROW_BLOCK, p->num_rows);
    switch (p->kind) {
    case EMBED:
        for (int row = first; row < end; row++)
            pn_embed(s->model, s->batch->token_ids[row],
                     s->hidden + (int64_t)row * s->model->hidden_size);
        break;
    case ROTATE:
        for (int row = first; row < end; row++) rotate(s, layer, p->layer, row);
        break;
    case ATTEND: attend(s, layer, p->layer, task, thread); break;
    case GATHER: gather_rows(s); break;
    case COPY_FEATURES:
        for (int row = first; row < end; row++) copy_features(s, p->layer, row);
        break;
    case ADD_ATTENTION:
        for (int row = first; row < end; row++)
            add_normed(s, layer->attention_post_norm, row, hidden);
        break;
    case ADD_FFN:
        for (int row = first; row < end; row++) add_normed(s, layer->ffn_post_norm, row, hidden);
        break;
    case NORM_ATTENTION: case NORM_FFN: case NORM_FINAL: case QUANTIZE_ATTENDED:
    case QUANTIZE_INNER: {
        pn_input read = input_of(s, p);
        pn_quantize_input(&read, s->model->rms_eps, p->num_rows, first, end, s->shared);
        break;
    }
    default: multiply(s, number, task, thread); break;
    }
}

/* ---- the list of phases ------------------------------------------------------------------ */

static int add_phase(pn_session *s, int count, phase_kind kind, int layer, int num_rows) {
    phase *p = &s->phases[count];
    *p = (phase){kind, layer, num_rows, 0};
    switch (kind) {
    case QUERY_KEY_VALUE: case ATTENTION_OUTPUT: case GATE_UP: case DOWN: case HEAD: {
        int num_tiles = matrix_of(s->model, p)->num_tiles;
        /* Tile pairs stay together, and so do the logits of one block maximum. */
        int together = kind == HEAD ? PN_MAXIMA_BLOCK / PN_TILE : 2;
        int tiles = pn_tiles_per_task(num_tiles, num_rows, pn_pool_threads(s->pool), together);
        p->tiles_per_task = tiles;
        s->num_tasks[count] = (num_tiles + tiles - 1) / tiles;
        break;
    }
    case ATTEND: s->num_tasks[count] = s->num_blocks * s->model->num_kv_heads; break;
    case GATHER: s->num_tasks[count] = 1; break;
    default: s->num_tasks[count] = (num_rows + PN_ROW_BLOCK - 1) / PN_ROW_BLOCK; break;
    }
    return count + 1;
}

static int add_product(pn_session *s, int count, phase_kind prepare, phase_kind product, int layer,
                       int num_rows) {
    if (num_rows > PN_THREAD_LOCAL_ROWS) count = add_phase(s, count, prepare, layer, num_rows);
    return add_phase(s, count, product, layer, num_rows);
}

static int list_phases(pn_session *s) {
    const pn_model *m = s->model;
    int num_rows = s->batch->num_rows, count = add_phase(s, 0, EMBED, 0, num_rows);
    s->keeps_all_rows = is_aux_layer(s, m->num_layers - 1);
    for (int l = 0; l < m->num_layers; l++) {
        const pn_layer *layer = &m->layers[l];
        count = add_product(s, count, NORM_ATTENTION, QUERY_KEY_VALUE, l, num_rows);
        count = add_phase(s, count, ROTATE, l, num_rows);
        if (l == m->num_layers - 1 && !s->keeps_all_rows) {
            num_rows = s->batch->num_logits;
            if (num_rows == 0) break; /* only keys and values are needed */
        }
        count = add_phase(s, count, ATTEND, l, num_rows);
        if (l == m->num_layers - 1 && !s->keeps_all_rows)
            count = add_phase(s, count, GATHER, l, num_rows);
        count = add_product(s, count, QUANTIZE_ATTENDED, ATTENTION_OUTPUT, l, num_rows);
        if (layer->attention_post_norm) count = add_phase(s, count, ADD_ATTENTION, l, num_rows);
        count = add_product(s, count, NORM_FFN, GATE_UP, l, num_rows);
        count = add_product(s, count, QUANTIZE_INNER, DOWN, l, num_rows);
        if (layer->ffn_post_norm) count = add_phase(s, count, ADD_FFN, l, num_rows);
        if (is_aux_layer(s, l)) count = add_phase(s, count, COPY_FEATURES, l, num_rows);
    }
    num_rows = s->batch->num_logits;
    if (s->keeps_all_rows && num_rows > 0)
        count = add_phase(s, count, GATHER, m->num_layers - 1, num_rows);
    if (num_rows > 0) count = add_product(s, count, NORM_FINAL, HEAD, m->num_layers - 1, num_rows);
    return count;
}

/* Rows of a segment per attention task; at least two, as every task reads all keys. */
static int rows_of_block(int length, int parts, int max) {
    return min_int(max_int((length + parts - 1) / parts, 2), max);
}

/* Computes slots and positions of all rows, and the attention tasks. 0 if out of memory. */
static int assign_slots(pn_session *s) {
    const pn_batch *batch = s->batch;
    int most_rows = pn_attention_rows(s->model->num_heads / s->model->num_kv_heads);
    int num_blocks = 0, block_size = s->cache->block_size;
    /* With few sequences of several rows, split them so that every thread has a task. */
    int tasks = batch->num_segments * s->model->num_kv_heads, threads = pn_pool_threads(s->pool);
    int parts = threads == 1 ? 1 : (2 * threads + tasks - 1) / tasks;
    for (int i = 0; i < batch->num_segments; i++) {
        int length = batch->segments[i].length;
        int rows = rows_of_block(length, parts, most_rows);
        num_blocks += (length + rows - 1) / rows;
    }
    if (!reserve_blocks(s, num_blocks)) return 0;
    s->num_blocks = 0;
    int row = 0;
    for (int i = 0; i < batch->num_segments; i++) {
        const pn_segment *segment = &batch->segments[i];
        const int32_t *ids = batch->block_ids + segment->first_block;
        int first = row, rows_per_block = rows_of_block(segment->length, parts, most_rows);
        for (int j = 0; j < segment->length; j += rows_per_block) {
            int rows = min_int(rows_per_block, segment->length - j);
            s->blocks[s->num_blocks++] = (query_block){i, rows, row + j, j};
        }
        for (int j = 0; j < segment->length; j++, row++) {
            int at = segment->start + j;
            s->slots[row] = (int64_t)ids[at / block_size] * block_size + at % block_size;
            s->depths[row] = j;
            if (segment->is_tree) {
                int parent = batch->parents[row];
                s->depths[row] = parent < 0 ? 0 : s->depths[first + parent] + 1;
            }
            s->positions[row] = segment->start + segment->skipped + s->depths[row];
        }
    }
    return 1;
}

/* Runs one step. Returns a pn_result; writes nothing unless it is PN_OK. */
PN_EXPORT int pn_forward(pn_session *s, const pn_cache *cache, const pn_batch *batch) {
    pn_result result = pn_check_batch(s->model, cache, batch);
    if (result != PN_OK) return result;
    s->cache = cache;
    s->batch = batch;
    if (!reserve_rows(s, max_int(batch->num_rows, batch->num_logits)) || !assign_slots(s))
        return PN_NO_MEMORY;
    int num_phases = list_phases(s);
    if (s->is_profiling) memset(s->phase_ns, 0, sizeof(int64_t) * num_phases);
    pn_pool_run(s->pool, num_phases, s->num_tasks, run_task, s,
                s->is_profiling ? s->phase_ns : NULL);
    s->first_phase += num_phases;
    for (int i = 0; s->is_profiling && i < num_phases; i++)
        s->kind_ns[s->phases[i].kind] += s->phase_ns[i];
    return PN_OK;
}

/* Starts (or stops) accumulating nanoseconds per phase_kind; returns the [NUM_KINDS] sums. */
PN_EXPORT const int64_t *pn_session_profile(pn_session *s, int is_on) {
    s->is_profiling = is_on;
    memset(s->kind_ns, 0, sizeof s->kind_ns);
    return s->kind_ns;
}

/* Name of a phase_kind; NULL beyond the last. */
PN_EXPORT const char *pn_phase_name(int kind) {
    return kind >= 0 && kind < NUM_KINDS ? PHASE_NAMES[kind] : NULL;
}
