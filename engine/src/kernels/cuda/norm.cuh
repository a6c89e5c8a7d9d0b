// RMSNorm of a row in shared memory, in lane order, and reductions over a block.

#pragma once
#include "args.cuh"
#include "lanes.cuh"

// Combines the values of all warps of the block; every thread gets the result. `shared` has room for one value per
// warp.
template <class T, class Combine> __device__ __forceinline__ T over_block(T of_warp, T* shared, Combine combine) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
    __syncthreads();
    T all = shared[0];
    for (u32 w = 1; w < blockDim.x / 32; w++) all = combine(all, shared[w]);
    return all;
}

// Returns the sum over all threads of the block.
__device__ __forceinline__ double sum_over_block(double v, double* shared) {
    for (u32 width = 16; width > 0; width /= 2) v = __dadd_rn(v, __shfl_xor_sync(FULL_WARP, v, width));
    return over_block(v, shared, [](double a, double b) { return __dadd_rn(a, b); });
}

// Rows in shared memory have room for a multiple of this many elements, with zeros after the width.
constexpr u32 ROW_MULTIPLE = 128;

__device__ __forceinline__ void pad_row(float* row, u32 width) {
    u32 end = (width + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
    for (u32 i = width + threadIdx.x; i < end; i += blockDim.x) row[i] = 0.0f;
}

// Copies a row to shared memory and pads it. Each thread has several loads in progress at a time. The caller
// synchronises the block.
__device__ __forceinline__ void load_row(const float* x, u32 width, float* row) {
    pad_row(row, width);
    if (width % 4 == 0) {
        constexpr u32 TOGETHER = 4;
        for (u32 first = threadIdx.x; first < width / 4; first += TOGETHER * blockDim.x) {
            float4 some[TOGETHER];
            UNROLL for (u32 u = 0; u < TOGETHER; u++) {
                u32 i = first + u * blockDim.x;
                if (i < width / 4) some[u] = reinterpret_cast<const float4*>(x)[i];
            }
            UNROLL for (u32 u = 0; u < TOGETHER; u++) {
                u32 i = first + u * blockDim.x;
                if (i < width / 4) reinterpret_cast<float4*>(row)[i] = some[u];
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) row[i] = x[i];
    }
}

// Returns the sum of squares of one lane, added as one chain. Eight elements are read while eight are added. The
// zeros after the width do not change any bit of the sum.
__device__ __forceinline__ float squares_of_lane(const float* row, u32 width, u32 lane) {
    constexpr u32 TOGETHER = ROW_MULTIPLE / LANES;
    float squares = 0.0f, next[TOGETHER];
    const float *at = row + lane, *last = at + (width - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
    UNROLL for (u32 u = 0; u < TOGETHER; u++) next[u] = at[u * LANES];
    UNROLL_BY(2) while (at < last) {
        at += ROW_MULTIPLE;
        float now[TOGETHER];
        UNROLL for (u32 u = 0; u < TOGETHER; u++) {
            now[u] = next[u];
            next[u] = at[u * LANES];
        }
        UNROLL for (u32 u = 0; u < TOGETHER; u++) squares = __fmaf_rn(now[u], now[u], squares);
    }
    UNROLL for (u32 u = 0; u < TOGETHER; u++) squares = __fmaf_rn(next[u], next[u], squares);
    return squares;
}

// row = weight * (row / sqrt(mean(row²) + eps)), in place, as ops::rms_norm. The first half of the first warp adds
// the squares in sixteen lanes by fused multiply-add while the other threads wait. The function synchronises the
// block at its start and its end. AHEAD: number of weights that a thread loads before the sum, for weights in global
// memory.
template <int AHEAD = 16>
__device__ __forceinline__ void rms_norm(float* row, const float* weight, u32 width, float eps) {
    __shared__ float inverse_shared;
    float ahead[AHEAD + 1];
    UNROLL for (int u = 0; u < AHEAD; u++) {
        u32 i = threadIdx.x + u32(u) * blockDim.x;
        ahead[u] = i < width ? weight[i] : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float squares = squares_of_lane(row, width, threadIdx.x % LANES);
        float mean = __fdiv_rn(sum_of_lanes(squares), __int2float_rn(i32(width)));
        float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        if (threadIdx.x == 0) inverse_shared = inverse;
    }
    __syncthreads();
    float inverse = inverse_shared;
    UNROLL for (int u = 0; u < AHEAD; u++) {
        u32 i = threadIdx.x + u32(u) * blockDim.x;
        if (i < width) row[i] = __fmul_rn(ahead[u], __fmul_rn(row[i], inverse));
    }
    for (u32 i = threadIdx.x + AHEAD * blockDim.x; i < width; i += blockDim.x) {
        row[i] = __fmul_rn(weight[i], __fmul_rn(row[i], inverse));
    }
    __syncthreads();
}

// Part of a row that a thread has in registers: groups of four neighbouring elements, threadIdx.x, threadIdx.x +
// blockDim.x, … Elements after the width are zero.
struct RowPart {
    static constexpr u32 GROUPS = 4;
    float of[GROUPS][4];

    // Returns whether the parts of all threads of the block have room for rows of a stride, a multiple of 128.
    static __device__ __forceinline__ bool has_room(u32 width, u32 stride) {
        return width % 4 == 0 && stride <= 4 * GROUPS * blockDim.x;
    }

    // Loads the part of a row. `load` loads sixteen bytes.
    template <class Load> __device__ __forceinline__ void load(const float* row, u32 width, Load load) {
        UNROLL for (u32 u = 0; u < GROUPS; u++) {
            u32 i = threadIdx.x + u * blockDim.x;
            uint4 four = i < width / 4 ? load(reinterpret_cast<const uint4*>(row) + i) : uint4{0, 0, 0, 0};
            of[u][0] = __uint_as_float(four.x), of[u][1] = __uint_as_float(four.y);
            of[u][2] = __uint_as_float(four.z), of[u][3] = __uint_as_float(four.w);
        }
    }

    // Loads the part of a row that earlier kernels write.
    __device__ __forceinline__ void load_row(const float* row, u32 width) {
        load(row, width, [](const uint4* from) { return load_constant(from); });
    }

    // Loads the part of the weights of a norm.
    __device__ __forceinline__ void load_weights(const float* row, u32 width) {
        load(row, width, [](const uint4* from) { return load_once(from); });
    }

    // Copies the part to a row in shared memory.
    __device__ __forceinline__ void store(float* row, u32 stride) const {
        UNROLL for (u32 u = 0; u < GROUPS; u++) {
            u32 i = threadIdx.x + u * blockDim.x;
            if (i < stride / 4) reinterpret_cast<float4*>(row)[i] = {of[u][0], of[u][1], of[u][2], of[u][3]};
        }
    }
};

// The same as rms_norm, of a row in registers. `row` is room for it in shared memory. // (stride)
__device__ __forceinline__ void rms_norm(RowPart& part, const RowPart& weight, float* row, u32 width, u32 stride, float eps) {
    __shared__ float inverse_shared;
    part.store(row, stride);
    __syncthreads();
    if (threadIdx.x < 32) {
        float squares = squares_of_lane(row, width, threadIdx.x % LANES);
        float mean = __fdiv_rn(sum_of_lanes(squares), __int2float_rn(i32(width)));
        float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        if (threadIdx.x == 0) inverse_shared = inverse;
    }
    __syncthreads();
    float inverse = inverse_shared;
    UNROLL for (u32 u = 0; u < RowPart::GROUPS; u++) {
        if (threadIdx.x + u * blockDim.x >= width / 4) continue;  // zeros stay, also where the inverse is not a number
        UNROLL for (u32 e = 0; e < 4; e++) part.of[u][e] = __fmul_rn(weight.of[u][e], __fmul_rn(part.of[u][e], inverse));
    }
}

// Returns the largest magnitude of a row in shared memory; NaNs are ignored.
__device__ __forceinline__ float largest_magnitude(const float* row, u32 width, float* shared) {
    float largest = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) largest = larger(fabsf(row[i]), largest);
    return over_block(largest_of_warp(largest), shared, larger);
}
