// Per-token int8 quantization of a row in shared memory.

#pragma once
#include "norm.cuh"

// Returns clamp(round_half_even(v · s), −128, 127), as ops::quantize.
__device__ __forceinline__ i32 quantized(float v, float s) {
    return __float2int_rn(larger(smaller(__fmul_rn(v, s), 127.0f), -128.0f));
}

// Scale and exact sum of a quantized row.
struct Quantized {
    float scale;
    i32 sum;
};

// Quantizes a row as ops::quantize does, with s = 127 / max(1e-5, max|v|). Writes the bytes of the row, then zeros
// up to the stride, which is the width rounded up to 128. Every thread gets the result.
__device__ __forceinline__ Quantized quantize_row(float* row, u32 width, u32 stride, i8* out, u32 order = ORDER_PLAIN) {
    __shared__ float floats[32];
    __shared__ i32 integers[32];
    __syncthreads();
    float largest = largest_magnitude(row, width, floats);
    float s = __fdiv_rn(127.0f, largest > 1e-5f ? largest : 1e-5f);
    i32 sum = 0;
    for (u32 i = threadIdx.x; i < stride / 4; i += blockDim.x) {
        float4 v = reinterpret_cast<const float4*>(row)[i];
        // Padding is zero for every s: a row that contains an infinity has s = 0, and 0 · 0 is 0.
        i32 q[4] = {quantized(v.x, s), quantized(v.y, s), quantized(v.z, s), quantized(v.w, s)};
        sum += q[0] + q[1] + q[2] + q[3];
        u32 at = order == ORDER_WGMMA ? (i & ~15u) | i % 4 * 4 | i / 4 % 4 : i;
        reinterpret_cast<u32*>(out)[at] = u32(q[0] & 255) | u32(q[1] & 255) << 8 | u32(q[2] & 255) << 16 | u32(q[3]) << 24;
    }
    sum = over_block(sum_of_warp(sum), integers, [](i32 a, i32 b) { return a + b; });
    return {s, sum};
}
