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
