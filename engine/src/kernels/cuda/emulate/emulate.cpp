// The CUDA kernels as ordinary C++, behind one entry:
//
//     int launch(const char* kernel, const u32 grid[3], const u32 block[3], u32 shared, void** args)
//
// which returns 0, or 1 for an unknown kernel and 2 for a shape it cannot run. `args[0]` points to the
// kernel's struct (`args.cuh`); device memory is host memory. Tests of the host code load this library
// as their device. Build, from engine/src/kernels/cuda:
//
//     g++ -O2 -std=c++17 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing -DEMULATE
//         -fPIC -shared -I. emulate/emulate.cpp -o libemulate.so
//
// Blocks run one after another, so a kernel must not wait for another block. A block's threads are
// fibers on stacks of their own: each runs until it meets `__syncthreads`, an operation of its warp or
// its end. Shared memory is filled with rubbish before each block, and asynchronous copies are carried
// out only when they are waited for, so that forgetting to initialise or to wait shows in the results.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sys/mman.h>
#include <vector>

#ifndef EMULATE
#define EMULATE
#endif
#include "emulate/cuda.h"

#include "kernels.h"

namespace emulate {

namespace {

constexpr u32 THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t SHARED_MAX = 227 << 10;
// Bytes beyond a block's shared memory that are looked at for stray writes.
constexpr size_t MARGIN = 16 << 10;

struct Copy {
    void* to;
    const void* from;
    u32 bytes;
};

enum class State { Ready, InBlockBarrier, InWarp, Ended };

struct Fiber : Thread {
    void* stack_pointer;
    State state;
    std::vector<std::vector<Copy>> groups;  // committed, oldest first; the last one is open
};

struct Warp {
    u32 arrived;
    void* lanes[32];
};

Fiber fibers[THREADS_MAX];
Warp warps[THREADS_MAX / 32];
void* scheduler_stack_pointer;
u32 thread_count, live_count, in_barrier_count, shared_size;
alignas(128) u8 shared_bytes[SHARED_MAX];
void (*body)(void**);
void** body_args;

extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

Fiber& self() { return *static_cast<Fiber*>(current); }

// Lets the other threads run until this one is ready again.
void leave() { emulate_switch(&self().stack_pointer, scheduler_stack_pointer); }

void release_barrier_if_full() {
    if (in_barrier_count < live_count) return;
    for (u32 t = 0; t < thread_count; t++) {
        if (fibers[t].state == State::InBlockBarrier) fibers[t].state = State::Ready;
    }
    in_barrier_count = 0;
}

void fiber_main() {
    body(body_args);
    self().state = State::Ended;
    live_count--;
    release_barrier_if_full();
    leave();
    abort();
}

u8* stacks() {
    static u8* base = static_cast<u8*>(mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return base;
}

void prepare(u32 t) {
    Fiber& fiber = fibers[t];
    fiber.index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
    fiber.lane = t % 32;
    fiber.state = State::Ready;
    fiber.groups.assign(1, {});
    auto* top = reinterpret_cast<void**>(stacks() + (t + 1) * STACK_BYTES);
    // The entry's return address is never used; the stack is aligned as after a call.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    top -= 6;
    fiber.stack_pointer = top;
}

void run_block() {
    size_t reach = std::min(sizeof shared_bytes, size_t(shared_size) + MARGIN);
    memset(shared_bytes, 0xcd, reach);
    live_count = thread_count;
    in_barrier_count = 0;
    for (u32 t = 0; t < thread_count; t++) prepare(t);
    for (u32 w = 0; w < thread_count / 32; w++) warps[w].arrived = 0;
    while (live_count > 0) {
        bool moved = false;
        for (u32 t = 0; t < thread_count; t++) {
            if (fibers[t].state != State::Ready) continue;
            moved = true;
            current = &fibers[t];
            emulate_switch(&scheduler_stack_pointer, fibers[t].stack_pointer);
        }
        if (!moved) {
            fprintf(stderr, "emulate: the threads of a block wait for one another\n");
            abort();
        }
    }
    for (size_t i = shared_size; i < reach; i++) {
        if (shared_bytes[i] != 0xcd) {
            fprintf(stderr, "emulate: shared memory written at %zu, of %u\n", i, shared_size);
            abort();
        }
    }
}

}  // namespace

Thread* current;
dim3 block_index, block_size, grid_size;

u8* dynamic_shared() { return shared_bytes; }

void block_barrier() {
    self().state = State::InBlockBarrier;
    in_barrier_count++;
    release_barrier_if_full();
    if (self().state == State::InBlockBarrier) leave();
}

void warp_operation(WarpOperation run, void* of_lane) {
    u32 first = u32(&self() - fibers) / 32 * 32;
    Warp& warp = warps[first / 32];
    warp.lanes[current->lane] = of_lane;
    if (++warp.arrived < 32) {
        self().state = State::InWarp;
        leave();
        return;
    }
    run(warp.lanes);
    warp.arrived = 0;
    for (u32 l = 0; l < 32; l++) fibers[first + l].state = State::Ready;
}

void copy_async(void* to, const void* from, u32 bytes) { self().groups.back().push_back({to, from, bytes}); }

void copy_commit() { self().groups.emplace_back(); }

void copy_wait(u32 groups_left) {
    auto& groups = self().groups;
    while (groups.size() > groups_left + 1) {
        for (const Copy& copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
        groups.erase(groups.begin());
    }
}

}  // namespace emulate

using namespace emulate;

extern "C" int launch(const char* name, const u32 grid[3], const u32 block[3], u32 shared, void** args) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    void (*found)(void**) = nullptr;
    for (const Entry& entry : ENTRIES) {
        if (strcmp(entry.name, name) == 0) found = entry.run;
    }
    if (!found) return 1;
    thread_count = block[0] * block[1] * block[2];
    if (thread_count == 0 || thread_count > THREADS_MAX || thread_count % 32 != 0 || shared > SHARED_MAX) return 2;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    shared_size = shared;
    body = found;
    body_args = args;
    for (u32 z = 0; z < grid[2]; z++) {
        for (u32 y = 0; y < grid[1]; y++) {
            for (u32 x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                run_block();
            }
        }
    }
    return 0;
}
