// Which tokens may be among a row's largest.

#include "norm.cuh"
#include "screen.cuh"

// Bits whose order as unsigned integers is that of the floats.
__device__ __forceinline__ u32 ordered(float v) {
    u32 bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// A block per row. The threshold is the count-th largest of the groups' largest lower bounds, found bit by
// bit: so many different tokens have logits at least so large. Candidates are the tokens whose upper bound
// is not below it, in no order.
KERNEL(1024) screen_select(const SelectArgs args) {
    __shared__ i32 counts[32];
    __shared__ u32 found_count;
    u32 row = blockIdx.x, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened) return;
    if (threadIdx.x == 0) found_count = 0;
    const float* lowest = args.lowest + u64(row) * groups;
    const float* highest = args.highest + u64(row) * groups;
    const float* estimates = args.estimates + u64(row) * groups * 16;
    u32 wanted = args.counts[row], key = 0;
    for (u32 bit = 0x80000000u; bit > 0 && wanted <= groups; bit >>= 1) {
        i32 count = 0;
        for (u32 g = threadIdx.x; g < groups; g += blockDim.x) count += ordered(lowest[g]) >= (key | bit);
        count = over_block(sum_of_warp(count), counts, [](i32 a, i32 b) { return a + b; });
        if (u32(count) >= wanted) key |= bit;
    }
    __syncthreads();
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
