// What the kernels of ternary linears share: where a tile of weights lies, how codes become
// fragments, how integer sums become outputs.
//
// A sum is Σ code · q with codes 0, 1, 2 in int32: at most 2 · 128 · width in magnitude. Less Σ q it is
// the ternary product, whatever order it was added in.

#pragma once
#include "args.cuh"
#include "fragments.cuh"

// Sixteen output features of one segment.
struct Tile {
    const uint4* weights;  // (k_blocks, 32)
    u32 segment;
    u32 first;  // row of the segment; beyond its end: no such tile
};

__device__ __forceinline__ u32 tile_count(const Segment& segment) { return (segment.rows + TILE_ROWS - 1) / TILE_ROWS; }

// Tile `index` of all segments' one after another. One beyond the last is the last segment's first,
// with no output.
__device__ __forceinline__ Tile find_tile(const LinearArgs& args, u32 index) {
    Tile tile = {args.segments[0].weights, 0, index * TILE_ROWS};
    u32 start = 0;
    UNROLL for (u32 s = 0; s < 3; s++) {
        u32 count = tile_count(args.segments[s]);
        if (s < args.segment_count && index >= start) {
            bool inside = index < start + count;
            u64 at = inside ? u64(index - start) * args.k_blocks * 32 : 0;
            tile = {args.segments[s].weights + at, s, (index - start) * TILE_ROWS};
        }
        start += count;
    }
    return tile;
}

// Tile `index` of one segment, as above.
__device__ __forceinline__ Tile tile_of(const LinearArgs& args, u32 s, u32 index) {
    const Segment& segment = args.segments[s];
    u64 at = index < tile_count(segment) ? u64(index) * args.k_blocks * 32 : 0;
    return {segment.weights + at, s, index * TILE_ROWS};
}

// Division by one divisor of many outputs, correctly rounded.
//
// With y = RN(1 / d), two steps q += (a − q d) · y from q = a · y give RN(a / d): after the first, q is
// within an ulp, and the remainder is exact (Markstein). Outside 2^±60, where that could overflow or
// underflow for an integer a below 2^31, it is divided.
struct Divisor {
    float value, reciprocal;
    bool plain;
};

__device__ __forceinline__ Divisor divisor(float value) {
    float magnitude = fabsf(value);
    return {value, __frcp_rn(value), magnitude > 8.7e-19f && magnitude < 1.1e18f};
}

__device__ __forceinline__ float divided(float a, const Divisor& d) {
    if (!d.plain) return __fdiv_rn(a, d.value);
    float q = __fmul_rn(a, d.reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, d.value, a), d.reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, d.value, a), d.reciprocal, q);
}

// What ops::rescale divides by, of one token and segment.
__device__ __forceinline__ Divisor divisor_of(const Segment& segment, float s) {
    return divisor(segment.divide ? __fmul_rn(s, segment.scale) : s);
}

// An integer sum as the linear's output: (a / s) · scale or a / (s · scale).
__device__ __forceinline__ float rescaled(i32 sum, const Divisor& d, const Segment& segment) {
    float y = divided(__int2float_rn(sum), d);
    return segment.divide ? y : __fmul_rn(y, segment.scale);
}

// act(gate) · up, as ops::gate.
__device__ __forceinline__ float gated(u32 activation, float gate, float up) {
    if (activation == ACTIVATION_SQUARED_RELU) {
        float r = gate > 0.0f ? gate : 0.0f;
        return __fmul_rn(__fmul_rn(r, r), up);
    }
    float e = exp_lane(__fsub_rn(0.0f, gate));
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(e, 1.0f)), up);
}

// Stores an output, or adds it to what is there.
__device__ __forceinline__ void put(u32 mode, float* at, float y) {
    *at = mode == LINEAR_ADD ? __fadd_rn(*at, y) : y;
}
