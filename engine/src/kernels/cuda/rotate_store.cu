// RoPE on queries and keys; keys and values into their KV blocks.

#include "kv.cuh"

// Half-split RoPE as backend/cpu/attend.rs has it: element j pairs with j + head_dim / 2, each product
// and difference rounded by itself.
struct Pair {
    float low, high;
};

__device__ __forceinline__ Pair rotated(float a, float b, float cos, float sin) {
    return {__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)), __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin))};
}

// A block per row of the step: rotates its queries in place, writes its keys, rotated, and its values.
template <class E> __device__ __forceinline__ void rotate_store(const RotateStoreArgs& args) {
    u32 row = blockIdx.x;
    if (row >= args.step->rows) return;
    const KvPool& pool = args.pool;
    u32 dim = pool.head_dim, half = dim / 2, position = args.positions[row];
    const float* cos = args.rotations + u64(position) * 2 * half;
    const float* sin = cos + half;
    float* queries = args.queries + u64(row) * pool.heads * dim;
    for (u32 i = threadIdx.x; i < pool.heads * half; i += blockDim.x) {
        u32 j = i % half;
        float* at = queries + i / half * dim + j;
        Pair pair = rotated(at[0], at[half], cos[j], sin[j]);
        at[0] = pair.low, at[half] = pair.high;
    }
    u32 block = args.blocks[args.tables[row] + position / BLOCK_TOKENS], slot = position % BLOCK_TOKENS;
    const float* keys = args.keys + u64(row) * pool.kv_heads * dim;
    for (u32 i = threadIdx.x; i < pool.kv_heads * half; i += blockDim.x) {
        u32 head = i / half, j = i % half;
        const float* at = keys + head * dim + j;
        Pair pair = rotated(at[0], at[half], cos[j], sin[j]);
        auto* out = keys_of<E>(pool, block, head);
        out[key_at<E>(slot, j)] = E::narrow(pair.low);
        out[key_at<E>(slot, j + half)] = E::narrow(pair.high);
    }
    const float* values = args.values + u64(row) * pool.kv_heads * dim;
    for (u32 i = threadIdx.x; i < pool.kv_heads * dim; i += blockDim.x) {
        u32 head = i / dim, d = i % dim;
        values_of<E>(pool, block, head)[value_at<E>(pool.padded_dim, slot, d)] = E::narrow(values[i]);
    }
}

KERNEL(256) rotate_store_f16(const RotateStoreArgs args) { rotate_store<F16>(args); }
KERNEL(256) rotate_store_f32(const RotateStoreArgs args) { rotate_store<F32>(args); }
