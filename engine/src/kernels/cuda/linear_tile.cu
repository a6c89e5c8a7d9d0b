// Ternary linears of many rows: tiles of outputs by int8 tensor cores.
//
// A block computes 16 · TILES features for TOKENS rows. Weights, still in 2 bits, and activations come to
// shared memory k block by k block, STAGES deep; each warp expands codes in registers (7 operations for
// the 16 codes of a fragment, which then serves WARP_N products). In the gate kernels even tiles are the
// gate's and odd ones the up matrix's, so that a thread ends up with both sums of an output.
//
// At 128 × 128 a k block is 2.1 M multiply-adds for 20 KiB read: bound by the tensor cores from about 300
// rows, by the filling of the device below.

#include "linear.cuh"

template <int TILES_, int TOKENS_, int WARPS_M_, int WARPS_N_> struct Shape {
    static constexpr u32 TILES = TILES_, TOKENS = TOKENS_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
    static constexpr u32 THREADS = WARPS_M * WARPS_N * 32;
    static constexpr u32 WARP_M = TILES / WARPS_M, WARP_N = TOKENS / N_TILE / WARPS_N;
    static constexpr u32 STAGES = 4;
    static constexpr u32 WEIGHT_BYTES = TILES * 512, STAGE_BYTES = WEIGHT_BYTES + TOKENS * K_BLOCK;
};

// Where 16 bytes of a row lie in a stage: odd rows have their halves swapped, so that the eight lanes
// that read together, of two rows, meet eight different bank groups.
__device__ __forceinline__ u32 chunk_at(u32 token, u32 chunk) {
    return token * K_BLOCK + (chunk ^ ((token & 1) * 4)) * 16;
}

// Starts the copies of one k block.
template <class S>
__device__ __forceinline__ void fetch(const uint4* (&weights)[S::TILES * 32 / S::THREADS + 1], const i8* x, u32 first,
                                      u32 count, u32 k_block, u32 k_blocks, u8* stage) {
    UNROLL for (u32 i = 0; i < (S::TILES * 32 + S::THREADS - 1) / S::THREADS; i++) {
        u32 at = i * S::THREADS + threadIdx.x;
        if (at < S::TILES * 32) copy_async16(stage + at * 16, weights[i] + k_block * 32);
    }
    UNROLL for (u32 i = 0; i < S::TOKENS * 8 / S::THREADS; i++) {
        u32 at = i * S::THREADS + threadIdx.x, token = at / 8, chunk = at % 8;
        u32 row = first + token < count ? first + token : count - 1;
        const i8* from = x + u64(row) * (k_blocks * K_BLOCK) + k_block * K_BLOCK + chunk * 16;
        copy_async16(stage + S::WEIGHT_BYTES + chunk_at(token, chunk), from);
    }
}

// Adds the products of one k block to a warp's sums.
template <class S>
__device__ __forceinline__ void multiply_stage(const u8* stage, u32 warp_m, u32 warp_n,
                                               i32 (&sums)[S::WARP_M][S::WARP_N][4]) {
    u32 lane = threadIdx.x % 32;
    uint4 words[S::WARP_M];
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        words[m] = *reinterpret_cast<const uint4*>(stage + ((warp_m * S::WARP_M + m) * 32 + lane) * 16);
    }
    UNROLL for (u32 half = 0; half < 2; half++) {
        uint4 b[S::WARP_N];
        UNROLL for (u32 n = 0; n < S::WARP_N; n++) {
            u32 token = (warp_n * S::WARP_N + n) * N_TILE + lane / 4;
            u32 at = S::WEIGHT_BYTES + chunk_at(token, half * 4 + lane % 4);
            b[n] = *reinterpret_cast<const uint4*>(stage + at);
        }
        UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
            u32 a[4];
            expand(half ? words[m].z : words[m].x, a);
            UNROLL for (u32 n = 0; n < S::WARP_N; n++) mma_s8(sums[m][n], a, b[n].x, b[n].y);
            expand(half ? words[m].w : words[m].y, a);
            UNROLL for (u32 n = 0; n < S::WARP_N; n++) mma_s8(sums[m][n], a, b[n].z, b[n].w);
        }
    }
}

// Tile m of the block: of the segments one after another, or of gate and up in turn.
template <bool GATE> __device__ __forceinline__ Tile block_tile(const LinearArgs& args, u32 tiles, u32 m) {
    if (GATE) return tile_of(args, m % 2, blockIdx.x * (tiles / 2) + m / 2);
    return find_tile(args, blockIdx.x * tiles + m);
}

// Writes a warp's sums as outputs. // token 2 t + c % 2, feature g + 8 (c / 2) of each product
template <class S, bool GATE>
__device__ __forceinline__ void finish(const LinearArgs& args, u32 first, u32 count, u32 warp_m, u32 warp_n,
                                       const i32 (&sums)[S::WARP_M][S::WARP_N][4]) {
    u32 lane = threadIdx.x % 32;
    constexpr u32 STEP = GATE ? 2 : 1;
    UNROLL for (u32 m = 0; m < S::WARP_M; m += STEP) {
        Tile tile = block_tile<GATE>(args, S::TILES, warp_m * S::WARP_M + m);
        const Segment& segment = args.segments[GATE ? 0 : tile.segment];
        UNROLL for (u32 n = 0; n < S::WARP_N; n++) {
            UNROLL for (u32 odd = 0; odd < 2; odd++) {
                u32 row = first + (warp_n * S::WARP_N + n) * N_TILE + lane % 4 * 2 + odd;
                if (row >= count) continue;
                float s = args.scales[row];
                i32 q = args.sums[row];
                Divisor d = divisor_of(segment, s);
                UNROLL for (u32 high = 0; high < 2; high++) {
                    u32 feature = tile.first + lane / 4 + high * 8;
                    if (feature >= segment.rows) continue;
                    float* at = segment.out + u64(row) * segment.stride + feature;
                    float y = rescaled(sums[m][n][high * 2 + odd] - q, d, segment);
                    if (GATE) {
                        const Segment& up = args.segments[1];
                        float u = rescaled(sums[m + STEP - 1][n][high * 2 + odd] - q, divisor_of(up, s), up);
                        *at = gated(args.activation, y, u);
                    } else {
                        put(args.mode, at, y);
                    }
                }
            }
        }
    }
}

template <class S, bool GATE> __device__ __forceinline__ void linear_tiles(const LinearArgs& args) {
    DYNAMIC_SHARED(stages);  // (STAGES, STAGE_BYTES)
    u32 first = blockIdx.y * S::TOKENS, count = args.step->rows, k_blocks = args.k_blocks;
    if (first >= count) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 warp_m = warp % S::WARPS_M, warp_n = warp / S::WARPS_M;
    const uint4* weights[S::TILES * 32 / S::THREADS + 1] = {};
    UNROLL for (u32 i = 0; i < (S::TILES * 32 + S::THREADS - 1) / S::THREADS; i++) {
        u32 m = i * (S::THREADS / 32) + warp;
        if (m < S::TILES) weights[i] = block_tile<GATE>(args, S::TILES, m).weights + lane;
    }
    UNROLL for (u32 k = 0; k < S::STAGES - 1; k++) {
        if (k < k_blocks) fetch<S>(weights, args.x, first, count, k, k_blocks, stages + k * S::STAGE_BYTES);
        copy_async_commit();
    }
    i32 sums[S::WARP_M][S::WARP_N][4] = {};
    for (u32 k = 0; k < k_blocks; k++) {
        copy_async_wait<S::STAGES - 2>();
        __syncthreads();
        u32 next = k + S::STAGES - 1;
        if (next < k_blocks) {
            u8* stage = stages + next % S::STAGES * S::STAGE_BYTES;
            fetch<S>(weights, args.x, first, count, next, k_blocks, stage);
        }
        copy_async_commit();
        multiply_stage<S>(stages + k % S::STAGES * S::STAGE_BYTES, warp_m, warp_n, sums);
    }
    finish<S, GATE>(args, first, count, warp_m, warp_n, sums);
}

typedef Shape<8, 128, 2, 4> Tile128;
typedef Shape<4, 64, 2, 2> Tile64;

extern "C" __global__ void __launch_bounds__(256, 2) linear_tile(const LinearArgs args) {
    linear_tiles<Tile128, false>(args);
}
extern "C" __global__ void __launch_bounds__(256, 2) gate_tile(const LinearArgs args) {
    linear_tiles<Tile128, true>(args);
}
extern "C" __global__ void __launch_bounds__(128, 4) linear_tile64(const LinearArgs args) {
    linear_tiles<Tile64, false>(args);
}
extern "C" __global__ void __launch_bounds__(128, 4) gate_tile64(const LinearArgs args) {
    linear_tiles<Tile64, true>(args);
}
