// The functions of `emulate.cpp` for the emulated driver and the tests of the kernels.

#pragma once
#include <vector>

#include "emulate/cuda.h"

namespace emulate {

// The codes of `CUresult` that a kernel can cause.
constexpr int NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719;

// A kernel; `args[0]` points to its argument struct (`args.cuh`). Device memory is host memory.
typedef void (*Kernel)(void** args);

// Returns the kernel with a name, or null.
Kernel kernel_of(const char* name);

// Whole pages of device memory.
struct Region {
    u8* start;
    size_t bytes;
    bool written;  // whether a kernel has ever written to it; set by `run`
};

// Checks that threads wait for the earlier kernels of the stream. `regions` is all memory of the device. A launch that
// starts early ends with LAUNCH_FAILED if a thread, before all threads of its block have called `wait_for_previous`,
// writes to a region, or reads one that a kernel has ever written: an earlier kernel may still write or read it. Whether
// it starts early or not, it ends so if a thread ends without the call.
struct Guard {
    const char* kernel;  // name for messages
    bool starts_early;
    std::vector<Region> regions;
};

// Runs all blocks; returns 0 or the error that ended the launch.
int run(Kernel kernel, dim3 grid, dim3 block, u32 shared, void** args, Guard* guard = nullptr);

// Which order a test shows of asynchronous copies to shared memory and of the products that read it. False: copies are
// executed as late as possible and products as early as possible. True: the other way round.
extern bool copies_early;

}  // namespace emulate
