// Code that the attention kernels of few sequences share: a task is spread over warps, by positions for its scores, and by queries
// and elements of the output for its values.

#pragma once
#include "attention.cuh"
#include "rotate.cuh"

// Largest number of queries of a task.
constexpr u32 QUERIES = 4;
// Elements of the output per block.
constexpr u32 SLICE = 32;
// Number of stages in the ring of values.
constexpr u32 STAGES = 4;

// Computes the scores of position `p` for all queries. This kernel may have written some of the keys.
template <class E>
__device__ __forceinline__ void score_position(const AttentionArgs& args, const Work& work, const typename E::Query* queries,
                                               const float (&factors)[QUERIES], u32 p, float (&scores)[QUERIES]) {
    u32 valid = p < work.last ? p : work.last, block = work.blocks[valid / BLOCK_TOKENS];
    const uint4* keys[1] = {key_chunks<E>(args.pool, block, work.kv_head, valid)};
    typename E::Sum sums[1][QUERIES];
    float of_key = key_scale<E, true>(args.pool, block, work.kv_head, valid);
    score<E, QUERIES, 1, 4, true>(queries, args.pool, keys, sums);
    UNROLL for (u32 q = 0; q < QUERIES; q++) scores[q] = score_of<E>(sums[0][q], of_key, factors[q]);
}

// Writes the keys and values of the last position.
template <class E> __device__ __forceinline__ void store_last(const RotateScoresArgs& args, const Work& work, const float* cos) {
    const KvPool& pool = args.attention.pool;
    u64 at = (u64(work.task.first_row) * pool.kv_heads + work.kv_head) * pool.head_dim;
    u32 block = work.blocks[work.last / BLOCK_TOKENS], slot = work.last % BLOCK_TOKENS;
    store_position<E>(pool, block, slot, work.kv_head, args.keys + at, args.values + at, cos);
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

// The scales of the values of a ring, where values have scales.
template <bool SCALED> struct RingScales {};
template <> struct RingScales<true> {
    float scales[STAGES][SEGMENT];
};

// The ring: per stage, the values of one slice, their scales, and the scores of the queries of the block.
template <class E> struct Ring : RingScales<E::SCALED> {
    static constexpr u32 POSITIONS = E::CHUNK == 4 ? 64 : 128;  // at most 8 KiB of values and 4 scores per lane
    static constexpr u32 CHUNKS = POSITIONS / E::CHUNK;
    static_assert(!E::SCALED || POSITIONS == SEGMENT, "the integer weights of a stage have one scale");
    uint4 values[STAGES][CHUNKS][SLICE];
    float scores[STAGES][QUERIES][POSITIONS];
};

// Starts the copies of one stage of values: this warp's part, and their scales by the first warp.
template <class E>
__device__ __forceinline__ void fetch_values(const AttentionArgs& args, const Work& work, Table& table, u32 stage, u32 first, Ring<E>& ring) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 base = stage * Ring<E>::POSITIONS, slot = stage % STAGES, d = first + lane;
    UNROLL_BY(4) for (u32 c = warp; c < Ring<E>::CHUNKS; c += warps) {
        u32 p = base + c * E::CHUNK;
        if (p > work.last) break;
        u32 block = table.block_of(p);
        if (d >= args.pool.padded_dim) continue;
        copy_async16(&ring.values[slot][c][lane],
                     values_of<E>(args.pool, block, work.kv_head) + value_at<E>(args.pool.padded_dim, p % BLOCK_TOKENS, d));
    }
    if constexpr (E::SCALED) {
        const float4* scales = value_scales<E>(table, args.pool, work.kv_head, base + 4 * lane);
        if (warp == 0 && base + 4 * lane <= work.last) copy_async16(&ring.scales[slot][4 * lane], scales);
    }
}

// The weights that a lane has of one stage: positions lane, lane + 32, …
template <class E> struct Weights {
    static constexpr u32 COUNT = Ring<E>::POSITIONS / 32;
    float of[COUNT];
    // Computes the weights from the scores of a stage.
    __device__ __forceinline__ void compute(const Work& work, u32 stage, const Ring<E>& ring, float largest) {
        const float* scores = ring.scores[stage % STAGES][threadIdx.x / 32];
        u32 base = stage * Ring<E>::POSITIONS;
        UNROLL for (u32 i = 0; i < COUNT; i++) {
            u32 p = threadIdx.x % 32 + 32 * i;
            of[i] = weight_of(scores[p], largest, base + p <= work.last);
        }
    }
    __device__ __forceinline__ void store(float* weights) const {
        UNROLL for (u32 i = 0; i < COUNT; i++) weights[threadIdx.x % 32 + 32 * i] = of[i];
    }
};

// For int8 values, a lane has positions 4 lane .. 4 lane + 3, and their integer weights, too.
template <> struct Weights<KvQ8> {
    float4 of;
    uint2 integers;
    float unit;  // what multiplies the sums of the stage
    __device__ __forceinline__ void compute(const Work& work, u32 stage, const Ring<KvQ8>& ring, float largest) {
        u32 lane = threadIdx.x % 32, slot = stage % STAGES, p = stage * SEGMENT + 4 * lane;
        of = weights_of(reinterpret_cast<const float4*>(ring.scores[slot][threadIdx.x / 32])[lane], largest, p, work.last);
        float4 scales = written_scales(reinterpret_cast<const float4*>(ring.scales[slot])[lane], p, work.last);
        float4 factors = factors_of(of, scales);
        float most = largest_factor(factors);
        unit = __fdiv_rn(most, WEIGHT_MAX);
        integers = integer_weights(factors, __fdiv_rn(WEIGHT_MAX, most));
    }
    __device__ __forceinline__ void store(float* weights) const { reinterpret_cast<float4*>(weights)[threadIdx.x % 32] = of; }
    // Replaces the stored weights by the integer weights.
    __device__ __forceinline__ const u16* store_integers(float* weights) const {
        __syncwarp();
        reinterpret_cast<uint2*>(weights)[threadIdx.x % 32] = integers;
        __syncwarp();
        return reinterpret_cast<const u16*>(weights);
    }
};

// Adds the weights of a stage, which are already stored, to the lane sum.
template <class E> __device__ __forceinline__ void add_weights(const float* weights, float& lane_sum) {
    UNROLL for (u32 p = threadIdx.x % LANES; p < Ring<E>::POSITIONS; p += LANES) lane_sum = __fadd_rn(lane_sum, weights[p]);
}

// Adds the positions of a stage to the chain, and their weights to the lane sum. Adds `left` positions, or the whole
// stage where `left` is larger.
// `meanwhile` runs beside the chain of a whole stage, which leaves most cycles free.
template <class E, class Meanwhile>
__device__ __forceinline__ void weigh_stage(const Weights<E>&, float* weights, const uint4 (&values)[Ring<E>::CHUNKS][SLICE],
                                            u32 left, float (&out)[1][1], float& lane_sum, Meanwhile meanwhile) {
    u32 lane = threadIdx.x % 32;
    add_weights<E>(weights, lane_sum);
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

// The same for int8 values. Two sums halve the chain of products.
template <class Meanwhile>
__device__ __forceinline__ void weigh_stage(const Weights<KvQ8>& of_lane, float* weights,
                                            const uint4 (&values)[Ring<KvQ8>::CHUNKS][SLICE], u32 left, float (&out)[1][1],
                                            float& lane_sum, Meanwhile meanwhile) {
    constexpr u32 CHUNK = KvQ8::CHUNK, CHUNKS = Ring<KvQ8>::CHUNKS;
    u32 lane = threadIdx.x % 32;
    add_weights<KvQ8>(weights, lane_sum);
    const u16* integers = of_lane.store_integers(weights);
    float unit = of_lane.unit;
    i32 sums[2][1][1] = {};
    if (left >= SEGMENT) {
        meanwhile();
        UNROLL for (u32 c = 0; c < CHUNKS; c++) {
            uint4 chunk[1] = {values[c][lane]};
            weigh_chunk<KvQ8, 1, 1>(integers + c * CHUNK, 0, chunk, sums[c % 2]);
        }
    } else {
        UNROLL_BY(1) for (u32 c = 0; c * CHUNK < left; c++) {
            uint4 chunk[1] = {values[c][lane]};
            weigh_chunk<KvQ8, 1, 1>(integers + c * CHUNK, 0, chunk, sums[0]);
        }
    }
    out[0][0] = add_segment(sums[0][0][0] + sums[1][0][0], unit, out[0][0]);
}
