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

// Quantizes four elements to the bytes of a word, and adds them to a sum.
__device__ __forceinline__ u32 quantized_word(float a, float b, float c, float d, float s, i32& sum) {
    i32 q[4] = {quantized(a, s), quantized(b, s), quantized(c, s), quantized(d, s)};
    sum += q[0] + q[1] + q[2] + q[3];
    return u32(q[0] & 255) | u32(q[1] & 255) << 8 | u32(q[2] & 255) << 16 | u32(q[3]) << 24;
}

// Returns the index of a word in a quantized row.
__device__ __forceinline__ u32 word_at(u32 i, u32 order) {
    return order == ORDER_WGMMA ? (i & ~15u) | i % 4 * 4 | i / 4 % 4 : i;
}

// Quantizes a row in registers as ops::quantize does, with s = 127 / max(1e-5, max|v|). Writes the bytes of the row, then
// zeros up to the stride. Every thread gets the result; the block is synchronised then.
__device__ __forceinline__ Quantized quantize_part(const RowPart& part, u32 stride, i8* out, u32 order = ORDER_PLAIN) {
    __shared__ float largest_of[32];
    __shared__ i32 sum_of[32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float largest = 0.0f;
    UNROLL for (u32 u = 0; u < RowPart::GROUPS; u++) {
        UNROLL for (u32 e = 0; e < 4; e++) largest = larger(fabsf(part.of[u][e]), largest);
    }
    largest = largest_magnitude_of_warp(largest);
    if (lane == 0) largest_of[warp] = largest;
    __syncthreads();
    largest = largest_magnitude_of_warp(lane < warps ? largest_of[lane] : 0.0f);
    float s = __fdiv_rn(127.0f, largest > 1e-5f ? largest : 1e-5f);
    i32 sum = 0;
    UNROLL for (u32 u = 0; u < RowPart::GROUPS; u++) {
        u32 i = threadIdx.x + u * blockDim.x;
        const float* v = part.of[u];
        // Padding is zero for every s: a row that contains an infinity has s = 0, and 0 · 0 is 0.
        if (i < stride / 4) reinterpret_cast<u32*>(out)[word_at(i, order)] = quantized_word(v[0], v[1], v[2], v[3], s, sum);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) sum_of[warp] = sum;
    __syncthreads();
    return {s, sum_of_warp(lane < warps ? sum_of[lane] : 0)};
}

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
        reinterpret_cast<u32*>(out)[word_at(i, order)] = quantized_word(v.x, v.y, v.z, v.w, s, sum);
    }
    sum = over_block(sum_of_warp(sum), integers, [](i32 a, i32 b) { return a + b; });
    return {s, sum};
}
