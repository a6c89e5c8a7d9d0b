// Code that the kernels of ternary linears share: finds tiles of weights and converts integer sums to outputs.
//
// A sum is Σ code · q with codes 0, 1, 2 in int32; its magnitude is at most 2 · 128 · width. The sum minus Σ q is
// the ternary product, and the order of the additions does not matter.

#pragma once
#include "args.cuh"
#include "fragments.cuh"
#include "outputs.cuh"

// The weights of sixteen output features of one segment.
struct Tile {
    const uint4* weights;  // (k_blocks, 32)
    u32 segment;
    u32 first;  // first row in the segment; beyond the end of the segment if the tile does not exist
};

__device__ __forceinline__ u32 tile_count(const Segment& segment) { return (segment.rows + TILE_ROWS - 1) / TILE_ROWS; }

// Returns tile `index`, counted over all segments in order. An index beyond the last tile gives the weights of the
// first tile of the last segment, with `first` beyond its end, so that the tile has no output.
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

// Returns tile `index` of one segment. An index beyond the last tile is handled as in find_tile.
__device__ __forceinline__ Tile tile_of(const LinearArgs& args, u32 s, u32 index) {
    const Segment& segment = args.segments[s];
    u64 at = index < tile_count(segment) ? u64(index) * args.k_blocks * 32 : 0;
    return {segment.weights + at, s, index * TILE_ROWS};
}

// A divisor of many outputs. The quotients are correctly rounded.
//
// With y = RN(1 / d), two steps q += (a − q d) · y from q = a · y give RN(a / d): after the first step q is within
// an ulp, and the remainder is exact (Markstein). Outside 2^±60 these steps could overflow or underflow for an
// integer a below 2^31; there the division instruction is used.
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

// Returns the divisor in ops::rescale for one token and segment.
__device__ __forceinline__ Divisor divisor_of(const Segment& segment, float s) {
    return divisor(segment.divide ? __fmul_rn(s, segment.scale) : s);
}

// Converts an integer sum to the output of the linear: (a / s) · scale or a / (s · scale).
__device__ __forceinline__ float rescaled(i32 sum, const Divisor& d, const Segment& segment) {
    float y = divided(__int2float_rn(sum), d);
    return segment.divide ? y : __fmul_rn(y, segment.scale);
}

// Converts an integer sum to the output of a feature, with its bias.
__device__ __forceinline__ float output(i32 sum, const Divisor& d, const Segment& segment, u32 feature) {
    return biased(rescaled(sum, d, segment), segment.bias, feature);
}

// Returns act(gate) · up, as ops::gate.
__device__ __forceinline__ float gated(u32 activation, float gate, float up) {
    if (activation == ACTIVATION_SQUARED_RELU) {
        float r = gate > 0.0f ? gate : 0.0f;
        return __fmul_rn(__fmul_rn(r, r), up);
    }
    float e = exp_lane(__fsub_rn(0.0f, gate));
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(e, 1.0f)), up);
}
