// Joins the outputs of the gate and up matrices of a feed-forward block, for models where the two matrices have
// separate inputs.

#include "linear.cuh"

// gate = act(gate) · up, in place. One block per row.
KERNEL(256) activate(const ActivateArgs args) {
    start_after_previous();
    u32 row = blockIdx.x;
    if (row >= args.step->rows) return;
    float* gate = args.gate + u64(row) * args.width;
    const float* up = args.up + u64(row) * args.width;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) gate[i] = gated(args.activation, gate[i], up[i]);
}
