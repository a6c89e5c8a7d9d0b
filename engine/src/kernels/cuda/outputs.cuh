// The last steps of all linears.

#pragma once
#include "args.cuh"

// Adds the bias of a feature, if the linear has one. Without one nothing is added: −0 + 0 is 0.
__device__ __forceinline__ float biased(float y, const float* bias, u32 feature) {
    return bias ? __fadd_rn(y, bias[feature]) : y;
}

// Stores an output, or adds it to the stored number.
__device__ __forceinline__ void put(u32 mode, float* at, float y) {
    *at = mode == LINEAR_ADD ? __fadd_rn(*at, y) : y;
}
