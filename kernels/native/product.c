/* A product within a call: what its threads share, what each keeps, and how it is cut into tasks.
 *
 * With few rows each thread quantises the input of a product itself, into its own copy, since that
 * costs less than waiting for another; with more rows it is a phase of its own.
 */
#include "parley.h"

enum { TASKS_A_THREAD = 6 };

void pn_threads_destroy(pn_thread_state *threads, int num_threads) {
    for (int i = 0; threads && i < num_threads; i++) {
        free(threads[i].own.codes);
        free(threads[i].own.meta);
        free(threads[i].attention);
    }
    free(threads);
}

/* For inputs of up to `most_inputs`. NULL without memory. */
pn_thread_state *pn_threads_create(int num_threads, int most_inputs, int head_dim) {
    pn_thread_state *threads = calloc((size_t)num_threads, sizeof *threads);
    int groups = most_inputs / PN_GROUP;
    for (int i = 0; threads && i < num_threads; i++) {
        pn_thread_state *thread = &threads[i];
        thread->prepared = -1;
        thread->own.codes = take(pn_code_bytes(PN_OWN_COPY_ROWS, groups));
        thread->own.meta = take(pn_meta_floats(PN_OWN_COPY_ROWS, groups) * 4);
        thread->attention = take(pn_attention_scratch(head_dim) * 4);
        if (!thread->own.codes || !thread->own.meta || !thread->attention) {
            pn_threads_destroy(threads, num_threads);
            return NULL;
        }
    }
    return threads;
}

/* Tiles come in whole multiples of `together`. */
int pn_tiles_a_task(int num_tiles, int num_rows, int num_threads, int together) {
    int tasks = num_threads == 1 ? 1 : num_threads * TASKS_A_THREAD;
    int tiles = largest_of((num_tiles + tasks - 1) / tasks, 1);
    if (num_rows > PN_ROW_BLOCK) tiles = smallest_of(tiles, 16); /* stay in the L2 cache */
    return round_up(tiles, together);
}

/* Rows [first_row, end_row) of `num_rows`. */
void pn_quantize_input(const pn_input *input, float eps, int num_rows, int first_row, int end_row,
                       pn_activations to) {
    to.num_groups = round_up(input->num_in, PN_GROUP) / PN_GROUP;
    to.pitch = smallest_of(num_rows, PN_ROW_BLOCK);
    pn_quantize_rows(input->rows, input->stride, input->num_in, input->norm, eps, first_row,
                     end_row, &to);
}

/* The quantised input of the product that is the call's phase `number`, counted over all calls:
 * `shared`, which the phase before has filled, or the thread's own copy. */
pn_activations pn_prepare_input(const pn_input *input, float eps, int num_rows,
                                pn_activations shared, pn_thread_state *thread, int64_t number) {
    if (num_rows <= PN_OWN_COPY_ROWS) {
        shared = thread->own;
        if (thread->prepared != number) {
            pn_quantize_input(input, eps, num_rows, 0, num_rows, shared);
            thread->prepared = number;
        }
    }
    shared.pitch = smallest_of(num_rows, PN_ROW_BLOCK);
    return shared;
}
