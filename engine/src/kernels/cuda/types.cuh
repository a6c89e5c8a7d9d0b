// Integer types, and the macros by which a host compiler accepts the kernels as C++ (`emulate/`).

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
// The block's dynamic shared memory, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) _Pragma(UNROLL_TEXT(unroll n))
#define UNROLL_TEXT(text) #text
#endif

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// The same, for kernels that need a number of blocks to fit on a multiprocessor.
#define KERNEL_BY(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
