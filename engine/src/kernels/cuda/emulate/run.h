// The functions of `emulate.cpp` for the emulated driver and the tests of the kernels.

#pragma once
#include "emulate/cuda.h"

namespace emulate {

// The codes of `CUresult` that a kernel can cause.
constexpr int NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716;

// A kernel; `args[0]` points to its argument struct (`args.cuh`). Device memory is host memory.
typedef void (*Kernel)(void** args);

// Returns the kernel with a name, or null.
Kernel kernel_of(const char* name);

// Runs all blocks; returns 0 or the error that ended the launch.
int run(Kernel kernel, dim3 grid, dim3 block, u32 shared, void** args);

// Which order a test shows of asynchronous copies to shared memory and of the products that read it. False: copies are
// executed as late as possible and products as early as possible. True: the other way round.
extern bool copies_early;

}  // namespace emulate
