// Ternary linears of many rows.
//
// At 128 × 128 a k block takes 2.1 M multiply-adds for 20 KiB read. From about 300 rows the tensor cores
// are the limit; below that, the limit is that there are too few blocks to fill the device.

#include "linear_many.cuh"
#include "tiles.cuh"

template <class S, bool GATE> __device__ __forceinline__ void linear_tiles(const LinearArgs& args) {
    start_after_previous();
    u32 first = blockIdx.y * S::TOKENS, count = args.step->rows;
    if (first >= count) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % S::WARPS_M, warp_n = warp / S::WARPS_M;
    const uint4* weights[S::WEIGHT_COPIES];
    UNROLL for (u32 i = 0; i < S::WEIGHT_COPIES; i++) {
        weights[i] = block_tile<GATE>(args, S::TILES, i * S::TILES_AT_ONCE + warp).weights + lane;
    }
    typename S::Sums sums = {};
    multiply_tiles<S>(weights, args.x, first, count, args.k_blocks, warp_m, warp_n, sums);
    finish<S, GATE>(args, first, count, warp_m, warp_n, sums);
}

typedef Shape<Ternary, 8, 128, 2, 4, 4> Tile128;
typedef Shape<Ternary, 4, 64, 2, 2, 4> Tile64;

KERNEL_BY(256, 2) linear_tile(const LinearArgs args) { linear_tiles<Tile128, false>(args); }
KERNEL_BY(256, 2) gate_tile(const LinearArgs args) { linear_tiles<Tile128, true>(args); }
KERNEL_BY(128, 4) linear_tile64(const LinearArgs args) { linear_tiles<Tile64, false>(args); }
KERNEL_BY(128, 4) gate_tile64(const LinearArgs args) { linear_tiles<Tile64, true>(args); }
