// RoPE, and the code that writes a position to the pool.

#pragma once
#include "kv.cuh"

// A rotated pair of elements. RoPE is half-split, as in backend/cpu/attend.rs: element j pairs with element
// j + head_dim / 2, and each product, sum and difference is rounded separately.
struct Pair {
    float low, high;
};

__device__ __forceinline__ Pair rotated(float a, float b, float cos, float sin) {
    return {__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)), __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin))};
}

// Writes one KV head of a position with one warp: its keys, rotated, and its values.
template <class E>
__device__ __forceinline__ void store_position(const KvPool& pool, u32 block, u32 slot, u32 kv_head, const float* keys,
                                               const float* values, const float* cos) {
    u32 dim = pool.head_dim, half = dim / 2, lane = threadIdx.x % 32;
    const float* sin = cos + half;
    float key_scale = 1.0f, value_scale = 1.0f;
    if (E::SCALED) {
        float of_keys = 0.0f, of_values = 0.0f;
        for (u32 j = lane; j < half; j += 32) {
            Pair pair = rotated(keys[j], keys[j + half], cos[j], sin[j]);
            of_keys = larger(fabsf(saturated(pair.low)), larger(fabsf(saturated(pair.high)), of_keys));
        }
        for (u32 d = lane; d < dim; d += 32) of_values = larger(fabsf(saturated(values[d])), of_values);
        key_scale = int8_scale(of_keys), value_scale = int8_scale(of_values);
        if (lane == 0) {
            scales_of<E>(pool, block, kv_head)[slot] = key_scale;
            scales_of<E>(pool, block, pool.kv_heads + kv_head)[slot] = value_scale;
        }
    }
    auto* key = keys_of<E>(pool, block, kv_head);
    for (u32 j = lane; j < half; j += 32) {
        Pair pair = rotated(keys[j], keys[j + half], cos[j], sin[j]);
        key[key_at<E>(slot, j)] = E::narrow(pair.low, key_scale);
        key[key_at<E>(slot, j + half)] = E::narrow(pair.high, key_scale);
    }
    auto* value = values_of<E>(pool, block, kv_head);
    for (u32 d = lane; d < dim; d += 32) value[value_at<E>(pool.padded_dim, slot, d)] = E::narrow(values[d], value_scale);
}
