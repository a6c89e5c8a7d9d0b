// Attention of few sequences. Two kernels spread each task over many blocks.
//
// `rotate_scores_*` does the work of rotate_store and spreads the positions over warps. `attend_values_*` spreads
// the queries and the elements of the output: a warp has one query and 32 elements, one chain per element, four
// cycles per position. Values come through a ring in shared memory that is filled far ahead, because a chain must
// not wait for memory. Both kernels give the same bits as `attend*`, because a chain is never split.

#include "attention.cuh"
#include "rotate.cuh"

// Largest number of queries of a task.
constexpr u32 QUERIES = 4;
// Elements of the output per block.
constexpr u32 SLICE = 32;
// Number of stages in the ring of values.
constexpr u32 STAGES = 4;

// Writes the scores of a group of 32 positions, and the largest score of each query in the group. This kernel may
// have written some of the keys.
template <class E>
__device__ __forceinline__ void score_group(const AttentionArgs& args, const Work& work, const float* queries, u32 group) {
    u32 lane = threadIdx.x % 32, p = group * 32 + lane, valid = p < work.last ? p : work.last;
    u32 block = work.blocks[valid / BLOCK_TOKENS];
    const uint4* keys[1] = {key_chunks<E>(args.pool, block, work.kv_head, valid)};
    float sums[1][QUERIES], factor = factor_of<E, true>(args, block, work.kv_head, valid);
    score<E, QUERIES, 1, 4, true>(queries, args.pool, keys, sums);
    UNROLL for (u32 q = 0; q < QUERIES; q++) {
        float v = __fmul_rn(sums[0][q], factor);
        u64 query = u64(blockIdx.x) * QUERIES + q;
        if (p <= work.last) args.scores[query * args.scores_stride + p] = v;
        float largest = largest_of_warp(p <= work.last ? larger(v, minus_infinity()) : minus_infinity());
        if (lane == 0) args.maxima[query * (args.scores_stride / 32) + group] = largest;
    }
}

// Rotates the queries of a warp in shared memory.
__device__ __forceinline__ void rotate_queries(const KvPool& pool, u32 count, const float* cos, float* queries) {
    u32 half = pool.head_dim / 2;
    for (u32 q = 0; q < count; q++) {
        for (u32 j = threadIdx.x % 32; j < half; j += 32) {
            float* at = queries + q * pool.padded_dim + j;
            Pair pair = rotated(at[0], at[half], cos[j], cos[half + j]);
            at[0] = pair.low, at[half] = pair.high;
        }
    }
    __syncwarp();
}

// Computes the scores of task `blockIdx.x` for position groups `blockIdx.y · warps + warp`, then every
// `gridDim.y · warps` groups. It rotates the queries first. The warp that has the last position first writes the
// keys and values of that position. Tasks that share a KV head write the same bytes.
template <class E> __device__ __forceinline__ void rotate_scores(const RotateScoresArgs& args) {
    DYNAMIC_SHARED(bytes);
    const AttentionArgs& attention = args.attention;
    const KvPool& pool = attention.pool;
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
    Work work = work_of(attention, blockIdx.x);
    if (blockIdx.x >= attention.step->tasks) return;
    u32 group = blockIdx.y * warps + warp, groups = work.last / 32 + 1;
    if (group >= groups) return;
    float* queries = reinterpret_cast<float*>(bytes) + warp * QUERIES * pool.padded_dim;
    const float* cos = args.rotations + u64(work.last) * pool.head_dim;
    load_queries<QUERIES>(attention, work, queries);
    rotate_queries(pool, work.count, cos, queries);
    for (; group < groups; group += gridDim.y * warps) {
        if (group == work.last / 32) {
            u64 at = (u64(work.task.first_row) * pool.kv_heads + work.kv_head) * pool.head_dim;
            u32 block = work.blocks[work.last / BLOCK_TOKENS], slot = work.last % BLOCK_TOKENS;
            store_position<E>(pool, block, slot, work.kv_head, args.keys + at, args.values + at, cos);
            __syncwarp();
        }
        score_group<E>(attention, work, queries, group);
    }
}

// The ring: per stage, the values of one slice and the scores of the queries of the block.
template <class E> struct Ring {
    static constexpr u32 POSITIONS = E::CHUNK == 4 ? 64 : 128;  // at most 8 KiB of values and 4 scores per lane
    static constexpr u32 CHUNKS = POSITIONS / E::CHUNK;
    uint4 values[STAGES][CHUNKS][SLICE];
    float scores[STAGES][QUERIES][POSITIONS];
};

// Starts the copies of one stage: the scores of this warp, and its part of the values.
template <class E>
__device__ __forceinline__ void fetch(const AttentionArgs& args, const Work& work, Table& table, u32 stage, u32 first,
                                      const float* scores, Ring<E>& ring) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 base = stage * Ring<E>::POSITIONS, slot = stage % STAGES, d = first + lane;
    if (base + 4 * lane <= work.last && lane < Ring<E>::POSITIONS / 4) {
        copy_async16(&ring.scores[slot][warp][4 * lane], scores + base + 4 * lane);
    }
    UNROLL_BY(4) for (u32 c = warp; c < Ring<E>::CHUNKS; c += warps) {
        u32 p = base + c * E::CHUNK;
        if (p > work.last) break;
        u32 block = table.block_of(p);
        if (d >= args.pool.padded_dim) continue;
        copy_async16(&ring.values[slot][c][lane],
                     values_of<E>(args.pool, block, work.kv_head) + value_at<E>(args.pool.padded_dim, p % BLOCK_TOKENS, d));
    }
}

// The weights that a lane has of one stage, and the scales of its values: positions lane, lane + 32, …
template <class E> struct Weights {
    static constexpr u32 COUNT = Ring<E>::POSITIONS / 32;
    float of[COUNT], scales[COUNT];
    // Computes the weights from the scores of the stage that starts at position `base`.
    __device__ __forceinline__ void compute(const KvPool& pool, const Work& work, u32 base, const float* scores, float largest) {
        UNROLL for (u32 i = 0; i < COUNT; i++) {
            u32 p = threadIdx.x % 32 + 32 * i;
            if (E::SCALED) scales[i] = value_scale<E>(pool, work, base + p);
            of[i] = weight_of(scores[p], largest, base + p <= work.last);
        }
    }
    __device__ __forceinline__ void store(float* weights) const {
        UNROLL for (u32 i = 0; i < COUNT; i++) weights[threadIdx.x % 32 + 32 * i] = of[i];
    }
    // Stores the weights multiplied by the scales of the values: the factors of the chain where values have scales.
    __device__ __forceinline__ void store_scaled(float* weights) const {
        __syncwarp();
        UNROLL for (u32 i = 0; i < COUNT; i++) weights[threadIdx.x % 32 + 32 * i] = __fmul_rn(of[i], scales[i]);
        __syncwarp();
    }
};

// Adds the positions of a stage to the chain, and their weights, which are already stored, to the lane sum. Adds
// `left` positions, or the whole stage where `left` is larger.
// `meanwhile` runs beside the chain of a whole stage, which leaves most cycles free.
template <class E, class Meanwhile>
__device__ __forceinline__ void weigh_stage(const Weights<E>& of_lane, float* weights, const uint4 (&values)[Ring<E>::CHUNKS][SLICE],
                                            u32 left, float (&out)[1][1], float& lane_sum, Meanwhile meanwhile) {
    u32 lane = threadIdx.x % 32;
    UNROLL for (u32 p = lane % LANES; p < Ring<E>::POSITIONS; p += LANES) lane_sum = __fadd_rn(lane_sum, weights[p]);
    if (E::SCALED) of_lane.store_scaled(weights);
    if (left >= Ring<E>::POSITIONS) {
        meanwhile();
        UNROLL for (u32 c = 0; c < Ring<E>::CHUNKS; c++) {
            uint4 chunk[1] = {values[c][lane]};
            weigh_chunk<E, 1, 1>(weights + c * E::CHUNK, 0, chunk, out);
        }
        return;
    }
    UNROLL_BY(1) for (u32 c = 0; c * E::CHUNK < left; c++) {
        uint4 chunk[1] = {first_values<E>(values[c][lane], left - c * E::CHUNK)};
        weigh_chunk<E, 1, 1>(weights + c * E::CHUNK, 0, chunk, out);
    }
}

// Computes elements SLICE · blockIdx.y .. of task blockIdx.x for query blockIdx.z · warps + warp.
template <class E> __device__ __forceinline__ void attend_values(const AttentionArgs& args) {
    __shared__ __align__(16) Ring<E> ring;
    Work work = work_of(args, blockIdx.x);
    if (blockIdx.x >= args.step->tasks) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * SLICE;
    u32 query = blockIdx.z * (blockDim.x / 32) + warp;
    u64 place = u64(blockIdx.x) * QUERIES + query;
    const float* scores = args.scores + place * args.scores_stride;
    const float* maxima = args.maxima + place * (args.scores_stride / 32);
    u32 stages = work.last / Ring<E>::POSITIONS + 1;
    Table table;
    table.begin(work);
    UNROLL for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < stages) fetch<E>(args, work, table, s, first, scores, ring);
        copy_async_commit();
    }
    float largest = minus_infinity();
    for (u32 g = lane; g <= work.last / 32; g += 32) largest = larger(maxima[g], largest);
    largest = largest_of_warp(largest);
    // The weights of a stage are computed while the stage before it is added to the chain.
    Weights<E> next;
    copy_async_wait<STAGES - 2>();
    __syncwarp();
    next.compute(args.pool, work, 0, ring.scores[0][warp], largest);
    float out[1][1] = {}, lane_sum = 0.0f;
    for (u32 s = 0; s < stages; s++) {
        __syncwarp();
        next.store(ring.scores[s % STAGES][warp]);
        copy_async_wait<STAGES - 3>();
        __syncthreads();
        if (s + STAGES - 1 < stages) fetch<E>(args, work, table, s + STAGES - 1, first, scores, ring);
        copy_async_commit();
        u32 left = work.last + 1 - s * Ring<E>::POSITIONS, then = (s + 1) * Ring<E>::POSITIONS;
        const float* scores_then = ring.scores[(s + 1) % STAGES][warp];
        auto meanwhile = [&] { next.compute(args.pool, work, then, scores_then, largest); };
        weigh_stage<E>(next, ring.scores[s % STAGES][warp], ring.values[s % STAGES], left, out, lane_sum, meanwhile);
    }
    float sum = sum_of_lanes(lane_sum);
    if (query < work.count && first + lane < args.pool.head_dim) {
        args.attended[query_at(args, work, query) + first + lane] = __fdiv_rn(out[0][0], sum);
    }
}

KERNEL(128) rotate_scores_f16(const RotateScoresArgs args) { rotate_scores<KvF16>(args); }
KERNEL(128) rotate_scores_f32(const RotateScoresArgs args) { rotate_scores<KvF32>(args); }
KERNEL(128) rotate_scores_q8(const RotateScoresArgs args) { rotate_scores<KvQ8>(args); }
KERNEL(128) attend_values_f16(const AttentionArgs args) { attend_values<KvF16>(args); }
KERNEL(128) attend_values_f32(const AttentionArgs args) { attend_values<KvF32>(args); }
KERNEL(128) attend_values_q8(const AttentionArgs args) { attend_values<KvQ8>(args); }
