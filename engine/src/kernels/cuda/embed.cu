// Copies embedding rows into the residual stream.

#include "args.cuh"
#include "lanes.cuh"

template <class E> __device__ __forceinline__ void widen_row(const EmbedArgs& args, u32 token, float* out) {
    const auto* row = static_cast<const typename E::Stored*>(args.table) + u64(token) * args.width;
    for (u32 i = threadIdx.x; i < args.width; i += blockDim.x) out[i] = __fmul_rn(E::widen(row[i]), args.factor);
}

// residual[row] = table[tokens[row]], widened exactly, times the factor. One block per row.
KERNEL(256) embed(const EmbedArgs args) {
    start_after_previous();
    u32 row = blockIdx.x;
    if (row >= args.step->rows) return;
    u32 token = args.tokens[row];
    if (token & IS_CARRIED) token = args.carried[token & ~IS_CARRIED];
    float* out = args.residual + u64(row) * args.width;
    switch (args.dtype) {
        case DTYPE_F16: widen_row<F16>(args, token, out); break;
        case DTYPE_BF16: widen_row<Bf16>(args, token, out); break;
        default: widen_row<F32>(args, token, out);
    }
}
