// Attention with one warp per task: decodes of many sequences, and tiles of prefill.
//
// Each lane of a warp holds the scores of 4 positions by Q queries, then 4 elements by Q queries of the outputs.
// The scores are in global scratch between the two phases; the scratch stays in the second-level cache. Keys and
// values are read once per task: 2 · padded_dim · size bytes per position for Q queries. The warps of a block take
// neighbouring tasks; in prefill these tasks share their keys and values in the first-level cache.

#include "attention.cuh"

// Positions per lane in the loop over scores, and elements per lane in the loop over outputs.
constexpr u32 PER_LANE = 4;
// Number of positions that have their weights in shared memory at the same time.
constexpr u32 STAGE = 128;
static_assert(STAGE == SEGMENT, "the integer weights of a stage have one scale");

// Writes the scores of all positions to scratch; `largest` gets the largest score of each query, in every lane.
template <class E, int Q>
__device__ __forceinline__ void all_scores(const AttentionArgs& args, const Work& work, const u32 (&limits)[Q],
                                           const typename E::Query* queries, const float (&factors)[Q], float* scores,
                                           float (&largest)[Q]) {
    u32 lane = threadIdx.x % 32;
    UNROLL for (u32 q = 0; q < Q; q++) largest[q] = minus_infinity();
    for (u32 base = 0; base <= work.last; base += 32 * PER_LANE) {
        const uint4* keys[PER_LANE];
        float key_scales[PER_LANE];
        UNROLL for (u32 i = 0; i < PER_LANE; i++) {
            u32 p = base + 32 * i + lane;
            p = p < work.last ? p : work.last;
            u32 block = work.blocks[p / BLOCK_TOKENS];
            keys[i] = key_chunks<E>(args.pool, block, work.kv_head, p);
            key_scales[i] = key_scale<E>(args.pool, block, work.kv_head, p);
        }
        typename E::Sum sums[PER_LANE][Q];
        score<E, Q, PER_LANE, 1>(queries, args.pool, keys, sums);
        UNROLL for (u32 i = 0; i < PER_LANE; i++) {
            u32 p = base + 32 * i + lane;
            if (p > work.last) continue;
            UNROLL for (u32 q = 0; q < Q; q++) {
                float v = score_of<E>(sums[i][q], key_scales[i], factors[q]);
                scores[u64(q) * args.scores_stride + p] = v;
                if (p <= limits[q]) largest[q] = larger(v, largest[q]);
            }
        }
    }
    UNROLL for (u32 q = 0; q < Q; q++) largest[q] = largest_of_warp(largest[q]);
    __syncwarp();
}

// Writes the weights of the positions of a stage to shared memory // (Q, STAGE), and adds the weights to the lane
// sums: lane l of the warp has sum lane l % 16 of queries l / 16, l / 16 + 2, …
template <int Q>
__device__ __forceinline__ void stage_weights(const AttentionArgs& args, const u32 (&limits)[Q], u32 base, const float* scores,
                                              const float (&largest)[Q], float* weights, float (&lane_sums)[Q / 2]) {
    u32 lane = threadIdx.x % 32;
    __syncwarp();
    UNROLL for (u32 q = 0; q < Q; q++) {
        u32 p = base + 4 * lane;
        float4 s = *reinterpret_cast<const float4*>(scores + u64(q) * args.scores_stride + p);
        reinterpret_cast<float4*>(weights + q * STAGE)[lane] = weights_of(s, largest[q], p, limits[q]);
    }
    __syncwarp();
    UNROLL for (u32 i = 0; i < Q / 2; i++) {
        const float* of_query = weights + (2 * i + lane / LANES) * STAGE + lane % LANES;
        UNROLL for (u32 p = 0; p < STAGE; p += LANES) lane_sums[i] = __fadd_rn(lane_sums[i], of_query[p]);
    }
}

// Replaces the weights of a stage by integer weights, in place: f32 (Q, STAGE) becomes u16 (Q, STAGE). `units` gets
// what multiplies the sums of each query. `scales` are those of the four positions of this lane.
template <int Q>
__device__ __forceinline__ void narrow_weights(float4 scales, float* weights, float (&units)[Q]) {
    u32 lane = threadIdx.x % 32;
    float4 factors[Q];
    float largest = FACTOR_MIN;
    UNROLL for (u32 q = 0; q < Q; q++) {
        factors[q] = factors_of(reinterpret_cast<const float4*>(weights + q * STAGE)[lane], scales);
        float of_query = largest_factor(factors[q]);
        if (lane % Q == q) largest = of_query;
    }
    // A division is many instructions and a shuffle is one, so each lane divides once, for one query.
    bool inverts = lane < 16;
    float quotient = __fdiv_rn(inverts ? WEIGHT_MAX : largest, inverts ? largest : WEIGHT_MAX);
    __syncwarp();
    UNROLL for (u32 q = 0; q < Q; q++) {
        float inverse = __shfl_sync(FULL_WARP, quotient, q);
        units[q] = __shfl_sync(FULL_WARP, quotient, 16 + q);
        u16* of_query = reinterpret_cast<u16*>(weights) + q * STAGE;
        reinterpret_cast<uint2*>(of_query)[lane] = integer_weights(factors[q], inverse);
    }
    __syncwarp();
}

// Loads the chunks of values of the elements of this lane at a position.
template <class E>
__device__ __forceinline__ void load_values(Table& table, u32 kv_head, const KvPool& pool, u32 position, u32 first,
                                            uint4 (&out)[PER_LANE]) {
    u32 block = table.block_of(position), part = position % BLOCK_TOKENS / E::CHUNK;
    const auto* values = reinterpret_cast<const uint4*>(values_of<E>(pool, block, kv_head)) + part * pool.padded_dim;
    UNROLL for (u32 i = 0; i < PER_LANE; i++) {
        u32 d = first + 32 * i + threadIdx.x % 32;
        if (d < pool.padded_dim) out[i] = load_constant(values + d);
    }
}

// Adds the products of a stage to the sums of each query by each element of this lane. `next` are the first values of
// the stage, then those of the stage after it.
template <class E, int Q>
__device__ __forceinline__ void weigh_positions(Table& table, const KvPool& pool, const Work& work, u32 base, u32 first,
                                                const typename E::Weight* weights, uint4 (&next)[PER_LANE],
                                                typename E::Sum (&sums)[PER_LANE][Q]) {
    u32 end = work.last + 1 - base < STAGE ? work.last + 1 - base : STAGE;
    for (u32 p = 0; p < end; p += E::CHUNK) {
        uint4 chunk[PER_LANE];
        UNROLL for (u32 i = 0; i < PER_LANE; i++) chunk[i] = next[i];
        u32 then = base + p + E::CHUNK;
        if (then <= work.last) load_values<E>(table, work.kv_head, pool, then, first, next);
        if (p + E::CHUNK > end) {
            UNROLL for (u32 i = 0; i < PER_LANE; i++) chunk[i] = first_values<E>(chunk[i], end - p);
        }
        weigh_chunk<E, Q, PER_LANE>(weights + p, STAGE, chunk, sums);
    }
}

// Computes the outputs of 128 elements of the head, from `first` on.
template <class E, int Q>
__device__ __forceinline__ void weigh(const AttentionArgs& args, const Work& work, const u32 (&limits)[Q], u32 first,
                                      const float* scores, const float (&largest)[Q], float* weights) {
    u32 lane = threadIdx.x % 32;
    float out[PER_LANE][Q] = {}, lane_sums[Q / 2] = {};
    uint4 next[PER_LANE] = {};
    Table table;
    table.begin(work);
    load_values<E>(table, work.kv_head, args.pool, 0, first, next);
    for (u32 base = 0; base <= work.last; base += STAGE) {
        float4 scales = load_value_scales<E>(table, args.pool, work, base + 4 * lane);
        stage_weights<Q>(args, limits, base, scores, largest, weights, lane_sums);
        if constexpr (E::SCALED) {
            float units[Q];
            narrow_weights<Q>(scales, weights, units);
            i32 sums[PER_LANE][Q] = {};
            weigh_positions<E, Q>(table, args.pool, work, base, first, reinterpret_cast<const u16*>(weights), next, sums);
            UNROLL for (u32 i = 0; i < PER_LANE; i++) {
                UNROLL for (u32 q = 0; q < Q; q++) out[i][q] = add_segment(sums[i][q], units[q], out[i][q]);
            }
        } else {
            weigh_positions<E, Q>(table, args.pool, work, base, first, weights, next, out);
        }
    }
    UNROLL for (u32 q = 0; q < Q; q++) {
        float sum = sum_of_lanes(lane_sums[q / 2]);
        sum = __shfl_sync(FULL_WARP, sum, q % 2 * LANES);
        UNROLL for (u32 i = 0; i < PER_LANE; i++) {
            u32 d = first + 32 * i + lane;
            if (q < work.count && d < args.pool.head_dim) {
                args.attended[query_at(args, work, q) + d] = __fdiv_rn(out[i][q], sum);
            }
        }
    }
}

// Attention for tasks of at most Q queries. // shared: per warp (Q, padded_dim) queries, (Q, STAGE) weights, as f32
template <class E, int Q> __device__ __forceinline__ void attend(const AttentionArgs& args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, slot = blockIdx.x * warps + warp;
    float* queries = reinterpret_cast<float*>(bytes) + warp * Q * (args.pool.padded_dim + STAGE);
    float* weights = queries + Q * args.pool.padded_dim;
    float* scores = args.scores + u64(slot) * Q * args.scores_stride;
    for (u32 index = slot; index < args.step->tasks; index += gridDim.x * warps) {
        Work work = work_of(args, index);
        u32 limits[Q];
        UNROLL for (u32 q = 0; q < Q; q++) limits[q] = limit_of(work, q < work.count ? q : 0);
        load_queries<Q>(args, work, queries);
        float factors[Q], largest[Q];
        const auto* prepared = prepare_queries<E, Q>(args, queries, factors);
        all_scores<E, Q>(args, work, limits, prepared, factors, scores, largest);
        for (u32 first = 0; first < args.pool.padded_dim; first += 32 * PER_LANE) {
            weigh<E, Q>(args, work, limits, first, scores, largest, weights);
        }
        __syncwarp();
    }
}

KERNEL_BY(128, 3) attend4_f16(const AttentionArgs args) { attend<KvF16, 4>(args); }
KERNEL_BY(128, 3) attend4_f32(const AttentionArgs args) { attend<KvF32, 4>(args); }
KERNEL_BY(128, 3) attend4_q8(const AttentionArgs args) { attend<KvQ8, 4>(args); }
KERNEL(128) attend8_f16(const AttentionArgs args) { attend<KvF16, 8>(args); }
KERNEL(128) attend8_f32(const AttentionArgs args) { attend<KvF32, 8>(args); }
KERNEL_BY(128, 3) attend8_q8(const AttentionArgs args) { attend<KvQ8, 8>(args); }
