// The state of the emulated driver: devices, contexts, and the objects that contexts own.

#pragma once
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <thread>

#include "image.h"

namespace emulate {

// Codes of `CUresult`.
enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, UNSUPPORTED_PTX_VERSION = 222, INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401, LAUNCH_OUT_OF_RESOURCES = 701, CONTEXT_IS_DESTROYED = 709, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_WRONG_THREAD = 908,
};
constexpr int CAPTURE_THREAD_LOCAL = 1;
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;

// CUDA 12.3, the oldest driver whose graphs have kernels that start early. A thread may choose an older one.
constexpr int EARLY_STARTS_VERSION = 12030;
inline int& driver_version() {
    static thread_local int of_thread = EARLY_STARTS_VERSION;
    return of_thread;
}
// Device memory of a recorded launch.
inline size_t recorded_launch_bytes() { return driver_version() < 12040 ? 64 << 10 : 16 << 10; }
// Of CUDA 12.1, the oldest driver that the program accepts.
constexpr u32 PTX_VERSION_MAX = 81;
// Shared memory of a block that has not opted in to more.
constexpr u32 SHARED_BYTES = 48 << 10;

struct Device {
    const char* name;
    int architecture;  // 10 * major + minor
    int multiprocessors;
    u32 shared_bytes;  // per block that opted in
    size_t memory_bytes;
    bool refuses_cubins;
    bool checks_waits = false;  // every launch has a `Guard`

    int refuses(const Image& image) const {
        if (image.kernels.empty()) return INVALID_IMAGE;
        if (image.ptx_version > PTX_VERSION_MAX) return UNSUPPORTED_PTX_VERSION;
        bool is_cubin = image.ptx_version == 0, is_old = int(image.architecture) > architecture;
        // Cubins are built only for major versions that have one minor version, so the architectures must be equal.
        if (is_cubin && (refuses_cubins || int(image.architecture) != architecture)) return NO_BINARY_FOR_GPU;
        return is_old ? NO_BINARY_FOR_GPU : SUCCESS;
    }
};

// The tests in `backend/cuda/tests` select devices by their index in this list.
constexpr size_t GIB = size_t(1) << 30;
const Device DEVICES[] = {
    {"emulated sm_90", 90, 2, 227 << 10, 4 * GIB, false},
    {"emulated sm_80", 80, 2, 163 << 10, 4 * GIB, false},
    {"emulated sm_90 without cubins", 90, 2, 227 << 10, 4 * GIB, true},
    {"emulated sm_90 with 1 GiB", 90, 2, 227 << 10, GIB, false},
    {"emulated sm_90 with 1 MiB", 90, 2, 227 << 10, GIB / 1024, false},
    {"emulated sm_75", 75, 2, 64 << 10, 4 * GIB, false},
    // One device for each test that ends with a sticky error.
    {"emulated sm_90, misaligned", 90, 2, 227 << 10, 4 * GIB, false},
    {"emulated sm_90, out of bounds", 90, 2, 227 << 10, 4 * GIB, false},
    {"emulated sm_90, released", 90, 2, 227 << 10, 4 * GIB, false},
    {"emulated sm_90 that checks waits", 90, 2, 227 << 10, 4 * GIB, false, true},
    {"emulated sm_90, early access", 90, 2, 227 << 10, 4 * GIB, false, true},
    // As many as an H100 has, for choices that depend on it.
    {"emulated sm_90 with 132 multiprocessors", 90, 132, 227 << 10, 4 * GIB, false},
};
constexpr int DEVICE_COUNT = sizeof DEVICES / sizeof *DEVICES;

// An operation of a stream or a graph; returns the sticky error of the context, or 0.
typedef std::function<int()> Operation;

struct Graph {
    std::vector<Operation> operations;
};
struct GraphExec {
    std::vector<Operation> operations;
    size_t bytes = 0;  // of device memory
};

struct Stream {
    std::vector<Operation> queue, captured;
    bool capture = false;
    int capture_error = SUCCESS;
    std::thread::id capturing_thread;

    int invalidate() {
        capture_error = CAPTURE_UNSUPPORTED;
        return CAPTURE_UNSUPPORTED;
    }
    int add(Operation operation) {
        if (capture && capture_error) return CAPTURE_INVALIDATED;
        (capture ? captured : queue).push_back(std::move(operation));
        return SUCCESS;
    }
};

// Counts the recordings of an event: those that a stream was given, and those that it has reached.
struct Event {
    std::shared_ptr<u64> reached = std::make_shared<u64>(0);
    u64 recorded = 0;
    Stream* stream = nullptr;
};

struct Function {
    std::string name;
    KernelInfo info;
    Kernel run;
    bool waits;       // whether the image has the instructions of overlap
    u32 dynamic_max;  // MAX_DYNAMIC_SHARED_SIZE_BYTES

    int refuses(dim3 grid, dim3 block, u32 shared) const {
        u64 threads = u64(block.x) * block.y * block.z;
        bool has_grid = grid.x && grid.y && grid.z && threads;
        if (!has_grid || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return INVALID_VALUE;
        if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024) return INVALID_VALUE;
        if (threads > info.threads_max || shared > dynamic_max) return INVALID_VALUE;
        // Registers are allocated to a warp in units of 256; warps are allocated in units of four.
        u32 of_warp = (info.registers * 32 + 255) / 256 * 256;
        u32 warps = u32(threads + 127) / 128 * 4;
        return of_warp * warps > 65536 ? LAUNCH_OUT_OF_RESOURCES : SUCCESS;
    }
};

struct Module {
    std::map<std::string, Function> functions;
};

// The objects of one kind that a context owns, by handle.
template <class T> class Handles {
    std::map<T*, std::unique_ptr<T>> all;

  public:
    T* make() {
        auto made = std::make_unique<T>();
        T* handle = made.get();
        all[handle] = std::move(made);
        return handle;
    }
    bool has(T* handle) const { return all.count(handle) == 1; }
    bool remove(T* handle) { return all.erase(handle) == 1; }
    void clear() { all.clear(); }
    template <class Each> void each(Each visit) {
        for (auto& [handle, object] : all) visit(*object);
    }
};

// The primary context of a device.
struct Context {
    const Device* device = nullptr;
    u32 references = 0;
    u64 life = 0;  // incremented each time the context is created
    int error = SUCCESS;  // sticky: keeps its value once set
    size_t allocated_bytes = 0;
    std::map<u64, size_t> allocations, pinned;
    std::set<u64> written;  // allocations that kernels have written; known only where waits are checked
    Handles<Stream> streams;
    Handles<Graph> graphs;
    Handles<GraphExec> graph_execs;
    Handles<Event> events;
    Handles<Module> modules;

    void begin(const Device* of) {
        device = of;
        life++;
        error = SUCCESS;
    }

    void end() {
        while (!allocations.empty()) free(allocations.begin()->first);
        for (auto& [address, bytes] : pinned) ::free(reinterpret_cast<void*>(address));
        graph_execs.each([&](GraphExec& graph) { allocated_bytes -= graph.bytes; });
        pinned.clear(), streams.clear(), graphs.clear(), graph_execs.clear(), events.clear(), modules.clear();
    }

    // Each allocation is at the end of its mapping and is followed by an unmapped page.
    static constexpr size_t PAGE = 4096;
    static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

    int allocate(size_t bytes, u64* address) {
        size_t rounded = (bytes + 255) / 256 * 256;
        if (allocated_bytes + rounded > device->memory_bytes) return OUT_OF_MEMORY;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* mapped = mmap(nullptr, pages(rounded) + 2 * PAGE, PROT_NONE, flags, -1, 0);
        if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
        u8* start = static_cast<u8*>(mapped) + PAGE;
        mprotect(start, pages(rounded), PROT_READ | PROT_WRITE);
        u8* at = start + pages(rounded) - rounded;
        memset(at, 0xff, rounded);
        *address = reinterpret_cast<u64>(at);
        allocations[*address] = rounded;
        allocated_bytes += rounded;
        return SUCCESS;
    }

    int free(u64 address) {
        auto found = allocations.find(address);
        if (found == allocations.end()) return INVALID_VALUE;
        size_t rounded = found->second;
        u64 mapped = address + rounded - pages(rounded) - PAGE;
        munmap(reinterpret_cast<void*>(mapped), pages(rounded) + 2 * PAGE);
        allocated_bytes -= rounded;
        allocations.erase(found), written.erase(address);
        return SUCCESS;
    }

    // Runs a kernel. // early: whether it starts before the earlier kernels have ended
    int run_kernel(const Function& function, dim3 grid, dim3 block, u32 shared, void** args, bool early) {
        if (!device->checks_waits) return run(function.run, grid, block, shared, args);
        Guard guard{function.name.c_str(), early, {}};
        for (auto& [address, bytes] : allocations) {
            u64 start = address + bytes - pages(bytes);
            guard.regions.push_back({reinterpret_cast<u8*>(start), pages(bytes), written.count(address) == 1});
        }
        int code = run(function.run, grid, block, shared, args, &guard);
        size_t index = 0;
        for (auto& [address, bytes] : allocations) {
            if (guard.regions[index++].written) written.insert(address);
        }
        return code;
    }

    bool holds(u64 address, size_t bytes) const {
        auto after = allocations.upper_bound(address);
        if (after == allocations.begin()) return false;
        auto& [start, size] = *--after;
        return address - start <= size && bytes <= size - (address - start);
    }

    bool has(Function* function) {
        bool found = false;
        modules.each([&](Module& module) {
            for (auto& [name, of] : module.functions) found |= &of == function;
        });
        return found;
    }

    void wait_for(Stream& stream) {
        std::vector<Operation> queue = std::move(stream.queue);
        stream.queue.clear();
        for (const Operation& operation : queue) {
            if (error == SUCCESS) error = operation();
        }
    }

    // Executes no more of the stream's work than the event needs.
    void wait_for(Event& event) {
        if (!event.stream || !streams.has(event.stream)) return;
        std::vector<Operation>& queue = event.stream->queue;
        size_t done = 0;
        while (*event.reached < event.recorded && done < queue.size() && error == SUCCESS) error = queue[done++]();
        queue.erase(queue.begin(), queue.begin() + done);
    }

    void wait_for_all() {
        streams.each([&](Stream& stream) { wait_for(stream); });
    }
};

// Serializes the calls of all devices and threads.
inline std::mutex& mutex() {
    static std::mutex one;
    return one;
}
inline bool& initialized() {
    static bool is = false;
    return is;
}
inline Context* contexts() {
    static Context all[DEVICE_COUNT];
    return all;
}
// The current context of the thread, and the value of `life` when it was set.
struct Current {
    Context* context;
    u64 life;
};
inline Current& current_context() {
    static thread_local Current of_thread{};
    return of_thread;
}
inline Stream*& capturing_stream() {
    static thread_local Stream* of_thread = nullptr;
    return of_thread;
}

// Finds the current context of the thread; returns SUCCESS, or the error with which the call must fail.
inline int enter(Context** context) {
    if (!initialized()) return NOT_INITIALIZED;
    Current current = current_context();
    if (!current.context) return INVALID_CONTEXT;
    if (current.context->references == 0 || current.context->life != current.life) return CONTEXT_IS_DESTROYED;
    *context = current.context;
    return current.context->error;
}

inline int refuse_while_capturing() { return capturing_stream() ? capturing_stream()->invalidate() : SUCCESS; }

}  // namespace emulate
