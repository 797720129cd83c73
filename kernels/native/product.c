/* A matrix product within a forward pass: its buffers, its input and its division into tasks.
 *
 * With few rows every thread quantises the product's input into its own copy, which costs less than
 * a synchronisation; with more rows quantisation is a phase of its own.
 */
#include "parley.h"

enum { TASKS_PER_THREAD = 6 };

void pn_threads_destroy(pn_thread_state *threads, int num_threads) {
    for (int i = 0; threads && i < num_threads; i++) {
        free(threads[i].own.codes);
        free(threads[i].own.meta);
        free(threads[i].attention);
    }
    free(threads);
}

/* For products of up to `max_inputs` inputs. NULL if out of memory. */
pn_thread_state *pn_threads_create(int num_threads, int max_inputs, int head_dim) {
    pn_thread_state *threads = calloc((size_t)num_threads, sizeof *threads);
    int groups = max_inputs / PN_GROUP;
    for (int i = 0; threads && i < num_threads; i++) {
        pn_thread_state *thread = &threads[i];
        thread->prepared = -1;
        thread->own.codes = allocate(pn_code_bytes(PN_THREAD_LOCAL_ROWS, groups));
        thread->own.meta = allocate(pn_meta_floats(PN_THREAD_LOCAL_ROWS, groups) * 4);
        thread->attention = allocate(pn_attention_scratch(head_dim) * 4);
        if (!thread->own.codes || !thread->own.meta || !thread->attention) {
            pn_threads_destroy(threads, num_threads);
            return NULL;
        }
    }
    return threads;
}

/* Tiles per task, a multiple of `together`. */
int pn_tiles_per_task(int num_tiles, int num_rows, int num_threads, int together) {
    int tasks = num_threads == 1 ? 1 : num_threads * TASKS_PER_THREAD;
    int tiles = max_int((num_tiles + tasks - 1) / tasks, 1);
    if (num_rows > PN_ROW_BLOCK) tiles = min_int(tiles, 16); /* stay within the L2 cache */
    return round_up(tiles, together);
}

/* Rows [first_row, end_row) of `num_rows`. */
void pn_quantize_input(const pn_input *input, float eps, int num_rows, int first_row, int end_row,
                       pn_activations to) {
    to.num_groups = round_up(input->num_in, PN_GROUP) / PN_GROUP;
    to.pitch = min_int(num_rows, PN_ROW_BLOCK);
    pn_quantize_rows(input->rows, input->stride, input->num_in, input->norm, eps, first_row,
                     end_row, &to);
}

/* The quantised input of the product in phase `number` (counted over all calls): `shared`, filled
 * by the previous phase, or the thread's own copy. */
pn_activations pn_prepare_input(const pn_input *input, float eps, int num_rows,
                                pn_activations shared, pn_thread_state *thread, int64_t number) {
    if (num_rows <= PN_THREAD_LOCAL_ROWS) {
        shared = thread->own;
        if (thread->prepared != number) {
            pn_quantize_input(input, eps, num_rows, 0, num_rows, shared);
            thread->prepared = number;
        }
    }
    shared.pitch = min_int(num_rows, PN_ROW_BLOCK);
    return shared;
}
