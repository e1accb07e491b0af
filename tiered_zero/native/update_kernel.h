/* Define the arithmetic of one update; update.c includes this file once per level.
 *
 * Defined before inclusion: LEVEL (name suffix), LANES (floats in a vector), TARGET (function attribute), and
 * ISA_AVX512 or ISA_AVX2 for their instructions; without either, those of NEON are used. The code uses the compilers'
 * portable vector extension; only fused multiply-add, square root and half precision use intrinsics of the instruction
 * set. Each operation is rounded once (IEEE), every level fuses the same operations, and every element takes the same
 * path: so the bits depend neither on the level nor on the place of an element. Stores go through the caches: streaming
 * stores were no faster on Zen 4, and the next reader of the 16-bit copy may find it in a cache.
 */

#ifndef NAME /* once: LEVEL and TARGET are expanded at each use of a name */
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(a) PASTE(a, LEVEL)
#define KERNEL static inline __attribute__((always_inline)) TARGET

#define vf NAME(vf)
#define vu NAME(vu)
#define vs NAME(vs)
#define vh NAME(vh)
#define splat NAME(splat)
#define choose NAME(choose)
#define fma_ NAME(fma)
#define root_ NAME(root)
#define estimate NAME(estimate)
#define newton_root NAME(newton_root)
#define from_half NAME(from_half)
#define to_half NAME(to_half)
#define to_bf16 NAME(to_bf16)
#define to_bf16_random NAME(to_bf16_random)
#define load NAME(load)
#define store NAME(store)
#define pass NAME(pass)
#define pass_all NAME(pass_all)
#define pass_rest NAME(pass_rest)
#define load_mark NAME(load_mark)
#define store_mark NAME(store_mark)
#define load_master NAME(load_master)
#define store_master NAME(store_master)
#define load_gradient NAME(load_gradient)
#define store_state NAME(store_state)
#define lerp NAME(lerp)
#define larger NAME(larger)
#define accumulate NAME(accumulate)
#define divide NAME(divide)
#define descend NAME(descend)
#define take_root NAME(take_root)
#define prefetch NAME(prefetch)
#define advance_blocks NAME(advance_blocks)
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int32_t vs __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

KERNEL vf splat(float x) { return x - (vf){0}; } /* minus, so that -0.0 stays -0.0 */

KERNEL vu choose(vs mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }

KERNEL vf fma_(vf a, vf b, vf c) {
#if defined(ISA_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(ISA_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

KERNEL vf root_(vf a) {
#if defined(ISA_AVX512)
    return (vf)_mm512_sqrt_ps((__m512)a);
#elif defined(ISA_AVX2)
    return (vf)_mm256_sqrt_ps((__m256)a);
#else
    return (vf)vsqrtq_f32((float32x4_t)a);
#endif
}

#if defined(__x86_64__)
KERNEL vf estimate(vf a) {
#if defined(ISA_AVX512) /* twice the AVX instruction: that of AVX-512 has other bits */
    __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256((__m512)a));
    __m256 high = _mm256_rsqrt_ps(_mm512_extractf32x8_ps((__m512)a, 1));
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#else
    return (vf)_mm256_rsqrt_ps((__m256)a);
#endif
}
#endif

/* A square root that is not always rounded correctly: the processor's estimate of 1/sqrt(a), a step of Goldschmidt
 * and one of Newton, without FMA. Denormals and the last floats, whose s * s may overflow, get the exact root. */
KERNEL vf newton_root(vf a) {
#if defined(__x86_64__)
    vf y = estimate(a), s = a * y, h = y * 0.5f, r = 0.5f - h * s;
    s = s + r * s;
    h = h + r * h;
    vs in_range = (a >= 0x1p-126f) & (a <= 0x1.ffep127f);
    return (vf)choose(in_range, (vu)(s - (s * s - a) * h), (vu)root_(a));
#else
    return root_(a);
#endif
}

KERNEL vf from_half(vh h) {
#if defined(ISA_AVX512)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(ISA_AVX2)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    return (vf)vcvt_f32_f16((float16x4_t)h);
#endif
}

/* Round to nearest, ties to even. */
KERNEL vh to_half(vf x) {
#if defined(ISA_AVX512)
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(ISA_AVX2)
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    return (vh)vcvt_f16_f32((float32x4_t)x);
#endif
}

/* Round to nearest, ties to even; every NaN becomes 0x7fc0. The result lies in the low halves. */
KERNEL vu to_bf16(vf x) {
    vu bits = (vu)x;
    return choose(x == x, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, (vu){0} + 0x7fc0);
}

/* Round stochastically. The noise is a hash of the value and of `seed`, which the step determines. It does not
 * depend on the element's position, so cuts and threads do not change it. */
KERNEL vu to_bf16_random(vf x, uint32_t seed) {
    vu bits = (vu)x, noise = bits ^ seed;
    noise = (noise ^ (noise >> 16)) * 0x85ebca6bu;
    noise = (noise ^ (noise >> 13)) * 0xc2b2ae35u;
    noise = (noise ^ (noise >> 16)) & 0xffff;
    vs finite = (bits & 0x7f800000) != (vu){0} + 0x7f800000;
    return choose(finite, (bits + noise) >> 16, to_bf16(x));
}

KERNEL vf load(const void *base, int64_t i, int type) {
    if (type == TZ_F32) {
        vf x;
        memcpy(&x, (const float *)base + i, sizeof x);
        return x;
    }
    vh h;
    memcpy(&h, (const uint16_t *)base + i, sizeof h);
    return type == TZ_BF16 ? (vf)(__builtin_convertvector(h, vu) << 16) : from_half(h);
}

KERNEL void store(void *base, int64_t i, int type, vf x) {
    if (type == TZ_F32) {
        memcpy((float *)base + i, &x, sizeof x);
        return;
    }
    vh h = type == TZ_BF16 ? __builtin_convertvector(to_bf16(x), vh) : to_half(x);
    memcpy((uint16_t *)base + i, &h, sizeof h);
}

/* TZ_REMAINDER, for Adam alone: the master is (out << 16) + the signed 16-bit remainder + the mark, 0 or 0x10000.
 * The mark is the sign bit of the second moment, which is never negative: see rules/state_layout.py. */
KERNEL vu load_mark(const struct tz_slice *r, int64_t i) {
    if (r->hyper->state_type == TZ_F32) {
        vu bits;
        memcpy(&bits, (const uint32_t *)r->state[1] + i, sizeof bits);
        return (bits >> 15) & 0x10000;
    }
    vh half;
    memcpy(&half, (const uint16_t *)r->state[1] + i, sizeof half);
    return (__builtin_convertvector(half, vu) << 1) & 0x10000;
}

KERNEL void store_mark(const struct tz_slice *r, int64_t i, vu mark) {
    if (r->hyper->state_type == TZ_F32) {
        vu bits;
        memcpy(&bits, (const uint32_t *)r->state[1] + i, sizeof bits);
        bits = (bits & 0x7fffffff) | (mark << 15);
        memcpy((uint32_t *)r->state[1] + i, &bits, sizeof bits);
        return;
    }
    vh half;
    memcpy(&half, (const uint16_t *)r->state[1] + i, sizeof half);
    half = (half & 0x7fff) | __builtin_convertvector(mark >> 1, vh);
    memcpy((uint16_t *)r->state[1] + i, &half, sizeof half);
}

KERNEL vf load_master(const struct tz_slice *r, int64_t i) {
    if (r->hyper->master_type == TZ_F32) return load(r->master, i, TZ_F32);
    vh high, low;
    memcpy(&high, (const uint16_t *)r->out + i, sizeof high);
    memcpy(&low, (const uint16_t *)r->master + i, sizeof low);
    vu wide = __builtin_convertvector(low, vu);
    return (vf)((__builtin_convertvector(high, vu) << 16) + ((wide ^ 0x8000) - 0x8000) + load_mark(r, i));
}

KERNEL void store_master(const struct tz_slice *r, int64_t i, vf x) {
    if (r->hyper->master_type == TZ_F32) {
        store(r->master, i, TZ_F32, x);
        if (r->out) store(r->out, i, r->hyper->out_type, x);
        return;
    }
    vu bits = choose(x == x, (vu)x, (vu){0} + 0x7fc00000);
    vh high = __builtin_convertvector(to_bf16(x), vh), low = __builtin_convertvector(bits & 0xffff, vh);
    memcpy((uint16_t *)r->out + i, &high, sizeof high);
    memcpy((uint16_t *)r->master + i, &low, sizeof low);
    store_mark(r, i, (vu)((bits & 0x1ffff) == 0x8000) & 0x10000);
}

/* Return the gradient for the rule: as float, times grad_scale, negated with TZ_MAXIMIZE, plus L2 decay. */
KERNEL vf load_gradient(const struct tz_slice *r, int64_t i) {
    const struct tz_hyper *h = r->hyper;
    vf g = load(r->grad, i, h->grad_type) * h->grad_scale;
    if (h->flags & TZ_MAXIMIZE) g = -g;
    if (h->flags & TZ_L2) g = fma_(load_master(r, i), splat(h->l2), g);
    return g;
}

KERNEL void store_state(const struct tz_slice *r, int which, int64_t i, vf x) {
    if (r->hyper->state_type == TZ_F32) {
        store(r->state[which], i, TZ_F32, x);
        return;
    }
    vh h = __builtin_convertvector(to_bf16_random(x, r->hyper->seed + (uint32_t)which), vh);
    memcpy((uint16_t *)r->state[which] + i, &h, sizeof h);
}

/* torch.lerp with a scalar weight. */
KERNEL vf lerp(vf from, vf to, float weight) {
    return fabsf(weight) < 0.5f ? fma_(splat(weight), to - from, from) : fma_(splat(weight - 1.0f), to - from, to);
}

/* torch.maximum: NaN if a or b is NaN. */
KERNEL vf larger(vf a, vf b) { return (vf)choose((a > b) | (a != a), (vu)a, (vu)b); }

/* Adam and Adagrad, part 1: update the state. Return the dividend; set `under` to the number under the square root. */
KERNEL vf accumulate(const struct tz_slice *r, int64_t i, vf *under) {
    const struct tz_hyper *h = r->hyper;
    vf g = load_gradient(r, i), top = g, sum;
    if (h->rule == TZ_ADAM) {
        top = lerp(load(r->state[0], i, h->state_type), g, h->weight1);
        vf square = load(r->state[1], i, h->state_type);
        if (h->master_type == TZ_REMAINDER) square = (vf)((vu)square & 0x7fffffff);
        vu mark = h->master_type == TZ_REMAINDER ? load_mark(r, i) : (vu){0};
        sum = fma_(g * h->weight2, g, square * h->beta2);
        store_state(r, 0, i, top);
        store_state(r, 1, i, sum);
        if (h->master_type == TZ_REMAINDER) store_mark(r, i, mark);
        if (h->flags & TZ_AMSGRAD) {
            sum = larger(load(r->state[2], i, h->state_type), sum);
            store_state(r, 2, i, sum);
        }
    } else {
        sum = fma_(g, g, load(r->state[0], i, h->state_type));
        store_state(r, 0, i, sum);
    }
    *under = sum;
    return top * h->rate;
}

/* Adam and Adagrad, part 2: update the master. `above`: the dividend. */
KERNEL void divide(const struct tz_slice *r, int64_t i, vf above, vf root) {
    const struct tz_hyper *h = r->hyper;
    store_master(r, i, load_master(r, i) * h->decay + above / (root / h->root2 + h->eps));
}

/* Update elements [from, to) by SGD or Lion, which need no square root. */
KERNEL void descend(const struct tz_slice *r, int64_t from, int64_t to) {
    const struct tz_hyper *h = r->hyper;
    for (int64_t i = from; i < to; i += LANES) {
        vf p = load_master(r, i), g = load_gradient(r, i);
        if (h->rule == TZ_LION) {
            vf m = load(r->state[0], i, h->state_type), u = lerp(m, g, h->weight1);
            vu sign = ((vu)u & 0x80000000) | 0x3f800000;
            store_state(r, 0, i, lerp(m, g, h->weight2));
            g = (vf)((vu)((u < 0) | (u > 0)) & sign); /* torch.sign: zero for zero and for NaN */
            p *= h->decay;
        } else if (h->flags & TZ_MOMENTUM) {
            vf b = g;
            if (!(h->flags & TZ_FIRST)) b = fma_(g, splat(h->weight2), load(r->state[0], i, h->state_type) * h->beta2);
            store_state(r, 0, i, b);
            g = h->flags & TZ_NESTEROV ? fma_(b, splat(h->beta2), g) : b;
        }
        store_master(r, i, fma_(g, splat(h->rate), p));
    }
}

KERNEL vf take_root(vf a, int flags) { return flags & TZ_NEWTON_ROOT ? newton_root(a) : root_(a); }

static inline void NAME(call_root)(tz_root *torch_root, const float *values, float *roots, int64_t n) {
    int32_t count = (int32_t)n;
    int64_t mode = TZ_ROOT_MODE;
    torch_root(&count, values, roots, &mode);
}

/* Compute any number of roots as an update with these flags does. */
TARGET static void NAME(extract)(const float *values, float *roots, int64_t numel, int flags, tz_root *torch_root) {
    if (flags & TZ_TORCH_ROOT && torch_root)
        for (int64_t begin = 0; begin < numel; begin += TZ_BLOCK)
            NAME(call_root)(torch_root, values + begin, roots + begin, begin + TZ_BLOCK < numel ? TZ_BLOCK : numel - begin);
    else
        for (int64_t i = 0; i < numel; i += LANES) store(roots, i, TZ_F32, take_root(load(values, i, TZ_F32), flags));
}

/* Update elements [from, to) with MKL's root, which takes arrays: one block at a time. */
KERNEL void advance_blocks(const struct tz_slice *r, int64_t from, int64_t to, tz_root *torch_root) {
    __attribute__((aligned(64))) float above[TZ_BLOCK], under[TZ_BLOCK], root[TZ_BLOCK];
    for (int64_t begin = from; begin < to; begin += TZ_BLOCK) {
        int64_t end = begin + TZ_BLOCK < to ? begin + TZ_BLOCK : to;
        for (int64_t i = begin; i < end; i += LANES) {
            __builtin_prefetch((const char *)r->master + i * (r->hyper->master_type == TZ_F32 ? 4 : 2), 1);
            vf sum, top = accumulate(r, i, &sum);
            store(above, i - begin, TZ_F32, top);
            store(under, i - begin, TZ_F32, sum);
        }
        NAME(call_root)(torch_root, under, root, end - begin);
        for (int64_t i = begin; i < end; i += LANES)
            divide(r, i, load(above, i - begin, TZ_F32), load(root, i - begin, TZ_F32));
    }
}

/* Prefetch what the loop reads next of each array; a processor's own prefetcher starts anew at each page. */
KERNEL void prefetch(const struct tz_slice *r, int64_t i) {
    const struct tz_hyper *h = r->hyper;
    __builtin_prefetch(at(r->grad, i, h->grad_type), 0);
    __builtin_prefetch(at(r->master, i, h->master_type), 1);
    for (int k = 0; k < TZ_STATES; k++)
        if (r->state[k]) __builtin_prefetch(at(r->state[k], i, h->state_type), 1);
}

/* Update elements [from, to) of one slice; their number is a multiple of TZ_GROUP. */
TARGET static void NAME(advance)(const struct tz_slice *slice, int64_t from, int64_t to, tz_root *torch_root) {
    const struct tz_hyper hyper = *slice->hyper; /* copies that no store can alias: they stay in registers */
    struct tz_slice local = *slice, *const r = &local;
    local.hyper = &hyper;
    if (hyper.rule == TZ_SGD || hyper.rule == TZ_LION)
        descend(r, from, to);
    else if (hyper.flags & TZ_TORCH_ROOT && torch_root)
        advance_blocks(r, from, to, torch_root);
    else
        for (int64_t line = from; line < to; line += TZ_GROUP) {
            prefetch(r, line + TZ_AHEAD);
            for (int64_t i = line; i < line + TZ_GROUP; i += LANES) {
                vf under, above = accumulate(r, i, &under);
                divide(r, i, above, take_root(under, hyper.flags));
            }
        }
}

/* Convert elements [from, to) of 8-bit moments to or from floats; `from` is the start of a block. See rules/quantized.py.
 * The compiler vectorizes the loops over a block. */
TARGET static void NAME(convert)(const struct tz_moments *q, int64_t from, int64_t to) {
    for (int64_t begin = from; begin < to; begin += TZ_SHARED) {
        int64_t n = begin + TZ_SHARED < to ? TZ_SHARED : to - begin;
        uint8_t *restrict codes = q->codes + begin;
        float *restrict values = q->values + begin, *scale = q->scales + begin / TZ_SHARED;
        if (!q->encode) {
            const float *restrict table = q->table, most = *scale;
            for (int64_t i = 0; i < n; i++) values[i] = table[codes[i]] * most;
            continue;
        }
        uint32_t bits[TZ_SHARED] = {0}, largest = 0, seed = q->seed;
        int32_t whole[TZ_SHARED], is_signed = q->is_signed;
        memcpy(bits, values, n * sizeof *values);
        for (int i = 0; i < TZ_SHARED; i++) {
            uint32_t magnitude = bits[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest; /* a NaN is larger than all */
        }
        memcpy(scale, &largest, sizeof *scale);
        float most = *scale < 0x1p-126f ? 0x1p-126f : *scale, top = is_signed ? 127.0f : 255.0f, root[TZ_SHARED];
        for (int i = 0; i < TZ_SHARED; i += LANES) {
            vu word;
            memcpy(&word, bits + i, sizeof word);
            vf share = root_((vf)(word & 0x7fffffff) / most);
            store(root, i, TZ_F32, is_signed ? share : root_(share));
        }
        for (int i = 0; i < TZ_SHARED; i++) {
            uint32_t noise = bits[i] ^ seed;
            noise = (noise ^ (noise >> 16)) * 0x85ebca6bu;
            noise = (noise ^ (noise >> 13)) * 0xc2b2ae35u;
            noise = (noise ^ (noise >> 16)) & 0xffff;
            float code = root[i] * top + (float)(int32_t)noise * 0x1p-16f;
            code = code >= 0 ? code : 0; /* false for a NaN */
            whole[i] = (int32_t)(code <= top ? code : top);
        }
        if (is_signed)
            for (int i = 0; i < TZ_SHARED; i++) whole[i] = (int32_t)bits[i] < 0 ? -whole[i] : whole[i];
        else /* only zero becomes zero: the next step divides by the root */
            for (int i = 0; i < TZ_SHARED; i++) whole[i] |= (bits[i] & 0x7fffffff) && !whole[i];
        for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)whole[i];
    }
}

/* Copy or add a vector, or only read it. Return the target's values (without a target, the source's) as floats; they
 * may have overflowed when they were stored. */
KERNEL vf pass(const struct tz_copy *c, int64_t at) {
    vf x = load(c->source, at, c->source_type);
    if (!c->target) return x;
    if (c->add) x = load(c->target, at, c->target_type) + x;
    store(c->target, at, c->target_type, x);
    return load(c->target, at, c->target_type);
}

/* Pass the last elements, from `whole` on and fewer than TZ_GROUP, in a padded copy. `x`: gets what `pass` returns. */
KERNEL void pass_rest(const struct tz_copy *c, int64_t whole, float *x) {
    int64_t left = c->numel - whole;
    float source[TZ_GROUP] = {0}, target[TZ_GROUP] = {0};
    struct tz_copy rest = *c;
    rest.source = source;
    rest.target = c->target ? target : NULL;
    memcpy(source, at(c->source, whole, c->source_type), left * widths[c->source_type]);
    if (c->target) memcpy(target, at(c->target, whole, c->target_type), left * widths[c->target_type]);
    for (int k = 0; k < TZ_GROUP; k += LANES) store(x, k, TZ_F32, pass(&rest, k));
    if (c->target) memcpy(at(c->target, whole, c->target_type), target, left * widths[c->target_type]);
}

KERNEL void pass_all(const struct tz_copy *c, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += LANES) {
        __builtin_prefetch(at(c->source, i + TZ_AHEAD, c->source_type), 0);
        __builtin_prefetch(at(c->target, i + TZ_AHEAD, c->target_type), 1);
        pass(c, i);
    }
}

/* Copy or add elements [from, to) of one array. Both are multiples of TZ_GROUP, except `to` at the array's end. */
TARGET static void NAME(carry)(const struct tz_copy *copy, int64_t from, int64_t to) {
    struct tz_copy c = *copy;
    int64_t whole = to - (to - from) % TZ_GROUP;
    float x[TZ_GROUP];
    if (c.source_type == TZ_BF16 && c.target_type == TZ_F32 && c.add) { /* micro-batches: compiled apart, with these types */
        struct tz_copy sum = {c.source, c.target, c.numel, TZ_BF16, TZ_F32, 1, 0};
        pass_all(&sum, from, whole);
    } else
        pass_all(&c, from, whole);
    if (whole < to) pass_rest(&c, whole, x);
}

/* Pass the whole array, and return its L2 norm. Squares are added in the order of ATen's vector_norm at every level:
 * eight running sums, joined one by one, then the rest. If ATen was compiled for processors with FMA (`fused_tail`),
 * GCC has fused those of the rest that follow its last whole group of four. */
TARGET static float NAME(receive)(const struct tz_copy *c, int fused_tail) {
    tz_eight sums = {0};
    int64_t whole = c->numel - c->numel % TZ_GROUP, left = c->numel - whole;
    for (int64_t i = 0; i < whole; i += TZ_GROUP) {
        vf squares[TZ_GROUP / LANES];
        for (int k = 0; k < TZ_GROUP / LANES; k++) {
            vf x = pass(c, i + k * LANES);
            squares[k] = x * x;
        }
        tz_eight halves[2];
        memcpy(halves, squares, sizeof halves);
        sums += halves[0];
        sums += halves[1];
    }
    float x[TZ_GROUP];
    pass_rest(c, whole, x);
    int64_t first = left / 8 * 8, fused = fused_tail ? first + (left - first) / 4 * 4 : left;
    for (int64_t i = 0; i < first; i++) sums[i] += x[i] * x[i];
    float total = sums[0];
    for (int k = 1; k < 8; k++) total += sums[k];
    for (int64_t i = first; i < left; i++) total = i < fused ? total + x[i] * x[i] : __builtin_fmaf(x[i], x[i], total);
    return __builtin_sqrtf(total);
}

#undef LEVEL
#undef LANES
#undef TARGET
#undef ISA_AVX512
#undef ISA_AVX2
