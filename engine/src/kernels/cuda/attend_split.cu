// Attention of few sequences. Two kernels spread each task over many blocks.
//
// `rotate_scores_*` does the work of rotate_store and spreads the positions over warps. `attend_values_*` spreads
// the queries and the elements of the output: a warp has one query and 32 elements, one chain per element, four
// cycles per position; int8 values take less than half of these cycles. Values come through a ring in shared memory
// that is filled far ahead, because a chain must not wait for memory. Both kernels give the same bits as `attend*`,
// because a chain is never split, and a sum of integers may be.

#include "attend_split.cuh"

// Writes the scores of a group of 32 positions, and the largest score of each query in the group.
template <class E>
__device__ __forceinline__ void score_group(const AttentionArgs& args, const Work& work, const typename E::Query* queries,
                                            const float (&factors)[QUERIES], u32 group) {
    u32 lane = threadIdx.x % 32, p = group * 32 + lane;
    float scores[QUERIES];
    score_position<E>(args, work, queries, factors, p, scores);
    UNROLL for (u32 q = 0; q < QUERIES; q++) {
        float v = scores[q];
        u64 query = u64(blockIdx.x) * QUERIES + q;
        if (p <= work.last) args.scores[query * args.scores_stride + p] = v;
        float largest = largest_of_warp(p <= work.last ? larger(v, minus_infinity()) : minus_infinity());
        if (lane == 0) args.maxima[query * (args.scores_stride / 32) + group] = largest;
    }
}

// Computes the scores of task `blockIdx.x` for position groups `blockIdx.y · warps + warp`, then every
// `gridDim.y · warps` groups. It rotates the queries first. The warp that has the last position first writes the
// keys and values of that position. Tasks that share a KV head write the same bytes.
template <class E> __device__ __forceinline__ void rotate_scores(const RotateScoresArgs& args) {
    start_after_previous();
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
    float factors[QUERIES];
    const auto* prepared = prepare_queries<E, QUERIES>(attention, queries, factors);
    for (; group < groups; group += gridDim.y * warps) {
        if (group == work.last / 32) {
            store_last<E>(args, work, cos);
            __syncwarp();
        }
        score_group<E>(attention, work, prepared, factors, group);
    }
}

// Starts the copies of one stage: the scores of this warp, and what `fetch_values` copies.
template <class E>
__device__ __forceinline__ void fetch(const AttentionArgs& args, const Work& work, Table& table, u32 stage, u32 first,
                                      const float* scores, Ring<E>& ring) {
    u32 lane = threadIdx.x % 32, base = stage * Ring<E>::POSITIONS;
    if (base + 4 * lane <= work.last && lane < Ring<E>::POSITIONS / 4) {
        copy_async16(&ring.scores[stage % STAGES][threadIdx.x / 32][4 * lane], scores + base + 4 * lane);
    }
    fetch_values<E>(args, work, table, stage, first, ring);
}

// Computes elements SLICE · blockIdx.y .. of task blockIdx.x for query blockIdx.z · warps + warp.
template <class E> __device__ __forceinline__ void attend_values(const AttentionArgs& args) {
    start_after_previous();
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
    // Scores were copied by this warp, scales by another.
    if (E::SCALED) __syncthreads();
    else __syncwarp();
    next.compute(work, 0, ring, largest);
    float out[1][1] = {}, lane_sum = 0.0f;
    for (u32 s = 0; s < stages; s++) {
        __syncwarp();
        next.store(ring.scores[s % STAGES][warp]);
        copy_async_wait<STAGES - 3>();
        __syncthreads();
        if (s + STAGES - 1 < stages) fetch<E>(args, work, table, s + STAGES - 1, first, scores, ring);
        copy_async_commit();
        u32 left = work.last + 1 - s * Ring<E>::POSITIONS;
        auto meanwhile = [&] { next.compute(work, s + 1, ring, largest); };
        weigh_stage(next, ring.scores[s % STAGES][warp], ring.values[s % STAGES], left, out, lane_sum, meanwhile);
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
