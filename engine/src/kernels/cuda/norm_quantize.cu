// The input of a linear: zero, one or two RMSNorms, then per-token int8 quantization.

#include "quantize.cuh"

// One row per block. ops::rms_norm and ops::quantize define the results.
//
// The kernel reads 4 bytes and writes 1 byte per element. The chain of width / 16 multiply-adds determines the time
// of one row.
KERNEL(1024) norm_quantize(const NormQuantizeArgs args) {
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (stride)
    u32 row = blockIdx.x, width = args.width, stride = args.stride;
    const float* x = args.x + u64(row) * width;
    i8* q = args.q + u64(row) * stride;
    Quantized row_q;
    let_next_start();
    // The loads of the row start before the row count of the step is read; the step may not have this row.
    if (RowPart::has_room(width, stride)) {
        RowPart part, weight;
        if (args.weight) weight.load_weights(args.weight, width);
        wait_for_previous();
        part.load_row(x, width);
        if (row >= args.step->rows) return;
        if (args.weight) rms_norm(part, weight, values, width, stride, args.eps);
        if (args.weight2) {
            weight.load_weights(args.weight2, width);
            rms_norm(part, weight, values, width, stride, args.eps2);
        }
        row_q = quantize_part(part, stride, q, args.order);
    } else {
        wait_for_previous();
        load_row(x, width, values);
        if (row >= args.step->rows) return;
        if (args.weight) rms_norm(values, args.weight, width, args.eps);
        if (args.weight2) rms_norm(values, args.weight2, width, args.eps2);
        row_q = quantize_row(values, width, stride, q, args.order);
    }
    if (threadIdx.x == 0) args.scales[row] = row_q.scale, args.sums[row] = row_q.sum;
}
