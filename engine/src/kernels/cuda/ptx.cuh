// Instructions that have no CUDA C++ function. Register layouts are those of the PTX ISA; the emulation follows the
// same specification.

#pragma once
#include "types.cuh"

#ifdef EMULATE
// C += A · B for both types of the elements of A.
template <class Element> void emulate_mma(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct Lane {
        i32* c;
        u32 a[4], b[2];
    } mine{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulate::warp_operation(
        [](void* lanes[32]) {
            static Element left[16][32];
            static i8 right[8][32];
            for (u32 l = 0; l < 32; l++) {
                const Lane& lane = *static_cast<Lane*>(lanes[l]);
                u32 g = l / 4, t = l % 4;
                for (u32 r = 0; r < 4; r++) memcpy(&left[g + 8 * (r % 2)][16 * (r / 2) + 4 * t], &lane.a[r], 4);
                for (u32 r = 0; r < 2; r++) memcpy(&right[g][16 * r + 4 * t], &lane.b[r], 4);
            }
            static i32 product[16][8];
            emulate::multiply(product[0], 8, left, 16, right);
            for (u32 l = 0; l < 32; l++) {
                const Lane& lane = *static_cast<Lane*>(lanes[l]);
                for (u32 r = 0; r < 4; r++) lane.c[r] += product[l / 4 + 8 * (r / 2)][l % 4 * 2 + r % 2];
            }
        },
        &mine);
}
#endif

// C += A · B, one m16n8k32 product of signed bytes. With g = lane / 4 and t = lane % 4:
//   A (16 × 32): a[0] row g, a[1] row g + 8, columns 4 t ..; a[2], a[3] the same rows, columns 16 + 4 t ..
//   B (32 × 8):  b[0] rows 4 t .. of column g; b[1] rows 16 + 4 t ..
//   C (16 × 8):  c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8
__device__ __forceinline__ void mma_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef EMULATE
    emulate_mma<i8>(c, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The same with unsigned bytes in A.
__device__ __forceinline__ void mma_u8_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef EMULATE
    emulate_mma<u8>(c, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// An address in shared memory, as load_matrices takes it; an offset in bytes can be added.
#ifdef EMULATE
typedef const u8* SharedAddress;
inline SharedAddress shared_address(const u8* at) { return at; }
#else
typedef u32 SharedAddress;
__device__ __forceinline__ SharedAddress shared_address(const u8* at) { return u32(__cvta_generic_to_shared(at)); }
#endif

// Loads four matrices of eight rows by sixteen bytes from shared memory. Lane l gives the address of row l % 8 of matrix
// l / 8, and gets bytes 4 (l % 4) .. of row l / 4 of each: with elements in rows, the B of mma_s8.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], SharedAddress row) {
#ifdef EMULATE
    struct Lane {
        u32* out;
        const u8* row;
    } mine{out, row};
    emulate::check_aligned(row, 16);
    emulate::warp_operation(
        [](void* lanes[32]) {
            for (u32 l = 0; l < 32; l++) {
                for (u32 m = 0; m < 4; m++) {
                    const Lane& of_row = *static_cast<Lane*>(lanes[8 * m + l / 4]);
                    memcpy(&static_cast<Lane*>(lanes[l])->out[m], of_row.row + l % 4 * 4, 4);
                }
            }
        },
        &mine);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
#endif
}

// Returns c plus the products of four signed bytes with four others.
__device__ __forceinline__ i32 dot4(u32 a, u32 b, i32 c) {
#ifdef EMULATE
    for (u32 i = 0; i < 4; i++) c += i32(i8(a >> (8 * i))) * i32(i8(b >> (8 * i)));
    return c;
#else
    i32 sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

// Returns c plus the products of two unsigned 16-bit numbers with the two low signed bytes of b.
__device__ __forceinline__ i32 dot2_low(u32 a, u32 b, i32 c) {
#ifdef EMULATE
    return c + i32(u16(a)) * i32(i8(b)) + i32(a >> 16) * i32(i8(b >> 8));
#else
    i32 sum;
    asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

// The same with the two high bytes of b.
__device__ __forceinline__ i32 dot2_high(u32 a, u32 b, i32 c) {
#ifdef EMULATE
    return dot2_low(a, b >> 16, c);
#else
    i32 sum;
    asm("dp2a.hi.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

#ifdef EMULATE
// Joins the numbers of a warp.
template <class Join> u32 emulate_redux(u32 v, Join) {
    emulate::warp_operation(
        [](void* lanes[32]) {
            u32 all = *static_cast<u32*>(lanes[0]);
            for (u32 l = 1; l < 32; l++) all = Join::of(all, *static_cast<u32*>(lanes[l]));
            for (u32 l = 0; l < 32; l++) *static_cast<u32*>(lanes[l]) = all;
        },
        &v);
    return v;
}
#endif

// Returns the sum of the 32 numbers of a warp.
__device__ __forceinline__ i32 sum_of_warp(i32 v) {
#ifdef EMULATE
    struct Add {
        static u32 of(u32 a, u32 b) { return a + b; }
    };
    return i32(emulate_redux(u32(v), Add{}));
#else
    i32 sum;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
    return sum;
#endif
}

// Returns the largest number of the 32 of a warp.
__device__ __forceinline__ u32 largest_u32_of_warp(u32 v) {
#ifdef EMULATE
    struct Larger {
        static u32 of(u32 a, u32 b) { return a > b ? a : b; }
    };
    return emulate_redux(v, Larger{});
#else
    u32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(v));
    return largest;
#endif
}

// Starts a copy of 16 bytes from global to shared memory.
__device__ __forceinline__ void copy_async16(void* to, const void* from) {
#ifdef EMULATE
    emulate::copy_async(to, from, 16);
#else
    asm volatile("{ .reg .u64 s; .reg .u32 a; cvta.to.shared.u64 s, %0; cvt.u32.u64 a, s; "
                 "cp.async.cg.shared.global [a], [%1], 16; }" ::"l"(to), "l"(from)
                 : "memory");
#endif
}

// Closes the current group of copies.
__device__ __forceinline__ void copy_async_commit() {
#ifdef EMULATE
    emulate::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most GROUPS groups of this thread are still in progress.
template <int GROUPS> __device__ __forceinline__ void copy_async_wait() {
#ifdef EMULATE
    emulate::copy_wait(GROUPS);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Returns when all earlier kernels of the stream have ended, with what they wrote visible. Every thread of every kernel
// calls it, also where it has no work. Before that, a kernel reads weights and nothing else, and writes nothing: earlier
// kernels may still run (README.md, "Overlap"). On devices before 9.0 they never do.
__device__ __forceinline__ void wait_for_previous() {
#ifdef EMULATE
    emulate::wait_for_previous();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel start as soon as all blocks of this one have called it or have ended. No block of
// this kernel is displaced: all of them have started by then.
__device__ __forceinline__ void let_next_start() {
#if !defined(EMULATE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The start of kernels that request nothing before the earlier kernels have ended.
__device__ __forceinline__ void start_after_previous() {
    let_next_start();
    wait_for_previous();
}

// Loads sixteen bytes of weights, which are read once and never written. The assembly here and in load_constant is
// volatile, so that the compiler keeps the load at its place, ahead of the work that it overlaps.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
#ifdef EMULATE
    return *from;
#else
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
    return v;
#endif
}

// Loads sixteen bytes that no thread of this kernel writes. An earlier kernel may write them while this one has already
// started, which rules out loads by the non-coherent path (`ld.global.nc`).
__device__ __forceinline__ uint4 load_constant(const void* from) {
#ifdef EMULATE
    return *static_cast<const uint4*>(from);
#else
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
#endif
}

// The same for a float.
__device__ __forceinline__ float load_constant_float(const float* from) {
#ifdef EMULATE
    return *from;
#else
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
#endif
}

// Converts f16 bits to f32, exactly.
__device__ __forceinline__ float widen_f16(u16 bits) {
#ifdef EMULATE
    return _cvtsh_ss(bits);
#else
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
#endif
}

// Converts f32 to f16 bits, rounding to nearest even.
__device__ __forceinline__ u16 narrow_f16(float v) {
#ifdef EMULATE
    return _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
#else
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
#endif
}
