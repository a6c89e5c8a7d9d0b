// Applies RoPE to queries and keys; writes keys and values to their KV blocks.

#include "rotate.cuh"

// One block per row of the step: rotates the queries of the row in place, writes its keys, rotated, and its values.
template <class E> __device__ __forceinline__ void rotate_store(const RotateStoreArgs& args) {
    start_after_previous();
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
    // Each warp writes one KV head at a time.
    for (u32 head = threadIdx.x / 32; head < pool.kv_heads; head += blockDim.x / 32) {
        u64 at = (u64(row) * pool.kv_heads + head) * dim;
        store_position<E>(pool, block, slot, head, args.keys + at, args.values + at, cos);
    }
}

KERNEL(256) rotate_store_f16(const RotateStoreArgs args) { rotate_store<KvF16>(args); }
KERNEL(256) rotate_store_f32(const RotateStoreArgs args) { rotate_store<KvF32>(args); }
KERNEL(256) rotate_store_q8(const RotateStoreArgs args) { rotate_store<KvQ8>(args); }
