// Products of M tiles of sixteen weight rows with N tiles of eight int8 rows, one block for each product. This is
// the shape for few tokens, where reading the weights takes most of the time. The warps of the block share the
// k blocks: warp w has blocks w, w + warps, …
//
// Weights, and the int8 rows where there are few, come through a ring in shared memory of DEPTH k blocks per warp.
// A lane reads only what it copied itself, so the ring needs no synchronisation. The ring exists because the
// compiler would move a prefetch into registers back to the place of its use.

#pragma once
#include "fragments.cuh"

// Numbers of the shape of a block. A slot of the ring has the weights of M tiles, then both halves of N tiles of
// rows, each with 16 bytes per lane.
template <class W_, int M_, int N_, int DEPTH_> struct Few {
    typedef W_ W;
    static constexpr int M = M_, N = N_, DEPTH = DEPTH_;
    static constexpr u32 ROWS = M * TILE_ROWS, TOKENS = N * N_TILE;
    static constexpr u32 STRIDE = ROWS + 4;  // avoids bank conflicts
    static constexpr bool X_IN_RING = N <= 2;
    static constexpr u32 WEIGHTS = M * W::PARTS * 32, SLOT = WEIGHTS + (X_IN_RING ? 2 * N * 32 : 0);
    // Where there are few sums, even and odd steps have separate sums, so that a product does not wait for the
    // product before it.
    static constexpr int SPLIT = M * N <= 2 ? 2 : 1;

    typedef i32 Sums[TOKENS * STRIDE];  // (TOKENS, ROWS), and padding
};

// A lane of a warp, and its part of the ring.
template <class F> struct Lane {
    const uint4* tiles[F::M];
    const i8* x;
    u32 rows[F::N];  // offset in x at which the part of each row for this lane starts
    uint4* ring;     // (DEPTH, SLOT), from the first element of this lane on
    u32 k_blocks;

    __device__ __forceinline__ void fetch_weights(u32 k, u32 slot) const {
        if (k >= k_blocks) return;
        UNROLL for (u32 m = 0; m < F::M; m++) {
            UNROLL for (u32 p = 0; p < F::W::PARTS; p++) {
                copy_async16(ring + slot * F::SLOT + (m * F::W::PARTS + p) * 32, tiles[m] + (k * F::W::PARTS + p) * 32);
            }
        }
    }

    __device__ __forceinline__ void fetch_x(u32 k, u32 slot) const {
        if constexpr (F::X_IN_RING) {
            if (k >= k_blocks) return;
            UNROLL for (u32 i = 0; i < 2 * F::N; i++) {
                copy_async16(ring + slot * F::SLOT + F::WEIGHTS + i * 32, x_at(k, i / F::N, i % F::N));
            }
        }
    }

    // Returns the address of columns 16 t .. of a half of a k block, in row n of the lane, with t = lane % 4.
    __device__ __forceinline__ const i8* x_at(u32 k, u32 half, u32 n) const { return x + rows[n] + k * K_BLOCK + half * 64; }

    __device__ __forceinline__ uint4 load_x(u32 k, u32 slot, u32 half, u32 n) const {
        if (F::X_IN_RING) return ring[slot * F::SLOT + F::WEIGHTS + (half * F::N + n) * 32];
        return load_constant(x_at(k, half, n));
    }
};

// Adds the products of one k block.
template <class F>
__device__ __forceinline__ void multiply_block(const Lane<F>& lane, u32 k, u32 slot, i32 (&sums)[F::SPLIT][F::M][F::N][4]) {
    typename F::W w[F::M];
    UNROLL for (u32 m = 0; m < F::M; m++) w[m].load(lane.ring + slot * F::SLOT + m * F::W::PARTS * 32);
    UNROLL for (u32 half = 0; half < 2; half++) {
        uint4 x[F::N];
        UNROLL for (u32 n = 0; n < F::N; n++) x[n] = lane.load_x(k, slot, half, n);
        UNROLL for (u32 m = 0; m < F::M; m++) {
            u32 a[4];
            w[m].fragment(2 * half, a);
            UNROLL for (u32 n = 0; n < F::N; n++) mma_s8(sums[0][m][n], a, x[n].x, x[n].y);
            w[m].fragment(2 * half + 1, a);
            UNROLL for (u32 n = 0; n < F::N; n++) mma_s8(sums[F::SPLIT - 1][m][n], a, x[n].z, x[n].w);
        }
    }
}

// Adds the sums of a warp to the sums of the block.
template <class F>
__device__ __forceinline__ void add_sums(const i32 (&sums)[F::SPLIT][F::M][F::N][4], i32* out) {
    u32 lane = threadIdx.x % 32;
    UNROLL for (u32 m = 0; m < F::M; m++) {
        UNROLL for (u32 n = 0; n < F::N; n++) {
            UNROLL for (u32 c = 0; c < 4; c++) {
                u32 token = n * N_TILE + lane % 4 * 2 + c % 2, row = m * TILE_ROWS + lane / 4 + c / 2 * 8;
                i32 sum = sums[0][m][n][c];
                if (F::SPLIT == 2) sum += sums[F::SPLIT - 1][m][n][c];
                atomicAdd(&out[token * F::STRIDE + row], sum);
            }
        }
    }
}

// Writes the sums of the tiles with rows first.. of x to shared memory. x has `*count · columns` rows; rows beyond
// the end repeat the last row. Returns false if there are no rows from `first` on. The copies of the first weights start
// before the wait for earlier kernels; `prepare` runs after it, while they are in progress.
template <class F, class Prepare>
__device__ __forceinline__ bool multiply_few(const uint4* const (&tiles)[F::M], const i8* x, u32 first, const u32* count,
                                             u32 columns, u32 k_blocks, i32* out, Prepare prepare) {
    DYNAMIC_SHARED(shared);
    u32 index = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Lane<F> lane;
    UNROLL for (u32 m = 0; m < F::M; m++) lane.tiles[m] = tiles[m] + index;
    lane.ring = reinterpret_cast<uint4*>(shared) + warp * (F::DEPTH * F::SLOT) + index;
    lane.x = x;
    lane.k_blocks = k_blocks;
    let_next_start();
    UNROLL for (u32 d = 0; d < F::DEPTH; d++) lane.fetch_weights(warp + d * warps, d);
    wait_for_previous();
    u32 rows = *count * columns;
    if (first >= rows) {
        copy_async_wait<0>();
        return false;
    }
    UNROLL for (u32 n = 0; n < F::N; n++) {
        u32 row = first + n * N_TILE + index / 4;
        lane.rows[n] = (row < rows ? row : rows - 1) * (k_blocks * K_BLOCK) + index % 4 * 16;
    }
    UNROLL for (u32 d = 0; d < F::DEPTH; d++) {
        lane.fetch_x(warp + d * warps, d);
        copy_async_commit();
    }
    for (u32 i = threadIdx.x; i < F::TOKENS * F::STRIDE; i += blockDim.x) out[i] = 0;
    prepare(rows);
    i32 sums[F::SPLIT][F::M][F::N][4] = {};
    u32 slot = 0;
    for (u32 k = warp; k < k_blocks; k += warps) {
        copy_async_wait<F::DEPTH - 1>();
        multiply_block<F>(lane, k, slot, sums);
        lane.fetch_weights(k + F::DEPTH * warps, slot);
        lane.fetch_x(k + F::DEPTH * warps, slot);
        copy_async_commit();
        slot = slot + 1 < F::DEPTH ? slot + 1 : 0;
    }
    __syncthreads();
    add_sums<F>(sums, out);
    __syncthreads();
    return true;
}
