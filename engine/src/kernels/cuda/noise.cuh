// The noise of sampling, as `GumbelNoise` in engine/src/sampling/gumbel.rs: the same hash and the same bits in f64, and bounds in f32.

#pragma once
#include "args.cuh"
#include "lanes.cuh"

// Returns 32 bits of a token for two keys: `triple32`, with a key before and one after the first round.
__device__ __forceinline__ u32 noise_bits(u32 token, u32 a, u32 b) {
    u32 x = token + a;
    x = (x ^ x >> 17) * 0xED5AD4BBu + b;
    x = (x ^ x >> 11) * 0xAC4C1B51u;
    x = (x ^ x >> 15) * 0x31848BABu;
    return x ^ x >> 14;
}

// ln x for a finite normal x > 0, as `math::ln`.
__device__ __forceinline__ double ln(double x) {
    u64 bits = u64(__double_as_longlong(x));
    i32 k = i32(bits >> 52) - 1023;
    double m = __longlong_as_double(i64((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull));
    if (m >= 1.41421356237309504880) {
        m = __dmul_rn(m, 0.5);
        k += 1;
    }
    double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0)), z = __dmul_rn(s, s), sum = 0.0;
    UNROLL for (u32 n = 11; n > 0; n--) sum = __dmul_rn(__dadd_rn(sum, 1.0 / (2.0 * n + 1.0)), z);
    double twice = __dmul_rn(2.0, s), whole = k;
    double low = __dadd_rn(__dmul_rn(twice, sum), __dmul_rn(whole, 1.9082149292705877e-10));
    return __dadd_rn(__dmul_rn(whole, 6.931471803691238e-1), __dadd_rn(twice, low));
}

// eˣ for x ≤ 0, as `math::exp`.
__device__ __forceinline__ double exp_f64(double x) {
    constexpr double WHOLE = 6755399441055744.0, LEAST = -708.0;
    constexpr double TERMS[13] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0,
                                  1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0};
    if (x < LEAST) return 0.0;
    double k = __dsub_rn(__dadd_rn(__dmul_rn(x, 1.44269504088896340736), WHOLE), WHOLE);
    double r = __dsub_rn(__dsub_rn(x, __dmul_rn(k, 6.931471803691238e-1)), __dmul_rn(k, 1.9082149292705877e-10));
    double sum = 1.0 / 6227020800.0;
    UNROLL for (u32 i = 0; i < 13; i++) sum = __dadd_rn(__dmul_rn(sum, r), TERMS[i]);
    i64 whole = i64(k), half = whole >> 1;
    sum = __dmul_rn(sum, __longlong_as_double((half + 1023) << 52));
    return __dmul_rn(sum, __longlong_as_double((whole - half + 1023) << 52));
}

// The noise of a token, as `Noise::of_token`.
__device__ __forceinline__ double noise_of(const u32 (&keys)[4], u32 token) {
    u32 first = noise_bits(token, keys[0], keys[1]), second = noise_bits(token, keys[2], keys[3]);
    u64 bits = u64(first) << 20 | second >> 12;
    double uniform = __dmul_rn(double(2 * bits + 1), 1.1102230246251565e-16);  // 2⁻⁵³; exact
    return -ln(-ln(__dsub_rn(1.0, uniform)));
}

// ln 2 · 2⁻²³. The bits of a positive f32 times this, less 127 ln 2, are at most its logarithm, and at least the logarithm less
// 0.0597, because m ≤ log₂(1 + m) ≤ m + 0.0861.
constexpr float LN_STEP = 8.262958405176314e-8f;
constexpr float LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float scaled_bits(float v) { return __fmul_rn(__int2float_rn(i32(__float_as_uint(v))), LN_STEP); }

// Bounds of the noise of a token with these first bits. Of V in [u, u + 1) · 2⁻²⁴, u = first >> 8, with W = (u + 1) · 2⁻²⁴:
//
//     −ln V ≥ noise ≥ −ln(−ln(1 − W)), which is at least −ln W + ln(1 − W) ≥ −ln W − 0.0318 for W ≤ 2⁻⁵
//
// `scaled_bits` gives each logarithm with an error of a known sign; roundings are below 2e-4.
__device__ __forceinline__ void noise_bounds(u32 first, float& lowest, float& highest) {
    constexpr float START = LN_2 * (24 + 127);
    u32 u = first >> 8;
    highest = __fsub_rn(START + 2e-4f, scaled_bits(__int2float_rn(i32(u))));
    float next = __int2float_rn(i32(u + 1));
    if (u + 1 <= 1u << 19) {
        lowest = __fsub_rn(START - 0.0925f, scaled_bits(next));
        return;
    }
    // −ln(1 − W), at most.
    float rest = __fsub_rn(1.0f, __fmul_rn(next, 5.9604644775390625e-8f));
    float outer = __fsub_rn(LN_2 * 127 + 1e-4f, scaled_bits(rest));
    // Noise is never below −3.6.
    lowest = larger(__fsub_rn(LN_2 * 127 - 0.0602f, scaled_bits(outer)), -3.7f);
}

// A token's value in a question: its logit plus temperature · noise, as `ScaledNoise::add_to`; without noise, its logit.
__device__ __forceinline__ double value_of(const RowQuestion& question, u32 token, float logit) {
    if (question.temperature == 0.0f) return logit;
    return __dadd_rn(logit, __dmul_rn(question.temperature, noise_of(question.keys, token)));
}
