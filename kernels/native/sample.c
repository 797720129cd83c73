/* Chooses a token from a row of logits: the rule of llm_core/sampling/sampler.py, read off the pieces of the
 * row whose largest logits (pn_note_maxima) lie near enough to the best. */
#include "parley.h"
#include <float.h>
#include <string.h>

#define NEAR_DEPTH 14.0 /* below ln(vocabulary) and this: never drawn, as in sampler.py */
#define ROUNDING 0.01f    /* what lies this near to an edge is left for the exact comparison */
#define TOP_K_DEPTH 8.0f   /* where the k best mostly are */
#define NUM_DEPTHS 4
static const float NUCLEUS_DEPTHS[NUM_DEPTHS] = {4.0f, 8.0f, 16.0f, INFINITY};

typedef struct {
    float *row, *maxima;
    float *sums;    /* of weights, of each piece */
    float *old;     /* logits before penalties */
    float *weights; /* of the list: [num_ids], as ids */
    int32_t *ids;
    int num_ids, num_old, num_maxima, vocab_size;
    float best, least, factor; /* logits below `least` are never drawn */
} chooser;

/* ---- penalties and biases ---------------------------------------------------------------- */

static void set_logit(chooser *c, int64_t id, float value) {
    c->old[c->num_old++] = c->row[id];
    c->row[id] = value;
}

static void note_piece(chooser *c, int64_t id) {
    int piece = (int)(id / PN_MAXIMUM_LEN), first = piece * PN_MAXIMUM_LEN;
    int last = smallest_of(first + PN_MAXIMUM_LEN, c->vocab_size), has_nan = 0;
    float most = -INFINITY;
    for (int i = first; i < last; i++) {
        has_nan |= c->row[i] != c->row[i];
        most = c->row[i] > most ? c->row[i] : most;
    }
    c->maxima[piece] = has_nan ? NAN : most;
}

static void penalise(chooser *c, const pn_draw *draw) {
    for (int i = 0; i < draw->num_seen; i++) {
        float value = c->row[draw->seen[i]];
        float less = value > 0 ? value / draw->repetition : value * draw->repetition;
        set_logit(c, draw->seen[i], less);
    }
    for (int i = 0; i < draw->num_counted; i++) {
        float less = draw->counts[i] * draw->frequency + draw->presence;
        set_logit(c, draw->counted[i], c->row[draw->counted[i]] - less);
    }
    for (int i = 0; i < draw->num_biased; i++)
        set_logit(c, draw->biased[i], c->row[draw->biased[i]] + draw->biases[i]);
    for (int i = 0; i < draw->num_seen; i++) note_piece(c, draw->seen[i]);
    for (int i = 0; i < draw->num_counted; i++) note_piece(c, draw->counted[i]);
    for (int i = 0; i < draw->num_biased; i++) note_piece(c, draw->biased[i]);
}

/* The row as it was: others tell its probabilities. The last that was set comes first. */
static void restore(chooser *c, const pn_draw *draw) {
    for (int i = draw->num_biased; i-- > 0;) c->row[draw->biased[i]] = c->old[--c->num_old];
    for (int i = draw->num_counted; i-- > 0;) c->row[draw->counted[i]] = c->old[--c->num_old];
    for (int i = draw->num_seen; i-- > 0;) c->row[draw->seen[i]] = c->old[--c->num_old];
}

/* ---- candidates -------------------------------------------------------------------------- */

/* The first of the largest logits; -1 where there is none to be used. */
static int best_of(const chooser *c) {
    int piece = 0, id;
    for (int i = 0; i < c->num_maxima; i++) {
        if (c->maxima[i] != c->maxima[i]) return -1;
        if (c->maxima[i] > c->maxima[piece]) piece = i;
    }
    if (c->maxima[piece] == INFINITY || c->maxima[piece] == -INFINITY) return -1;
    for (id = piece * PN_MAXIMUM_LEN; c->row[id] != c->maxima[piece];) id++;
    return id;
}

static int piece_end(const chooser *c, int piece) {
    return smallest_of((piece + 1) * PN_MAXIMUM_LEN, c->vocab_size);
}

/* Weights of a piece's logits: exp of what they lie below the best, at the temperature. */
static float weigh_piece(const chooser *c, int piece, float *weights) {
    int first = piece * PN_MAXIMUM_LEN, num = piece_end(c, piece) - first, i = 0;
    f8 total = f8_all(0);
    for (; i + PN_TILE <= num; i += PN_TILE) {
        f8 weight = f8_exp((f8_load(c->row + first + i) - c->best) * c->factor);
        total += weight;
        if (weights) f8_store(weights + i, weight);
    }
    float sum = f8_sum(total);
    for (; i < num; i++) {
        float weight = expf((c->row[first + i] - c->best) * c->factor);
        sum += weight;
        if (weights) weights[i] = weight;
    }
    return sum;
}

/* The sums of all pieces that can matter, and of these. */
static double weigh(chooser *c) {
    double total = 0;
    for (int piece = 0; piece < c->num_maxima; piece++) {
        c->sums[piece] = c->maxima[piece] < c->least ? 0 : weigh_piece(c, piece, NULL);
        total += c->sums[piece];
    }
    return total;
}

/* Becomes the list: ids of all logits at most `depth` (at the temperature) below the best, in
 * order, with their weights. */
static void gather(chooser *c, float depth) {
    float least = c->best - depth / c->factor, weights[PN_MAXIMUM_LEN];
    if (!(least > c->least)) least = c->least;
    c->num_ids = 0;
    for (int piece = 0; piece < c->num_maxima; piece++) {
        if (c->maxima[piece] < least) continue;
        int first = piece * PN_MAXIMUM_LEN, end = piece_end(c, piece), count = c->num_ids;
        weigh_piece(c, piece, weights);
        for (int i = first; i < end; i++) { /* without branches: most are not near */
            c->ids[count] = i;
            c->weights[count] = weights[i - first];
            count += c->row[i] >= least;
        }
        c->num_ids = count;
    }
}

/* Keeps the weights above `least` and, in the order of ids, those equal to it until what is kept
 * measures `needed`: in their number, or (is_sum) their sum. */
static void keep(chooser *c, float least, float needed, int is_sum) {
    float measured = pn_measure(c->weights, c->num_ids, nextafterf(least, INFINITY), is_sum);
    int count = 0;
    for (int i = 0; i < c->num_ids; i++) {
        float weight = c->weights[i];
        int is_kept = weight > least;
        if (weight == least && measured < needed) {
            measured += is_sum ? weight : 1;
            is_kept = 1;
        }
        c->ids[count] = c->ids[i]; /* without branches: half of them may stay */
        c->weights[count] = weight;
        count += is_kept;
    }
    c->num_ids = count;
}

/* The nucleus of the list, or (is_all) of all logits, which is mostly near the best. */
static void keep_nucleus(chooser *c, float top_p, int is_all) {
    double total = is_all ? weigh(c) : pn_measure(c->weights, c->num_ids, 0.0f, 1);
    float needed = fmaxf(FLT_MIN, (float)(top_p * total)); /* one token at least */
    for (int i = 0; is_all && i < NUM_DEPTHS; i++) {
        gather(c, NUCLEUS_DEPTHS[i]);
        if (pn_measure(c->weights, c->num_ids, 0.0f, 1) >= needed) break;
    }
    keep(c, pn_threshold(c->weights, c->num_ids, 0.0f, needed, 1), needed, 1);
}

/* The id of the list at which the running sum of weights passes `fraction` of their total. */
static int drawn(const chooser *c, double fraction) {
    double total = 0, sum = 0;
    int last = c->num_ids - 1;
    for (int i = 0; i < c->num_ids; i++) total += c->weights[i];
    for (int i = 0; i < c->num_ids; i++)
        if ((sum += c->weights[i]) > fraction * total) return c->ids[i];
    while (last > 0 && c->weights[last] == 0) last--; /* rounding */
    return c->ids[last];
}

/* The same of all logits: first the piece, then in it. */
static int drawn_of_all(chooser *c, double fraction) {
    double point = fraction * weigh(c), before = 0;
    float weights[PN_MAXIMUM_LEN];
    int piece = 0, last = c->num_maxima - 1;
    while (last > 0 && c->sums[last] == 0) last--;
    for (; piece < last && before + c->sums[piece] <= point; piece++) before += c->sums[piece];
    weigh_piece(c, piece, weights);
    int num = piece_end(c, piece) - piece * PN_MAXIMUM_LEN, place = 0;
    for (int i = 0; i < num; i++) {
        if (weights[i] == 0) continue;
        place = i;
        if ((before += weights[i]) > point) break;
    }
    return piece * PN_MAXIMUM_LEN + place;
}

static int64_t choose(chooser *c, const pn_draw *draw) {
    int best = best_of(c), is_cut = 0;
    if (best < 0 || draw->is_greedy) return best;
    c->best = c->row[best];
    c->factor = 1.0f / draw->temperature;
    double least = c->best - (log((double)c->vocab_size) + NEAR_DEPTH) * draw->temperature;
    c->least = least > -FLT_MAX ? (float)least : -FLT_MAX;
    if (draw->top_k > 0 && draw->top_k < c->vocab_size) {
        gather(c, TOP_K_DEPTH);
        if (c->num_ids < draw->top_k) gather(c, INFINITY);
        if (c->num_ids > draw->top_k)
            keep(c, pn_threshold(c->weights, c->num_ids, 0.0f, draw->top_k, 0), draw->top_k, 0);
        is_cut = 1;
    }
    if (draw->top_p < 1.0f) {
        keep_nucleus(c, draw->top_p, !is_cut);
        is_cut = 1;
    }
    if (draw->min_p > 0) {
        if (!is_cut) gather(c, ROUNDING - logf(draw->min_p));
        keep(c, draw->min_p, INFINITY, 0);
        is_cut = 1;
    }
    return is_cut ? drawn(c, draw->fraction) : drawn_of_all(c, draw->fraction);
}

/* The token, or -1 where the logits are unusable. `row` [vocab_size] is as it was afterwards;
 * `maxima` are its own. `scratch` has 6 * (vocab_size + PN_MAXIMUM_LEN) numbers of 4 bytes. The ids seen
 * differ from each other, as do those counted and those biased; all of them are sound. */
int64_t pn_draw_token(float *row, const float *maxima, int vocab_size, const pn_draw *draw,
                      float *scratch) {
    int num_maxima = (vocab_size + PN_MAXIMUM_LEN - 1) / PN_MAXIMUM_LEN;
    int room = vocab_size + PN_MAXIMUM_LEN; /* a list is written one beyond its end */
    chooser c = {.row = row, .maxima = scratch, .sums = scratch + num_maxima, .num_maxima = num_maxima,
                 .weights = scratch + room, .ids = (int32_t *)(scratch + 2 * room),
                 .old = scratch + 3 * room, /* as many as are seen, counted and biased */
                 .vocab_size = vocab_size};
    memcpy(c.maxima, maxima, sizeof(float) * c.num_maxima);
    penalise(&c, draw);
    int64_t token = choose(&c, draw);
    restore(&c, draw);
    return token;
}
