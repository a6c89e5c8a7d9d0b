// Where keys and values lie: the one place that knows the pool's layout (README.md).

#pragma once
#include "args.cuh"
#include "lanes.cuh"

// Bytes of one head's keys, or of its values, in a block.
template <class E> __device__ __forceinline__ u32 head_bytes(const KvPool& pool) {
    return BLOCK_TOKENS * pool.padded_dim * sizeof(typename E::Stored);
}

// Keys of a block and KV head. // (padded_dim / CHUNK, 16, CHUNK)
template <class E> __device__ __forceinline__ typename E::Stored* keys_of(const KvPool& pool, u32 block, u32 kv_head) {
    u8* at = pool.base + block * pool.block_bytes + pool.layer_offset + u64(kv_head) * head_bytes<E>(pool);
    return reinterpret_cast<typename E::Stored*>(at);
}

// Values of a block and KV head. // (16 / CHUNK, padded_dim, CHUNK)
template <class E> __device__ __forceinline__ typename E::Stored* values_of(const KvPool& pool, u32 block, u32 kv_head) {
    return keys_of<E>(pool, block, pool.kv_heads + kv_head);
}

// Element d of a position's key.
template <class E> __device__ __forceinline__ u32 key_at(u32 slot, u32 d) {
    return (d / E::CHUNK * BLOCK_TOKENS + slot) * E::CHUNK + d % E::CHUNK;
}

// Element d of a position's value.
template <class E> __device__ __forceinline__ u32 value_at(u32 padded_dim, u32 slot, u32 d) {
    return (slot / E::CHUNK * padded_dim + d) * E::CHUNK + slot % E::CHUNK;
}
