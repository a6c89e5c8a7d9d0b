// The distributions of rows with log-probabilities, from all logits of the row: `Distribution` in
// engine/src/backend/distribution.rs, to the same bits.

#include "norm.cuh"
#include "screen.cuh"

// Partial sums; each thread has one.
constexpr u32 SUMS = 1024;
// No token.
constexpr u32 NONE = 0xffffffffu;

// A token as a number that is larger for more probable tokens, and of equally probable ones for lower ids.
__device__ __forceinline__ u64 place_of(u32 token, float logit) {
    // −0 becomes 0.
    return u64(ordered(__fadd_rn(logit, 0.0f))) << 32 | ~token;
}

__device__ __forceinline__ u64 first_of(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 first_of_warp(u64 place) {
    for (u32 width = 16; width > 0; width /= 2) place = first_of(place, __shfl_xor_sync(FULL_WARP, place, width));
    return place;
}

// Returns the most probable of the tokens `start`, `start` + stride, … after `last` in the order; 0 if there is none.
__device__ __forceinline__ u64 first_after(u64 last, const float* logits, u32 start, u32 stride, u32 vocab) {
    u64 first = 0;
    for (u32 token = start; token < vocab; token += stride) {
        u64 place = place_of(token, logits[token]);
        if (place < last) first = first_of(first, place);
    }
    return first;
}

// One block per row. Rows with a logit that is NaN or +∞, or with no finite logit, are left to the host.
KERNEL(1024) distribution(const DistributionArgs args) {
    start_after_previous();
    __shared__ double sums[32];
    __shared__ u64 places[32];
    u32 row = blockIdx.x, thread = threadIdx.x, vocab = args.vocab;
    if (row >= args.step->reported) return;
    u32 of_step = args.step->whole - args.step->reported + row;
    const float* logits = args.logits + u64(of_step) * vocab;
    Distribution* out = args.distributions + row;
    // NaN and +∞ have the first place of all.
    constexpr u64 ALL = ~0ull;
    u64 here = 0;
    for (u32 token = thread; token < vocab; token += SUMS) {
        float logit = logits[token];
        here = first_of(here, logit < -minus_infinity() ? place_of(token, logit) : ALL);
    }
    u64 first = over_block(first_of_warp(here), places, first_of);
    float largest = from_ordered(u32(first >> 32));
    bool is_known = first != ALL && largest > minus_infinity();
    if (thread == 0) out->is_known = is_known, out->largest = largest;
    if (!is_known) return;
    double sum = 0.0;
    for (u32 token = thread; token < vocab; token += SUMS) sum = __dadd_rn(sum, exp_f64(__dsub_rn(double(logits[token]), double(largest))));
    sum = sum_over_block(sum, sums);
    if (thread == 0) out->sum = sum;
    u32 count = args.tops[of_step] < vocab ? args.tops[of_step] : vocab;
    if (thread >= count && thread < TOPS) out->top[thread].token = NONE;
    for (u32 i = 0; i < count; i++) {
        if (i > 0) first = over_block(first_of_warp(here), places, first_of);
        u32 token = ~u32(first), owner = token % SUMS;
        if (thread == 0) out->top[i] = {token, from_ordered(u32(first >> 32))};
        if (i + 1 == count || thread / 32 != owner / 32) continue;
        // The warp of the thread that has the token finds that thread's next one.
        u64 next = first_of_warp(first_after(first, logits, owner + thread % 32 * SUMS, 32 * SUMS, vocab));
        if (thread == owner) here = next;
    }
}
