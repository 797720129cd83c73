/* What words are chosen from: the largest of a target's logits, and the words of a draft head. */
#include "parley.h"

/* The largest of each PN_MAXIMUM_LEN logits [num_rows][vocab_size] of tiles [first_tile, end_tile),
 * NaN where one of them is NaN: whoever chooses a token need not read 49 thousand logits again. */
void pn_note_maxima(const float *logits, float *maxima, int vocab_size, int first_tile, int end_tile,
                    int num_rows) {
    int64_t num_maxima = (vocab_size + PN_MAXIMUM_LEN - 1) / PN_MAXIMUM_LEN;
    int end = smallest_of(end_tile * PN_TILE, vocab_size);
    for (int row = 0; row < num_rows; row++, logits += vocab_size, maxima += num_maxima) {
        for (int first = first_tile * PN_TILE; first < end; first += PN_MAXIMUM_LEN) {
            int last = smallest_of(first + PN_MAXIMUM_LEN, end), i = first;
            f8 most = f8_all(-INFINITY);
            s8 is_nan = {0};
            for (; i + PN_TILE <= last; i += PN_TILE) {
                f8 values = f8_load(logits + i);
                is_nan |= values != values;
                most = f8_max(most, values);
            }
            float largest = f8_largest(most);
            int has_nan = largest_magnitude(is_nan & (s8)f8_all(1.0f)) > 0;
            for (; i < last; i++) {
                has_nan |= logits[i] != logits[i];
                largest = logits[i] > largest ? logits[i] : largest;
            }
            maxima[first / PN_MAXIMUM_LEN] = has_nan ? NAN : largest;
        }
    }
}

/* ---- drafts ------------------------------------------------------------------------------ */

/* The number, or (is_sum) the sum, of weights from `least` on. */
float pn_measure(const float *weights, int num, float least, int is_sum) {
    f8 total = f8_all(0);
    int j = 0;
    for (; j + PN_TILE <= num; j += PN_TILE) {
        f8 weight = f8_load(weights + j);
        s8 counts = weight >= f8_all(least);
        total += (f8)((s8)(is_sum ? weight : f8_all(1.0f)) & counts);
    }
    float sum = f8_sum(total);
    for (; j < num; j++) sum += weights[j] >= least ? (is_sum ? weights[j] : 1.0f) : 0.0f;
    return sum;
}

/* The largest weight such that those from it on measure `needed`; `least` if none does. Weights are
 * in (0, 1], where numbers compare as their bits do. */
float pn_threshold(const float *weights, int num, float least, float needed, int is_sum) {
    union { float value; uint32_t bits; } low = {.value = least}, high = {.value = 1.0f}, at;
    if (pn_measure(weights, num, 1.0f, is_sum) >= needed) return 1.0f;
    while (low.bits + 1 < high.bits) { /* low measures enough, or is where to stop; high does not */
        at.bits = low.bits + (high.bits - low.bits) / 2;
        if (pn_measure(weights, num, at.value, is_sum) >= needed) low = at; else high = at;
    }
    return low.value;
}

/* Of draws by numbers around `fraction`, weighed by exp(-distance / reach): the share of those below
 * each of `ends`. */
static f8 passed_by(f8 ends, float fraction, float reach) {
    f8 half = f8_exp((f8)f8_magnitude(ends - fraction) * (-1.0f / reach)) * 0.5f;
    s8 is_before = ends < fraction;
    return (f8)(((s8)half & is_before) | ((s8)(1.0f - half) & ~is_before));
}

/* Weights become the odds that each word is drawn by a target whose distribution is near: its share
 * of the numbers around `fraction` and, PN_ANYHOW of all, its own likelihood. */
static void odds_of_draws(float *weights, int num, const pn_draft_choice *choice, float fraction,
                          float reach) {
    float least = 0.0f, passed = 0.0f, bounds[2][PN_TILE];
    if (choice->top_k > 0 && choice->top_k < num)
        least = pn_threshold(weights, num, least, (float)choice->top_k, 0);
    if (choice->top_p < 1.0f)
        least = pn_threshold(weights, num, least, choice->top_p * pn_measure(weights, num, least, 1), 1);
    if (least < choice->min_p) least = choice->min_p;
    float scale = 1.0f / pn_measure(weights, num, least, 1);
    f8 limits = passed_by((f8){0.0f, 1.0f}, fraction, reach);
    float near = (1.0f - PN_ANYHOW) / (limits[1] - limits[0]);
    for (int j = 0; j < num; j += PN_TILE) {
        int count = smallest_of(PN_TILE, num - j);
        float shares[PN_TILE] = {0};
        for (int i = 0; i < count; i++)
            if (weights[j + i] >= least) shares[i] = weights[j + i] * scale;
        for (int i = 0; i < PN_TILE; i++) {
            bounds[0][i] = passed;
            bounds[1][i] = passed += shares[i];
        }
        f8 inside = passed_by(f8_load(bounds[1]), fraction, reach) -
                    passed_by(f8_load(bounds[0]), fraction, reach);
        f8_store(shares, f8_load(shares) * PN_ANYHOW + inside * near);
        for (int i = 0; i < count; i++) weights[j + i] = shares[i];
    }
}

static int place_of_largest(const float *values, int num, float *largest) {
    int padded = num / PN_TILE * PN_TILE, place = 0;
    f8 most = f8_all(-INFINITY);
    for (int j = 0; j < padded; j += PN_TILE) most = f8_max(most, f8_load(values + j));
    *largest = f8_largest(most);
    for (int j = padded; j < num; j++) *largest = *largest > values[j] ? *largest : values[j];
    while (place < num - 1 && values[place] != *largest) place++;
    return place;
}

/* The likeliest word or, where `fraction` is not negative, the one that is likeliest to be drawn by
 * it. `logits` become the probabilities of all words, in that sense. */
int pn_choose_word(float *logits, int num_words, float fraction, float reach,
                   const pn_draft_choice *choice) {
    int padded = num_words / PN_TILE * PN_TILE;
    float largest, sum = 0, factor = fraction < 0 ? 1.0f : 1.0f / choice->temperature;
    int word = place_of_largest(logits, num_words, &largest);
    f8 total = f8_all(0);
    for (int j = 0; j < padded; j += PN_TILE) {
        f8 weight = f8_exp((f8_load(logits + j) - largest) * factor);
        total += weight;
        f8_store(logits + j, weight);
    }
    for (int j = padded; j < num_words; j++) sum += logits[j] = expf((logits[j] - largest) * factor);
    if (fraction >= 0) {
        odds_of_draws(logits, num_words, choice, fraction, reach);
        return place_of_largest(logits, num_words, &largest);
    }
    float scale = 1.0f / (sum + f8_sum(total));
    for (int j = 0; j < num_words; j++) logits[j] *= scale;
    return word;
}

/* The words of the largest weights but `chosen`, in falling order. */
void pn_find_siblings(const float *weights, int num_words, int chosen, int count, int *words) {
    float least[PN_MAX_SIBLINGS];
    for (int i = 0; i < count; i++) least[i] = -1.0f, words[i] = 0;
    for (int j = 0; j < num_words; j++) {
        if (!(weights[j] > least[count - 1]) || j == chosen) continue;
        int at = count - 1;
        for (; at > 0 && weights[j] > least[at - 1]; at--)
            least[at] = least[at - 1], words[at] = words[at - 1];
        least[at] = weights[j], words[at] = j;
    }
}
