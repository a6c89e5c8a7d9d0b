// Products of M tiles of sixteen weight rows with N tiles of eight int8 rows, a block for each: the
// shape for few tokens, where reading weights is what takes time. The warps of the block share the k
// blocks, and weights go from memory to registers: 512 consecutive bytes a warp and k block.

#pragma once
#include "linear.cuh"

// Ternary weights: four words of codes a lane and k block.
struct Ternary {
    uint4 words;
    __device__ __forceinline__ void load(const uint4* tile, u32 k_block, u32 lane) {
        words = load_once(tile + k_block * 32 + lane);
    }
    __device__ __forceinline__ void fragment(u32 step, u32 (&a)[4]) const {
        expand(step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w, a);
    }
};

// Int8 weights: the fragments themselves.
struct Bytes {
    uint4 steps[4];
    __device__ __forceinline__ void load(const uint4* tile, u32 k_block, u32 lane) {
        UNROLL for (u32 s = 0; s < 4; s++) steps[s] = load_once(tile + (k_block * 4 + s) * 32 + lane);
    }
    __device__ __forceinline__ void fragment(u32 step, u32 (&a)[4]) const {
        a[0] = steps[step].x, a[1] = steps[step].y, a[2] = steps[step].z, a[3] = steps[step].w;
    }
};

// Sums of a block: (8 N tokens, 16 M rows and padding that keeps banks apart).
template <int M, int N> struct Sums {
    static constexpr u32 ROWS = M * TILE_ROWS, TOKENS = N * N_TILE, STRIDE = ROWS + 4;
    i32 at[TOKENS * STRIDE];
};

// Adds the products of one k block.
template <class W, int M, int N>
__device__ __forceinline__ void multiply_block(const W (&w)[M], const i8* x, const u32 (&rows)[N], i32 (&sums)[M][N][4]) {
    UNROLL for (u32 half = 0; half < 2; half++) {
        uint4 b[N];
        UNROLL for (u32 n = 0; n < N; n++) b[n] = load_constant(x + rows[n] + half * 64);
        UNROLL for (u32 m = 0; m < M; m++) {
            u32 a[4];
            w[m].fragment(2 * half, a);
            UNROLL for (u32 n = 0; n < N; n++) mma_s8(sums[m][n], a, b[n].x, b[n].y);
            w[m].fragment(2 * half + 1, a);
            UNROLL for (u32 n = 0; n < N; n++) mma_s8(sums[m][n], a, b[n].z, b[n].w);
        }
    }
}

// Sums of the tiles with rows first.. (count in all; those beyond repeat the last) of x, into shared
// memory. AHEAD k blocks are read together, so that enough bytes are under way.
template <class W, int M, int N, int AHEAD>
__device__ __forceinline__ void multiply_few(const uint4* const (&tiles)[M], const i8* x, u32 first, u32 count,
                                             u32 k_blocks, Sums<M, N>& out) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 i = threadIdx.x; i < Sums<M, N>::TOKENS * Sums<M, N>::STRIDE; i += blockDim.x) out.at[i] = 0;
    u32 rows[N];  // where this lane's part of each row starts
    UNROLL for (u32 n = 0; n < N; n++) {
        u32 row = first + n * N_TILE + lane / 4;
        rows[n] = (row < count ? row : count - 1) * (k_blocks * K_BLOCK) + lane % 4 * 16;
    }
    i32 sums[M][N][4] = {};
    u32 k = warp;
    for (; k + (AHEAD - 1) * warps < k_blocks; k += AHEAD * warps) {
        W w[AHEAD][M];
        UNROLL for (u32 i = 0; i < AHEAD; i++) {
            UNROLL for (u32 m = 0; m < M; m++) w[i][m].load(tiles[m], k + i * warps, lane);
        }
        UNROLL for (u32 i = 0; i < AHEAD; i++) multiply_block(w[i], x + (k + i * warps) * K_BLOCK, rows, sums);
    }
    for (; k < k_blocks; k += warps) {
        W w[M];
        UNROLL for (u32 m = 0; m < M; m++) w[m].load(tiles[m], k, lane);
        multiply_block(w, x + k * K_BLOCK, rows, sums);
    }
    __syncthreads();
    UNROLL for (u32 m = 0; m < M; m++) {
        UNROLL for (u32 n = 0; n < N; n++) {
            UNROLL for (u32 c = 0; c < 4; c++) {
                u32 token = n * N_TILE + lane % 4 * 2 + c % 2, row = m * TILE_ROWS + lane / 4 + c / 2 * 8;
                atomicAdd(&out.at[token * Sums<M, N>::STRIDE + row], sums[m][n][c]);
            }
        }
    }
    __syncthreads();
}
