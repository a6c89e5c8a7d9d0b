// Addresses of keys and values. The layout of the pool (README.md) is implemented only here.

#pragma once
#include "args.cuh"
#include "lanes.cuh"

// The element types of stored keys and values. SCALED: the keys of a position and head have one scale, and so do the
// values; the number is the stored element times the scale. Keys are multiplied by Query, values by Weight; both
// products are added as Sum.
struct KvF32 : F32 {
    static constexpr bool SCALED = false;
    typedef float Query, Weight, Sum;
    static __device__ __forceinline__ float narrow(float v, float) { return v; }
};

struct KvF16 : F16 {
    static constexpr bool SCALED = false;
    typedef float Query, Weight, Sum;
    static __device__ __forceinline__ u16 narrow(float v, float) { return narrow_f16(saturated(v)); }
};

struct KvQ8 : I8 {
    static constexpr bool SCALED = true;
    typedef i8 Query;
    typedef u16 Weight;
    typedef i32 Sum;
    // As ops::narrow_int8. The result is within ±127, because the scale comes from the largest magnitude.
    static __device__ __forceinline__ i8 narrow(float v, float scale) {
        return i8(__float2int_rn(__fdiv_rn(saturated(v), scale)));
    }
};

// Returns the bytes of the keys (or of the values) of one head in a block: the elements, then a scale per position.
template <class E> __device__ __forceinline__ u32 head_bytes(const KvPool& pool) {
    return BLOCK_TOKENS * (pool.padded_dim * sizeof(typename E::Stored) + (E::SCALED ? sizeof(float) : 0));
}

// Returns the address of the keys of a block and KV head. // (padded_dim / CHUNK, 16, CHUNK)
template <class E> __device__ __forceinline__ typename E::Stored* keys_of(const KvPool& pool, u32 block, u32 kv_head) {
    u8* at = pool.base + block * pool.block_bytes + pool.layer_offset + u64(kv_head) * head_bytes<E>(pool);
    return reinterpret_cast<typename E::Stored*>(at);
}

// Returns the address of the values of a block and KV head. // (16 / CHUNK, padded_dim, CHUNK)
template <class E> __device__ __forceinline__ typename E::Stored* values_of(const KvPool& pool, u32 block, u32 kv_head) {
    return keys_of<E>(pool, block, pool.kv_heads + kv_head);
}

// Returns the address of the scales of the keys of a block; `head` = kv_heads + kv_head selects the values. // (16)
template <class E> __device__ __forceinline__ float* scales_of(const KvPool& pool, u32 block, u32 head) {
    return reinterpret_cast<float*>(keys_of<E>(pool, block, head) + BLOCK_TOKENS * pool.padded_dim);
}

// Returns the index of element d of the key of a position.
template <class E> __device__ __forceinline__ u32 key_at(u32 slot, u32 d) {
    return (d / E::CHUNK * BLOCK_TOKENS + slot) * E::CHUNK + d % E::CHUNK;
}

// Returns the index of element d of the value of a position.
template <class E> __device__ __forceinline__ u32 value_at(u32 padded_dim, u32 slot, u32 d) {
    return (slot / E::CHUNK * padded_dim + d) * E::CHUNK + slot % E::CHUNK;
}
