// Ternary linears of few rows: up to 64 rows per block.
//
// out[row] (+)= rescale(Σ code · q − Σ q), as kernels::scalar and ops::rescale define it. Weights are read once for
// each 8 N rows: 0.25 byte per multiply-add at one row, and two m16n8k32 products for 64 weights of a lane, which
// the tensor cores compute faster than memory delivers the weights. Any number of warps works: they share the
// k blocks.

#include "few.cuh"
#include "linear.cuh"

// The scales and the sums of q of the tokens of a block.
template <int TOKENS> struct Scales {
    Divisor scales[TOKENS];
    i32 sums[TOKENS];
    __device__ __forceinline__ void load(const LinearArgs& args, u32 first, u32 rows) {
        for (u32 t = threadIdx.x; t < TOKENS; t += blockDim.x) {
            u32 row = first + t < rows ? first + t : rows - 1;
            scales[t] = divisor(args.scales[row]);
            sums[t] = args.sums[row];
        }
    }

    // Returns the output of a feature of a segment for a token.
    __device__ __forceinline__ float output_of(i32 sum, u32 token, const Segment& segment, u32 feature) const {
        const Divisor& shared = scales[token];
        Divisor d = segment.divide ? divisor_of(segment, shared.value) : shared;
        return output(sum - sums[token], d, segment, feature);
    }
};

// Outputs that a thread computes together, so that it waits once for the numbers that they are added to.
constexpr u32 OUTPUTS_TOGETHER = 4;

template <class F> __device__ __forceinline__ void linear_few(const LinearArgs& args) {
    __shared__ typename F::Sums sums;
    __shared__ Scales<F::TOKENS> scales;
    u32 first = blockIdx.y * F::TOKENS, rows = 0;
    Tile tiles[F::M];
    const uint4* weights[F::M];
    UNROLL for (u32 m = 0; m < F::M; m++) {
        tiles[m] = find_tile(args, blockIdx.x * F::M + m);
        weights[m] = tiles[m].weights;
    }
    auto prepare = [&](u32 count) { scales.load(args, first, rows = count); };
    if (!multiply_few<F>(weights, args.x, first, &args.step->rows, 1, args.k_blocks, sums, prepare)) return;
    for (u32 start = threadIdx.x; start < F::TOKENS * F::ROWS; start += OUTPUTS_TOGETHER * blockDim.x) {
        float *at[OUTPUTS_TOGETHER], before[OUTPUTS_TOGETHER];
        u32 segments[OUTPUTS_TOGETHER], features[OUTPUTS_TOGETHER];
        UNROLL for (u32 u = 0; u < OUTPUTS_TOGETHER; u++) {
            u32 i = start + u * blockDim.x, m = i / TILE_ROWS % F::M, row = first + i / F::ROWS;
            Tile tile = tiles[0];
            UNROLL for (u32 other = 1; other < F::M; other++) {
                if (m == other) tile = tiles[other];
            }
            const Segment& segment = args.segments[segments[u] = tile.segment];
            u32 feature = features[u] = tile.first + i % TILE_ROWS;
            bool has_output = i < F::TOKENS * F::ROWS && row < rows && feature < segment.rows;
            at[u] = has_output ? segment.out + u64(row) * segment.stride + feature : nullptr;
            before[u] = has_output && args.mode == LINEAR_ADD ? *at[u] : 0.0f;
        }
        UNROLL for (u32 u = 0; u < OUTPUTS_TOGETHER; u++) {
            if (!at[u]) continue;
            u32 i = start + u * blockDim.x, token = i / F::ROWS;
            i32 sum = sums[token * F::STRIDE + i % F::ROWS];
            float y = scales.output_of(sum, token, args.segments[segments[u]], features[u]);
            *at[u] = args.mode == LINEAR_ADD ? __fadd_rn(before[u], y) : y;
        }
    }
}

// out[row] = act(gate[row]) · up[row] for sixteen features per block, from one gate tile and one up tile.
template <class F> __device__ __forceinline__ void gate_few(const LinearArgs& args) {
    __shared__ typename F::Sums sums;
    __shared__ Scales<F::TOKENS> scales;
    u32 first = blockIdx.y * F::TOKENS, rows = 0;
    const uint4* weights[2] = {tile_of(args, 0, blockIdx.x).weights, tile_of(args, 1, blockIdx.x).weights};
    auto prepare = [&](u32 count) { scales.load(args, first, rows = count); };
    if (!multiply_few<F>(weights, args.x, first, &args.step->rows, 1, args.k_blocks, sums, prepare)) return;
    const Segment &gate = args.segments[0], &up = args.segments[1];
    for (u32 i = threadIdx.x; i < F::TOKENS * TILE_ROWS; i += blockDim.x) {
        u32 token = i / TILE_ROWS, row = first + token, feature = blockIdx.x * TILE_ROWS + i % TILE_ROWS;
        if (row >= rows || feature >= gate.rows) continue;
        const i32* at = sums + token * F::STRIDE + i % TILE_ROWS;
        float g = scales.output_of(at[0], token, gate, feature);
        float u = scales.output_of(at[TILE_ROWS], token, up, feature);
        gate.out[u64(row) * gate.stride + feature] = gated(args.activation, g, u);
    }
}

KERNEL(512) linear_n8(const LinearArgs args) { linear_few<Few<Ternary, 1, 1, 4>>(args); }
KERNEL(512) linear_n16(const LinearArgs args) { linear_few<Few<Ternary, 1, 2, 4>>(args); }
KERNEL(256) linear_n32(const LinearArgs args) { linear_few<Few<Ternary, 2, 4, 4>>(args); }
KERNEL(256) linear_n64(const LinearArgs args) { linear_few<Few<Ternary, 2, 8, 4>>(args); }
KERNEL(512) gate_n8(const LinearArgs args) { gate_few<Few<Ternary, 2, 1, 4>>(args); }
KERNEL(512) gate_n16(const LinearArgs args) { gate_few<Few<Ternary, 2, 2, 4>>(args); }
KERNEL(256) gate_n32(const LinearArgs args) { gate_few<Few<Ternary, 2, 4, 4>>(args); }
KERNEL(256) gate_n64(const LinearArgs args) { gate_few<Few<Ternary, 2, 8, 4>>(args); }
