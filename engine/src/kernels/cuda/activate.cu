// The gate of a feed-forward block whose gate and up matrices have inputs of their own: both outputs are
// there, and are joined here.

#include "linear.cuh"

// A block per row.
KERNEL(256) activate(const ActivateArgs args) {
    u32 row = blockIdx.x;
    if (row >= args.step->rows) return;
    float* gate = args.gate + u64(row) * args.width;
    const float* up = args.up + u64(row) * args.width;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) gate[i] = gated(args.activation, gate[i], up[i]);
}
