// RMSNorms of each query head and of each key head, before RoPE.

#include "args.cuh"
#include "lanes.cuh"

// One block per row; a warp has one head at a time. Both halves of a warp add the same squares, in sixteen lanes, as
// ops::rms_norm; every lane then writes its own elements.
KERNEL(256) norm_heads(const NormHeadsArgs args) {
    start_after_previous();
    u32 row = blockIdx.x, dim = args.head_dim, lane = threadIdx.x % 32;
    if (row >= args.step->rows) return;
    for (u32 head = threadIdx.x / 32; head < args.heads + args.kv_heads; head += blockDim.x / 32) {
        bool is_key = head >= args.heads;
        float* x = is_key ? args.keys + (u64(row) * args.kv_heads + head - args.heads) * dim
                          : args.queries + (u64(row) * args.heads + head) * dim;
        const float* weight = is_key ? args.key_weight : args.query_weight;
        float squares = 0.0f;
        for (u32 i = lane % LANES; i < dim; i += LANES) squares = __fmaf_rn(x[i], x[i], squares);
        float mean = __fdiv_rn(sum_of_lanes(squares), __int2float_rn(i32(dim)));
        float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
        // Before a lane changes what another one has to read.
        __syncwarp();
        for (u32 i = lane; i < dim; i += 32) x[i] = __fmul_rn(weight[i], __fmul_rn(x[i], inverse));
    }
}
