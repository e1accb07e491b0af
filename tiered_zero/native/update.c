/* Update at memory speed, in one pass over gradient, master weights and optimizer state.
 *
 * Plain C with pthreads, bound by update.py with ctypes. Adam with 16-bit gradients and copies moves 28 bytes per
 * parameter: each array is read once and written once. The arithmetic is in update_kernel.h, compiled here once for
 * each instruction set of the architecture; the caller names the one to run. The threads are in thread_pool.h. No
 * environment variable is read.
 */
#if defined(__FAST_MATH__)
#error "update.c needs IEEE arithmetic: build without -ffast-math"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off,no-math-errno,no-trapping-math")
#endif
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "version.h"

#define API __attribute__((visibility("default")))

enum { TZ_F32, TZ_BF16, TZ_F16, TZ_REMAINDER };
enum { TZ_ADAM, TZ_SGD, TZ_ADAGRAD, TZ_LION };
enum { TZ_MAXIMIZE = 1, TZ_L2 = 2, TZ_AMSGRAD = 4, TZ_MOMENTUM = 8, TZ_NESTEROV = 16, TZ_FIRST = 32 };
enum { TZ_TORCH_ROOT = 64, TZ_NEWTON_ROOT = 128 };
enum { TZ_AVX2, TZ_AVX512, TZ_NEON, TZ_LEVELS };
enum { TZ_STATES = 3, TZ_MAX_THREADS = 256 };

/* In elements. TZ_GROUP: the kernels take multiples of it. TZ_BLOCK: what MKL's root takes at once; it stays in the
 * first cache. TZ_LINE: where slices are cut. TZ_FEWEST, TZ_PIECE: the smallest and largest piece that a thread takes.
 * TZ_AHEAD: how far ahead memory is prefetched; 512 was the best of 0 to 1024, and 6% faster than 0 (Zen 5). */
enum { TZ_GROUP = 16, TZ_BLOCK = 256, TZ_LINE = 64, TZ_FEWEST = 4 << 10, TZ_PIECE = 64 << 10, TZ_AHEAD = 512 };
enum { TZ_SHARED = 32 }; /* 8-bit moments that share one scale */

/* The numbers of one step. The caller computes them in double and rounds them to float once, as torch does.
 * adam     weight1 = 1 - beta1, beta2, weight2 = 1 - beta2, root2 = sqrt(1 - beta2^t), eps, rate = -lr / (1 - beta1^t),
 *          decay
 * sgd      beta2 = momentum, weight2 = 1 - dampening, rate = -lr
 * adagrad  root2 = 1, eps, rate = -lr / (1 + (t - 1) * lr_decay)
 * lion     weight1 = 1 - beta1, weight2 = 1 - beta2, rate = -lr, decay
 * decay: factor on the master (decoupled weight decay; else 1). l2: with TZ_L2, l2 * master is added to the gradient. */
struct tz_hyper {
    int32_t rule, flags, grad_type, master_type, out_type, state_type;
    uint32_t seed; /* of stochastic rounding, where state_type is TZ_BF16 */
    float grad_scale, l2, decay, weight1, beta2, weight2, root2, eps, rate;
};

/* A range of elements. master: float; with TZ_REMAINDER (only Adam) the int16 low halves, and `out` the high halves.
 * out: else a copy of the new master, as out_type; NULL for none. */
struct tz_slice {
    void *master;
    const void *grad;
    void *out;
    void *state[TZ_STATES];
    int64_t numel;
    const struct tz_hyper *hyper;
};

/* One array of 8-bit moments and the floats that they stand for. codes: int8 if is_signed. scales: one for TZ_SHARED
 * codes. table: by a code, taken as a byte, the factor of its scale that gives the value. */
struct tz_moments {
    uint8_t *codes;
    float *scales, *values;
    const float *table;
    int64_t numel;
    int32_t is_signed, encode;
    uint32_t seed, reserved;
};

/* target: NULL if the source is only read. */
struct tz_copy {
    const void *source;
    void *target;
    int64_t numel;
    int32_t source_type, target_type, add, reserved;
};

/* MKL's Fortran entry point of vmsSqrt, and the mode in which ATen calls it (VML_HA, denormals kept, errors
 * ignored). After torch.set_num_threads, MKL would start threads even for a block, so each thread limits it to 1. */
typedef void tz_root(const int32_t *n, const float *a, float *y, const int64_t *mode);
typedef int tz_set_threads(int num_threads);
#define TZ_ROOT_MODE (0x2 | 0x140000 | 0x100)

static const int widths[] = {[TZ_F32] = 4, [TZ_BF16] = 2, [TZ_F16] = 2, [TZ_REMAINDER] = 2};

static inline void *at(const void *base, int64_t i, int type) { return base ? (char *)base + i * widths[type] : NULL; }

typedef float tz_eight __attribute__((vector_size(32)));

#if defined(__x86_64__)
#define LEVEL avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define ISA_AVX2
#include "update_kernel.h"
#define LEVEL avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define ISA_AVX512
#include "update_kernel.h"
#elif defined(__aarch64__)
#define LEVEL neon
#define LANES 4
#define TARGET
#include "update_kernel.h"
#endif

typedef void tz_advance(const struct tz_slice *, int64_t, int64_t, tz_root *);
typedef float tz_receive(const struct tz_copy *, int);
typedef void tz_carry(const struct tz_copy *, int64_t, int64_t);
typedef void tz_convert(const struct tz_moments *, int64_t, int64_t);
typedef void tz_extract(const float *, float *, int64_t, int, tz_root *);
static const struct {
    tz_advance *advance;
    tz_extract *extract;
    tz_receive *receive;
    tz_carry *carry;
    tz_convert *convert;
} kernels[TZ_LEVELS] = {
#if defined(__x86_64__)
    [TZ_AVX2] = {advance_avx2, extract_avx2, receive_avx2, carry_avx2, convert_avx2},
    [TZ_AVX512] = {advance_avx512, extract_avx512, receive_avx512, carry_avx512, convert_avx512},
#elif defined(__aarch64__)
    [TZ_NEON] = {advance_neon, extract_neon, receive_neon, carry_neon, convert_neon},
#endif
};

static inline int was_compiled(int level) { return level >= 0 && level < TZ_LEVELS && kernels[level].advance; }

/* Return 1 if `level` was compiled in and this processor and operating system run it. Callers keep the result: on a
 * virtual machine CPUID takes microseconds. */
API int tz_supported(int level) {
    if (!was_compiled(level)) return 0;
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    int half = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    __builtin_cpu_init();
    int avx2 = half && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (level == TZ_AVX2) return avx2;
    if (level == TZ_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return 1;
}

#include "thread_pool.h"

/* Turn denormals on for this thread, and return the former mode. The caller may have turned them off for itself
 * (torch.set_flush_denormal), workers have not; results must not depend on the thread. */
static inline unsigned keep_denormals(void) {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
#else
    return 0;
#endif
}

static inline void restore_denormals(unsigned before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* ---- Updates: slices, laid end to end, are cut into equal pieces; inside a slice, at multiples of TZ_LINE. ---- */

struct update {
    const struct tz_slice *slices;
    int64_t num_slices, piece;
    const int64_t *starts; /* of each slice when all are laid end to end; then the end of the last */
    int level;
    tz_root *root;
    tz_set_threads *set_threads;
};

/* Update the last n elements of a slice, fewer than TZ_GROUP, by the same code in a padded copy. */
static void advance_tail(const struct update *u, const struct tz_slice *r, int64_t from, int64_t n) {
    const struct tz_hyper *h = r->hyper;
    __attribute__((aligned(64))) float space[3 + TZ_STATES][TZ_GROUP] = {{0}};
    const void *places[3 + TZ_STATES] = {at(r->master, from, h->master_type), at(r->out, from, h->out_type),
                                         at(r->grad, from, h->grad_type)};
    int types[3 + TZ_STATES] = {h->master_type, h->out_type, h->grad_type};
    for (int k = 0; k < TZ_STATES; k++) {
        places[3 + k] = at(r->state[k], from, h->state_type);
        types[3 + k] = h->state_type;
    }
    for (int k = 0; k < 3 + TZ_STATES; k++)
        if (places[k]) memcpy(space[k], places[k], n * widths[types[k]]);
    struct tz_slice padded = {space[0], space[2], r->out ? space[1] : NULL, {space[3], space[4], space[5]}, TZ_GROUP, h};
    kernels[u->level].advance(&padded, 0, TZ_GROUP, u->root);
    for (int k = 0; k < 3 + TZ_STATES; k++)
        if (places[k] && k != 2) memcpy((void *)places[k], space[k], n * widths[types[k]]);
}

/* Return the index of the last start <= x. */
static int64_t find(const int64_t *starts, int64_t count, int64_t x) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (starts[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int64_t to_line(int64_t i, int64_t numel) {
    i = (i + TZ_LINE - 1) / TZ_LINE * TZ_LINE;
    return i < 0 ? 0 : i < numel ? i : numel;
}

static void update_piece(void *context, int64_t index) {
    const struct update *u = context;
    int64_t begin = index * u->piece, end = begin + u->piece;
    unsigned mode = keep_denormals();
    int threads = u->root ? u->set_threads(1) : 0;
    for (int64_t k = find(u->starts, u->num_slices, begin); k < u->num_slices && u->starts[k] < end; k++) {
        const struct tz_slice *r = &u->slices[k];
        int64_t from = to_line(begin - u->starts[k], r->numel), to = to_line(end - u->starts[k], r->numel);
        int64_t whole = to - (to - from) % TZ_GROUP;
        if (from < whole) kernels[u->level].advance(r, from, whole, u->root);
        if (whole < to) advance_tail(u, r, whole, to - whole);
    }
    if (u->root) u->set_threads(threads);
    restore_denormals(mode);
}

/* Update every slice. root, set_threads: MKL's functions, for slices with TZ_TORCH_ROOT; both NULL without MKL.
 * Return 0; -1: no memory, nothing was done; -2: the level was not compiled in. */
API int tz_update_batch(struct tz_pool *pool, const struct tz_slice *slices, int64_t num_slices, int level,
                        tz_root *root, tz_set_threads *set_threads) {
    if (!was_compiled(level)) return -2;
    int64_t *starts = malloc((num_slices + 1) * sizeof *starts), total = 0;
    if (!starts) return -1;
    for (int64_t i = 0; i < num_slices; i++) {
        starts[i] = total;
        total += slices[i].numel;
    }
    starts[num_slices] = total;
    int64_t piece = total / (4 * (pool->max_workers + 1));
    piece = to_line(piece < TZ_FEWEST ? TZ_FEWEST : piece, TZ_PIECE);
    struct update update = {slices, num_slices, piece, starts, level, root, set_threads};
    run(pool, update_piece, &update, (total + piece - 1) / piece);
    free(starts);
    return 0;
}

/* Compute square roots as an update with these flags does, on the calling thread. numel: a multiple of TZ_GROUP. Return
 * 0; -2: the level was not compiled in. */
API int tz_square_roots(const float *values, float *roots, int64_t numel, int flags, int level, tz_root *root,
                        tz_set_threads *set_threads) {
    if (!was_compiled(level)) return -2;
    unsigned mode = keep_denormals();
    int threads = root ? set_threads(1) : 0;
    kernels[level].extract(values, roots, numel, flags, root);
    if (root) set_threads(threads);
    restore_denormals(mode);
    return 0;
}

/* ---- Moments of 8 bits ---- */

struct conversion {
    const struct tz_moments *moments;
    int level;
};

static void convert_piece(void *context, int64_t index) {
    const struct conversion *x = context;
    int64_t from = index * TZ_FEWEST, to = from + TZ_FEWEST < x->moments->numel ? from + TZ_FEWEST : x->moments->numel;
    unsigned mode = keep_denormals();
    kernels[x->level].convert(x->moments, from, to);
    restore_denormals(mode);
}

/* Convert one array of moments to floats or back. Return 0; -2: the level was not compiled in. */
API int tz_convert_moments(struct tz_pool *pool, const struct tz_moments *moments, int level) {
    if (!was_compiled(level)) return -2;
    struct conversion conversion = {moments, level};
    run(pool, convert_piece, &conversion, (moments->numel + TZ_FEWEST - 1) / TZ_FEWEST);
    return 0;
}

/* ---- Received gradients ---- */

struct carriage {
    const struct tz_copy *copies;
    int64_t num_copies;
    const int64_t *starts; /* the first piece of each copy */
    int level;
};

static void carry_piece(void *context, int64_t index) {
    const struct carriage *x = context;
    int64_t k = find(x->starts, x->num_copies, index), from = (index - x->starts[k]) * TZ_PIECE, to = from + TZ_PIECE;
    unsigned mode = keep_denormals();
    kernels[x->level].carry(&x->copies[k], from, to < x->copies[k].numel ? to : x->copies[k].numel);
    restore_denormals(mode);
}

/* Copy or add `count` arrays, whose targets do not overlap, on all threads. Return as tz_update_batch does. */
API int tz_copy_arrays(struct tz_pool *pool, const struct tz_copy *copies, int64_t count, int level) {
    if (!was_compiled(level)) return -2;
    int64_t *starts = malloc((count + 1) * sizeof *starts), num_pieces = 0;
    if (!starts) return -1;
    for (int64_t i = 0; i < count; i++) {
        starts[i] = num_pieces;
        num_pieces += (copies[i].numel + TZ_PIECE - 1) / TZ_PIECE;
    }
    struct carriage carriage = {copies, count, starts, level};
    run(pool, carry_piece, &carriage, num_pieces);
    free(starts);
    return 0;
}

struct measurement {
    const struct tz_copy *copies;
    float *norms;
    int fused_tail, level;
};

static void receive_piece(void *context, int64_t index) {
    const struct measurement *x = context;
    unsigned mode = keep_denormals();
    x->norms[index] = kernels[x->level].receive(&x->copies[index], x->fused_tail);
    restore_denormals(mode);
}

/* Copy, add or only read `count` arrays: one array a thread; without a pool all on the calling thread, in order.
 * norms: gets the norm of each target afterwards (without a target, of the source), with the same bits at any level;
 * not finite if an element is not. Return as tz_convert_moments does. */
API int tz_copy_norms(struct tz_pool *pool, const struct tz_copy *copies, int64_t count, int fused_tail, float *norms,
                      int level) {
    if (!was_compiled(level)) return -2;
    struct measurement measurement = {copies, norms, fused_tail, level};
    if (pool)
        run(pool, receive_piece, &measurement, count);
    else
        for (int64_t i = 0; i < count; i++) receive_piece(&measurement, i);
    return 0;
}
