// Draws with top-k, top-p and min-p, as engine/src/sampling/top_k_top_p.rs defines them, from the exact logits of the most probable
// tokens and of those with changes, and bounds of the others.
//
// The tokens that can be drawn are the first of the order by descending logit, then by ascending token: of the tokens that top-k
// leaves, those before which the others weigh less than top_p of all, and with a weight of at least min_p. So only the token with
// the largest value needs to be looked at. If it cannot be drawn, all tokens after it cannot, and the next one is the token with
// the largest value among those before it.
//
// A token weighs exp((logit − largest logit) / temperature). Sums are bounds, further apart than the roundings of any order of
// additions. Where these do not decide, the row is left to the host.

#include "norm.cuh"
#include "screen.cuh"

// Factors of the bounds of sums in f32, of weights with an error of 10⁻⁵, and of sums in f64.
constexpr float ROUND_F32 = 1e-4f;
constexpr double ROUND_F64 = 1e-9;

// Bounds of the weight of the tokens that are not candidates. Blocks of row blockIdx.y have parts of the vocabulary.
KERNEL(256) weigh_rest(const WeighRestArgs args) {
    start_after_previous();
    __shared__ float shared[32];
    u32 row = blockIdx.y, groups = (args.vocab + 15) / 16;
    if (row >= args.step->screened) return;
    RowFilter filter = args.filters[row];
    if (!filter.is_on || filter.top_k > 0 || filter.top_p >= 1.0f) return;
    float threshold = args.thresholds[row], temperature = args.questions[row].temperature;
    float least = 0.0f, most = 0.0f, before = 0.0f;
    Found first = args.firsts[row];
    const float* values = args.estimates.values + u64(row) * groups * 16;
    DigitRow of_row = digit_row(args.estimates, row);
    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.vocab; token += gridDim.x * blockDim.x) {
        Interval bounds = logit_bounds_of(args.estimates, of_row, values, token);
        if (bounds.highest >= threshold) continue;
        float high = exp_lane(__fdiv_rn(__fsub_rn(bounds.highest, threshold), temperature));
        most = __fadd_rn(most, high);
        if (bounds.highest >= first.logit && token != first.token) before = __fadd_rn(before, high);
        float low = __fdiv_rn(__fsub_rn(bounds.lowest, threshold), temperature);
        if (low > -80.0f) least = __fadd_rn(least, exp_lane(low));
    }
    for (u32 width = 16; width > 0; width /= 2) {
        least = __fadd_rn(least, __shfl_xor_sync(FULL_WARP, least, width));
        most = __fadd_rn(most, __shfl_xor_sync(FULL_WARP, most, width));
        before = __fadd_rn(before, __shfl_xor_sync(FULL_WARP, before, width));
    }
    auto add = [](float a, float b) { return __fadd_rn(a, b); };
    least = over_block(least, shared, add);
    most = over_block(most, shared, add);
    before = over_block(before, shared, add);
    if (threadIdx.x != 0) return;
    args.rests[u64(row) * gridDim.x + blockIdx.x] = {__fmul_rn(least, 1.0f - ROUND_F32), __fmul_rn(most, 1.0f + ROUND_F32),
                                                     __fmul_rn(before, 1.0f + ROUND_F32), 0};
}

// A candidate and its value.
struct Valued {
    Found found;
    double value;
};

__device__ __forceinline__ Valued better(const Valued& a, const Valued& b) {
    return b.value > a.value || b.value == a.value && b.found.token < a.found.token ? b : a;
}

// The candidates of a row, with its tokens that have changes, and what is common to all looks at them.
struct Candidates {
    const Found* found;
    u32 count;
    const Found* changed;  // with the model's logits
    const LogitChange* changes;
    u32 changed_count;
    float least;    // those with smaller logits are not ordered among the other tokens
    float largest;  // logit
    float temperature;

    __device__ __forceinline__ double weight(float logit) const {
        return exp_f64(__ddiv_rn(__dsub_rn(logit, largest), temperature));
    }
    // Calls `look_at` for the candidates of this thread.
    template <class Each> __device__ __forceinline__ void each(Each look_at) const {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) look_at(found[i]);
        for (u32 i = threadIdx.x; i < changed_count; i += blockDim.x)
            look_at(Found{changed[i].token, changed_logit(changes[i], changed[i].logit)});
    }
    // The same for those that stand before `limit`.
    template <class Each> __device__ __forceinline__ void before(Found limit, Each look_at) const {
        each([&](Found f) {
            // 0 stands before −0.
            u32 place = ordered(f.logit), end = ordered(limit.logit);
            if (place > end || place == end && f.token < limit.token) look_at(f);
        });
    }
    // Returns the weight of the candidates before `limit`: of those that are ordered, or of the others.
    __device__ __forceinline__ double weight_before(Found limit, bool ordered, double* shared) const {
        double sum = 0.0;
        before(limit, [&](Found f) {
            if (f.logit >= least == ordered) sum = __dadd_rn(sum, weight(f.logit));
        });
        return sum_over_block(sum, shared);
    }
    // Returns the ordered candidate with the largest value before `limit`; of equal ones, the lowest token.
    __device__ __forceinline__ Found best_before(Found limit, const RowQuestion& question, Valued* shared) const {
        Valued best = {{0xffffffffu, 0.0f}, minus_infinity()};
        before(limit, [&](Found f) {
            if (f.logit >= least) best = better(best, {f, value_of(question, f.token, f.logit)});
        });
        for (u32 width = 16; width > 0; width /= 2) {
            Valued other = {{__shfl_xor_sync(FULL_WARP, best.found.token, width), __shfl_xor_sync(FULL_WARP, best.found.logit, width)},
                            __shfl_xor_sync(FULL_WARP, best.value, width)};
            best = better(best, other);
        }
        return over_block(best, shared, [](const Valued& a, const Valued& b) { return better(a, b); }).found;
    }
};

// Returns the k-th largest logit of the candidates. There are at least k.
__device__ __forceinline__ float kth_largest(const Candidates& all, u32 k, u32 (&counts)[32]) {
    if (threadIdx.x < 32) counts[threadIdx.x] = 0;
    __syncthreads();
    u32 key = 0;
    for (u32 round = 0; round < 32; round++) {
        u32 least = key | 0x80000000u >> round, here = 0;
        all.each([&](Found f) { here += ordered(f.logit) >= least; });
        here = u32(sum_of_warp(i32(here)));
        if (threadIdx.x % 32 == 0) atomicAdd(&counts[round], here);
        __syncthreads();
        if (counts[round] >= k) key = least;
    }
    return from_ordered(key);
}

// Finds the drawn token of a row. `first` is the token with the largest value of all. Returns false if the candidates do not
// decide; all threads return the same.
__device__ __forceinline__ bool find_drawn(const FilteredDrawArgs& args, u32 row, const RowFilter& filter, Found first, Found& drawn) {
    __shared__ double doubles[32];
    __shared__ float floats[32];
    __shared__ Valued valued[32];
    __shared__ u32 counts[32];
    RowQuestion question = args.questions[row];
    Candidates all = {args.some + u64(row) * args.capacity, args.some_counts[row], args.changed + u64(row) * args.changes_max,
                      changes_of(args.step, question), question.changes, 0.0f, minus_infinity(), question.temperature};
    if (all.count > args.capacity || all.count + all.changed_count < filter.top_k) return false;
    float here = minus_infinity();
    all.each([&](Found f) { here = larger(f.logit, here); });
    all.largest = over_block(largest_of_warp(here), floats, larger);
    if (!(fabsf(all.largest) < -minus_infinity())) return false;
    float threshold = args.thresholds[row];
    all.least = filter.top_k > 0 ? kth_largest(all, filter.top_k, counts) : threshold;
    bool by_weight = filter.top_p < 1.0f;
    Found end = {0xffffffffu, minus_infinity()}, now = first;
    // The weight of the ordered candidates, and bounds of the weight that the tokens before a drawn one stay below.
    double sum = 0.0, enough_least = 0.0, enough_most = 0.0;
    // At most: the weight of other tokens before the first one of the question.
    double before_first = 0.0;
    if (by_weight) {
        sum = all.weight_before(end, true, doubles);
        double rest_least = 0.0, rest_most = 0.0;
        if (filter.top_k == 0) {
            rest_least = rest_most = all.weight_before(end, false, doubles);
            before_first = all.weight_before(first, false, doubles);
            double unit = all.weight(threshold);
            const Rest* rests = args.rests + u64(row) * args.parts;
            for (u32 i = 0; i < args.parts; i++) {
                rest_least = __dadd_rn(rest_least, __dmul_rn(unit, rests[i].least));
                rest_most = __dadd_rn(rest_most, __dmul_rn(unit, rests[i].most));
                before_first = __dadd_rn(before_first, __dmul_rn(unit, rests[i].before));
            }
        }
        enough_least = __dmul_rn(__dmul_rn(filter.top_p, __dadd_rn(sum, rest_least)), 1.0 - ROUND_F64);
        enough_most = __dmul_rn(__dmul_rn(filter.top_p, __dadd_rn(sum, rest_most)), 1.0 + ROUND_F64);
    }
    // Whether all tokens that can be drawn are among the ordered candidates.
    bool has_all = filter.top_k > 0 || __dmul_rn(all.weight(threshold), 1.0 + ROUND_F64) < filter.min_p ||
                   by_weight && __dmul_rn(sum, 1.0 - ROUND_F64) >= enough_most;
    if (filter.top_k > 0) {
        now = all.best_before(end, question, valued);
    } else if (!(first.logit >= all.least)) {
        bool is_drawn = all.weight(first.logit) >= filter.min_p &&
                        (!by_weight || __dmul_rn(__dadd_rn(sum, before_first), 1.0 + ROUND_F64) < enough_least);
        if (is_drawn) drawn = first;
        if (is_drawn || !has_all) return is_drawn;
        now = all.best_before(end, question, valued);
    }
    for (;;) {
        bool can_be = all.weight(now.logit) >= filter.min_p;
        if (can_be && by_weight) {
            double before = all.weight_before(now, true, doubles);
            bool is_in = __dmul_rn(before, 1.0 + ROUND_F64) < enough_least;
            if (!is_in && __dmul_rn(before, 1.0 - ROUND_F64) < enough_most) return false;
            can_be = is_in;
        }
        if (can_be) {
            drawn = now;
            return true;
        }
        now = all.best_before(now, question, valued);
    }
}

// Returns a token with the logit that it has without a change.
__device__ __forceinline__ Found with_model_logit(const FilteredDrawArgs& args, u32 row, Found drawn) {
    const Found* changed = args.changed + u64(row) * args.changes_max;
    u32 low = 0, end = args.questions[row].changes, high = end;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (changed[middle].token < drawn.token) low = middle + 1;
        else high = middle;
    }
    return low < end && changed[low].token == drawn.token ? changed[low] : drawn;
}

// One block per row with filters: the candidate with the largest value of those that can be drawn.
KERNEL(256) filtered_draw(const FilteredDrawArgs args) {
    start_after_previous();
    u32 row = blockIdx.x;
    if (row >= args.step->screened) return;
    RowFilter filter = args.filters[row];
    if (!filter.is_on || args.found_counts[row] > args.capacity) return;
    Found drawn = {0, 0.0f};
    bool is_decided = find_drawn(args, row, filter, args.firsts[row], drawn);
    if (threadIdx.x != 0) return;
    if (is_decided) args.drawn[row] = with_model_logit(args, row, drawn);
    else args.found_counts[row] = args.capacity + 1;
    args.carried[args.step->carry + row] = is_decided ? drawn.token : 0;
}
