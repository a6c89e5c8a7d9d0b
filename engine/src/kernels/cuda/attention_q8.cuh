// Integer products of attention with int8 keys and values. `../float/attention_q8.rs` defines the results:
//
//     score[p]  = f32(Σ_d query[d]·K[d][p]) · (key_scale[p] · (scale · query_scale))
//     weight[p] = exp(score[p] − max score)                        p ≤ position of the query
//     factor[p] = weight[p] · value_scale[p]
//     largest_s = max(10⁻³⁰, max factor[p])                        p in segment s of 128 positions
//     w[p]      = round(factor[p] · (32767 / largest_s))           half to even
//     sum_s[d]  = f32(Σ_p w[p]·V[p][d])
//     out[d]    = (Σ_s sum_s[d] · (largest_s / 32767)) / Σ_p weight[p]   s ascending, fused; the divisor in lane order
//
// The inner sums are exact, so their order is free: an instruction adds four products of a score, or two products
// of an output, because weights have sixteen bits.

#pragma once
#include "kv.cuh"

// Positions of a segment: their weights have one scale.
constexpr u32 SEGMENT = 128;
// Largest integer weight.
constexpr float WEIGHT_MAX = 32767.0f;
// Least largest factor of a segment.
constexpr float FACTOR_MIN = 1e-30f;

__device__ __forceinline__ float magnitude(float v) { return fabsf(saturated(v)); }

__device__ __forceinline__ u32 narrow4(float4 v, float scale) {
    u32 x = u8(KvQ8::narrow(v.x, scale)), y = u8(KvQ8::narrow(v.y, scale));
    u32 z = u8(KvQ8::narrow(v.z, scale)), w = u8(KvQ8::narrow(v.w, scale));
    return x | y << 8 | z << 16 | w << 24;
}

// Narrows the queries of a warp as keys are narrowed, in place: f32 (Q, padded_dim) becomes i8 (Q, padded_dim).
// `factors` gets what multiplies the products of each query, besides the scales of keys.
template <int Q>
__device__ __forceinline__ const i8* narrow_queries(const AttentionArgs& args, float* queries, float (&factors)[Q]) {
    u32 lane = threadIdx.x % 32, quads = args.pool.padded_dim / 4;
    const float4* from = reinterpret_cast<const float4*>(queries);
    u32* to = reinterpret_cast<u32*>(queries);
    float largest[Q] = {}, scales[Q];
    UNROLL_BY(1) for (u32 i = lane; i < quads; i += 32) {
        UNROLL for (u32 q = 0; q < Q; q++) {
            float4 v = from[q * quads + i];
            float of_four = larger(larger(magnitude(v.x), magnitude(v.y)), larger(magnitude(v.z), magnitude(v.w)));
            largest[q] = larger(of_four, largest[q]);
        }
    }
    UNROLL for (u32 q = 0; q < Q; q++) {
        scales[q] = int8_scale(largest[q]);
        factors[q] = __fmul_rn(args.scale, scales[q]);
    }
    UNROLL for (u32 q = 0; q < Q; q++) {
        UNROLL_BY(1) for (u32 first = 0; first < quads; first += 32) {
            u32 at = q * quads + first + lane;
            bool exists = first + lane < quads;
            u32 bytes = exists ? narrow4(from[at], scales[q]) : 0;
            // The bytes replace elements that other lanes read.
            __syncwarp();
            if (exists) to[at] = bytes;
        }
    }
    __syncwarp();
    return reinterpret_cast<const i8*>(queries);
}

// Adds the products of sixteen elements. Queries are zero from head_dim on, so the number of elements is not needed.
template <class E, int Q, int P>
__device__ __forceinline__ void score_chunk(const i8* queries, u32 padded, const uint4 (&chunk)[P], u32, i32 (&sums)[P][Q]) {
    UNROLL for (u32 q = 0; q < Q; q++) {
        uint4 v = *reinterpret_cast<const uint4*>(queries + q * padded);
        UNROLL for (u32 i = 0; i < P; i++) {
            sums[i][q] = dot4(v.x, chunk[i].x, sums[i][q]);
            sums[i][q] = dot4(v.y, chunk[i].y, sums[i][q]);
            sums[i][q] = dot4(v.z, chunk[i].z, sums[i][q]);
            sums[i][q] = dot4(v.w, chunk[i].w, sums[i][q]);
        }
    }
}

// Returns the scales of the values of four positions, with 0 for positions after `last`: these were not written and
// may be NaN.
__device__ __forceinline__ float4 written_scales(float4 scales, u32 position, u32 last) {
    return make_float4(position <= last ? scales.x : 0.0f, position + 1 <= last ? scales.y : 0.0f,
                       position + 2 <= last ? scales.z : 0.0f, position + 3 <= last ? scales.w : 0.0f);
}

__device__ __forceinline__ float4 factors_of(float4 weights, float4 scales) {
    return make_float4(__fmul_rn(weights.x, scales.x), __fmul_rn(weights.y, scales.y), __fmul_rn(weights.z, scales.z),
                       __fmul_rn(weights.w, scales.w));
}

// Returns the largest factor of a segment; each lane of the warp has four factors of it.
__device__ __forceinline__ float largest_factor(float4 factors) {
    return largest_magnitude_of_warp(larger(larger(factors.x, factors.y), larger(larger(factors.z, factors.w), FACTOR_MIN)));
}

// Returns bits of which the low 16 are factor · inverse, rounded as in exp_lane: the product is within 0..=32767.
__device__ __forceinline__ u32 rounded(float factor, float inverse) {
    return __float_as_uint(__fadd_rn(__fmul_rn(factor, inverse), 12582912.0f));
}

// Returns the integer weights of four factors, sixteen bits each. `inverse` is 32767 / largest factor.
__device__ __forceinline__ uint2 integer_weights(float4 factors, float inverse) {
    u32 x = rounded(factors.x, inverse), y = rounded(factors.y, inverse);
    u32 z = rounded(factors.z, inverse), w = rounded(factors.w, inverse);
    return make_uint2((x & 0xffffu) | y << 16, (z & 0xffffu) | w << 16);
}

// Adds a chunk of positions to the sums of Q queries by D elements. // weights: (Q, stride)
template <class E, int Q, int D>
__device__ __forceinline__ void weigh_chunk(const u16* weights, u32 stride, const uint4 (&chunk)[D], i32 (&sums)[D][Q]) {
    UNROLL for (u32 q = 0; q < Q; q++) {
        const uint4* of_query = reinterpret_cast<const uint4*>(weights + q * stride);
        uint4 low = of_query[0], high = of_query[1];
        UNROLL for (u32 i = 0; i < D; i++) {
            sums[i][q] = dot2_low(low.x, chunk[i].x, sums[i][q]);
            sums[i][q] = dot2_high(low.y, chunk[i].x, sums[i][q]);
            sums[i][q] = dot2_low(low.z, chunk[i].y, sums[i][q]);
            sums[i][q] = dot2_high(low.w, chunk[i].y, sums[i][q]);
            sums[i][q] = dot2_low(high.x, chunk[i].z, sums[i][q]);
            sums[i][q] = dot2_high(high.y, chunk[i].z, sums[i][q]);
            sums[i][q] = dot2_low(high.z, chunk[i].w, sums[i][q]);
            sums[i][q] = dot2_high(high.w, chunk[i].w, sums[i][q]);
        }
    }
}

// Returns the output after a segment. `unit` is the segment's largest factor / 32767.
__device__ __forceinline__ float add_segment(i32 sum, float unit, float out) { return __fmaf_rn(__int2float_rn(sum), unit, out); }
