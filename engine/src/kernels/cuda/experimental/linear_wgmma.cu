// Ternary linears of many rows by the products of warpgroups (`wgmma.cuh`), for compute capability 9.0 alone: the same
// results as linear_tile.cu.
//
// A block of two warpgroups computes 256 features for TOKENS rows: a warp has two tiles of sixteen features, of which it
// expands the codes in registers, and all its products read the same rows from shared memory. The rows were quantized in
// the order ORDER_WGMMA, so that 32 of their bytes meet the columns of a fragment. At 256 × 128 a k block takes 4.2 M
// multiply-adds for 24 KiB read.
//
// While the products of a k block are in progress, the codes of the next one are expanded: the registers of A alternate. The
// fetch after the barrier in the turn of k block k writes the stage of k block k − 1. Before that barrier,
// every thread has waited for the products that read this stage.

#include "linear_many.cuh"
#include "wgmma.cuh"

// Products that a k block takes one after another.
constexpr u32 STEPS = K_BLOCK / WGMMA_K;

// AHEAD: whether all codes are expanded before the wait, for which 64 tokens in two blocks leave too few registers.
template <int TOKENS_, bool AHEAD_> struct Warpgroups {
    static constexpr bool AHEAD = AHEAD_;
    static constexpr u32 TOKENS = TOKENS_, THREADS = 2 * WARPGROUP, STAGES = 6;
    static constexpr u32 WARP_M = 2, WARP_N = TOKENS / N_TILE, TILES = THREADS / 32 * WARP_M;
    // A stage has the rows of a k block, then the tiles, with 16 bytes per lane.
    static constexpr u32 ROW_BYTES = TOKENS * K_BLOCK, STAGE_BYTES = ROW_BYTES + TILES * 512;

    typedef i32 Sums[WARP_M][WARP_N][4];
    typedef u32 Fragments[STEPS][WARP_M][4];
};

// Starts the copies of one k block: rows, of which those beyond the end repeat the last one, and the tiles of the warp.
template <class S>
__device__ __forceinline__ void fetch_k_block(const uint4* const (&weights)[S::WARP_M], const LinearArgs& args, u32 first,
                                              u32 count, u32 k_block, u8* stage) {
    UNROLL for (u32 i = 0; i < S::TOKENS * 8 / S::THREADS; i++) {
        u32 at = i * S::THREADS + threadIdx.x, token = at / 8, chunk = at % 8;
        u32 row = first + token < count ? first + token : count - 1;
        const i8* from = args.x + u64(row) * (args.k_blocks * K_BLOCK) + k_block * K_BLOCK + chunk * 16;
        copy_async16(stage + swizzled(token, chunk), from);
    }
    uint4* tiles = reinterpret_cast<uint4*>(stage + S::ROW_BYTES) + threadIdx.x / 32 * (S::WARP_M * 32) + threadIdx.x % 32;
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) copy_async16(tiles + m * 32, weights[m] + k_block * 32);
}

// Loads the codes of a k block that this thread copied.
template <class S> __device__ __forceinline__ void load_codes(const u8* stage, Ternary (&codes)[S::WARP_M]) {
    const uint4* tiles = reinterpret_cast<const uint4*>(stage + S::ROW_BYTES) + threadIdx.x / 32 * (S::WARP_M * 32);
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) codes[m].load(tiles + m * 32 + threadIdx.x % 32);
}

// Expands codes to the fragments of all products of a k block.
template <class S> __device__ __forceinline__ void expand_codes(const Ternary (&codes)[S::WARP_M], typename S::Fragments& a) {
    UNROLL for (u32 step = 0; step < STEPS; step++) {
        UNROLL for (u32 m = 0; m < S::WARP_M; m++) codes[m].fragment(step, a[step][m]);
        if (S::AHEAD) keep_here(a[step]);
    }
}

// Computes the sums of the tiles of the warp with rows first.. of x, which has `count` rows.
template <class S>
__device__ __forceinline__ void multiply_by_warpgroups(const uint4* const (&weights)[S::WARP_M], const LinearArgs& args,
                                                       u32 first, u32 count, typename S::Sums& sums) {
    DYNAMIC_SHARED(shared);
    u8* stages = shared + (0 - address_in_shared(shared)) % ROWS_BYTES;  // (STAGES, STAGE_BYTES)
    UNROLL for (u32 k = 0; k < S::STAGES - 1; k++) {
        if (k < args.k_blocks) fetch_k_block<S>(weights, args, first, count, k, stages + k * S::STAGE_BYTES);
        copy_async_commit();
    }
    Ternary codes[S::WARP_M];
    typename S::Fragments a[2];  // of even and odd k blocks
    copy_async_wait<S::STAGES - 2>();
    fence_to_products();
    __syncthreads();
    load_codes<S>(stages, codes);
    expand_codes<S>(codes, a[0]);
    for (u32 even = 0; even < args.k_blocks; even += 2) {
        UNROLL for (u32 odd = 0; odd < 2; odd++) {
            u32 k = even + odd, ahead = k + S::STAGES - 1;
            if (k >= args.k_blocks) break;
            u64 rows = descriptor(address_in_shared(stages + k % S::STAGES * S::STAGE_BYTES));
            UNROLL for (u32 m = 0; m < S::WARP_M; m++) keep_here(sums[m]);
            UNROLL for (u32 step = 0; step < STEPS; step++) keep_here(a[odd][step]);
            wgmma_fence();
            UNROLL for (u32 step = 0; step < STEPS; step++) {
                UNROLL for (u32 m = 0; m < S::WARP_M; m++) wgmma_s8(sums[m], a[odd][step][m], rows + step * (WGMMA_K / 16));
            }
            wgmma_commit();
            copy_async_wait<S::STAGES - 3>();
            load_codes<S>(stages + (k + 1) % S::STAGES * S::STAGE_BYTES, codes);
            fence_to_products();
            __syncthreads();
            u8* free = stages + ahead % S::STAGES * S::STAGE_BYTES;
            if (ahead < args.k_blocks) fetch_k_block<S>(weights, args, first, count, ahead, free);
            copy_async_commit();
            expand_codes<S>(codes, a[1 - odd]);
            wgmma_wait();
        }
    }
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) keep_here(sums[m]);
}

template <class S, bool GATE> __device__ __forceinline__ void linear_warpgroups(const LinearArgs& args) {
    start_after_previous();
    u32 first = blockIdx.y * S::TOKENS, count = args.step->rows, warp = threadIdx.x / 32;
    if (first >= count) return;
    const uint4* weights[S::WARP_M];
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        weights[m] = block_tile<GATE>(args, S::TILES, warp * S::WARP_M + m).weights + threadIdx.x % 32;
    }
    typename S::Sums sums = {};
    multiply_by_warpgroups<S>(weights, args, first, count, sums);
    finish<S, GATE>(args, first, count, warp, 0, sums);
}

KERNEL_BY(256, 1) linear_wgmma(const LinearArgs args) { linear_warpgroups<Warpgroups<128, true>, false>(args); }
KERNEL_BY(256, 1) gate_wgmma(const LinearArgs args) { linear_warpgroups<Warpgroups<128, true>, true>(args); }
KERNEL_BY(256, 2) linear_wgmma64(const LinearArgs args) { linear_warpgroups<Warpgroups<64, false>, false>(args); }
KERNEL_BY(256, 2) gate_wgmma64(const LinearArgs args) { linear_warpgroups<Warpgroups<64, false>, true>(args); }
