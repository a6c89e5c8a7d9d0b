// Ternary linears of one row, with the norm and the quantization before them. This is a decode of one sequence,
// where launching a separate kernel for the norm takes longer than the norm.
//
// Every block norms and quantizes the row itself while its weights are being copied; their copies start before the
// kernel that writes the row has ended. Reading a row from the second-level cache costs less than waiting for another
// kernel. Results are the same as of norm_quantize followed by linear_n8 or gate_n8.

#include "linear.cuh"
#include "quantize.cuh"

// Number of k blocks of weights that a warp copies ahead.
constexpr u32 ONE_DEPTH = 4;

// Starts the copies of a lane for the weights of one k block. // slot: (M, 32)
template <int M>
__device__ __forceinline__ void fetch_one(const uint4* const (&tiles)[M], u32 k, u32 k_blocks, uint4* slot) {
    if (k < k_blocks) {
        UNROLL for (u32 m = 0; m < M; m++) copy_async16(slot + m * 32, tiles[m] + k * 32);
    }
    copy_async_commit();
}

// Writes the sums of M tiles for the row to `out` in shared memory; returns the scale and Σ q of the row.
// `prepare` runs after the wait for earlier kernels, while the first copies are in progress.
// shared: (warps, ONE_DEPTH, M, 32) of uint4, (stride) of f32, (stride) of int8
template <int M, class Prepare>
__device__ __forceinline__ Quantized multiply_one(const NormLinearArgs& args, const uint4* const (&of_tiles)[M],
                                                  i32 (&out)[M * TILE_ROWS], Prepare prepare) {
    DYNAMIC_SHARED(shared);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 k_blocks = args.linear.k_blocks, stride = k_blocks * K_BLOCK;
    uint4* ring = reinterpret_cast<uint4*>(shared) + warp * (ONE_DEPTH * M * 32) + lane;
    float* row = reinterpret_cast<float*>(shared + warps * (ONE_DEPTH * M * 512));
    i8* q = reinterpret_cast<i8*>(row + stride);
    let_next_start();
    const uint4* tiles[M];
    UNROLL for (u32 m = 0; m < M; m++) tiles[m] = of_tiles[m] + lane;
    UNROLL for (u32 d = 0; d < ONE_DEPTH; d++) fetch_one<M>(tiles, warp + d * warps, k_blocks, ring + d * M * 32);
    Quantized quantized;
    if (RowPart::has_room(args.width, stride)) {
        RowPart part, weight;
        if (args.weight) weight.load_weights(args.weight, args.width);
        wait_for_previous();
        part.load_row(args.x, args.width);
        for (u32 i = threadIdx.x; i < M * TILE_ROWS; i += blockDim.x) out[i] = 0;
        prepare();
        if (args.weight) rms_norm(part, weight, row, args.width, stride, args.eps);
        if (args.weight2) {
            weight.load_weights(args.weight2, args.width);
            rms_norm(part, weight, row, args.width, stride, args.eps2);
        }
        quantized = quantize_part(part, stride, q);
    } else {
        wait_for_previous();
        load_row(args.x, args.width, row);
        for (u32 i = threadIdx.x; i < M * TILE_ROWS; i += blockDim.x) out[i] = 0;
        prepare();
        if (args.weight) rms_norm(row, args.weight, args.width, args.eps);
        if (args.weight2) rms_norm(row, args.weight2, args.width, args.eps2);
        quantized = quantize_row(row, args.width, stride, q);
    }
    i32 sums[2][M][4] = {};
    u32 slot = 0;
    for (u32 k = warp; k < k_blocks; k += warps) {
        copy_async_wait<ONE_DEPTH - 1>();
        UNROLL for (u32 m = 0; m < M; m++) {
            uint4 words = ring[(slot * M + m) * 32];
            UNROLL for (u32 half = 0; half < 2; half++) {
                // All eight columns of the B fragment are the row.
                uint4 x = *reinterpret_cast<const uint4*>(q + k * K_BLOCK + half * 64 + lane % 4 * 16);
                u32 a[4];
                expand(half ? words.z : words.x, a);
                mma_s8(sums[0][m], a, x.x, x.y);
                expand(half ? words.w : words.y, a);
                mma_s8(sums[1][m], a, x.z, x.w);
            }
        }
        fetch_one<M>(tiles, k + ONE_DEPTH * warps, k_blocks, ring + slot * M * 32);
        slot = (slot + 1) % ONE_DEPTH;
    }
    if (lane % 4 == 0) {
        UNROLL for (u32 m = 0; m < M; m++) {
            atomicAdd(&out[m * TILE_ROWS + lane / 4], sums[0][m][0] + sums[1][m][0]);
            atomicAdd(&out[m * TILE_ROWS + lane / 4 + 8], sums[0][m][2] + sums[1][m][2]);
        }
    }
    __syncthreads();
    return quantized;
}

// A linear with segments as in linear_n8, sixteen features per block. The step has one row.
KERNEL(512) linear_one(const NormLinearArgs args) {
    __shared__ i32 sums[TILE_ROWS];
    __shared__ float before[TILE_ROWS];
    const LinearArgs& linear = args.linear;
    Tile tile = find_tile(linear, blockIdx.x);
    const uint4* tiles[1] = {tile.weights};
    const Segment& segment = linear.segments[tile.segment];
    u32 feature = tile.first + threadIdx.x;
    bool has_output = threadIdx.x < TILE_ROWS && feature < segment.rows;
    float* at = segment.out + feature;
    auto prepare = [&] {
        if (has_output) before[threadIdx.x] = linear.mode == LINEAR_ADD ? *at : 0.0f;
    };
    Quantized row = multiply_one<1>(args, tiles, sums, prepare);
    if (!has_output) return;
    float y = output(sums[threadIdx.x] - row.sum, divisor_of(segment, row.scale), segment, feature);
    *at = linear.mode == LINEAR_ADD ? __fadd_rn(before[threadIdx.x], y) : y;
}

// Gate and up matrices as in gate_n8. The step has one row.
KERNEL(512) gate_one(const NormLinearArgs args) {
    __shared__ i32 sums[2 * TILE_ROWS];
    const LinearArgs& linear = args.linear;
    const uint4* tiles[2] = {tile_of(linear, 0, blockIdx.x).weights, tile_of(linear, 1, blockIdx.x).weights};
    Quantized row = multiply_one<2>(args, tiles, sums, [] {});
    const Segment &gate = linear.segments[0], &up = linear.segments[1];
    u32 feature = blockIdx.x * TILE_ROWS + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || feature >= gate.rows) return;
    float g = output(sums[threadIdx.x] - row.sum, divisor_of(gate, row.scale), gate, feature);
    float u = output(sums[TILE_ROWS + threadIdx.x] - row.sum, divisor_of(up, row.scale), up, feature);
    gate.out[feature] = gated(linear.activation, g, u);
}
