// Selects the tokens that may be among the first of a row's ranking, and the first of them.

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
// found bit by bit, less `within`: at least `count` different tokens have values of at least the threshold plus `within`.
// Candidates are the tokens with an upper bound of at least the threshold, unordered.
KERNEL(1024) screen_select(const SelectArgs args) {
    start_after_previous();
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
    RowRanking ranking = args.rankings[row];
    u32 wanted = ranking.count, key = 0;
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
    if (ranking.within > 0.0f) {
        // Less by more than the roundings of the differences.
        float least = __fsub_rn(__fsub_rn(threshold, ranking.within), __fmul_rn(fabsf(threshold), 1e-6f));
        threshold = or_if_nan(least, minus_infinity());
    }
    bool exact = !args.errors;
    DigitRow of_row = exact ? DigitRow{} : args.rows[row];
    Found* found = args.found + u64(row) * args.capacity;
    for (u32 g = threadIdx.x; g < groups; g += blockDim.x) {
        if (!(highest[g] >= threshold)) continue;
        for (u32 token = g * 16; token < g * 16 + 16 && token < args.vocab; token++) {
            float estimate = estimates[token];
            Interval of_logit = exact ? exactly(estimate) : interval(estimate, of_row, args.errors[token], args.norms[token]);
            Interval bounds = value_bounds(of_logit, ranking, token);
            if (!(bounds.highest >= threshold)) continue;
            u32 at = atomicAdd(&found_count, 1u);
            if (at < args.capacity) found[at] = {token, estimate};
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) args.found_counts[row] = found_count;
}

// The bounds of groups of 16 tokens as the screen writes them, from all logits. One thread per group of row blockIdx.y.
KERNEL(256) logit_bounds(const LogitBoundsArgs args) {
    start_after_previous();
    u32 row = blockIdx.y, group = blockIdx.x * blockDim.x + threadIdx.x, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened || group >= groups) return;
    RowRanking ranking = args.rankings[row];
    const float* logits = args.logits + u64(row) * groups * 16;
    float lowest = minus_infinity(), highest = minus_infinity();
    for (u32 token = group * 16; token < group * 16 + 16 && token < args.vocab; token++) {
        Interval bounds = value_bounds(exactly(logits[token]), ranking, token);
        lowest = larger(bounds.lowest, lowest), highest = larger(bounds.highest, highest);
    }
    args.lowest[u64(row) * groups + group] = lowest;
    args.highest[u64(row) * groups + group] = highest;
}

// One warp per row that needs a single token: the candidate with the largest value. Equal largest values and NaN are left to
// the host, by a number of candidates above the capacity.
KERNEL(32) draw(const DrawArgs args) {
    start_after_previous();
    u32 row = blockIdx.x, lane = threadIdx.x;
    if (row >= args.step->screened) return;
    RowRanking ranking = args.rankings[row];
    u32 count = args.found_counts[row];
    if (!ranking.single) return;
    u32* carried = args.carried + args.step->carry + row;
    if (lane == 0) *carried = 0;
    if (count > args.capacity) return;
    const Found* found = args.found + u64(row) * args.capacity;
    constexpr u32 NONE = 0xffffffffu;
    double most = minus_infinity();
    u32 best = NONE, equal = 0, unordered = 0;  // whether another candidate has the same value; whether one is NaN
    for (u32 i = lane; i < count; i += 32) {
        double value = value_of(ranking, found[i].token, found[i].logit);
        unordered |= value != value;
        if (best == NONE || value > most) most = value, best = i, equal = 0;
        else equal |= value == most;
    }
    for (u32 width = 16; width > 0; width /= 2) {
        double of_other = __shfl_xor_sync(FULL_WARP, most, width);
        u32 other = __shfl_xor_sync(FULL_WARP, best, width), others = __shfl_xor_sync(FULL_WARP, equal, width);
        unordered |= __shfl_xor_sync(FULL_WARP, unordered, width);
        if (other == NONE) continue;
        if (best == NONE || of_other > most) most = of_other, best = other, equal = others;
        else equal |= of_other == most;
    }
    if (lane != 0) return;
    if (best != NONE && !equal && !unordered) {
        args.drawn[row] = found[best];
        *carried = found[best].token;
    } else {
        args.found_counts[row] = args.capacity + 1;
    }
}
