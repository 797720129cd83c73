/* Samples a token from a row of logits, reading only the blocks whose maximum (pn_block_maxima) is
 * near enough to the best logit.
 *
 * Order: penalties and biases, temperature, top-k, top-p, min-p; then the token at which the
 * running sum of probabilities, in the order of token ids, passes `u`. Logits more than
 * ln(vocab_size) + PN_TAIL_DEPTH below the best have a joint probability below 2^-20 and are never
 * sampled.
 */
#include "parley.h"
#include <float.h>
#include <string.h>

#define ROUNDING 0.01f   /* margin of the coarse cut before the exact comparison */
#define TOP_K_DEPTH 8.0f /* depth that mostly contains the k best */
#define NUM_DEPTHS 4
static const float NUCLEUS_DEPTHS[NUM_DEPTHS] = {4.0f, 8.0f, 16.0f, INFINITY};

/* The maximum of each PN_MAXIMA_BLOCK logits [num_rows][vocab_size] of tiles [first_tile,
 * end_tile), NaN if one of them is NaN. Sampling then skips most blocks of a row of 49 thousand
 * logits. */
void pn_block_maxima(const float *logits, float *maxima, int vocab_size, int first_tile,
                     int end_tile, int num_rows) {
    int64_t num_maxima = (vocab_size + PN_MAXIMA_BLOCK - 1) / PN_MAXIMA_BLOCK;
    int end = min_int(end_tile * PN_TILE, vocab_size);
    for (int row = 0; row < num_rows; row++, logits += vocab_size, maxima += num_maxima) {
        for (int first = first_tile * PN_TILE; first < end; first += PN_MAXIMA_BLOCK) {
            int last = min_int(first + PN_MAXIMA_BLOCK, end), i = first;
            f8 max = f8_splat(-INFINITY);
            s8 is_nan = {0};
            for (; i + PN_TILE <= last; i += PN_TILE) {
                f8 values = f8_load(logits + i);
                is_nan |= values != values;
                max = f8_max(max, values);
            }
            float largest = f8_max_lane(max);
            int has_nan = largest_magnitude(is_nan & (s8)f8_splat(1.0f)) > 0;
            for (; i < last; i++) {
                has_nan |= logits[i] != logits[i];
                largest = logits[i] > largest ? logits[i] : largest;
            }
            maxima[first / PN_MAXIMA_BLOCK] = has_nan ? NAN : largest;
        }
    }
}

typedef struct {
    float *row, *maxima;
    float *sums;    /* sum of weights of each block */
    float *old;     /* logits before penalties */
    float *weights; /* of the candidates, as ids */
    int32_t *ids;   /* [num_ids] candidates, ascending */
    int num_ids, num_old, num_blocks, vocab_size;
    float best, least, factor; /* logits below `least` are never sampled */
} sampler;

/* ---- penalties and biases ---------------------------------------------------------------- */

static void set_logit(sampler *s, int64_t id, float value) {
    s->old[s->num_old++] = s->row[id];
    s->row[id] = value;
}

static void update_block_max(sampler *s, int64_t id) {
    int block = (int)(id / PN_MAXIMA_BLOCK), first = block * PN_MAXIMA_BLOCK;
    int last = min_int(first + PN_MAXIMA_BLOCK, s->vocab_size), has_nan = 0;
    float max = -INFINITY;
    for (int i = first; i < last; i++) {
        has_nan |= s->row[i] != s->row[i];
        max = s->row[i] > max ? s->row[i] : max;
    }
    s->maxima[block] = has_nan ? NAN : max;
}

static void apply_penalties(sampler *s, const pn_sample_params *params) {
    for (int i = 0; i < params->num_repeated; i++) {
        float value = s->row[params->repeated_ids[i]];
        float penalty = params->repetition_penalty;
        set_logit(s, params->repeated_ids[i], value > 0 ? value / penalty : value * penalty);
    }
    for (int i = 0; i < params->num_reply_ids; i++) {
        float less = params->reply_counts[i] * params->frequency_penalty + params->presence_penalty;
        set_logit(s, params->reply_ids[i], s->row[params->reply_ids[i]] - less);
    }
    for (int i = 0; i < params->num_biases; i++)
        set_logit(s, params->bias_ids[i], s->row[params->bias_ids[i]] + params->biases[i]);
    for (int i = 0; i < params->num_repeated; i++) update_block_max(s, params->repeated_ids[i]);
    for (int i = 0; i < params->num_reply_ids; i++) update_block_max(s, params->reply_ids[i]);
    for (int i = 0; i < params->num_biases; i++) update_block_max(s, params->bias_ids[i]);
}

/* Undoes the penalties (log-probabilities are of the raw logits), the last one first. */
static void restore_logits(sampler *s, const pn_sample_params *params) {
    for (int i = params->num_biases; i-- > 0;) s->row[params->bias_ids[i]] = s->old[--s->num_old];
    for (int i = params->num_reply_ids; i-- > 0;)
        s->row[params->reply_ids[i]] = s->old[--s->num_old];
    for (int i = params->num_repeated; i-- > 0;)
        s->row[params->repeated_ids[i]] = s->old[--s->num_old];
}

/* ---- candidates -------------------------------------------------------------------------- */

/* The first of the largest logits; -1 if it is not finite. */
static int best_of(const sampler *s) {
    int block = 0, id;
    for (int i = 0; i < s->num_blocks; i++) {
        if (s->maxima[i] != s->maxima[i]) return -1;
        if (s->maxima[i] > s->maxima[block]) block = i;
    }
    if (s->maxima[block] == INFINITY || s->maxima[block] == -INFINITY) return -1;
    for (id = block * PN_MAXIMA_BLOCK; s->row[id] != s->maxima[block];) id++;
    return id;
}

static int block_end(const sampler *s, int block) {
    return min_int((block + 1) * PN_MAXIMA_BLOCK, s->vocab_size);
}

/* Weights of a piece's logits: exp of what they lie below the best, at the temperature. */
static float weigh_block(const sampler *s, int block, float *weights) {
    int first = block * PN_MAXIMA_BLOCK, num = block_end(s, block) - first, i = 0;
    f8 total = f8_splat(0);
    for (; i + PN_TILE <= num; i += PN_TILE) {
        f8 weight = f8_exp((f8_load(s->row + first + i) - s->best) * s->factor);
        total += weight;
        if (weights) f8_store(weights + i, weight);
    }
    float sum = f8_sum(total);
    for (; i < num; i++) {
        float weight = expf((s->row[first + i] - s->best) * s->factor);
        sum += weight;
        if (weights) weights[i] = weight;
    }
    return sum;
}

/* Computes the sums of all blocks; returns their total. */
static double weigh(sampler *s) {
    double total = 0;
    for (int block = 0; block < s->num_blocks; block++) {
        s->sums[block] = s->maxima[block] < s->least ? 0 : weigh_block(s, block, NULL);
        total += s->sums[block];
    }
    return total;
}

/* Collects the candidates: ids of all logits at most `depth` (scaled by the temperature) below the
 * best, in order, with their weights. */
static void gather(sampler *s, float depth) {
    float least = s->best - depth / s->factor, weights[PN_MAXIMA_BLOCK];
    if (!(least > s->least)) least = s->least;
    s->num_ids = 0;
    for (int block = 0; block < s->num_blocks; block++) {
        if (s->maxima[block] < least) continue;
        int first = block * PN_MAXIMA_BLOCK, end = block_end(s, block), count = s->num_ids;
        weigh_block(s, block, weights);
        for (int i = first; i < end; i++) { /* branch-free: most are too low */
            s->ids[count] = i;
            s->weights[count] = weights[i - first];
            count += s->row[i] >= least;
        }
        s->num_ids = count;
    }
}

/* Keeps the candidates with weights above `least` and, in the order of ids, those equal to it until
 * the measure of all kept ones reaches `needed` (see pn_measure). */
static void keep(sampler *s, float least, float needed, int is_sum) {
    float measured = pn_measure(s->weights, s->num_ids, nextafterf(least, INFINITY), is_sum);
    int count = 0;
    for (int i = 0; i < s->num_ids; i++) {
        float weight = s->weights[i];
        int is_kept = weight > least;
        if (weight == least && measured < needed) {
            measured += is_sum ? weight : 1;
            is_kept = 1;
        }
        s->ids[count] = s->ids[i]; /* branch-free: about half are kept */
        s->weights[count] = weight;
        count += is_kept;
    }
    s->num_ids = count;
}

/* Applies top-p to the candidates or, if is_all, to all logits. */
static void keep_nucleus(sampler *s, float top_p, int is_all) {
    double total = is_all ? weigh(s) : pn_measure(s->weights, s->num_ids, 0.0f, 1);
    float needed = fmaxf(FLT_MIN, (float)(top_p * total)); /* at least one token */
    for (int i = 0; is_all && i < NUM_DEPTHS; i++) {
        gather(s, NUCLEUS_DEPTHS[i]);
        if (pn_measure(s->weights, s->num_ids, 0.0f, 1) >= needed) break;
    }
    keep(s, pn_threshold(s->weights, s->num_ids, 0.0f, needed, 1), needed, 1);
}

/* The candidate at which the running sum of weights passes `u` of their total. */
static int sample_from_list(const sampler *s, double u) {
    double total = 0, sum = 0;
    int last = s->num_ids - 1;
    for (int i = 0; i < s->num_ids; i++) total += s->weights[i];
    for (int i = 0; i < s->num_ids; i++)
        if ((sum += s->weights[i]) > u * total) return s->ids[i];
    while (last > 0 && s->weights[last] == 0) last--; /* rounding */
    return s->ids[last];
}

/* The same over all logits: first finds the block, then the token within it. */
static int sample_from_all(sampler *s, double u) {
    double point = u * weigh(s), before = 0;
    float weights[PN_MAXIMA_BLOCK];
    int block = 0, last = s->num_blocks - 1;
    while (last > 0 && s->sums[last] == 0) last--;
    for (; block < last && before + s->sums[block] <= point; block++) before += s->sums[block];
    weigh_block(s, block, weights);
    int num = block_end(s, block) - block * PN_MAXIMA_BLOCK, slot = 0;
    for (int i = 0; i < num; i++) {
        if (weights[i] == 0) continue;
        slot = i;
        if ((before += weights[i]) > point) break;
    }
    return block * PN_MAXIMA_BLOCK + slot;
}

static int64_t choose(sampler *s, const pn_sample_params *params) {
    int best = best_of(s), is_cut = 0;
    if (best < 0 || params->is_greedy) return best;
    s->best = s->row[best];
    s->factor = 1.0f / params->temperature;
    double least = s->best - (log((double)s->vocab_size) + PN_TAIL_DEPTH) * params->temperature;
    s->least = least > -FLT_MAX ? (float)least : -FLT_MAX;
    if (params->top_k > 0 && params->top_k < s->vocab_size) {
        gather(s, TOP_K_DEPTH);
        if (s->num_ids < params->top_k) gather(s, INFINITY);
        if (s->num_ids > params->top_k)
            keep(s, pn_threshold(s->weights, s->num_ids, 0.0f, params->top_k, 0), params->top_k, 0);
        is_cut = 1;
    }
    if (params->top_p < 1.0f) {
        keep_nucleus(s, params->top_p, !is_cut);
        is_cut = 1;
    }
    if (params->min_p > 0) {
        if (!is_cut) gather(s, ROUNDING - logf(params->min_p));
        keep(s, params->min_p, INFINITY, 0);
        is_cut = 1;
    }
    return is_cut ? sample_from_list(s, params->u) : sample_from_all(s, params->u);
}

/* The token, or -1 if the logits are unusable. `row` [vocab_size] is modified during the call and
 * restored; `block_maxima` are of the raw row. `scratch` float [6 * (vocab_size +
 * PN_MAXIMA_BLOCK)]. */
int64_t pn_sample_token(float *row, const float *block_maxima, int vocab_size,
                        const pn_sample_params *params, float *scratch) {
    int num_blocks = (vocab_size + PN_MAXIMA_BLOCK - 1) / PN_MAXIMA_BLOCK;
    int room = vocab_size + PN_MAXIMA_BLOCK; /* gather writes one entry beyond the end */
    sampler s = {.row = row, .num_blocks = num_blocks,
                 .maxima = scratch, .sums = scratch + num_blocks,
                 .weights = scratch + room, .ids = (int32_t *)(scratch + 2 * room),
                 .old = scratch + 3 * room, /* one entry per penalty and bias */
                 .vocab_size = vocab_size};
    memcpy(s.maxima, block_maxima, sizeof(float) * s.num_blocks);
    apply_penalties(&s, params);
    int64_t token = choose(&s, params);
    restore_logits(&s, params);
    return token;
}
