// Integer types, and the macros that let a host compiler compile the kernels as C++ (`emulate/`).

#pragma once

#ifdef EMULATE
#include "emulate/cuda.h"
#else
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
// The dynamic shared memory of the block, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) _Pragma(UNROLL_TEXT(unroll n))
#define UNROLL_TEXT(text) #text
#endif

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// The same, for kernels that need a minimum number of blocks per multiprocessor.
#define KERNEL_BY(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
