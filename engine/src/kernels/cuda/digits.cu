// The input of the screen: applies the norm before the head and writes its rows as one or two int8 digits.

#include "norm.cuh"

// One block per wanted row. x[k] is about step · X[k]. With one digit |X| ≤ 127; with two digits
// X = 256 · digit 0 + digit 1 and |X| ≤ 127 · 256. Digits are signed. The factors of the bounds are the same as
// in Estimates::factors in backend/cpu/screen.rs.
KERNEL(256) digits(const DigitsArgs args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (stride)
    __shared__ float floats[32];
    __shared__ double doubles[32];
    u32 index = blockIdx.x, width = args.width;
    if (index >= args.step->screened) return;
    load_row(args.residual + u64(args.wanted[index]) * width, width, values);
    rms_norm(values, args.weight, width, args.eps);
    float largest = largest_magnitude(values, width, floats);
    i32 limit = args.digit_count == 1 ? 127 : 127 * 256;
    float step = largest > 0.0f ? __fdiv_rn(largest, __int2float_rn(limit)) : 1.0f;
    double norm = 0.0, error = 0.0;
    float* out = args.x + u64(index) * width;
    i8* first = args.digits + u64(index) * args.digit_count * args.stride;
    i8* second = first + args.stride;
    for (u32 k = threadIdx.x; k < args.stride; k += blockDim.x) {
        float v = k < width ? values[k] : 0.0f;
        i32 nearest = __float2int_rn(__fdiv_rn(v, step));
        nearest = nearest > limit ? limit : nearest < -limit ? -limit : nearest;
        double left = __dsub_rn(v, __dmul_rn(nearest, step));
        norm = __fma_rn(v, v, norm);
        error = __fma_rn(left, left, error);
        if (k < width) out[k] = v;
        if (args.digit_count == 1) {
            first[k] = i8(nearest);
        } else {
            i32 low = ((nearest + 128) & 255) - 128;
            first[k] = i8((nearest - low) >> 8);
            second[k] = i8(low);
        }
    }
    norm = __dsqrt_rn(sum_over_block(norm, doubles));
    error = __dsqrt_rn(sum_over_block(error, doubles));
    if (threadIdx.x != 0) return;
    double rounding = __dmul_rn((args.stride / LANES + 32) * 1.1920928955078125e-7, norm);
    float above = 1.00001f;
    args.rows[index] = {step, __fmul_rn(float(__dadd_rn(norm, rounding)), above),
                        __fmul_rn(float(__dadd_rn(error, rounding)), above), 0};
}
