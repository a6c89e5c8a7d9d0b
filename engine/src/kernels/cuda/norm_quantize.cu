// The input of a linear: RMSNorm (none, one or two) and per-token int8 quantization.

#include "norm.cuh"

// q = clamp(round_half_even(v · s), −128, 127), as ops::quantize.
__device__ __forceinline__ i32 quantized(float v, float s) {
    return __float2int_rn(larger(smaller(__fmul_rn(v, s), 127.0f), -128.0f));
}

// One row per block. Defined by ops::rms_norm and ops::quantize: s = 127 / max(1e-5, max|v|). Writes
// the row's bytes up to the stride, its scale s and the exact sum of its bytes.
//
// Reads 4 bytes and writes 1 an element; the chain of width / 16 multiply-adds is what one row waits for.
KERNEL(1024) norm_quantize(const NormQuantizeArgs args) {
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (stride)
    __shared__ float floats[32];
    __shared__ i32 integers[32];
    u32 row = blockIdx.x, width = args.width;
    if (row >= args.step->rows) return;
    load_row(args.x + u64(row) * width, width, values);
    if (args.weight) rms_norm(values, args.weight, width, args.eps);
    if (args.weight2) rms_norm(values, args.weight2, width, args.eps2);
    for (u32 i = width + threadIdx.x; i < args.stride; i += blockDim.x) values[i] = 0.0f;
    __syncthreads();
    float largest = largest_magnitude(values, width, floats);
    float s = __fdiv_rn(127.0f, largest > 1e-5f ? largest : 1e-5f);
    i32 sum = 0;
    auto* out = reinterpret_cast<u32*>(args.q + u64(row) * args.stride);
    for (u32 i = threadIdx.x; i < args.stride / 4; i += blockDim.x) {
        float4 v = reinterpret_cast<const float4*>(values)[i];
        i32 q[4] = {quantized(v.x, s), quantized(v.y, s), quantized(v.z, s), quantized(v.w, s)};
        // Padding is zero whatever s is: an infinite row has s = 0, and 0 · 0 is 0.
        sum += q[0] + q[1] + q[2] + q[3];
        out[i] = u32(q[0] & 255) | u32(q[1] & 255) << 8 | u32(q[2] & 255) << 16 | u32(q[3]) << 24;
    }
    sum = over_block(sum_of_warp(sum), integers, [](i32 a, i32 b) { return a + b; });
    if (threadIdx.x == 0) args.scales[row] = s, args.sums[row] = sum;
}
