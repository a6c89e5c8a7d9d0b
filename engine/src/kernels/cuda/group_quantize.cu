// The input of linears with scales of groups: zero, one or two RMSNorms, then quantization to one or two int8 digits.

#include "norm.cuh"

// Returns round_half_even(v / scale) within the limits, as ops::quantize_groups. NaN becomes the upper limit.
__device__ __forceinline__ i32 nearest(float v, float scale, float least, float most) {
    return __float2int_rn(larger(smaller(__fdiv_rn(v, scale), most), least));
}

// Sum over the sixteen lanes of a half of the warp; each half has its own.
__device__ __forceinline__ i32 sum_of_half(i32 v) {
    for (u32 width = 8; width > 0; width /= 2) v += __shfl_xor_sync(FULL_WARP, v, width);
    return v;
}

// One block per row. ops::rms_norm and ops::quantize_groups define the results: 128 inputs share the scale
// max(1e-5, max|v|) / limit, with the limit 127 of one digit or 32639 = 256 · 127 + 127 of two. A warp quantizes 128
// inputs at a time, four per lane; lanes 0 to 15 have the first half of them.
KERNEL(256) group_quantize(const GroupQuantizeArgs args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (stride)
    u32 row = blockIdx.x, width = args.width, lane = threadIdx.x % 32;
    if (row >= *args.count) return;
    load_row(args.x + u64(args.wanted ? args.wanted[row] : row) * width, width, values);
    if (args.weight) rms_norm(values, args.weight, width, args.eps);
    if (args.weight2) rms_norm(values, args.weight2, width, args.eps2);
    __syncthreads();
    u32 blocks = args.stride / ROW_MULTIPLE;
    // As the reference, one digit may be −128, which no quotient rounds to but for NaN and infinity.
    float most = args.digits == 1 ? 127.0f : 32639.0f, least = args.digits == 1 ? -128.0f : -32639.0f;
    u32* first = reinterpret_cast<u32*>(args.q + u64(row) * args.digits * args.stride);
    u32* second = first + args.stride / 4;
    for (u32 block = threadIdx.x / 32; block < blocks; block += blockDim.x / 32) {
        u32 at = block * 32 + lane;
        float4 v = reinterpret_cast<const float4*>(values)[at];
        float largest = larger(fabsf(v.x), 1e-5f);
        largest = larger(fabsf(v.w), larger(fabsf(v.z), larger(fabsf(v.y), largest)));
        float scale = __fdiv_rn(largest_magnitude_of_warp(largest), most);
        i32 q[4] = {nearest(v.x, scale, least, most), nearest(v.y, scale, least, most), nearest(v.z, scale, least, most),
                    nearest(v.w, scale, least, most)};
        i32 sum = sum_of_half(q[0] + q[1] + q[2] + q[3]);
        i32 of_second = __shfl_sync(FULL_WARP, sum, 16);
        if (lane == 0) args.blocks[u64(row) * blocks + block] = {scale, {sum, of_second}, 0};
        u32 low = 0, high = 0;
        UNROLL for (u32 i = 0; i < 4; i++) {
            low |= u32(q[i] & 255) << (8 * i);
            high |= u32((q[i] + 128) >> 8 & 255) << (8 * i);
        }
        if (args.digits == 1) {
            first[at] = low;
        } else {
            first[at] = high, second[at] = low;
        }
    }
}
