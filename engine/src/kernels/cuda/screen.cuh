// Error bounds of the estimates of the screen (backend/cpu/screen.rs). With w = s·q + e, a head row and its int8
// copy, and x = t·X + f, a hidden row and its digits,
//
//     |w·x − s·t·(q·X)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖
//
// plus the rounding error of f32 sums, which is included in the factors of the hidden row. A bound may be loose but
// must be safe: the logits of all remaining candidates are computed in full precision.

#pragma once
#include "noise.cuh"

struct Interval {
    float lowest, highest;  // never NaN: infinite where the bound is unknown
};

__device__ __forceinline__ float or_if_nan(float v, float other) { return v != v ? other : v; }

__device__ __forceinline__ Interval interval(float estimate, const DigitRow& row, float error, float norm) {
    float bound = __fadd_rn(__fmul_rn(row.by_error, error), __fmul_rn(row.by_norm, norm));
    float lowest = __fsub_rn(estimate, bound), highest = __fadd_rn(estimate, bound);
    return {or_if_nan(lowest, minus_infinity()), or_if_nan(highest, -minus_infinity())};
}

// Returns the bounds of a logit that is known.
__device__ __forceinline__ Interval exactly(float logit) {
    return {or_if_nan(logit, minus_infinity()), or_if_nan(logit, -minus_infinity())};
}

// Returns the bounds of a token's logit. `row` is the row's entry of `estimates.rows`, `values` its estimates.
__device__ __forceinline__ Interval logit_bounds_of(const Estimates& estimates, const DigitRow& row, const float* values, u32 token) {
    if (!estimates.errors) return exactly(values[token]);
    return interval(values[token], row, estimates.errors[token], estimates.norms[token]);
}

// Loads four numbers, aligned to their total size.
__device__ __forceinline__ void load_four(const float* from, float (&out)[4]) {
    float4 four = *reinterpret_cast<const float4*>(from);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}

// The same for four tokens from a multiple of four on. All arrays have room for whole groups of 16.
__device__ __forceinline__ void four_logit_bounds(const Estimates& estimates, const DigitRow& row, const float* values, u32 first,
                                                  Interval (&out)[4]) {
    float of[4], errors[4] = {}, norms[4] = {};
    load_four(values + first, of);
    if (estimates.errors) {
        load_four(estimates.errors + first, errors);
        load_four(estimates.norms + first, norms);
    }
    UNROLL for (u32 i = 0; i < 4; i++) out[i] = estimates.errors ? interval(of[i], row, errors[i], norms[i]) : exactly(of[i]);
}

__device__ __forceinline__ DigitRow digit_row(const Estimates& estimates, u32 row) {
    return estimates.errors ? estimates.rows[row] : DigitRow{};
}

// Returns the bounds of a value from those of its logit. The last factor exceeds the roundings of a product and two sums.
__device__ __forceinline__ Interval value_bounds(const Interval& logit, const RowQuestion& question, u32 token) {
    if (question.temperature == 0.0f) return logit;
    float low, high;
    noise_bounds(noise_bits(token, question.keys[0], question.keys[1]), low, high);
    low = __fmul_rn(question.temperature, low), high = __fmul_rn(question.temperature, high);
    float lowest = __fsub_rn(__fadd_rn(logit.lowest, low), __fmul_rn(__fadd_rn(fabsf(logit.lowest), fabsf(low)), 2.5e-7f));
    float highest = __fadd_rn(__fadd_rn(logit.highest, high), __fmul_rn(__fadd_rn(fabsf(logit.highest), fabsf(high)), 2.5e-7f));
    return {or_if_nan(lowest, minus_infinity()), or_if_nan(highest, -minus_infinity())};
}

// Returns the estimate of a logit from the sums of the digits of a row: `first`, and `second` if there are two digits.
__device__ __forceinline__ float estimate_of(u32 digit_count, const DigitRow& row, float scale, i32 first, i32 second) {
    i64 sum = digit_count == 1 ? first : i64(first) * 256 + second;
    return __fmul_rn(__ll2float_rn(sum), __fmul_rn(scale, row.step));
}

// Returns a token's logit after its change, as `LogitChange::apply`.
__device__ __forceinline__ float changed_logit(const LogitChange& change, float logit) {
    logit = __fadd_rn(logit, change.bias);
    logit = logit < 0.0f ? __fmul_rn(logit, change.penalty) : __fdiv_rn(logit, change.penalty);
    return __fsub_rn(logit, change.less);
}

// The changes of a row. The inputs begin with the step.
__device__ __forceinline__ const LogitChange* changes_of(const Step* step, const RowQuestion& question) {
    return reinterpret_cast<const LogitChange*>(step) + question.first_change;
}

// Returns whether a token with this estimate was taken out of the estimates, because it has a change. Others with −∞ have no weight
// and are never drawn.
__device__ __forceinline__ bool is_taken(const RowQuestion& question, float estimate) {
    return question.changes > 0 && estimate == minus_infinity();
}

// Returns bits that compare as unsigned integers in the same order as the floats.
__device__ __forceinline__ u32 ordered(float v) {
    u32 bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
