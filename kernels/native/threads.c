/* A thread pool that runs a step: a list of phases, each consisting of tasks.
 *
 * Threads claim tasks one by one from an atomic counter, so a preempted thread delays at most the
 * task that it holds, and a late thread finds the counters exhausted and moves on. Phase p + 1
 * begins when all tasks of phase p are done, not when all threads have arrived. Counters carry the
 * step number: a thread that slept through a whole step sees a different number, cannot claim a
 * task of the new step by mistake, and reloads the step.
 *
 * Waiting threads spin for a bounded time and then sleep, which yields the core, perhaps to the
 * very thread that they wait for. A pool of one thread needs no synchronisation.
 */
#define _GNU_SOURCE
#include "parley.h"

#include <pthread.h>
#include <time.h>

enum { TASK_BITS = 20 };
#define TASK_MASK ((1u << TASK_BITS) - 1)
#define STEP_OF(word) ((word) >> (2 * TASK_BITS))
#define STEP_MASK ((1u << 24) - 1)

typedef struct {
    _Atomic uint64_t ticket; /* step:24 | number of tasks:20 | next task:20 */
    _Atomic uint64_t done;   /* step:24 | unused:20          | tasks done:20 */
} phase_state;

struct pn_pool {
    pthread_t threads[PN_MAX_THREADS];
    int num_threads, num_started, spin_us;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic int num_sleeping, stopping;
    _Atomic uint32_t step;
    _Atomic int num_phases;
    int capacity;
    phase_state *_Atomic phases;
    phase_state *retired[32]; /* replaced arrays, which a late thread may still read */
    int num_retired;
    pn_task_fn run;
    void *context;
};

typedef struct {
    pn_pool *pool;
    int index;
} thread_argument;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake_sleepers(pn_pool *pool) {
    if (atomic_load(&pool->num_sleeping) == 0) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
}

/* Waits while `condition` holds. A waiter increments num_sleeping before its last check, and a
 * waker changes the state before it reads num_sleeping, so no wake-up is lost. */
#define WAIT_WHILE(pool, condition)                                        \
    do {                                                                   \
        int64_t end_ns = 0;                                                \
        for (int turn = 1; (condition); turn++) {                          \
            relax();                                                       \
            if (turn % 64 != 0) continue;                                  \
            int64_t at_ns = now_ns();                                      \
            if (end_ns == 0) end_ns = at_ns + (pool)->spin_us * 1000;      \
            if (at_ns < end_ns) continue;                                  \
            pthread_mutex_lock(&(pool)->lock);                             \
            atomic_fetch_add(&(pool)->num_sleeping, 1);                    \
            while (condition) pthread_cond_wait(&(pool)->changed, &(pool)->lock); \
            atomic_fetch_sub(&(pool)->num_sleeping, 1);                    \
            pthread_mutex_unlock(&(pool)->lock);                           \
            break;                                                         \
        }                                                                  \
    } while (0)

/* Is the phase unfinished? Also false if another step has begun. */
static int is_unfinished(phase_state *phase, uint64_t step, uint64_t num_tasks) {
    uint64_t done = atomic_load(&phase->done);
    return STEP_OF(done) == step && (done & TASK_MASK) < num_tasks;
}

/* Runs tasks of all phases of `step`; returns early if that step is over. */
static void work(pn_pool *pool, uint64_t step, int thread, int64_t *phase_ns) {
    phase_state *phases = atomic_load(&pool->phases);
    int num_phases = atomic_load(&pool->num_phases);
    int64_t start_ns = phase_ns ? now_ns() : 0;
    for (int p = 0; p < num_phases; p++) {
        phase_state *phase = &phases[p];
        uint64_t word = atomic_load(&phase->ticket), num_tasks;
        for (;;) {
            if (STEP_OF(word) != step) return;
            num_tasks = (word >> TASK_BITS) & TASK_MASK;
            uint64_t task = word & TASK_MASK;
            if (task >= num_tasks) break;
            if (!atomic_compare_exchange_weak(&phase->ticket, &word, word + 1)) continue;
            /* The step cannot end while a task of it is claimed, so its data is safe to read. */
            pool->run(pool->context, p, (int)task, thread);
            uint64_t done = atomic_fetch_add(&phase->done, 1) + 1;
            if ((done & TASK_MASK) == num_tasks) wake_sleepers(pool);
            word = atomic_load(&phase->ticket);
        }
        WAIT_WHILE(pool, is_unfinished(phase, step, num_tasks));
        if (phase_ns) {
            int64_t at_ns = now_ns();
            phase_ns[p] += at_ns - start_ns;
            start_ns = at_ns;
        }
    }
}

static void *thread_main(void *raw) {
    thread_argument argument = *(thread_argument *)raw;
    pn_pool *pool = argument.pool;
    free(raw);
    uint32_t seen = 0;
    for (;;) {
        WAIT_WHILE(pool, atomic_load(&pool->step) == seen && !atomic_load(&pool->stopping));
        if (atomic_load(&pool->stopping)) return NULL;
        seen = atomic_load(&pool->step);
        work(pool, seen & STEP_MASK, argument.index, NULL);
    }
}

/* NULL if memory or threads are exhausted. Thread 0 is the caller of pn_pool_run. */
pn_pool *pn_pool_create(int num_threads, int spin_us) {
    if (num_threads < 1 || num_threads > PN_MAX_THREADS) return NULL;
    pn_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->num_threads = num_threads;
    pool->spin_us = spin_us;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    for (int i = 1; i < num_threads; i++) {
        thread_argument *argument = malloc(sizeof *argument);
        if (argument) *argument = (thread_argument){pool, i};
        if (!argument || pthread_create(&pool->threads[i], NULL, thread_main, argument) != 0) {
            free(argument);
            pn_pool_destroy(pool);
            return NULL;
        }
        pool->num_started = i;
    }
    return pool;
}

void pn_pool_destroy(pn_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stopping, 1);
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i <= pool->num_started; i++) pthread_join(pool->threads[i], NULL);
    for (int i = 0; i < pool->num_retired; i++) free(pool->retired[i]);
    free(atomic_load(&pool->phases));
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->changed);
    free(pool);
}

int pn_pool_threads(const pn_pool *pool) { return pool->num_threads; }

static int reserve_phases(pn_pool *pool, int num_phases) {
    if (num_phases <= pool->capacity) return 1;
    int capacity = num_phases * 2;
    phase_state *phases = calloc((size_t)capacity, sizeof *phases);
    if (!phases) return 0;
    if (atomic_load(&pool->phases)) pool->retired[pool->num_retired++] = atomic_load(&pool->phases);
    atomic_store(&pool->phases, phases);
    pool->capacity = capacity;
    return 1;
}

static void run_alone(int num_phases, const int32_t *num_tasks, pn_task_fn run, void *context,
                      int64_t *phase_ns) {
    int64_t start_ns = phase_ns ? now_ns() : 0;
    for (int p = 0; p < num_phases; p++) {
        for (int task = 0; task < num_tasks[p]; task++) run(context, p, task, 0);
        if (!phase_ns) continue;
        int64_t at_ns = now_ns();
        phase_ns[p] += at_ns - start_ns;
        start_ns = at_ns;
    }
}

/* Runs all phases and returns when the last is done. One caller at a time. Adds each phase's
 * duration, as seen by the caller, to `phase_ns` (or NULL). Runs on one thread if out of memory. */
void pn_pool_run(pn_pool *pool, int num_phases, const int32_t *num_tasks, pn_task_fn run,
                 void *context, int64_t *phase_ns) {
    if (pool->num_threads == 1 || !reserve_phases(pool, num_phases)) {
        run_alone(num_phases, num_tasks, run, context, phase_ns);
        return;
    }
    uint32_t next = atomic_load(&pool->step) + 1;
    if ((next & STEP_MASK) == 0) next++; /* fresh counters carry step 0 */
    uint64_t step = (uint64_t)(next & STEP_MASK) << (2 * TASK_BITS);
    pool->run = run;
    pool->context = context;
    phase_state *phases = atomic_load(&pool->phases);
    atomic_store(&pool->num_phases, num_phases);
    for (int p = 0; p < num_phases; p++) {
        atomic_store_explicit(&phases[p].done, step, memory_order_relaxed);
        uint64_t word = step | ((uint64_t)num_tasks[p] << TASK_BITS);
        atomic_store_explicit(&phases[p].ticket, word, memory_order_release);
    }
    atomic_store(&pool->step, next);
    wake_sleepers(pool);
    work(pool, next & STEP_MASK, 0, phase_ns);
}
