// How far the screen's estimates may be off (backend/cpu/screen.rs). With w = s·q + e a head row and its
// int8, and x = t·X + f a hidden row and its digits,
//
//     |w·x − s·t·(q·X)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖
//
// plus what f32 sums may be off, which is in the factors of the hidden row. A bound need only be safe:
// the logits of whatever it leaves are computed in full precision.

#pragma once
#include "args.cuh"
#include "lanes.cuh"

struct Interval {
    float lowest, highest;  // never NaN: infinite where nothing is known
};

__device__ __forceinline__ Interval interval(float estimate, const DigitRow& row, float error, float norm) {
    float bound = __fadd_rn(__fmul_rn(row.by_error, error), __fmul_rn(row.by_norm, norm));
    float lowest = __fsub_rn(estimate, bound), highest = __fadd_rn(estimate, bound);
    if (lowest != lowest) lowest = minus_infinity();
    if (highest != highest) highest = -minus_infinity();
    return {lowest, highest};
}

// A logit's estimate from the sums of a row's digits: `first`, and `second` if there are two.
__device__ __forceinline__ float estimate_of(u32 digit_count, const DigitRow& row, float scale, i32 first, i32 second) {
    i64 sum = digit_count == 1 ? first : i64(first) * 256 + second;
    return __fmul_rn(__ll2float_rn(sum), __fmul_rn(scale, row.step));
}
