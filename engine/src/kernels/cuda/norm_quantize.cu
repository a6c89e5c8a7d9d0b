// The input of a linear: zero, one or two RMSNorms, then per-token int8 quantization.

#include "quantize.cuh"

// One row per block. ops::rms_norm and ops::quantize define the results.
//
// The kernel reads 4 bytes and writes 1 byte per element. The chain of width / 16 multiply-adds determines the time
// of one row.
KERNEL(1024) norm_quantize(const NormQuantizeArgs args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (stride)
    u32 row = blockIdx.x, width = args.width;
    // The loads of the row start before the row count of the step is read; the step may not have this row.
    load_row(args.x + u64(row) * width, width, values);
    if (row >= args.step->rows) return;
    if (args.weight) rms_norm(values, args.weight, width, args.eps);
    if (args.weight2) rms_norm(values, args.weight2, width, args.eps2);
    Quantized row_q = quantize_row(values, width, args.stride, args.q + u64(row) * args.stride, args.order);
    if (threadIdx.x == 0) args.scales[row] = row_q.scale, args.sums[row] = row_q.sum;
}
