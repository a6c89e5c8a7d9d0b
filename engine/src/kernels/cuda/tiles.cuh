// Products of many rows: tiles of outputs, computed by int8 tensor cores.
//
// A block computes 16 · TILES features for TOKENS rows. Weights and int8 rows are copied to shared memory one k block
// at a time, STAGES deep; ternary weights are still in 2 bits there. Each warp expands codes in registers: 7
// operations for the 16 codes of a fragment, which WARP_N products then use.

#pragma once
#include "fragments.cuh"

template <class W_, int TILES_, int TOKENS_, int WARPS_M_, int WARPS_N_, int STAGES_> struct Shape {
    typedef W_ W;
    static constexpr u32 TILES = TILES_, TOKENS = TOKENS_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
    static constexpr u32 THREADS = WARPS_M * WARPS_N * 32;
    static constexpr u32 WARP_M = TILES / WARPS_M, WARP_N = TOKENS / N_TILE / WARPS_N;
    // Copies of weights per thread and stage: copy i is of tile i · THREADS / 32 + warp.
    static constexpr u32 TILES_AT_ONCE = THREADS / 32, WEIGHT_COPIES = (TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
    static constexpr u32 TILE_BYTES = W::PARTS * 512, WEIGHT_BYTES = TILES * TILE_BYTES;
    static constexpr u32 STAGE_BYTES = WEIGHT_BYTES + TOKENS * K_BLOCK;

    typedef i32 Sums[WARP_M][WARP_N][4];
};

// Returns the offset of 16 bytes of a row in a stage. Odd rows have their halves swapped, so that the eight lanes
// that read two rows together access eight different bank groups.
__device__ __forceinline__ u32 chunk_at(u32 token, u32 chunk) {
    return token * K_BLOCK + (chunk ^ ((token & 1) * 4)) * 16;
}

// Starts the copies of one k block.
template <class S>
__device__ __forceinline__ void fetch_stage(const uint4* const (&weights)[S::WEIGHT_COPIES], const i8* x, u32 first, u32 count,
                                            u32 k_block, u32 k_blocks, u8* stage) {
    UNROLL for (u32 i = 0; i < S::WEIGHT_COPIES; i++) {
        u32 tile = i * S::TILES_AT_ONCE + threadIdx.x / 32;
        if (S::TILES % S::TILES_AT_ONCE != 0 && tile >= S::TILES) break;
        UNROLL for (u32 p = 0; p < S::W::PARTS; p++) {
            u32 at = (tile * S::W::PARTS + p) * 32 + threadIdx.x % 32;
            copy_async16(stage + at * 16, weights[i] + (k_block * S::W::PARTS + p) * 32);
        }
    }
    UNROLL for (u32 i = 0; i < S::TOKENS * 8 / S::THREADS; i++) {
        u32 at = i * S::THREADS + threadIdx.x, token = at / 8, chunk = at % 8;
        u32 row = first + token < count ? first + token : count - 1;
        const i8* from = x + u64(row) * (k_blocks * K_BLOCK) + k_block * K_BLOCK + chunk * 16;
        copy_async16(stage + S::WEIGHT_BYTES + chunk_at(token, chunk), from);
    }
}

// Adds the products of one k block to the sums of a warp.
template <class S>
__device__ __forceinline__ void multiply_stage(const u8* stage, u32 warp_m, u32 warp_n, typename S::Sums& sums) {
    u32 lane = threadIdx.x % 32;
    typename S::W w[S::WARP_M];
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        w[m].load(reinterpret_cast<const uint4*>(stage + (warp_m * S::WARP_M + m) * S::TILE_BYTES) + lane);
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
            w[m].fragment(2 * half, a);
            UNROLL for (u32 n = 0; n < S::WARP_N; n++) mma_s8(sums[m][n], a, b[n].x, b[n].y);
            w[m].fragment(2 * half + 1, a);
            UNROLL for (u32 n = 0; n < S::WARP_N; n++) mma_s8(sums[m][n], a, b[n].z, b[n].w);
        }
    }
}

// Computes the sums of the tiles of the block with rows first.. of x, which has `count` rows; rows beyond the end
// repeat the last row. `weights` are the addresses that this thread copies from: a tile, plus its lane.
template <class S>
__device__ __forceinline__ void multiply_tiles(const uint4* const (&weights)[S::WEIGHT_COPIES], const i8* x, u32 first, u32 count,
                                               u32 k_blocks, u32 warp_m, u32 warp_n, typename S::Sums& sums) {
    DYNAMIC_SHARED(stages);  // (STAGES, STAGE_BYTES)
    UNROLL for (u32 k = 0; k < S::STAGES - 1; k++) {
        if (k < k_blocks) fetch_stage<S>(weights, x, first, count, k, k_blocks, stages + k * S::STAGE_BYTES);
        copy_async_commit();
    }
    for (u32 k = 0; k < k_blocks; k++) {
        copy_async_wait<S::STAGES - 2>();
        __syncthreads();
        u32 next = k + S::STAGES - 1;
        if (next < k_blocks) {
            u8* stage = stages + next % S::STAGES * S::STAGE_BYTES;
            fetch_stage<S>(weights, x, first, count, next, k_blocks, stage);
        }
        copy_async_commit();
        multiply_stage<S>(stages + k % S::STAGES * S::STAGE_BYTES, warp_m, warp_n, sums);
    }
}
