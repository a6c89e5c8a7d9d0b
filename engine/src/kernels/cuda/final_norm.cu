// The norm before the head, for the rows that need logits.

#include "norm.cuh"

// out[i] = norm of row wanted[i] of the residual stream. One block per wanted row.
KERNEL(256) final_norm(const FinalNormArgs args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    auto* values = reinterpret_cast<float*>(bytes);  // (width rounded up to 128)
    u32 index = blockIdx.x, width = args.width;
    if (index >= args.step->whole) return;
    load_row(args.residual + u64(args.wanted[index]) * width, width, values);
    rms_norm(values, args.weight, width, args.eps);
    float* out = args.out + u64(index) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = values[i];
}
