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

// Writes the scores of all positions to scratch; `largest` gets the largest score of each query, in every lane.
template <class E, int Q>
__device__ __forceinline__ void all_scores(const AttentionArgs& args, const Work& work, const u32 (&limits)[Q],
                                           const float* queries, float* scores, float (&largest)[Q]) {
    u32 lane = threadIdx.x % 32;
    UNROLL for (u32 q = 0; q < Q; q++) largest[q] = minus_infinity();
    for (u32 base = 0; base <= work.last; base += 32 * PER_LANE) {
        const uint4* keys[PER_LANE];
        float factors[PER_LANE];
        UNROLL for (u32 i = 0; i < PER_LANE; i++) {
            u32 p = base + 32 * i + lane;
            p = p < work.last ? p : work.last;
            u32 block = work.blocks[p / BLOCK_TOKENS];
            keys[i] = key_chunks<E>(args.pool, block, work.kv_head, p);
            factors[i] = factor_of<E>(args, block, work.kv_head, p);
        }
        float sums[PER_LANE][Q];
        score<E, Q, PER_LANE, 1>(queries, args.pool, keys, sums);
        UNROLL for (u32 i = 0; i < PER_LANE; i++) {
            u32 p = base + 32 * i + lane;
            if (p > work.last) continue;
            UNROLL for (u32 q = 0; q < Q; q++) {
                float v = __fmul_rn(sums[i][q], factors[i]);
                scores[u64(q) * args.scores_stride + p] = v;
                if (p <= limits[q]) largest[q] = larger(v, largest[q]);
            }
        }
    }
    UNROLL for (u32 q = 0; q < Q; q++) largest[q] = largest_of_warp(largest[q]);
    __syncwarp();
}

// Writes the weights of the positions of a stage to shared memory // (Q, STAGE), and adds the weights to the lane
// sums: lane l of the warp has sum lane l % 16 of queries l / 16, l / 16 + 2, … Where values have scales, the
// weights in shared memory are multiplied by the scales.
template <class E, int Q>
__device__ __forceinline__ void stage_weights(const AttentionArgs& args, const Work& work, const u32 (&limits)[Q], u32 base,
                                              const float* scores, const float (&largest)[Q], float* weights,
                                              float (&lane_sums)[Q / 2]) {
    u32 lane = threadIdx.x % 32;
    __syncwarp();
    UNROLL for (u32 q = 0; q < Q; q++) {
        u32 p = base + 4 * lane;
        float4 s = *reinterpret_cast<const float4*>(scores + u64(q) * args.scores_stride + p);
        s.x = weight_of(s.x, largest[q], p <= limits[q]);
        s.y = weight_of(s.y, largest[q], p + 1 <= limits[q]);
        s.z = weight_of(s.z, largest[q], p + 2 <= limits[q]);
        s.w = weight_of(s.w, largest[q], p + 3 <= limits[q]);
        reinterpret_cast<float4*>(weights + q * STAGE)[lane] = s;
    }
    __syncwarp();
    UNROLL for (u32 i = 0; i < Q / 2; i++) {
        const float* of_query = weights + (2 * i + lane / LANES) * STAGE + lane % LANES;
        UNROLL for (u32 p = 0; p < STAGE; p += LANES) lane_sums[i] = __fadd_rn(lane_sums[i], of_query[p]);
    }
    if (!E::SCALED) return;
    __syncwarp();
    UNROLL for (u32 p = lane; p < STAGE; p += 32) {
        float scale = value_scale<E>(args.pool, work, base + p);
        UNROLL for (u32 q = 0; q < Q; q++) weights[q * STAGE + p] = __fmul_rn(weights[q * STAGE + p], scale);
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
        stage_weights<E, Q>(args, work, limits, base, scores, largest, weights, lane_sums);
        u32 end = work.last + 1 - base < STAGE ? work.last + 1 - base : STAGE;
        for (u32 p = 0; p < end; p += E::CHUNK) {
            uint4 chunk[PER_LANE];
            UNROLL for (u32 i = 0; i < PER_LANE; i++) chunk[i] = next[i];
            u32 then = base + p + E::CHUNK;
            if (then <= work.last) load_values<E>(table, work.kv_head, args.pool, then, first, next);
            if (p + E::CHUNK > end) {
                UNROLL for (u32 i = 0; i < PER_LANE; i++) chunk[i] = first_values<E>(chunk[i], end - p);
            }
            weigh_chunk<E, Q, PER_LANE>(weights + p, STAGE, chunk, out);
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

// Attention for tasks of at most Q queries. // shared: per warp (Q, padded_dim) queries, (Q, STAGE) weights
template <class E, int Q> __device__ __forceinline__ void attend(const AttentionArgs& args) {
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
        float largest[Q];
        all_scores<E, Q>(args, work, limits, queries, scores, largest);
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
KERNEL(128) attend8_q8(const AttentionArgs args) { attend<KvQ8, 8>(args); }
