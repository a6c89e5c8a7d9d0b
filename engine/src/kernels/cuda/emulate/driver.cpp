// The CUDA driver for machines without a GPU: the calls that `backend/cuda/driver` makes, as `libcuda.so`.
//
// Kernels run on the processor (`emulate.cpp`), and device memory is host memory. Every limit in the CUDA driver
// documentation for these calls is enforced, with the error codes of the driver. Where the documentation leaves a
// choice, this driver takes the choice that exposes mistakes:
// - The work of a stream is executed when a thread waits for the stream, and not earlier.
// - Allocations are filled with bytes that are NaN as floats, and are placed between unmapped pages.
// - A released primary context stays destroyed for every thread that had it as its current context.
//
// Build it with `build.sh`. `DEVICES` lists the devices.

#include "state.h"

using namespace emulate;

#define API extern "C" __attribute__((visibility("default"))) int

// The first lines of a call that needs a working context. `ENTER_UNSAFE` is for calls that are not allowed while
// this thread captures; such a call also invalidates the capture.
#define ENTER                                                      \
    std::lock_guard<std::mutex> lock(mutex());                     \
    Context* context = nullptr;                                    \
    if (int code = enter(&context)) return code
#define ENTER_UNSAFE                                               \
    ENTER;                                                         \
    if (int code = refuse_while_capturing()) return code

API cuDriverGetVersion(int* version) {
    *version = driver_version();
    return SUCCESS;
}

// Not of CUDA: changes the version of the driver that the calling thread sees.
API emulate_driver_version(int version) {
    driver_version() = version;
    return SUCCESS;
}

// Not of CUDA: returns how many launches of a kernel that may start early the calling thread has made.
static std::map<std::string, int>& early_launches() {
    static thread_local std::map<std::string, int> of_thread;
    return of_thread;
}
API emulate_early_launches(const char* kernel) { return early_launches()[kernel]; }

API cuInit(u32 flags) {
    std::lock_guard<std::mutex> lock(mutex());
    initialized() = true;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

API cuDeviceGetCount(int* count) {
    if (!initialized()) return NOT_INITIALIZED;
    *count = DEVICE_COUNT;
    return SUCCESS;
}

API cuDeviceGet(int* device, int ordinal) {
    if (!initialized()) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= DEVICE_COUNT) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char* name, int bytes, int device) {
    if (device < 0 || device >= DEVICE_COUNT) return INVALID_DEVICE;
    snprintf(name, size_t(bytes), "%s", DEVICES[device].name);
    return SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device < 0 || device >= DEVICE_COUNT) return INVALID_DEVICE;
    const Device& of = DEVICES[device];
    switch (attribute) {
        case 16: *value = of.multiprocessors; return SUCCESS;
        case 75: *value = of.architecture / 10; return SUCCESS;
        case 76: *value = of.architecture % 10; return SUCCESS;
        case 97: *value = int(of.shared_bytes); return SUCCESS;
        default: return INVALID_VALUE;  // the engine requests only the attributes above
    }
}

API cuDevicePrimaryCtxRetain(Context** context, int device) {
    std::lock_guard<std::mutex> lock(mutex());
    if (!initialized()) return NOT_INITIALIZED;
    if (device < 0 || device >= DEVICE_COUNT) return INVALID_DEVICE;
    Context& of = contexts()[device];
    if (of.references++ == 0) of.begin(&DEVICES[device]);
    *context = &of;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    std::lock_guard<std::mutex> lock(mutex());
    if (device < 0 || device >= DEVICE_COUNT || contexts()[device].references == 0) return INVALID_CONTEXT;
    Context& of = contexts()[device];
    if (--of.references == 0) of.end();
    return SUCCESS;
}

API cuCtxSetCurrent(Context* context) {
    std::lock_guard<std::mutex> lock(mutex());
    if (!initialized()) return NOT_INITIALIZED;
    if (context && context->references == 0) return INVALID_CONTEXT;
    current_context() = {context, context ? context->life : 0};
    return SUCCESS;
}

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER;
    *total = context->device->memory_bytes;
    *free = *total - context->allocated_bytes;
    return SUCCESS;
}

API cuMemAlloc_v2(u64* address, size_t bytes) {
    ENTER_UNSAFE;
    if (bytes == 0) return INVALID_VALUE;
    return context->allocate(bytes, address);
}

API cuMemFree_v2(u64 address) {
    ENTER_UNSAFE;
    context->wait_for_all();
    return context->free(address);
}

API cuMemHostAlloc(void** address, size_t bytes, u32 flags) {
    ENTER_UNSAFE;
    if (bytes == 0 || flags > 7) return INVALID_VALUE;
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    context->pinned[reinterpret_cast<u64>(*address)] = bytes;
    return SUCCESS;
}

API cuMemFreeHost(void* address) {
    ENTER_UNSAFE;
    context->wait_for_all();
    if (!context->pinned.erase(reinterpret_cast<u64>(address))) return INVALID_VALUE;
    free(address);
    return SUCCESS;
}

API cuStreamCreate(Stream** stream, u32 flags) {
    ENTER_UNSAFE;
    if (flags > 1) return INVALID_VALUE;
    *stream = context->streams.make();
    return SUCCESS;
}

API cuStreamDestroy_v2(Stream* stream) {
    ENTER;
    if (!context->streams.has(stream)) return INVALID_HANDLE;
    if (stream->capture) capturing_stream() = nullptr;
    context->wait_for(*stream);
    context->streams.remove(stream);
    return SUCCESS;
}

API cuStreamSynchronize(Stream* stream) {
    ENTER_UNSAFE;
    if (!context->streams.has(stream)) return INVALID_HANDLE;
    context->wait_for(*stream);
    return context->error;
}

API cuEventCreate(Event** event, u32 flags) {
    ENTER_UNSAFE;
    if (flags > 3) return INVALID_VALUE;
    *event = context->events.make();
    return SUCCESS;
}

API cuEventRecord(Event* event, Stream* stream) {
    ENTER;
    if (!context->events.has(event) || !context->streams.has(stream)) return INVALID_HANDLE;
    if (stream->capture) return stream->invalidate();  // the engine never captures an event
    event->stream = stream;
    u64 recording = ++event->recorded;
    return stream->add([reached = event->reached, recording] {
        *reached = recording;
        return SUCCESS;
    });
}

API cuEventSynchronize(Event* event) {
    ENTER_UNSAFE;
    if (!context->events.has(event)) return INVALID_HANDLE;
    context->wait_for(*event);
    return context->error;
}

API cuEventDestroy_v2(Event* event) {
    ENTER;
    return context->events.remove(event) ? SUCCESS : INVALID_HANDLE;
}

API cuStreamBeginCapture_v2(Stream* stream, int mode) {
    ENTER;
    if (!context->streams.has(stream)) return INVALID_HANDLE;
    if (mode != CAPTURE_THREAD_LOCAL) return INVALID_VALUE;  // the engine requests only this mode
    if (stream->capture || capturing_stream()) return ILLEGAL_STATE;
    stream->capture = true, stream->capture_error = SUCCESS, stream->captured.clear();
    stream->capturing_thread = std::this_thread::get_id();
    capturing_stream() = stream;
    return SUCCESS;
}

API cuStreamEndCapture(Stream* stream, Graph** graph) {
    ENTER;
    *graph = nullptr;
    if (!context->streams.has(stream)) return INVALID_HANDLE;
    if (!stream->capture) return ILLEGAL_STATE;
    if (stream->capturing_thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    stream->capture = false, capturing_stream() = nullptr;
    if (stream->capture_error) return CAPTURE_INVALIDATED;
    *graph = context->graphs.make();
    (*graph)->operations = std::move(stream->captured);
    return SUCCESS;
}

API cuGraphInstantiateWithFlags(GraphExec** made, Graph* graph, u64 flags) {
    ENTER_UNSAFE;
    if (!context->graphs.has(graph)) return INVALID_HANDLE;
    if (flags != 0) return INVALID_VALUE;
    size_t bytes = graph->operations.size() * recorded_launch_bytes();
    if (context->allocated_bytes + bytes > context->device->memory_bytes) return OUT_OF_MEMORY;
    context->allocated_bytes += bytes;
    *made = context->graph_execs.make();
    (*made)->operations = graph->operations, (*made)->bytes = bytes;
    return SUCCESS;
}

API cuGraphDestroy(Graph* graph) {
    ENTER;
    return context->graphs.remove(graph) ? SUCCESS : INVALID_HANDLE;
}

API cuGraphExecDestroy(GraphExec* graph) {
    ENTER;
    if (!context->graph_execs.has(graph)) return INVALID_HANDLE;
    context->allocated_bytes -= graph->bytes;
    context->graph_execs.remove(graph);
    return SUCCESS;
}

API cuGraphLaunch(GraphExec* graph, Stream* stream) {
    ENTER;
    if (!context->streams.has(stream) || !context->graph_execs.has(graph)) return INVALID_HANDLE;
    if (stream->capture) return stream->invalidate();  // the engine never captures the launch of a graph
    for (const Operation& operation : graph->operations) stream->queue.push_back(operation);
    return SUCCESS;
}

// Adds a copy to a stream. Fails if a device memory range is not inside one allocation.
static int copy(Context& context, Stream* stream, u64 to, u64 from, size_t bytes, bool to_device, bool from_device) {
    if (!context.streams.has(stream)) return INVALID_HANDLE;
    if (to_device && !context.holds(to, bytes)) return INVALID_VALUE;
    if (from_device && !context.holds(from, bytes)) return INVALID_VALUE;
    return stream->add([=] {
        memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
        return SUCCESS;
    });
}

API cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) {
    ENTER;
    return copy(*context, stream, to, reinterpret_cast<u64>(from), bytes, true, false);
}

API cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) {
    ENTER;
    return copy(*context, stream, reinterpret_cast<u64>(to), from, bytes, false, true);
}

API cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) {
    ENTER;
    return copy(*context, stream, to, from, bytes, true, true);
}

API cuModuleLoadDataEx(Module** module, const void* image, u32, int*, void**) {
    ENTER_UNSAFE;
    auto* bytes = static_cast<const u8*>(image);
    bool is_cubin = memcmp(bytes, "\x7f""ELF", 4) == 0;
    Image parsed = is_cubin ? parse_cubin(bytes) : parse_ptx(static_cast<const char*>(image));
    if (int code = context->device->refuses(parsed)) return code;
    *module = context->modules.make();
    for (auto& [name, info] : parsed.kernels) {
        Function& function = (*module)->functions[name];
        function.name = name, function.info = info, function.run = kernel_of(name.c_str());
        function.waits = is_cubin && parsed.architecture >= 90;
        function.dynamic_max = SHARED_BYTES - std::min(SHARED_BYTES, info.static_shared_bytes);
    }
    return SUCCESS;
}

API cuModuleLoadData(Module** module, const void* image) { return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr); }

API cuModuleUnload(Module* module) {
    ENTER_UNSAFE;
    context->wait_for_all();
    return context->modules.remove(module) ? SUCCESS : INVALID_HANDLE;
}

API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER;
    if (!context->modules.has(module)) return INVALID_HANDLE;
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *function = &found->second;
    return SUCCESS;
}

API cuFuncGetAttribute(int* value, int attribute, Function* function) {
    ENTER;
    if (!context->has(function)) return INVALID_HANDLE;
    switch (attribute) {
        case 0: *value = int(function->info.threads_max); return SUCCESS;
        case 1: *value = int(function->info.static_shared_bytes); return SUCCESS;
        case 4: *value = int(function->info.registers); return SUCCESS;
        case 8: *value = int(function->dynamic_max); return SUCCESS;
        default: return INVALID_VALUE;
    }
}

API cuFuncSetAttribute(Function* function, int attribute, int value) {
    ENTER;
    if (!context->has(function)) return INVALID_HANDLE;
    // A preference for shared memory, in percent; −1 for none.
    if (attribute == 9) return value < -1 || value > 100 ? INVALID_VALUE : SUCCESS;
    i64 most = i64(context->device->shared_bytes) - function->info.static_shared_bytes;
    if (attribute != 8 || value < 0 || value > most) return INVALID_VALUE;
    function->dynamic_max = u32(value);
    return SUCCESS;
}

// Adds a launch to a stream. // early: whether it starts before the earlier kernels have ended
static int launch(Context& context, Function* function, dim3 grid, dim3 block, u32 shared, Stream* stream,
                  void** parameters, void** extra, bool early) {
    if (!context.streams.has(stream) || !context.has(function)) return INVALID_HANDLE;
    if (int code = function->refuses(grid, block, shared)) return code;
    if (!parameters || extra) return INVALID_VALUE;
    if (early) {
        // A CUDA driver might let a kernel start early that has no wait; it would compute wrong results.
        bool supported = context.device->architecture >= 90 && function->waits;
        bool captured = stream->capture && driver_version() < EARLY_STARTS_VERSION;
        if (!supported || captured) return NOT_SUPPORTED;
        early_launches()[function->name]++;
    }
    // As the CUDA driver does, copy as many bytes as the kernel declares.
    auto* from = static_cast<const u8*>(parameters[0]);
    auto args = std::make_shared<std::vector<u64>>((function->info.param_bytes + 7) / 8);
    memcpy(args->data(), from, function->info.param_bytes);
    return stream->add([=, &context] {
        void* pointers[1] = {args->data()};
        return context.run_kernel(*function, grid, block, shared, pointers, early);
    });
}

API cuLaunchKernel(Function* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x, u32 block_y, u32 block_z,
                   u32 shared, Stream* stream, void** parameters, void** extra) {
    ENTER;
    dim3 grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
    return launch(*context, function, grid, block, shared, stream, parameters, extra, false);
}

// `CUlaunchAttribute` and `CUlaunchConfig`.
struct LaunchAttribute {
    int id;
    u8 padding[4];
    union {
        u8 bytes[64];
        int allowed;
    };
};
struct LaunchConfig {
    dim3 grid, block;
    u32 shared;
    Stream* stream;
    const LaunchAttribute* attributes;
    u32 attribute_count;
};

API cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters, void** extra) {
    ENTER;
    if (!config || (config->attribute_count && !config->attributes)) return INVALID_VALUE;
    bool early = false;
    for (u32 i = 0; i < config->attribute_count; i++) {
        const LaunchAttribute& attribute = config->attributes[i];
        // The engine uses no other attribute.
        if (attribute.id != PROGRAMMATIC_STREAM_SERIALIZATION || (attribute.allowed & ~1)) return INVALID_VALUE;
        early = attribute.allowed == 1;
    }
    const auto& [grid, block, shared, stream, attributes, count] = *config;
    return launch(*context, function, grid, block, shared, stream, parameters, extra, early);
}
