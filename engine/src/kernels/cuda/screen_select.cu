// Selects the tokens that may have one of the largest logits of a row.

#include "norm.cuh"
#include "screen.cuh"

// Returns bits that compare as unsigned integers in the same order as the floats.
__device__ __forceinline__ u32 ordered(float v) {
    u32 bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Number of groups per thread that have their bounds in registers.
constexpr u32 SOME = 8;

// One block per row. The threshold is the count-th largest value among the largest lower bounds of the groups,
// found bit by bit: at least `count` different tokens have logits of at least the threshold. Candidates are the
// tokens with an upper bound of at least the threshold, unordered.
KERNEL(1024) screen_select(const SelectArgs args) {
    __shared__ u32 counts[32];  // one counter per round; a round decides one bit
    __shared__ u32 found_count;
    u32 row = blockIdx.x, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened) return;
    if (threadIdx.x < 32) counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) found_count = 0;
    __syncthreads();
    const float* lowest = args.lowest + u64(row) * groups;
    const float* highest = args.highest + u64(row) * groups;
    const float* estimates = args.estimates + u64(row) * groups * 16;
    u32 wanted = args.counts[row], key = 0;
    u32 some[SOME];  // the first groups of the thread; large vocabularies have more, read again each round
    UNROLL for (u32 i = 0; i < SOME; i++) {
        u32 g = threadIdx.x + i * blockDim.x;
        some[i] = g < groups ? ordered(lowest[g]) : 0;
    }
    for (u32 round = 0; round < 32 && wanted <= groups; round++) {
        u32 least = key | 0x80000000u >> round, count = 0;
        UNROLL for (u32 i = 0; i < SOME; i++) count += some[i] >= least;
        for (u32 g = threadIdx.x + SOME * blockDim.x; g < groups; g += blockDim.x) count += ordered(lowest[g]) >= least;
        count = u32(sum_of_warp(i32(count)));
        if (threadIdx.x % 32 == 0) atomicAdd(&counts[round], count);
        __syncthreads();
        if (counts[round] >= wanted) key = least;
    }
    float threshold = wanted <= groups ? from_ordered(key) : minus_infinity();
    DigitRow of_row = args.rows[row];
    Found* found = args.found + u64(row) * args.capacity;
    for (u32 g = threadIdx.x; g < groups; g += blockDim.x) {
        if (!(highest[g] >= threshold)) continue;
        for (u32 token = g * 16; token < g * 16 + 16 && token < args.vocab; token++) {
            Interval bounds = interval(estimates[token], of_row, args.errors[token], args.norms[token]);
            if (!(bounds.highest >= threshold)) continue;
            u32 at = atomicAdd(&found_count, 1u);
            if (at < args.capacity) found[at].token = token;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) args.found_counts[row] = found_count;
}
