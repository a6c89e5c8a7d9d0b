// Attention of few sequences with short contexts: the scores and the values of a task in one kernel, to the same bits as
// attend_split.cu. Blocks with other elements of the output compute all scores again, so no block waits for another; the values of
// all positions are copied meanwhile.

#include "attend_split.cuh"

// Computes elements SLICE · blockIdx.y .. of task `blockIdx.x`. All its positions fit the ring. The last warp, which has the fewest
// positions, first writes the keys and values of the last position; other blocks of the task and tasks that share a KV head write
// the same bytes.
template <class E> __device__ __forceinline__ void attend_short(const RotateScoresArgs& args) {
    start_after_previous();
    __shared__ __align__(16) Ring<E> ring;
    DYNAMIC_SHARED(bytes);
    constexpr u32 POSITIONS = Ring<E>::POSITIONS;
    const AttentionArgs& attention = args.attention;
    const KvPool& pool = attention.pool;
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * SLICE;
    Work work = work_of(attention, blockIdx.x);
    if (blockIdx.x >= attention.step->tasks) return;
    u32 stages = work.last / POSITIONS + 1, groups = work.last / 32 + 1;
    const float* cos = args.rotations + u64(work.last) * pool.head_dim;
    Table table;
    table.begin(work);
    for (u32 s = 0; s + 1 < stages; s++) fetch_values<E>(attention, work, table, s, first, ring);
    if (warp == warps - 1) store_last<E>(args, work, cos);
    float* queries = reinterpret_cast<float*>(bytes) + warp * QUERIES * pool.padded_dim;
    load_queries<QUERIES>(attention, work, queries);
    rotate_queries(pool, work.count, cos, queries);
    float factors[QUERIES];
    const auto* prepared = prepare_queries<E, QUERIES>(attention, queries, factors);
    __syncthreads();
    fetch_values<E>(attention, work, table, stages - 1, first, ring);
    copy_async_commit();
    for (u32 group = warp; group < groups; group += warps) {
        u32 p = group * 32 + lane;
        float scores[QUERIES];
        score_position<E>(attention, work, prepared, factors, p, scores);
        UNROLL for (u32 q = 0; q < QUERIES; q++) ring.scores[p / POSITIONS][q][p % POSITIONS] = scores[q];
    }
    copy_async_wait<0>();
    __syncthreads();
    // A warp has one query.
    if (warp >= work.count) return;
    float largest = minus_infinity();
    for (u32 p = lane; p <= work.last; p += 32) {
        float score = ring.scores[p / POSITIONS][warp][p % POSITIONS];
        largest = larger(larger(score, minus_infinity()), largest);
    }
    largest = largest_of_warp(largest);
    // The weights of a stage are computed while the stage before it is added to the chain.
    Weights<E> next;
    next.compute(work, 0, ring, largest);
    float out[1][1] = {}, lane_sum = 0.0f;
    for (u32 s = 0; s < stages; s++) {
        __syncwarp();
        next.store(ring.scores[s][warp]);
        __syncwarp();
        u32 left = work.last + 1 - s * POSITIONS;
        auto meanwhile = [&] {
            if (s + 1 < stages) next.compute(work, s + 1, ring, largest);
        };
        weigh_stage(next, ring.scores[s][warp], ring.values[s], left, out, lane_sum, meanwhile);
    }
    float sum = sum_of_lanes(lane_sum);
    if (first + lane < pool.head_dim) attention.attended[query_at(attention, work, warp) + first + lane] = __fdiv_rn(out[0][0], sum);
}

KERNEL(512) attend_short_f16(const RotateScoresArgs args) { attend_short<KvF16>(args); }
KERNEL(512) attend_short_f32(const RotateScoresArgs args) { attend_short<KvF32>(args); }
KERNEL(512) attend_short_q8(const RotateScoresArgs args) { attend_short<KvQ8>(args); }
