// The float operations of `../float/lanes.rs`, written so that no compiler flag changes their results: comparisons
// with NaN, the exponential, the order of a sum over sixteen lanes.

#pragma once
#include "ptx.cuh"

// Number of lanes of every sum: lane j adds elements j, j + 16, …
constexpr u32 LANES = 16;
// Positions per KV block.
constexpr u32 BLOCK_TOKENS = 16;
constexpr u32 FULL_WARP = 0xffffffffu;

// Returns a if a > b, else b. If either is NaN, returns b.
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
// Returns a if a < b, else b.
__device__ __forceinline__ float smaller(float a, float b) { return a < b ? a : b; }

// Limits v to the finite range of f16; NaN becomes the upper end.
__device__ __forceinline__ float saturated(float v) { return larger(smaller(v, 65504.0f), -65504.0f); }

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Returns e^x by the polynomial of Cephes, as Lanes::exp. Adding 1.5 · 2^23 rounds to an integer, ties to even, and
// leaves the integer in the low bits. This takes a fourth of the time of the instructions for rounding and
// conversion. x must be within ±87.3.
__device__ __forceinline__ float exp_in_range(float x) {
    constexpr float WHOLE = 12582912.0f;
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896340736f), WHOLE);
    float n = __fsub_rn(shifted, WHOLE);
    float r = __fmaf_rn(n, -0.6933594f, x);
    r = __fmaf_rn(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = __fmaf_rn(p, r, 1.3981999e-3f);
    p = __fmaf_rn(p, r, 8.333452e-3f);
    p = __fmaf_rn(p, r, 4.1665796e-2f);
    p = __fmaf_rn(p, r, 1.6666665e-1f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, __fmul_rn(r, r), __fadd_rn(r, 1.0f));
    return __fmul_rn(p, __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u));
}

// The same for all x, which it limits to that range.
__device__ __forceinline__ float exp_lane(float x) { return exp_in_range(larger(smaller(x, 87.3f), -87.3f)); }

// Returns, in each thread, the sum of sixteen lanes that sixteen neighbouring threads hold: lane i + lane i + 8,
// then + 4, + 2, + 1. All threads of the warp must call it; each half of the warp has its own sum.
__device__ __forceinline__ float sum_of_lanes(float lane) {
    for (u32 width = 8; width > 0; width /= 2) {
        lane = __fadd_rn(lane, __shfl_xor_sync(FULL_WARP, lane, width));
    }
    return lane;
}

// Returns the largest value of a warp. The values must not be NaN.
__device__ __forceinline__ float largest_of_warp(float v) {
    for (u32 width = 16; width > 0; width /= 2) v = larger(__shfl_xor_sync(FULL_WARP, v, width), v);
    return v;
}

// The same for values that are not negative: their bits have the order of the values.
__device__ __forceinline__ float largest_magnitude_of_warp(float v) { return __uint_as_float(largest_u32_of_warp(__float_as_uint(v))); }

// Returns the scale of int8 numbers of a head, as ops::int8_scale. `largest` is the largest magnitude of its elements.
__device__ __forceinline__ float int8_scale_of(float largest) { return __fdiv_rn(larger(largest, 1e-5f), 127.0f); }

// The same; `largest` is the largest magnitude of the elements that this lane has. All lanes of the warp must call it.
__device__ __forceinline__ float int8_scale(float largest) { return int8_scale_of(largest_magnitude_of_warp(largest)); }

// Converts bf16 bits to f32, exactly.
__device__ __forceinline__ float widen_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Types of stored numbers. They widen to f32 exactly and are read in chunks of sixteen bytes.
struct F32 {
    static constexpr u32 CHUNK = 4;
    typedef float Stored;
    static __device__ __forceinline__ float widen(float v) { return v; }
    static __device__ __forceinline__ void widen_chunk(uint4 chunk, float (&out)[CHUNK]) {
        out[0] = __uint_as_float(chunk.x), out[1] = __uint_as_float(chunk.y);
        out[2] = __uint_as_float(chunk.z), out[3] = __uint_as_float(chunk.w);
    }
};

struct F16 {
    static constexpr u32 CHUNK = 8;
    typedef u16 Stored;
    static __device__ __forceinline__ float widen(u16 v) { return widen_f16(v); }
    static __device__ __forceinline__ void widen_chunk(uint4 chunk, float (&out)[CHUNK]) {
        u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        UNROLL for (u32 i = 0; i < 4; i++) {
            out[2 * i] = widen_f16(u16(words[i]));
            out[2 * i + 1] = widen_f16(u16(words[i] >> 16));
        }
    }
};

struct Bf16 {
    static constexpr u32 CHUNK = 8;
    typedef u16 Stored;
    static __device__ __forceinline__ float widen(u16 v) { return widen_bf16(v); }
    static __device__ __forceinline__ void widen_chunk(uint4 chunk, float (&out)[CHUNK]) {
        u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        UNROLL for (u32 i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

struct I8 {
    static constexpr u32 CHUNK = 16;
    typedef i8 Stored;
    static __device__ __forceinline__ float widen(i8 v) { return __int2float_rn(v); }
    static __device__ __forceinline__ void widen_chunk(uint4 chunk, float (&out)[CHUNK]) {
        u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        UNROLL for (u32 i = 0; i < 16; i++) out[i] = __int2float_rn(i8(words[i / 4] >> (8 * (i % 4))));
    }
};
