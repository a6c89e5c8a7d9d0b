// Code that the attention kernels share. `../float/attention.rs` defines the results:
//
//     score[p]  = (Σ_d q[d]·K[d][p]) · scale             a chain of fused multiply-adds, d ascending
//     weight[p] = exp(score[p] − max score)               p ≤ position of the query
//     out[d]    = (Σ_p weight[p]·V[p][d]) / Σ_p weight[p]  a chain, p ascending; the divisor in lane order
//
// Int8 keys and values are multiplied as integers: attention_q8.cuh.
//
// A chain is never split, so threads cannot share a chain. A thread holds several chains, for some queries by some
// positions (or elements of the output), because an operand that is read from shared memory for one multiply-add
// takes four times as long as the multiply-add.

#pragma once
#include "attention_q8.cuh"

// A task, as a warp sees it.
struct Work {
    AttentionTask task;
    u32 count;  // number of queries
    u32 kv_head;
    u32 last;  // position of the last row
    const u32* blocks;
};

__device__ __forceinline__ Work work_of(const AttentionArgs& args, u32 index) {
    AttentionTask task = args.tasks[index];
    u32 group = args.pool.heads / args.pool.kv_heads;
    return {task, task.row_count * task.head_count, task.first_head / group, task.position + task.row_count - 1,
            args.blocks + task.table};
}

__device__ __forceinline__ u32 row_of(const Work& work, u32 query) {
    return work.task.first_row + query / work.task.head_count;
}

// Returns the last position that a query of the task sees.
__device__ __forceinline__ u32 limit_of(const Work& work, u32 query) {
    return work.task.position + query / work.task.head_count;
}

// Returns the index of a query of the task in the queries and outputs of the step.
__device__ __forceinline__ u64 query_at(const AttentionArgs& args, const Work& work, u32 query) {
    u32 head = work.task.first_head + query % work.task.head_count;
    return (u64(row_of(work, query)) * args.pool.heads + head) * args.pool.head_dim;
}

// Copies the queries of a warp to shared memory, with zeros for missing queries. // (Q, padded_dim)
template <int Q>
__device__ __forceinline__ void load_queries(const AttentionArgs& args, const Work& work, float* queries) {
    u32 padded = args.pool.padded_dim;
    UNROLL for (u32 q = 0; q < Q; q++) {
        const float* from = args.queries + (q < work.count ? query_at(args, work, q) : 0);
        for (u32 d = threadIdx.x % 32; d < padded; d += 32) {
            queries[q * padded + d] = q < work.count && d < args.pool.head_dim ? from[d] : 0.0f;
        }
    }
    __syncwarp();
}

// Returns the queries of a warp as keys are multiplied by them; `factors` gets what multiplies the products of each.
template <class E, int Q>
__device__ __forceinline__ const typename E::Query* prepare_queries(const AttentionArgs& args, float* queries, float (&factors)[Q]) {
    if constexpr (E::SCALED) {
        return narrow_queries<Q>(args, queries, factors);
    } else {
        UNROLL for (u32 q = 0; q < Q; q++) factors[q] = args.scale;
        return queries;
    }
}

// Adds the products of one chunk of elements; the first `count` elements exist.
template <class E, int Q, int P>
__device__ __forceinline__ void score_chunk(const float* queries, u32 padded, const uint4 (&chunk)[P], u32 count,
                                            float (&sums)[P][Q]) {
    float keys[P][E::CHUNK];
    UNROLL for (u32 i = 0; i < P; i++) E::widen_chunk(chunk[i], keys[i]);
    if (count < E::CHUNK) {
        UNROLL for (u32 e = 0; e < E::CHUNK; e++) {
            if (e >= count) break;
            UNROLL for (u32 q = 0; q < Q; q++) {
                UNROLL for (u32 i = 0; i < P; i++) sums[i][q] = __fmaf_rn(queries[q * padded + e], keys[i][e], sums[i][q]);
            }
        }
        return;
    }
    UNROLL for (u32 e = 0; e < E::CHUNK; e += 4) {
        UNROLL for (u32 q = 0; q < Q; q++) {
            float4 v = *reinterpret_cast<const float4*>(queries + q * padded + e);
            UNROLL for (u32 i = 0; i < P; i++) {
                sums[i][q] = __fmaf_rn(v.x, keys[i][e], sums[i][q]);
                sums[i][q] = __fmaf_rn(v.y, keys[i][e + 1], sums[i][q]);
                sums[i][q] = __fmaf_rn(v.z, keys[i][e + 2], sums[i][q]);
                sums[i][q] = __fmaf_rn(v.w, keys[i][e + 3], sums[i][q]);
            }
        }
    }
}

// Loads sixteen bytes of keys. WRITTEN: this kernel may have written them.
template <bool WRITTEN> __device__ __forceinline__ uint4 load_keys(const uint4* from) {
    return WRITTEN ? *from : load_constant(from);
}

// Computes the products of P positions per lane, before the factors. keys[i] is the address of the key of position `i`
// of the lane. AHEAD chunks are loaded before the current chunks are multiplied. WRITTEN: this kernel may have
// written keys.
template <class E, int Q, int P, int AHEAD, bool WRITTEN = false>
__device__ __forceinline__ void score(const typename E::Query* queries, const KvPool& pool, const uint4* const (&keys)[P],
                                      typename E::Sum (&sums)[P][Q]) {
    u32 chunks = (pool.head_dim + E::CHUNK - 1) / E::CHUNK;
    UNROLL for (u32 i = 0; i < P; i++) {
        UNROLL for (u32 q = 0; q < Q; q++) sums[i][q] = 0;
    }
    uint4 next[AHEAD][P];
    UNROLL for (u32 a = 0; a < AHEAD; a++) {
        UNROLL for (u32 i = 0; i < P; i++) {
            next[a][i] = load_keys<WRITTEN>(keys[i] + (a < chunks ? a : 0) * BLOCK_TOKENS);
        }
    }
    for (u32 c = 0; c < chunks; c += AHEAD) {
        uint4 now[AHEAD][P];
        UNROLL for (u32 a = 0; a < AHEAD; a++) {
            u32 then = c + AHEAD + a;
            UNROLL for (u32 i = 0; i < P; i++) {
                now[a][i] = next[a][i];
                if (then < chunks) next[a][i] = load_keys<WRITTEN>(keys[i] + then * BLOCK_TOKENS);
            }
        }
        UNROLL for (u32 a = 0; a < AHEAD; a++) {
            u32 d = (c + a) * E::CHUNK;
            if (d < pool.head_dim) score_chunk<E, Q, P>(queries + d, pool.padded_dim, now[a], pool.head_dim - d, sums);
        }
    }
}

// Returns the address of the first chunk of the key of a position; the next chunks are BLOCK_TOKENS chunks apart.
template <class E>
__device__ __forceinline__ const uint4* key_chunks(const KvPool& pool, u32 block, u32 kv_head, u32 position) {
    return reinterpret_cast<const uint4*>(keys_of<E>(pool, block, kv_head)) + position % BLOCK_TOKENS;
}

// Returns the scale of the key of a position. WRITTEN: as above.
template <class E, bool WRITTEN = false>
__device__ __forceinline__ float key_scale(const KvPool& pool, u32 block, u32 kv_head, u32 position) {
    if (!E::SCALED) return 1.0f;
    const float* scale = scales_of<E>(pool, block, kv_head) + position % BLOCK_TOKENS;
    return WRITTEN ? *scale : load_constant_float(scale);
}

// Returns the score of a position. `factor` is the query's.
template <class E> __device__ __forceinline__ float score_of(typename E::Sum sum, float key_scale, float factor) {
    if constexpr (E::SCALED) return __fmul_rn(__int2float_rn(sum), __fmul_rn(key_scale, factor));
    else return __fmul_rn(sum, factor);
}

// Reads the block table of a warp ahead of use: each lane has one block of the current window of 32 blocks and one
// of the next window, in registers. Positions must be requested in ascending order.
struct Table {
    const u32* blocks;
    u32 count, window, ids, next;

    __device__ __forceinline__ u32 load(u32 of_window) const {
        u32 index = of_window * 32 + threadIdx.x % 32;
        return blocks[index < count ? index : count - 1];
    }
    __device__ __forceinline__ void begin(const Work& work) {
        blocks = work.blocks, count = work.last / BLOCK_TOKENS + 1, window = 0;
        ids = load(0), next = load(1);
    }
    // Returns the block of a position. All lanes of the warp must request positions of the same window.
    __device__ __forceinline__ u32 block_of(u32 position) {
        u32 index = position / BLOCK_TOKENS;
        if (index / 32 > window) {
            window = index / 32, ids = next;
            next = load(window + 1);
        }
        return __shfl_sync(FULL_WARP, ids, index % 32);
    }
};

// Zeros the positions of a chunk of values from `count` on. These positions were not written and may be NaN, and
// NaN times their weight of 0 is NaN. An int8 is never NaN.
template <class E> __device__ __forceinline__ uint4 first_values(uint4 chunk, u32 count) {
    if (E::CHUNK == 16) return chunk;
    u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    UNROLL for (u32 w = 0; w < 4; w++) {
        if (E::CHUNK == 4) {
            if (w >= count) words[w] = 0;
        } else {
            if (2 * w >= count) words[w] = 0;
            else if (2 * w + 1 >= count) words[w] &= 0xffffu;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Adds a chunk of positions to the chains of Q queries by D elements. // weights: (Q, stride)
template <class E, int Q, int D>
__device__ __forceinline__ void weigh_chunk(const float* weights, u32 stride, const uint4 (&chunk)[D], float (&out)[D][Q]) {
    float values[D][E::CHUNK];
    UNROLL for (u32 i = 0; i < D; i++) E::widen_chunk(chunk[i], values[i]);
    UNROLL for (u32 e = 0; e < E::CHUNK; e += 4) {
        UNROLL for (u32 q = 0; q < Q; q++) {
            float4 w = *reinterpret_cast<const float4*>(weights + q * stride + e);
            UNROLL for (u32 i = 0; i < D; i++) {
                out[i][q] = __fmaf_rn(w.x, values[i][e], out[i][q]);
                out[i][q] = __fmaf_rn(w.y, values[i][e + 1], out[i][q]);
                out[i][q] = __fmaf_rn(w.z, values[i][e + 2], out[i][q]);
                out[i][q] = __fmaf_rn(w.w, values[i][e + 3], out[i][q]);
            }
        }
    }
}

// Returns the address of the scales of the values of positions p .. p + 3, for p a multiple of four.
template <class E>
__device__ __forceinline__ const float4* value_scales(Table& table, const KvPool& pool, u32 kv_head, u32 p) {
    return reinterpret_cast<const float4*>(scales_of<E>(pool, table.block_of(p), pool.kv_heads + kv_head) + p % BLOCK_TOKENS);
}

// Loads the scales of the values of positions p .. p + 3; 0 for positions that were not written, and for values
// without scales.
template <class E>
__device__ __forceinline__ float4 load_value_scales(Table& table, const KvPool& pool, const Work& work, u32 p) {
    float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!E::SCALED) return none;
    const float4* from = value_scales<E>(table, pool, work.kv_head, p);
    if (p > work.last) return none;
    uint4 bits = load_constant(from);
    float4 scales = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
    return written_scales(scales, p, work.last);
}

// Returns the weight of a position; 0 if the position is not visible to the query.
__device__ __forceinline__ float weight_of(float score, float largest, bool visible) {
    float weight = exp_lane(__fsub_rn(score, largest));
    return visible ? weight : 0.0f;
}

// Returns the weights of positions p .. p + 3; 0 for positions after `limit`.
__device__ __forceinline__ float4 weights_of(float4 scores, float largest, u32 p, u32 limit) {
    return make_float4(weight_of(scores.x, largest, p <= limit), weight_of(scores.y, largest, p + 1 <= limit),
                       weight_of(scores.z, largest, p + 2 <= limit), weight_of(scores.w, largest, p + 3 <= limit));
}
