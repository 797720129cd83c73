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
static float measure(const float *weights, int num, float least, int is_sum) {
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
static float threshold(const float *weights, int num, float least, float needed, int is_sum) {
    union { float value; uint32_t bits; } low = {.value = least}, high = {.value = 1.0f}, at;
    if (measure(weights, num, 1.0f, is_sum) >= needed) return 1.0f;
    while (low.bits + 1 < high.bits) { /* low measures enough, or is where to stop; high does not */
        at.bits = low.bits + (high.bits - low.bits) / 2;
        if (measure(weights, num, at.value, is_sum) >= needed) low = at; else high = at;
    }
    return low.value;
}

/* The word that most of the draws within `reach` of `fraction` would choose, in the order of words;
 * `share` of these draws do. */
static int guess_word(const float *weights, int num, const pn_draft_choice *choice, float fraction,
                      float reach, float *share) {
    float least = 0.0f, passed = 0.0f, most = -1.0f;
    if (choice->top_k > 0 && choice->top_k < num)
        least = threshold(weights, num, least, (float)choice->top_k, 0);
    if (choice->top_p < 1.0f)
        least = threshold(weights, num, least, choice->top_p * measure(weights, num, least, 1), 1);
    if (least < choice->min_p) least = choice->min_p;
    float total = measure(weights, num, least, 1);
    float low = fraction > reach ? (fraction - reach) * total : 0.0f;
    float high = fraction + reach < 1.0f ? (fraction + reach) * total : total;
    int word = 0;
    for (int j = 0; j < num && passed < high; j++) {
        if (weights[j] < least || weights[j] == 0.0f) continue;
        float start = passed > low ? passed : low;
        passed += weights[j];
        float covered = (passed < high ? passed : high) - start;
        if (covered > most) {
            most = covered;
            word = j;
        }
    }
    *share = most > 0.0f ? most / (high - low) : 0.0f;
    return word;
}

/* The likeliest word or, where `fraction` is not negative, the one that is likely to be drawn; and
 * how likely it is: of what is drawn, the geometric mean of its share and of what the head says.
 * `logits` become weights, `all` their sum without the temperature. */
int pn_choose_word(float *logits, int num_words, float fraction, float reach,
                   const pn_draft_choice *choice, float *probability, float *all) {
    int padded = num_words / PN_TILE * PN_TILE, word = 0;
    f8 most = f8_all(-INFINITY), total = f8_all(0);
    for (int j = 0; j < padded; j += PN_TILE) most = f8_max(most, f8_load(logits + j));
    float largest = f8_largest(most), sum = 0;
    for (int j = padded; j < num_words; j++) largest = largest > logits[j] ? largest : logits[j];
    while (word < num_words - 1 && logits[word] != largest) word++;
    float factor = fraction < 0 ? 1.0f : 1.0f / choice->temperature;
    for (int j = 0; j < padded; j += PN_TILE) {
        f8 logit = f8_load(logits + j) - largest;
        f8 weight = f8_exp(logit * factor);
        total += fraction < 0 ? weight : f8_exp(logit);
        f8_store(logits + j, weight);
    }
    for (int j = padded; j < num_words; j++) {
        float logit = logits[j] - largest;
        logits[j] = expf(logit * factor);
        sum += fraction < 0 ? logits[j] : expf(logit);
    }
    sum += f8_sum(total);
    *all = sum;
    if (fraction < 0) {
        *probability = logits[word] / sum;
        return word;
    }
    float share;
    word = guess_word(logits, num_words, choice, fraction, reach, &share);
    *probability = sqrtf(share * powf(logits[word], choice->temperature) / sum);
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
