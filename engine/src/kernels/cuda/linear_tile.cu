// Ternary linears of many rows.
//
// In the gate kernels even tiles belong to the gate and odd tiles to the up matrix, so that a thread has both sums of
// an output. At 128 × 128 a k block takes 2.1 M multiply-adds for 20 KiB read. From about 300 rows the tensor cores
// are the limit; below that, the limit is that there are too few blocks to fill the device.

#include "linear.cuh"
#include "tiles.cuh"

// Returns tile m of the block, counted over the segments in order, or alternating between gate and up.
template <bool GATE> __device__ __forceinline__ Tile block_tile(const LinearArgs& args, u32 tiles, u32 m) {
    if (GATE) return tile_of(args, m % 2, blockIdx.x * (tiles / 2) + m / 2);
    return find_tile(args, blockIdx.x * tiles + m);
}

// Writes the sums of a warp as outputs. // token 2 t + odd, feature g + 8 high of each product
template <class S, bool GATE>
__device__ __forceinline__ void finish(const LinearArgs& args, u32 first, u32 count, u32 warp_m, u32 warp_n,
                                       const typename S::Sums& sums) {
    u32 lane = threadIdx.x % 32;
    constexpr u32 STEP = GATE ? 2 : 1;
    const Segment &gate = args.segments[0], &up = args.segments[1];
    Tile tiles[S::WARP_M];
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) tiles[m] = block_tile<GATE>(args, S::TILES, warp_m * S::WARP_M + m);
    UNROLL for (u32 i = 0; i < 2 * S::WARP_N; i++) {
        u32 n = i / 2, odd = i % 2, row = first + (warp_n * S::WARP_N + n) * N_TILE + lane % 4 * 2 + odd;
        if (row >= count) continue;
        float s = args.scales[row];
        i32 q = args.sums[row];
        Divisor shared = divisor(s);
        UNROLL for (u32 m = 0; m < S::WARP_M; m += STEP) {
            const Segment& segment = GATE ? gate : args.segments[tiles[m].segment];
            Divisor d = segment.divide ? divisor_of(segment, s) : shared;
            UNROLL for (u32 high = 0; high < 2; high++) {
                u32 feature = tiles[m].first + lane / 4 + high * 8;
                if (feature >= segment.rows) continue;
                float* at = segment.out + u64(row) * segment.stride + feature;
                float y = output(sums[m][n][high * 2 + odd] - q, d, segment, feature);
                if (GATE) {
                    Divisor of_up = up.divide ? divisor_of(up, s) : shared;
                    float u = output(sums[m + STEP - 1][n][high * 2 + odd] - q, of_up, up, feature);
                    *at = gated(args.activation, y, u);
                } else {
                    put(args.mode, at, y);
                }
            }
        }
    }
}

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
