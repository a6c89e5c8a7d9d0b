// The part of CUDA C++ that the kernels use, for a host compiler. The threads of a block are fibers that run until
// they reach a barrier or an operation of the whole warp; see emulate.cpp.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct dim3 {
    u32 x, y, z;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulate {

struct Thread {
    dim3 index;
    u32 lane;
};
extern Thread* current;
extern dim3 block_index, block_size, grid_size;

u8* dynamic_shared();
void block_barrier();

// Adds the operands of a lane to an operation of its warp; the last lane calls `run` for all 32 lanes.
typedef void (*WarpOperation)(void* lanes[32]);
void warp_operation(WarpOperation run, void* of_lane);

// Ends the launch with MISALIGNED_ADDRESS unless the address is a multiple of `bytes`.
void check_aligned(const void* at, u32 bytes);

// Leaves the thread until all threads of the block have called it, if the launch has a `Guard`.
void wait_for_previous();

// Copies are executed when a thread waits for their group; their sources are accessed at once, too.
void copy_async(void* to, const void* from, u32 bytes);
void copy_commit();
void copy_wait(u32 groups_left);

// The products of a warpgroup, see wgmma.cuh: C (64 × n) += A (64 × 32) · B (32 × n) with B at a matrix descriptor. They are
// executed for all 128 threads together, when their group is closed or, with `copies_early`, when it is waited for.
void wgmma(u32 n, i32* c, const u32* a, u64 b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait();
// Lets products see what this thread copied to shared memory.
void fence_to_products();
// Returns the address that a descriptor has for a place in dynamic shared memory.
u32 shared_address(const void* at);

// Widens 32 bytes to 16 bits each, two in an i32.
template <class Element> void widen(i32 (&pairs)[16], const Element* bytes) {
    i16 wide[32];
    for (u32 k = 0; k < 32; k++) wide[k] = bytes[k];
    memcpy(pairs, wide, sizeof pairs);
}

// out[row * stride + column] = the inner product of 32 bytes of x[row] and of y[column], for eight columns.
template <class Element> void multiply(i32* out, u32 stride, const Element (*x)[32], u32 rows, const i8 (*y)[32]) {
    i32 columns[8][16], row_pairs[16];
    __m256i pairs[16];
    for (u32 column = 0; column < 8; column++) widen(columns[column], y[column]);
    __m256i offsets = _mm256_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112);
    for (u32 k = 0; k < 16; k++) pairs[k] = _mm256_i32gather_epi32(columns[0] + k, offsets, 4);
    for (u32 row = 0; row < rows; row++) {
        widen(row_pairs, x[row]);
        __m256i sums = _mm256_setzero_si256();
        for (u32 k = 0; k < 16; k++) {
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_set1_epi32(row_pairs[k]), pairs[k]));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + row * stride), sums);
    }
}

template <class T> struct Exchange {
    T value, result;
    u32 from;
};

template <class T> T exchange(T value, u32 from) {
    Exchange<T> mine{value, value, from};
    warp_operation(
        [](void* lanes[32]) {
            for (u32 l = 0; l < 32; l++) {
                auto* lane = static_cast<Exchange<T>*>(lanes[l]);
                lane->result = static_cast<Exchange<T>*>(lanes[lane->from & 31])->value;
            }
        },
        &mine);
    return mine.result;
}

}  // namespace emulate

#define threadIdx (emulate::current->index)
#define blockIdx (emulate::block_index)
#define blockDim (emulate::block_size)
#define gridDim (emulate::grid_size)

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__
// One block runs at a time.
// All in one section, so that the emulation can fill it with garbage.
#define __shared__ static __attribute__((section("shared_arrays")))
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) u8* name = emulate::dynamic_shared()
#define UNROLL
#define UNROLL_BY(n)

inline void __syncthreads() { emulate::block_barrier(); }
inline void __syncwarp() { emulate::exchange(0, 0); }
template <class T> T __shfl_sync(u32, T value, u32 lane) { return emulate::exchange(value, lane); }
template <class T> T __shfl_xor_sync(u32, T value, u32 mask) {
    return emulate::exchange(value, emulate::current->lane ^ mask);
}

inline i32 atomicAdd(i32* at, i32 value) {
    i32 before = *at;
    *at += value;
    return before;
}
inline u32 atomicAdd(u32* at, u32 value) {
    u32 before = *at;
    *at += value;
    return before;
}

// Returns four of the eight bytes of x and y; each nibble of `selector` is the number of one.
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 bytes = u64(y) << 32 | x;
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) out |= u32(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline long long __double_as_longlong(double a) { long long bits; memcpy(&bits, &a, 8); return bits; }
inline double __longlong_as_double(long long bits) { double a; memcpy(&a, &bits, 8); return a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __int2float_rn(i32 a) { return float(a); }
inline float __ll2float_rn(i64 a) { return float(a); }
inline i32 __float2int_rn(float a) {
    if (std::isnan(a)) return 0;
    float rounded = rintf(a);
    return rounded >= 0x1p31f ? 0x7fffffff : rounded < -0x1p31f ? i32(0x80000000u) : i32(rounded);
}
inline u32 __float_as_uint(float a) {
    u32 bits;
    memcpy(&bits, &a, 4);
    return bits;
}
inline float __uint_as_float(u32 bits) {
    float a;
    memcpy(&a, &bits, 4);
    return a;
}
