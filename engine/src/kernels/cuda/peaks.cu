// The highest rates of a device, as a reference for the other kernels: memory reads, int8 tensor core products with
// the same instruction as the kernels, fused multiply-adds. Steps never launch these kernels.

#include "args.cuh"
#include "ptx.cuh"

// Number of sums that a thread adds to in turn, so that an addition does not wait for the addition before it.
constexpr u32 CHAINS = 8;

// Reads all of `from`. Each thread has four loads of 16 bytes in progress.
KERNEL(256) peak_read(const PeakArgs args) {
    start_after_previous();
    u64 stride = u64(gridDim.x) * blockDim.x;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 sum = 0;
    for (; i + 3 * stride < args.count; i += 4 * stride) {
        uint4 v[4];
        UNROLL for (u32 j = 0; j < 4; j++) v[j] = load_once(args.from + i + j * stride);
        UNROLL for (u32 j = 0; j < 4; j++) sum |= v[j].x | v[j].y | v[j].z | v[j].w;
    }
    for (; i < args.count; i += stride) sum |= load_once(args.from + i).x;
    if (sum == 0x5a5a5a5au) args.to[0] = sum;
}

// Computes CHAINS products of 16 × 32 by 32 × 8 per warp and round.
KERNEL(256) peak_mma_s8(const PeakArgs args) {
    start_after_previous();
    i32 sums[CHAINS][4] = {};
    u32 a[4] = {threadIdx.x, args.rounds, threadIdx.x * 3, args.rounds * 5};
    for (u32 round = 0; round < args.rounds; round++) {
        UNROLL for (u32 i = 0; i < CHAINS; i++) mma_s8(sums[i], a, threadIdx.x + i, args.rounds + i);
    }
    i32 all = 0;
    UNROLL for (u32 i = 0; i < CHAINS; i++) all |= sums[i][0] | sums[i][1] | sums[i][2] | sums[i][3];
    if (all == 0x5a5a5a5a) args.to[0] = u32(all);
}

// Computes 2 · CHAINS multiply-adds per thread and round.
KERNEL(256) peak_fma_f32(const PeakArgs args) {
    start_after_previous();
    float sums[2 * CHAINS];
    UNROLL for (u32 i = 0; i < 2 * CHAINS; i++) sums[i] = float(threadIdx.x + i);
    float factor = 1.0f / float(args.rounds + 1);
    for (u32 round = 0; round < args.rounds; round++) {
        UNROLL for (u32 i = 0; i < 2 * CHAINS; i++) sums[i] = __fmaf_rn(sums[i], factor, 1.0f);
    }
    float all = 0;
    UNROLL for (u32 i = 0; i < 2 * CHAINS; i++) all += sums[i];
    if (all == -1.0f) args.to[0] = args.rounds;
}
