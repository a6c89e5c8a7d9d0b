// The products of a warpgroup, Hopper's `wgmma`: four consecutive warps multiply 64 rows of A, in registers, by N columns
// of B, in shared memory. Only machine code for sm_90a has these instructions. The rules below are those of the PTX ISA,
// and the emulation follows the same text:
//
// - A product is asynchronous. Until `wgmma_wait` has waited for its group, its sums are not there, its registers of A
//   must keep their values, and its part of shared memory must not be written.
// - `wgmma_fence` stands between writes to registers and the first product that uses them. For the compiler it does not: `keep_here`
//   keeps their computation before it.
// - Copies and stores to shared memory are seen by products after `fence_to_products`, by the thread that wrote, and then a
//   barrier.

#pragma once
#include "fragments.cuh"

constexpr u32 WARPGROUP = 128;
// Bytes of K of one product.
constexpr u32 WGMMA_K = 32;
// Rows of B lie in groups of eight, 128 bytes each; a group starts at a multiple of its size.
constexpr u32 ROWS_BYTES = 8 * K_BLOCK;

// Returns the address of a place in the shared memory of the block.
__device__ __forceinline__ u32 address_in_shared(const void* at) {
#ifdef EMULATE
    return emulate::shared_address(at);
#else
    u32 address;
    asm("{ .reg .u64 s; cvta.to.shared.u64 s, %1; cvt.u32.u64 %0, s; }" : "=r"(address) : "l"(at));
    return address;
#endif
}

// Returns the offset of 16 bytes of a row in B, as the 128-byte swizzle places them: bits 4 to 6 of an address are
// combined with bits 7 to 9.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * K_BLOCK + (chunk ^ row % 8) * 16; }

// Returns the matrix descriptor of B: rows of 128 bytes of K in the 128-byte swizzle, ROWS_BYTES from eight rows to the
// next eight. `WGMMA_K / 16` more is the descriptor of the next 32 bytes of K.
__device__ __forceinline__ u64 descriptor(u32 address) {
    constexpr u64 SWIZZLE_128 = 1, STRIDE = ROWS_BYTES >> 4, LEADING = 1;  // the last is not used with a swizzle
    return SWIZZLE_128 << 62 | STRIDE << 32 | LEADING << 16 | (address & 0x3ffff) >> 4;
}

// Makes the copies and stores of this thread to shared memory visible to products.
__device__ __forceinline__ void fence_to_products() {
#ifdef EMULATE
    emulate::fence_to_products();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Orders earlier accesses to registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
#ifdef EMULATE
    emulate::wgmma_fence();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes the current group of products.
__device__ __forceinline__ void wgmma_commit() {
#ifdef EMULATE
    emulate::wgmma_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for all closed groups of the warpgroup.
__device__ __forceinline__ void wgmma_wait() {
#ifdef EMULATE
    emulate::wgmma_wait();
#else
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

#define WGMMA_4(c, n) "+r"(c[n][0]), "+r"(c[n][1]), "+r"(c[n][2]), "+r"(c[n][3])
#define WGMMA_16(c, n) WGMMA_4(c, n), WGMMA_4(c, n + 1), WGMMA_4(c, n + 2), WGMMA_4(c, n + 3)

// C += A · B, one m64nNk32 product of signed bytes, N = 64 or 128. The warp w of the warpgroup has rows 16 w .. of A and C:
// its fragments are those of `mma_s8`, with c[n] for columns 8 n ...
__device__ __forceinline__ void wgmma_s8(i32 (&c)[8][4], const u32 (&a)[4], u64 b) {
#ifdef EMULATE
    emulate::wgmma(64, c[0], a, b);
#else
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, adds; }"
                 : WGMMA_16(c, 0), WGMMA_16(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

__device__ __forceinline__ void wgmma_s8(i32 (&c)[16][4], const u32 (&a)[4], u64 b) {
#ifdef EMULATE
    emulate::wgmma(128, c[0], a, b);
#else
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, adds; }"
                 : WGMMA_16(c, 0), WGMMA_16(c, 4), WGMMA_16(c, 8), WGMMA_16(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

// Keeps the compiler from computing these numbers later than here, or using them earlier.
template <int N> __device__ __forceinline__ void keep_here(i32 (&c)[N][4]) {
#ifndef EMULATE
    UNROLL for (int n = 0; n < N; n++) asm volatile("" : WGMMA_4(c, n)::"memory");
#endif
}
template <int N> __device__ __forceinline__ void keep_here(u32 (&a)[N][4]) {
#ifndef EMULATE
    UNROLL for (int n = 0; n < N; n++) asm volatile("" : WGMMA_4(a, n)::"memory");
#endif
}
