// RoPE, and what of a position is written to the pool.

#pragma once
#include "kv.cuh"

// Half-split RoPE as backend/cpu/attend.rs has it: element j pairs with j + head_dim / 2, each product
// and difference rounded by itself.
struct Pair {
    float low, high;
};

__device__ __forceinline__ Pair rotated(float a, float b, float cos, float sin) {
    return {__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)), __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin))};
}

// Writes one KV head of a position: its keys, rotated, and its values. `index` of `count` threads take part.
template <class E>
__device__ __forceinline__ void store_position(const KvPool& pool, u32 block, u32 slot, u32 kv_head, const float* keys,
                                               const float* values, const float* cos, u32 index, u32 count) {
    u32 dim = pool.head_dim, half = dim / 2;
    const float* sin = cos + half;
    auto* key = keys_of<E>(pool, block, kv_head);
    for (u32 j = index; j < half; j += count) {
        Pair pair = rotated(keys[j], keys[j + half], cos[j], sin[j]);
        key[key_at<E>(slot, j)] = E::narrow(pair.low);
        key[key_at<E>(slot, j + half)] = E::narrow(pair.high);
    }
    auto* value = values_of<E>(pool, block, kv_head);
    for (u32 d = index; d < dim; d += count) value[value_at<E>(pool.padded_dim, slot, d)] = E::narrow(values[d]);
}
