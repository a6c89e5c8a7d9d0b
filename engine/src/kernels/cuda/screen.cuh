// Error bounds of the estimates of the screen (backend/cpu/screen.rs). With w = s·q + e, a head row and its int8
// copy, and x = t·X + f, a hidden row and its digits,
//
//     |w·x − s·t·(q·X)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖
//
// plus the rounding error of f32 sums, which is included in the factors of the hidden row. A bound may be loose but
// must be safe: the logits of all remaining candidates are computed in full precision.

#pragma once
#include "args.cuh"
#include "lanes.cuh"

struct Interval {
    float lowest, highest;  // never NaN: infinite where the bound is unknown
};

__device__ __forceinline__ Interval interval(float estimate, const DigitRow& row, float error, float norm) {
    float bound = __fadd_rn(__fmul_rn(row.by_error, error), __fmul_rn(row.by_norm, norm));
    float lowest = __fsub_rn(estimate, bound), highest = __fadd_rn(estimate, bound);
    if (lowest != lowest) lowest = minus_infinity();
    if (highest != highest) highest = -minus_infinity();
    return {lowest, highest};
}

// Returns the estimate of a logit from the sums of the digits of a row: `first`, and `second` if there are two digits.
__device__ __forceinline__ float estimate_of(u32 digit_count, const DigitRow& row, float scale, i32 first, i32 second) {
    i64 sum = digit_count == 1 ? first : i64(first) * 256 + second;
    return __fmul_rn(__ll2float_rn(sum), __fmul_rn(scale, row.step));
}
