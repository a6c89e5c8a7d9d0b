// Ternary linears of few rows: up to 64 a block.
//
// out[row] (+)= rescale(Σ code · q − Σ q), as kernels::scalar and ops::rescale define it. Weights are read
// once for each 8 N rows: 0.25 byte a multiply-add at one row, and two m16n8k32 products for 64 weights of
// a lane, which the tensor cores do faster than memory delivers. Any number of warps works: they share
// the k blocks.

#include "few.cuh"

template <int M, int N, int AHEAD> __device__ __forceinline__ void linear_few(const LinearArgs& args) {
    __shared__ Sums<M, N> sums;
    u32 first = blockIdx.y * (N * N_TILE), count = args.step->rows;
    if (first >= count) return;
    Tile tiles[M];
    const uint4* weights[M];
    UNROLL for (u32 m = 0; m < M; m++) {
        tiles[m] = find_tile(args, blockIdx.x * M + m);
        weights[m] = tiles[m].weights;
    }
    multiply_few<Ternary, M, N, AHEAD>(weights, args.x, first, count, args.k_blocks, sums);
    for (u32 i = threadIdx.x; i < N * N_TILE * M * TILE_ROWS; i += blockDim.x) {
        u32 token = i / (M * TILE_ROWS), m = i / TILE_ROWS % M, row = first + token;
        Tile tile = tiles[0];
        UNROLL for (u32 other = 1; other < M; other++) {
            if (m == other) tile = tiles[other];
        }
        const Segment& segment = args.segments[tile.segment];
        u32 feature = tile.first + i % TILE_ROWS;
        if (row >= count || feature >= segment.rows) continue;
        i32 sum = sums.at[token * Sums<M, N>::STRIDE + i % (M * TILE_ROWS)] - args.sums[row];
        float y = rescaled(sum, divisor_of(segment, args.scales[row]), segment);
        put(args.mode, segment.out + u64(row) * segment.stride + feature, y);
    }
}

// out[row] = act(gate[row]) · up[row] of sixteen features a block: gate and up tiles together.
template <int N, int AHEAD> __device__ __forceinline__ void gate_few(const LinearArgs& args) {
    __shared__ Sums<2, N> sums;
    u32 first = blockIdx.y * (N * N_TILE), count = args.step->rows;
    if (first >= count) return;
    const uint4* weights[2] = {tile_of(args, 0, blockIdx.x).weights, tile_of(args, 1, blockIdx.x).weights};
    multiply_few<Ternary, 2, N, AHEAD>(weights, args.x, first, count, args.k_blocks, sums);
    const Segment &gate = args.segments[0], &up = args.segments[1];
    for (u32 i = threadIdx.x; i < N * N_TILE * TILE_ROWS; i += blockDim.x) {
        u32 token = i / TILE_ROWS, row = first + token, feature = blockIdx.x * TILE_ROWS + i % TILE_ROWS;
        if (row >= count || feature >= gate.rows) continue;
        const i32* at = sums.at + token * Sums<2, N>::STRIDE + i % TILE_ROWS;
        float s = args.scales[row];
        i32 q = args.sums[row];
        float g = rescaled(at[0] - q, divisor_of(gate, s), gate);
        float u = rescaled(at[TILE_ROWS] - q, divisor_of(up, s), up);
        gate.out[u64(row) * gate.stride + feature] = gated(args.activation, g, u);
    }
}

KERNEL(512) linear_n8(const LinearArgs args) { linear_few<1, 1, 4>(args); }
KERNEL(512) linear_n16(const LinearArgs args) { linear_few<1, 2, 2>(args); }
KERNEL(256) linear_n32(const LinearArgs args) { linear_few<2, 4, 2>(args); }
KERNEL(256) linear_n64(const LinearArgs args) { linear_few<2, 8, 1>(args); }
KERNEL(512) gate_n8(const LinearArgs args) { gate_few<1, 2>(args); }
KERNEL(512) gate_n16(const LinearArgs args) { gate_few<2, 2>(args); }
KERNEL(256) gate_n32(const LinearArgs args) { gate_few<4, 2>(args); }
KERNEL(256) gate_n64(const LinearArgs args) { gate_few<8, 1>(args); }
