// Code that the kernels of linears with scales of groups share.
//
// As in linear.cuh, a product is Σ code · q with codes 0, 1, 2 in int32, less Σ q. Two digits are two columns of the
// product, side by side: column 2 r has the high digits of row r, column 2 r + 1 the low ones. With 128 inputs a sum
// is at most 2 · 128 · 32,896, and the ternary product of two digits is below 2^23, so its conversion to f32 is exact.
// kernels/group_gemm.rs defines the results: groups are joined in ascending order, so no two threads share an output.

#pragma once
#include "args.cuh"
#include "fragments.cuh"
#include "outputs.cuh"

// The weights of sixteen output features of one segment.
struct GroupTile {
    const uint4* weights;  // (k_blocks, 32)
    const u16* scales;     // (groups, 16)
    u32 segment;
    u32 first;  // first row in the segment; beyond the end of the segment if the tile does not exist
};

// Returns tile `index`, counted over all segments in order. An index beyond the last tile gives the first tile of the
// last segment, with `first` beyond its end, so that the tile has no output.
__device__ __forceinline__ GroupTile find_group_tile(const GroupLinearArgs& args, u32 index) {
    GroupTile tile = {args.segments[0].weights, args.segments[0].scales, 0, index * TILE_ROWS};
    u32 start = 0;
    UNROLL for (u32 s = 0; s < 3; s++) {
        const GroupSegment& segment = args.segments[s];
        u32 count = (segment.rows + TILE_ROWS - 1) / TILE_ROWS;
        if (s < args.segment_count && index >= start) {
            u64 at = index < start + count ? index - start : 0;
            tile = {segment.weights + at * args.k_blocks * 32, segment.scales + at * segment.groups * TILE_ROWS, s,
                    (index - start) * TILE_ROWS};
        }
        start += count;
    }
    return tile;
}

// Adds the product of one group: fma(f32(sum), weight scale · row scale, y).
__device__ __forceinline__ float joined(i32 sum, float of_weights, float of_row, float y) {
    return __fmaf_rn(__int2float_rn(sum), __fmul_rn(of_weights, of_row), y);
}
