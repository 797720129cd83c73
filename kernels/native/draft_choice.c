/* Choice of draft tokens from the logits of a draft head. */
#include "parley.h"

/* Share of the head's own distribution in a proposal, whatever the random number. */
#define UNINFORMED_SHARE 0.1f

/* The count or, if is_sum, the sum of the weights >= `least`. */
float pn_measure(const float *weights, int num, float least, int is_sum) {
    f8 total = f8_splat(0);
    int j = 0;
    for (; j + PN_TILE <= num; j += PN_TILE) {
        f8 weight = f8_load(weights + j);
        s8 counts = weight >= f8_splat(least);
        total += (f8)((s8)(is_sum ? weight : f8_splat(1.0f)) & counts);
    }
    float sum = f8_sum(total);
    for (; j < num; j++) sum += weights[j] >= least ? (is_sum ? weights[j] : 1.0f) : 0.0f;
    return sum;
}

/* The largest threshold for which pn_measure reaches `needed`; `least` if there is none. A
 * bisection over bit patterns, which order like the floats as weights are in (0, 1]. */
float pn_threshold(const float *weights, int num, float least, float needed, int is_sum) {
    union { float value; uint32_t bits; } low = {.value = least}, high = {.value = 1.0f}, at;
    if (pn_measure(weights, num, 1.0f, is_sum) >= needed) return 1.0f;
    /* Invariant: low reaches `needed` or is `least`, high does not reach it. */
    while (low.bits + 1 < high.bits) {
        at.bits = low.bits + (high.bits - low.bits) / 2;
        if (pn_measure(weights, num, at.value, is_sum) >= needed) low = at; else high = at;
    }
    return low.value;
}

/* Laplace distribution around `u` with scale `bandwidth`: its cumulative probability at `ends`. */
static f8 laplace_cdf(f8 ends, float u, float bandwidth) {
    f8 half = f8_exp((f8)f8_magnitude(ends - u) * (-1.0f / bandwidth)) * 0.5f;
    s8 is_before = ends < u;
    return (f8)(((s8)half & is_before) | ((s8)(1.0f - half) & ~is_before));
}

/* Turns weights into the probabilities that a target with a similar distribution samples each token
 * with the random number `u`: mostly the token's share of a Laplace distribution around `u`, mixed
 * with UNINFORMED_SHARE of its own probability. */
static void proposal_probs(float *weights, int num, const pn_draft_choice *choice, float u,
                          float bandwidth) {
    float least = 0.0f, passed = 0.0f, bounds[2][PN_TILE];
    if (choice->top_k > 0 && choice->top_k < num)
        least = pn_threshold(weights, num, least, (float)choice->top_k, 0);
    if (choice->top_p < 1.0f)
        least = pn_threshold(weights, num, least,
                             choice->top_p * pn_measure(weights, num, least, 1), 1);
    if (least < choice->min_p) least = choice->min_p;
    float scale = 1.0f / pn_measure(weights, num, least, 1);
    f8 limits = laplace_cdf((f8){0.0f, 1.0f}, u, bandwidth);
    float near = (1.0f - UNINFORMED_SHARE) / (limits[1] - limits[0]);
    for (int j = 0; j < num; j += PN_TILE) {
        int count = min_int(PN_TILE, num - j);
        float shares[PN_TILE] = {0};
        for (int i = 0; i < count; i++)
            if (weights[j + i] >= least) shares[i] = weights[j + i] * scale;
        for (int i = 0; i < PN_TILE; i++) {
            bounds[0][i] = passed;
            bounds[1][i] = passed += shares[i];
        }
        f8 inside = laplace_cdf(f8_load(bounds[1]), u, bandwidth) -
                    laplace_cdf(f8_load(bounds[0]), u, bandwidth);
        f8_store(shares, f8_load(shares) * UNINFORMED_SHARE + inside * near);
        for (int i = 0; i < count; i++) weights[j + i] = shares[i];
    }
}

static int argmax(const float *values, int num, float *largest) {
    int padded = num / PN_TILE * PN_TILE, at = 0;
    f8 max = f8_splat(-INFINITY);
    for (int j = 0; j < padded; j += PN_TILE) max = f8_max(max, f8_load(values + j));
    *largest = f8_max_lane(max);
    for (int j = padded; j < num; j++) *largest = *largest > values[j] ? *largest : values[j];
    while (at < num - 1 && values[at] != *largest) at++;
    return at;
}

/* The draft token: the most likely one or, with u >= 0, the one that `u` most likely samples. Turns
 * `logits` into the probabilities of all tokens in that sense. */
int pn_choose_draft(float *logits, int draft_vocab_size, float u, float bandwidth,
                   const pn_draft_choice *choice) {
    int padded = draft_vocab_size / PN_TILE * PN_TILE;
    float largest, sum = 0, factor = u < 0 ? 1.0f : 1.0f / choice->temperature;
    int token = argmax(logits, draft_vocab_size, &largest);
    f8 total = f8_splat(0);
    for (int j = 0; j < padded; j += PN_TILE) {
        f8 weight = f8_exp((f8_load(logits + j) - largest) * factor);
        total += weight;
        f8_store(logits + j, weight);
    }
    for (int j = padded; j < draft_vocab_size; j++)
        sum += logits[j] = expf((logits[j] - largest) * factor);
    if (u >= 0) {
        proposal_probs(logits, draft_vocab_size, choice, u, bandwidth);
        return argmax(logits, draft_vocab_size, &largest);
    }
    float scale = 1.0f / (sum + f8_sum(total));
    for (int j = 0; j < draft_vocab_size; j++) logits[j] *= scale;
    return token;
}

/* The `count` tokens with the largest weights except `chosen`, in descending order. */
void pn_find_siblings(const float *weights, int draft_vocab_size, int chosen, int count,
                      int *siblings) {
    float least[PN_MAX_SIBLINGS];
    for (int i = 0; i < count; i++) least[i] = -1.0f, siblings[i] = 0;
    for (int j = 0; j < draft_vocab_size; j++) {
        if (!(weights[j] > least[count - 1]) || j == chosen) continue;
        int at = count - 1;
        for (; at > 0 && weights[j] > least[at - 1]; at--)
            least[at] = least[at - 1], siblings[at] = siblings[at - 1];
        least[at] = weights[j], siblings[at] = j;
    }
}
