// Selects the tokens that may be among the first of a row's question, and the first of them.

#include "norm.cuh"
#include "screen.cuh"

// Number of elements per thread that stay in registers.
constexpr u32 SOME = 8;

// Returns the largest key with at least `wanted` elements of at least it; 0 if there are fewer. `counts` has a counter per round; a round decides one bit.
__device__ __forceinline__ u32 largest_key(const float* values, u32 length, u32 wanted, u32 (&counts)[32]) {
    __syncthreads();
    if (threadIdx.x < 32) counts[threadIdx.x] = 0;
    __syncthreads();
    u32 key = 0;
    u32 some[SOME];  // the first elements of the thread; large vocabularies have more, read again each round
    UNROLL for (u32 i = 0; i < SOME; i++) {
        u32 at = threadIdx.x + i * blockDim.x;
        some[i] = at < length ? ordered(values[at]) : 0;
    }
    for (u32 round = 0; round < 32 && wanted <= length; round++) {
        u32 least = key | 0x80000000u >> round, count = 0;
        UNROLL for (u32 i = 0; i < SOME; i++) count += some[i] >= least;
        for (u32 at = threadIdx.x + SOME * blockDim.x; at < length; at += blockDim.x) count += ordered(values[at]) >= least;
        count = u32(sum_of_warp(i32(count)));
        if (threadIdx.x % 32 == 0) atomicAdd(&counts[round], count);
        __syncthreads();
        if (counts[round] >= wanted) key = least;
    }
    return key;
}

// Returns `value` less a distance, by more than the roundings of differences.
__device__ __forceinline__ float further_down(float value, float distance) {
    float least = __fsub_rn(__fsub_rn(value, distance), __fmul_rn(fabsf(value), 1e-6f));
    return or_if_nan(least, minus_infinity());
}

// Most times that the candidates of filters are selected until they have room.
constexpr u32 SELECTIONS = 5;

// The threshold of a row with filters. With top-k, at least k tokens have values of at least it. Otherwise so many groups have
// candidates as have room, half of that in each further selection. Then it is not above the largest lower bound, so the token with
// the largest logit is a candidate.
__device__ __forceinline__ float filter_threshold(const RowFilter& filter, const float* lowest, const float* highest, u32 groups,
                                                  u32 capacity, u32 selection, u32 (&counts)[32]) {
    __shared__ u32 of_warps[32];
    bool from_lowest = filter.top_k > 0;
    u32 room = (capacity < groups ? capacity : groups) / 2 >> selection;
    u32 wanted = from_lowest ? filter.top_k : room > 0 ? room : 1;
    u32 key = largest_key(from_lowest ? lowest : highest, groups, wanted, counts);
    float threshold = wanted <= groups ? from_ordered(key) : minus_infinity();
    if (from_lowest) return threshold;
    u32 largest = 0;
    for (u32 g = threadIdx.x; g < groups; g += blockDim.x) {
        u32 of_group = ordered(lowest[g]);
        largest = of_group > largest ? of_group : largest;
    }
    largest = over_block(largest_u32_of_warp(largest), of_warps, [](u32 a, u32 b) { return a > b ? a : b; });
    float known = from_ordered(largest);
    return smaller(larger(threshold, further_down(known, filter.reach)), known);
}

// One block per row. The threshold is the count-th largest value among the largest lower bounds of the groups, less `within`: at
// least `count` different tokens have values of at least the threshold plus `within`. Candidates are the tokens with an upper
// bound of at least the threshold, unordered; those with changes are elsewhere. With filters, values are logits.
KERNEL(1024) screen_select(const SelectArgs args) {
    start_after_previous();
    __shared__ u32 counts[32];
    __shared__ u32 found_count;
    u32 row = blockIdx.x, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened) return;
    RowQuestion question = args.questions[row];
    RowFilter filter = args.filters ? args.filters[row] : RowFilter{};
    if (args.filters && !filter.is_on) return;
    const float* lowest = args.lowest + u64(row) * groups;
    const float* highest = args.highest + u64(row) * groups;
    const float* estimates = args.estimates.values + u64(row) * groups * 16;
    DigitRow of_row = digit_row(args.estimates, row);
    Found* found = args.found + u64(row) * args.capacity;
    if (args.filters) question.temperature = 0.0f;
    for (u32 selection = 0;; selection++) {
        float threshold;
        if (threadIdx.x == 0) found_count = 0;
        if (args.filters) {
            threshold = filter_threshold(filter, lowest, highest, groups, args.capacity, selection, counts);
        } else {
            u32 key = largest_key(lowest, groups, question.count, counts);
            threshold = question.count <= groups ? from_ordered(key) : minus_infinity();
            if (question.within > 0.0f) threshold = further_down(threshold, question.within);
        }
        for (u32 g = threadIdx.x; g < groups; g += blockDim.x) {
            if (!(highest[g] >= threshold)) continue;
            for (u32 token = g * 16; token < g * 16 + 16 && token < args.vocab; token++) {
                if (is_taken(question, estimates[token])) continue;
                Interval bounds = value_bounds(logit_bounds_of(args.estimates, of_row, estimates, token), question, token);
                if (!(bounds.highest >= threshold)) continue;
                u32 at = atomicAdd(&found_count, 1u);
                if (at < args.capacity) found[at] = {token, estimates[token]};
            }
        }
        __syncthreads();
        bool again = args.filters && filter.top_k == 0 && found_count > args.capacity && selection + 1 < SELECTIONS;
        if (!again && threadIdx.x == 0) {
            args.found_counts[row] = found_count;
            if (args.filters) args.thresholds[row] = threshold;
        }
        if (!again) return;
        __syncthreads();
    }
}

// The bounds of groups of 16 tokens as the screen writes them, from the estimates. One thread per group of row blockIdx.y. With
// filters, these are bounds of the logits.
KERNEL(256) logit_bounds(const LogitBoundsArgs args) {
    start_after_previous();
    u32 row = blockIdx.y, group = blockIdx.x * blockDim.x + threadIdx.x, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened || group >= groups) return;
    if (args.filters && !args.filters[row].is_on) return;
    RowQuestion question = args.questions[row];
    if (args.filters) question.temperature = 0.0f;
    const float* values = args.estimates.values + u64(row) * groups * 16;
    DigitRow of_row = digit_row(args.estimates, row);
    float lowest = minus_infinity(), highest = minus_infinity();
    UNROLL for (u32 first = group * 16; first < group * 16 + 16; first += 4) {
        Interval four[4];
        four_logit_bounds(args.estimates, of_row, values, first, four);
        UNROLL for (u32 i = 0; i < 4; i++) {
            if (first + i >= args.vocab) break;
            if (is_taken(question, values[first + i])) continue;
            Interval bounds = value_bounds(four[i], question, first + i);
            lowest = larger(bounds.lowest, lowest), highest = larger(bounds.highest, highest);
        }
    }
    args.lowest[u64(row) * groups + group] = lowest;
    args.highest[u64(row) * groups + group] = highest;
}

// The tokens with changes: their estimates are copied and become −∞, so that they are not candidates, and the bounds of their
// groups follow. Blocks of row blockIdx.y; the first change of a group has a thread.
KERNEL(256) take_changed(const TakeChangedArgs args) {
    start_after_previous();
    u32 row = blockIdx.y, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened) return;
    RowQuestion question = args.questions[row];
    const LogitChange* changes = changes_of(args.step, question);
    float* values = args.values + u64(row) * groups * 16;
    Found* changed = args.changed + u64(row) * args.changes_max;
    DigitRow of_row = digit_row(args.estimates, row);
    if (blockIdx.x == 0 && threadIdx.x == 0) args.changed_counts[row] = question.changes;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < question.changes; i += gridDim.x * blockDim.x) {
        u32 group = changes[i].token / 16;
        if (i > 0 && changes[i - 1].token / 16 == group) continue;
        for (u32 j = i; j < question.changes && changes[j].token / 16 == group; j++) {
            u32 token = changes[j].token;
            changed[j] = {token, values[token]};
            values[token] = minus_infinity();
        }
        Interval all = {minus_infinity(), minus_infinity()};
        for (u32 token = group * 16; token < group * 16 + 16 && token < args.vocab; token++) {
            if (is_taken(question, values[token])) continue;
            Interval bounds = value_bounds(logit_bounds_of(args.estimates, of_row, values, token), question, token);
            all.lowest = larger(bounds.lowest, all.lowest), all.highest = larger(bounds.highest, all.highest);
        }
        args.lowest[u64(row) * groups + group] = all.lowest;
        args.highest[u64(row) * groups + group] = all.highest;
    }
}

// One warp per row that needs a single token: the one with the largest value of the candidates and of the tokens with changes. Rows
// with equal largest values, with an infinite one, or with NaN are left to the host, by a number of candidates above the capacity.
KERNEL(32) draw(const DrawArgs args) {
    start_after_previous();
    u32 row = blockIdx.x, lane = threadIdx.x;
    if (row >= args.step->screened) return;
    RowQuestion question = args.questions[row];
    u32 count = args.found_counts[row];
    if (!question.single) return;
    u32* carried = args.carried + args.step->carry + row;
    if (lane == 0) *carried = 0;
    if (count > args.capacity) return;
    constexpr u32 NONE = 0xffffffffu;
    double most = minus_infinity();
    Found best = {NONE, 0.0f};
    float of_model = 0.0f;           // its logit without the change
    u32 equal = 0, unordered = 0;  // whether another token has the same value; whether one is NaN
    auto look_at = [&](Found f, float model) {
        // The logarithms of noise take long. A bound of NaN is +∞.
        if (value_bounds(exactly(f.logit), question, f.token).highest < most) return;
        double value = value_of(question, f.token, f.logit);
        unordered |= value != value;
        if (best.token == NONE || value > most) most = value, best = f, of_model = model, equal = 0;
        else equal |= value == most;
    };
    const Found* found = args.found + u64(row) * args.capacity;
    for (u32 i = lane; i < count; i += 32) look_at(found[i], found[i].logit);
    const Found* changed = args.changed + u64(row) * args.changes_max;
    const LogitChange* changes = changes_of(args.step, question);
    for (u32 i = lane; i < question.changes; i += 32) look_at({changed[i].token, changed_logit(changes[i], changed[i].logit)}, changed[i].logit);
    for (u32 width = 16; width > 0; width /= 2) {
        double of_other = __shfl_xor_sync(FULL_WARP, most, width);
        Found other = {__shfl_xor_sync(FULL_WARP, best.token, width), __shfl_xor_sync(FULL_WARP, best.logit, width)};
        float model = __shfl_xor_sync(FULL_WARP, of_model, width);
        u32 others = __shfl_xor_sync(FULL_WARP, equal, width);
        unordered |= __shfl_xor_sync(FULL_WARP, unordered, width);
        if (other.token == NONE) continue;
        if (best.token == NONE || of_other > most) most = of_other, best = other, of_model = model, equal = others;
        else equal |= of_other == most;
    }
    if (lane != 0) return;
    if (best.token != NONE && !equal && !unordered && fabs(most) < -minus_infinity()) {
        args.firsts[row] = best;
        args.drawn[row] = {best.token, of_model};
        *carried = best.token;
    } else {
        args.found_counts[row] = args.capacity + 1;
    }
}
