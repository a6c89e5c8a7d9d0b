// Runs the CUDA kernels as ordinary C++. `driver.cpp` adds the calls of the CUDA driver; `tests/` calls `launch`.
//
// Blocks run one after another, so a kernel must not wait for another block. The threads of a block are fibers with
// separate stacks: each runs until it reaches `__syncthreads`, an operation of its warp, or its end.
//
// The emulation detects errors of kernels that results alone would not show:
// - Shared memory is filled with garbage before each block, and bytes after its end are checked for writes.
// - Launches differ in the order of threads: up or down, all in turn or a warp as far as it can; blocks are run up or down. So a missing
//   barrier lets threads read too early in some launch, or overwrite too early in another.
// - Asynchronous copies are executed when a thread waits for them, or at once (`copies_early`).
// - Products of warpgroups are executed when their group is closed or, with `copies_early`, when it is waited for: A is read,
//   and C is written, not earlier. They see copies that were fenced.
// - An access to an address that is not a multiple of its size ends the launch with MISALIGNED_ADDRESS. The compiler
//   checks every typed access (-fsanitize=alignment); `check_aligned` checks the other accesses.
// - An access to unmapped memory ends the launch with ILLEGAL_ADDRESS: `driver.cpp` puts unmapped pages around every
//   allocation.
// - With a `Guard`, an access before the wait for earlier kernels ends the launch with LAUNCH_FAILED: until all threads of
//   a block wait, the pages that kernels have written have no access, and all others cannot be written.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#ifndef EMULATE
#define EMULATE
#endif
#include "emulate/run.h"
#include "emulate/warpgroup.h"

#include "kernels.h"

// The section of the static shared arrays, from the linker.
extern "C" u8 __start_shared_arrays[], __stop_shared_arrays[];

namespace emulate {

namespace {

constexpr u32 THREADS_MAX = 1024;
// Not a multiple of a page, so that the tops of all stacks do not share a few sets of the processor's caches.
constexpr size_t STACK_BYTES = (128 << 10) + 320;
constexpr size_t SHARED_MAX = 227 << 10;
// Number of bytes after the shared memory of a block that are checked for stray writes.
constexpr size_t MARGIN = 16 << 10;

struct Copy {
    void* to;
    const void* from;
    u32 bytes;
};

enum class State { Ready, InBlockBarrier, InWarp, InWait, Ended };

struct Fiber : Thread {
    void* stack_pointer;
    State state;
    bool has_waited;  // for earlier kernels
    std::vector<std::vector<Copy>> groups;  // committed groups, oldest first; the last group is open
    std::vector<Copy> unseen;               // copies that products do not see yet
    Warpgroup products;
};

struct Warp {
    u32 arrived;
    void* lanes[32];
};

Fiber fibers[THREADS_MAX];
Warp warps[THREADS_MAX / 32];
u32 arrived_in_warpgroup[THREADS_MAX / WARPGROUP_THREADS];
void* scheduler_stack_pointer;
u32 thread_count, live_count, in_barrier_count, in_wait_count, shared_size;
Guard* guard;        // of the launch, or null
bool before_wait;    // whether the block starts early and a thread of it has not waited
// The result of the launch: 0, or the error with which a thread ended it.
volatile int fault;
alignas(128) u8 shared_bytes[SHARED_MAX];
// The shared memory as products see it.
alignas(128) u8 seen_bytes[SHARED_MAX];
// Dynamic shared memory starts after what the driver uses and what the kernel declares, at a multiple of 128 bytes.
constexpr u32 SHARED_START = 1024 + 128;
Kernel body;
void** body_args;
// The order of the threads and blocks of a launch.
struct {
    bool backwards, by_warps;
} order;
u32 launch_count;

// Jumps instead of returning: the processor predicts that a return goes to the last call, which this one never does.
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
    popq %rcx
    jmpq *%rcx
)");

Fiber& self() { return *static_cast<Fiber*>(current); }

u8* stacks() {
    static u8* base = static_cast<u8*>(mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return base;
}

// Runs the other threads until this one is ready again.
void leave() { emulate_switch(&self().stack_pointer, scheduler_stack_pointer); }

// Ends the launch; the threads of the block are abandoned at their current instruction.
[[noreturn]] void end_launch(int code) {
    fault = code;
    leave();
    abort();
}

[[noreturn]] void end_at_illegal_address() { end_launch(ILLEGAL_ADDRESS); }

// Sets the access to the memory of the device. Memory that no kernel has written is read-only, so that a first write is
// noticed.
void protect(bool is_before_wait) {
    before_wait = is_before_wait;
    for (const Region& region : guard->regions) {
        int written = is_before_wait ? PROT_NONE : PROT_READ | PROT_WRITE;
        mprotect(region.start, region.bytes, region.written ? written : PROT_READ);
    }
}

[[noreturn]] void end_before_wait() {
    const char* what = current && self().state == State::Ended ? "ends" : "accesses memory";
    fprintf(stderr, "emulate: a thread of %s %s before it has waited for the earlier kernels\n", guard->kernel, what);
    end_launch(LAUNCH_FAILED);
}

Region* region_of(const void* address) {
    if (!guard) return nullptr;
    for (Region& region : guard->regions) {
        if (address >= region.start && address < region.start + region.bytes) return &region;
    }
    return nullptr;
}

struct sigaction signal_action_before;

// Signal handler: a thread that accessed memory that it may not access continues in a function that ends the launch.
void on_illegal_access(int signal, siginfo_t* info, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    u8* stack = reinterpret_cast<u8*>(registers[REG_RSP]);
    if (!current || stack < stacks() || stack >= stacks() + THREADS_MAX * STACK_BYTES) {
        sigaction(signal, &signal_action_before, nullptr);
        return;
    }
    Region* region = region_of(info->si_addr);
    if (region && !before_wait && !region->written) {
        // The first write by a kernel; the thread repeats it.
        region->written = true;
        mprotect(region->start, region->bytes, PROT_READ | PROT_WRITE);
        return;
    }
    // Sets a stack pointer as after a call, below the red zone.
    registers[REG_RSP] = ((registers[REG_RSP] - 256) & ~15ll) - 8;
    registers[REG_RIP] = reinterpret_cast<greg_t>(region ? end_before_wait : end_at_illegal_address);
}

// While this object exists, illegal accesses of kernels end the launch instead of the process.
struct SignalHandler {
    SignalHandler() {
        struct sigaction action = {};
        action.sa_sigaction = on_illegal_access;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &signal_action_before);
    }
    ~SignalHandler() { sigaction(SIGSEGV, &signal_action_before, nullptr); }
};

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
    if (guard && !self().has_waited) end_before_wait();
    live_count--;
    release_barrier_if_full();
    leave();
    abort();
}

void prepare(u32 t) {
    Fiber& fiber = fibers[t];
    fiber.index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
    fiber.lane = t % 32;
    fiber.state = State::Ready;
    fiber.has_waited = false;
    fiber.groups.assign(1, {});
    fiber.unseen.clear();
    fiber.products = {};
    auto* top = reinterpret_cast<void**>(stacks() + (t + 1) * STACK_BYTES);
    // The return address of the entry is never used; the stack is aligned as after a call.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    top -= 6;
    fiber.stack_pointer = top;
}

// Runs a thread as far as it can. Returns whether it was ready.
bool run_thread(u32 t) {
    if (fibers[t].state != State::Ready) return false;
    current = &fibers[t];
    emulate_switch(&scheduler_stack_pointer, fibers[t].stack_pointer);
    return true;
}

void run_block() {
    size_t reach = std::min(sizeof shared_bytes, size_t(shared_size) + MARGIN);
    memset(shared_bytes, 0xcd, reach);  // garbage
    memset(__start_shared_arrays, 0xcd, size_t(__stop_shared_arrays - __start_shared_arrays));
    memset(seen_bytes, 0xcd, reach);
    live_count = thread_count;
    in_barrier_count = in_wait_count = 0;
    if (guard) protect(guard->starts_early);
    for (u32 t = 0; t < thread_count; t++) prepare(t);
    for (u32 w = 0; w < thread_count / 32; w++) warps[w].arrived = 0;
    for (u32& arrived : arrived_in_warpgroup) arrived = 0;
    while (live_count > 0) {
        bool moved = false;
        u32 together = order.by_warps ? 32 : thread_count;
        for (u32 first = 0; first < thread_count; first += together) {
            bool again;
            do {
                again = false;
                for (u32 i = first; i < first + together; i++) {
                    again |= run_thread(order.backwards ? thread_count - 1 - i : i);
                    if (fault) return;
                }
                moved |= again;
            } while (again && order.by_warps);
        }
        if (!moved) {
            fprintf(stderr, "emulate: deadlock between the threads of a block\n");
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

void wait_for_previous() {
    if (!guard || self().has_waited) return;
    self().has_waited = true;
    if (++in_wait_count < thread_count) {
        self().state = State::InWait;
        leave();
        return;
    }
    for (u32 t = 0; t < thread_count; t++) {
        if (fibers[t].state == State::InWait) fibers[t].state = State::Ready;
    }
    protect(false);
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

void check_aligned(const void* at, u32 bytes) {
    if (reinterpret_cast<size_t>(at) % bytes != 0) end_launch(MISALIGNED_ADDRESS);
}

bool copies_early = false;

// Executes a copy. Returns whether it was to dynamic shared memory.
static bool execute(const Copy& copy) {
    memcpy(copy.to, copy.from, copy.bytes);
    return copy.to >= shared_bytes && copy.to < shared_bytes + SHARED_MAX;
}

// Lets products see what was copied.
static void show(const Copy& copy) {
    memcpy(seen_bytes + (static_cast<u8*>(copy.to) - shared_bytes), copy.to, copy.bytes);
}

void copy_async(void* to, const void* from, u32 bytes) {
    check_aligned(to, bytes);
    check_aligned(from, bytes);
    // An access before the wait for earlier kernels is noticed here, not when the copy is carried out.
    (void)*static_cast<const volatile u8*>(from);
    Copy copy{to, from, bytes};
    if (!copies_early) {
        self().groups.back().push_back(copy);
    } else if (execute(copy)) {
        show(copy);
    }
}

void copy_commit() { self().groups.emplace_back(); }

void copy_wait(u32 groups_left) {
    auto& groups = self().groups;
    while (groups.size() > groups_left + 1) {
        for (const Copy& copy : groups.front()) {
            if (execute(copy)) self().unseen.push_back(copy);
        }
        groups.erase(groups.begin());
    }
}

void fence_to_products() {
    for (const Copy& copy : self().unseen) show(copy);
    self().unseen.clear();
}

u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - shared_bytes) + SHARED_START; }

void wgmma_fence() { self().products.is_fenced = true; }

void wgmma(u32 n, i32* c, const u32* a, u64 b) {
    if (!Matrix(b).is_emulated()) {
        fprintf(stderr, "emulate: matrices of the descriptor %llx are not emulated\n", b);
        abort();
    }
    Warpgroup& products = self().products;
    products.open.push_back({n, c, a, b, products.is_fenced});
}

// Executes the products of 128 threads, the first of which is given.
static void execute_products(Fiber* first) {
    for (size_t i = 0; i < first->products.closed.size(); i++) {
        const Product* threads[WARPGROUP_THREADS];
        for (u32 t = 0; t < WARPGROUP_THREADS; t++) {
            auto& closed = first[t].products.closed;
            if (closed.size() != first->products.closed.size() || closed[i].b != first->products.closed[i].b) {
                fprintf(stderr, "emulate: the threads of a warpgroup have different products\n");
                abort();
            }
            threads[t] = &closed[i];
        }
        execute(threads, [](u32 address) {
            if (address - SHARED_START >= shared_size) end_launch(ILLEGAL_ADDRESS);
            return seen_bytes[address - SHARED_START];
        });
    }
    for (u32 t = 0; t < WARPGROUP_THREADS; t++) first[t].products.closed.clear();
}

// The last of 128 threads that calls this executes their products.
static void meet_in_warpgroup() {
    u32 warpgroup = u32(&self() - fibers) / WARPGROUP_THREADS;
    if (++arrived_in_warpgroup[warpgroup] < WARPGROUP_THREADS) {
        self().state = State::InWarp;
        leave();
        return;
    }
    Fiber* first = fibers + warpgroup * WARPGROUP_THREADS;
    execute_products(first);
    arrived_in_warpgroup[warpgroup] = 0;
    for (u32 t = 0; t < WARPGROUP_THREADS; t++) first[t].state = State::Ready;
}

void wgmma_commit() {
    Warpgroup& products = self().products;
    products.closed.insert(products.closed.end(), products.open.begin(), products.open.end());
    products.open.clear();
    products.is_fenced = false;
    if (!copies_early) meet_in_warpgroup();
}

void wgmma_wait() {
    if (copies_early) meet_in_warpgroup();
}

}  // namespace emulate

// Code compiled with -fsanitize=alignment calls this before an access to a misaligned address.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, size_t at) {
    using namespace emulate;
    if (!current) {
        fprintf(stderr, "emulate: misaligned access to %zx outside of kernels\n", at);
        abort();
    }
    end_launch(MISALIGNED_ADDRESS);
}

namespace emulate {

Kernel kernel_of(const char* name) {
    for (const Entry& entry : ENTRIES) {
        if (strcmp(entry.name, name) == 0) return entry.run;
    }
    return nullptr;
}

int run(Kernel kernel, dim3 grid, dim3 block, u32 shared, void** args, Guard* guard_of_launch) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    SignalHandler handler;
    thread_count = block.x * block.y * block.z;
    if (thread_count == 0 || thread_count > THREADS_MAX || thread_count % 32 != 0 || shared > SHARED_MAX) {
        fprintf(stderr, "emulate: blocks of %u threads with %u bytes cannot be emulated\n", thread_count, shared);
        abort();
    }
    grid_size = grid, block_size = block, shared_size = shared;
    body = kernel, body_args = args, fault = 0, guard = guard_of_launch;
    u32 bits = launch_count++ * 2654435769u >> 30;
    order = {(bits & 1) != 0, (bits & 2) != 0};
    for (u32 z = 0; z < grid.z && !fault; z++) {
        for (u32 y = 0; y < grid.y && !fault; y++) {
            for (u32 x = 0; x < grid.x && !fault; x++) {
                block_index = order.backwards ? dim3{grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z} : dim3{x, y, z};
                run_block();
            }
        }
    }
    current = nullptr;
    if (guard) {
        for (const Region& region : guard->regions) mprotect(region.start, region.bytes, PROT_READ | PROT_WRITE);
    }
    return fault;
}

}  // namespace emulate

// Every kernel of the tests must wait, but none of them starts early.
extern "C" int launch(const char* name, const u32 grid[3], const u32 block[3], u32 shared, void** args) {
    emulate::Kernel kernel = emulate::kernel_of(name);
    if (!kernel) return emulate::NOT_FOUND;
    emulate::Guard guard{name, false, {}};
    return emulate::run(kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, args, &guard);
}
