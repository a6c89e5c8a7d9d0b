// The `Guard` finds kernels that do not wait for the earlier ones.

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#include "emulate/run.h"
#include "ptx.cuh"
#include "tests.h"

namespace {

// What a thread does. 0: waits, then copies `from` to `to`.
enum Mistake : u32 { NO_MISTAKE, READS_EARLY, COPIES_EARLY, WRITES_EARLY, NEVER_WAITS, ONE_NEVER_WAITS, READS_BEFORE_OTHERS };

struct Args {
    const u32 *weights, *from;
    u32* to;
    Mistake mistake;
};

void kernel(const Args& args) {
    static uint4 shared;
    u32 i = threadIdx.x, sum = args.weights[i];
    bool last = blockIdx.x == 1 && i == blockDim.x - 1;
    if (args.mistake == READS_EARLY) sum += args.from[i];
    if (args.mistake == COPIES_EARLY && last) copy_async16(&shared, args.from);
    if (args.mistake == WRITES_EARLY && last) args.to[i] = 0;
    // The other threads wait only after this one has read.
    if (args.mistake == READS_BEFORE_OTHERS) {
        if (i == 0) sum += args.from[0];
        __syncthreads();
    }
    if (args.mistake == NEVER_WAITS || (args.mistake == ONE_NEVER_WAITS && last)) return;
    wait_for_previous();
    args.to[i] = sum + args.from[i];
}

u8* pages() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    return static_cast<u8*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, flags, -1, 0));
}

void expect(bool is, const char* what, u32 mistake) {
    if (is) return;
    printf("%s, mistake %u\n", what, mistake);
    exit(1);
}

// Runs a kernel after one that has written `from`. The weights were never written by a kernel, nor was `to`.
void check(Mistake mistake, bool starts_early, bool fails) {
    u8 *weights = pages(), *from = pages(), *to = pages();
    emulate::Guard guard{"kernel", starts_early, {{weights, 4096, false}, {from, 4096, true}, {to, 4096, false}}};
    Args args{reinterpret_cast<u32*>(weights), reinterpret_cast<u32*>(from), reinterpret_cast<u32*>(to), mistake};
    args.to[5] = 1;
    void* pointers[] = {&args};
    auto run = [](void** args) { kernel(*static_cast<Args*>(args[0])); };
    int code = emulate::run(run, {2, 1, 1}, {64, 1, 1}, 0, pointers, &guard);
    expect(code == (fails ? emulate::LAUNCH_FAILED : 0), "the code of the launch", mistake);
    expect(fails || (guard.regions[2].written && args.to[5] == 0), "the first write", mistake);
    expect(!guard.regions[0].written, "weights are not written", mistake);
    // Afterwards the host may access everything.
    weights[0] = from[0] = to[0] = 1;
    for (u8* at : {weights, from, to}) munmap(at, 4096);
}

}  // namespace

void test_overlap() {
    test("waits for earlier kernels", [] {
        for (Mistake mistake : {READS_EARLY, COPIES_EARLY, WRITES_EARLY, READS_BEFORE_OTHERS}) {
            check(mistake, true, true);
            check(mistake, false, false);
        }
        for (bool starts_early : {false, true}) {
            check(NO_MISTAKE, starts_early, false);
            check(NEVER_WAITS, starts_early, true);
            check(ONE_NEVER_WAITS, starts_early, true);
        }
    });
}
