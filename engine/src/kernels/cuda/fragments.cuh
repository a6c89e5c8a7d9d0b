// The A fragments of ternary or int8 weights, from sixteen bytes per lane (README.md).

#pragma once
#include "lanes.cuh"

// Rows of a weight tile, and columns of a k block.
constexpr u32 TILE_ROWS = 16;
constexpr u32 K_BLOCK = 128;
// Tokens in the B fragment of one product.
constexpr u32 N_TILE = 8;

// Expands the codes of one word to the A fragment of a product over 32 columns.
__device__ __forceinline__ void expand(u32 word, u32 (&a)[4]) {
    UNROLL for (u32 j = 0; j < 4; j++) a[j] = (word >> (2 * j)) & 0x03030303u;
}

// Ternary weights: sixteen bytes of codes per lane and k block.
struct Ternary {
    static constexpr u32 PARTS = 1;
    uint4 words;
    __device__ __forceinline__ void load(const uint4* slot) { words = slot[0]; }
    __device__ __forceinline__ void fragment(u32 step, u32 (&a)[4]) const {
        expand(step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w, a);
    }
};

// Int8 weights: the fragments themselves, sixteen bytes for each of four steps.
struct Bytes {
    static constexpr u32 PARTS = 4;
    uint4 steps[PARTS];
    __device__ __forceinline__ void load(const uint4* slot) {
        UNROLL for (u32 s = 0; s < PARTS; s++) steps[s] = slot[s * 32];
    }
    __device__ __forceinline__ void fragment(u32 step, u32 (&a)[4]) const {
        a[0] = steps[step].x, a[1] = steps[step].y, a[2] = steps[step].z, a[3] = steps[step].w;
    }
};
