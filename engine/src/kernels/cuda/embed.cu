// Copies embedding rows into the residual stream.

#include "args.cuh"
#include "lanes.cuh"

template <class E> __device__ __forceinline__ void widen_row(const void* table, u64 at, u32 width, float* out) {
    const auto* row = static_cast<const typename E::Stored*>(table) + at;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = E::widen(row[i]);
}

// residual[row] = table[tokens[row]], widened exactly. One block per row.
KERNEL(256) embed(const EmbedArgs args) {
    u32 row = blockIdx.x;
    if (row >= args.step->rows) return;
    u32 token = args.tokens[row];
    if (token & IS_CARRIED) token = args.carried[token & ~IS_CARRIED];
    u64 at = u64(token) * args.width;
    float* out = args.residual + u64(row) * args.width;
    switch (args.dtype) {
        case DTYPE_F16: widen_row<F16>(args.table, at, args.width, out); break;
        case DTYPE_BF16: widen_row<Bf16>(args.table, at, args.width, out); break;
        default: widen_row<F32>(args.table, at, args.width, out);
    }
}
