// Ternary linears of few rows with scales of groups: up to 32 columns per block, where a row has one column per digit.
//
// A block has one tile of sixteen features. Its warps share the k blocks and write the sums of each group to shared
// memory; then one thread per output joins the groups in order. A round is so many k blocks that every warp has DEPTH
// of them, whose weights are loaded together, before the groups of the round before are joined.

#include "group.cuh"

constexpr u32 GROUP_WARPS = 8;
// Integers from one column of sums to the next; avoids bank conflicts.
constexpr u32 SUMS_STRIDE = TILE_ROWS + 4;

// A thread's place in the sums of a round, and the scales of its output.
struct Output {
    const i32* sums;           // of the first group, from the first column of the row on
    const InputBlock* blocks;  // of the row
    const u16* scales;         // of the feature
    u32 groups, digits, step;  // step: integers from one group of sums to the next
};

// Joins the groups of k blocks start .. end to y. WHOLE: groups have 128 inputs and not 64.
template <bool WHOLE> __device__ __forceinline__ float join_round(const Output& output, u32 start, u32 end, float y) {
    const i32* sums = output.sums;
    UNROLL_BY(4) for (u32 k = start; k < end; k++) {
        InputBlock block = load_block(output.blocks + k);
        UNROLL for (u32 half = 0; half < (WHOLE ? 1 : 2); half++) {
            u32 group = WHOLE ? k : 2 * k + half;
            i32 sum = output.digits == 2 ? 256 * sums[0] + sums[SUMS_STRIDE] : sums[0];
            sum -= WHOLE ? block.sums[0] + block.sums[1] : block.sums[half];
            sums += output.step;
            if (group < output.groups) y = joined(sum, widen_f16(output.scales[group * TILE_ROWS]), block.scale, y);
        }
    }
    return y;
}

// Writes the sums of a lane for one group. // out: (columns, SUMS_STRIDE)
template <int N> __device__ __forceinline__ void store_sums(const i32 (&sums)[N][4], i32* out) {
    u32 lane = threadIdx.x % 32;
    UNROLL for (u32 n = 0; n < N; n++) {
        UNROLL for (u32 c = 0; c < 4; c++) {
            u32 column = n * N_TILE + lane % 4 * 2 + c % 2, feature = lane / 4 + c / 2 * 8;
            out[column * SUMS_STRIDE + feature] = sums[n][c];
        }
    }
}

template <int N> __device__ __forceinline__ void multiply_half(u32 even, u32 odd, const uint4 (&x)[N], i32 (&sums)[N][4]) {
    u32 a[4];
    expand(even, a);
    UNROLL for (u32 n = 0; n < N; n++) mma_s8(sums[n], a, x[n].x, x[n].y);
    expand(odd, a);
    UNROLL for (u32 n = 0; n < N; n++) mma_s8(sums[n], a, x[n].z, x[n].w);
}

// N: tiles of eight columns.
// shared: (k blocks of a round · groups of a k block, 8 · N, SUMS_STRIDE) of i32
template <int N, int DEPTH> __device__ __forceinline__ void group_few(const GroupLinearArgs& args) {
    constexpr u32 COLUMNS = N * N_TILE, OF_GROUP = COLUMNS * SUMS_STRIDE, ROUND = GROUP_WARPS * DEPTH;
    constexpr u32 THREADS = GROUP_WARPS * 32, OUTPUTS = (COLUMNS * TILE_ROWS + THREADS - 1) / THREADS;
    DYNAMIC_SHARED(shared);
    i32* sums = reinterpret_cast<i32*>(shared);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_blocks = args.k_blocks, digits = args.digits;
    GroupTile tile = find_group_tile(args, blockIdx.x);
    const GroupSegment& segment = args.segments[tile.segment];
    bool whole = segment.halves == 2;
    uint4 words[DEPTH];
    UNROLL for (u32 d = 0; d < DEPTH; d++) {
        u32 k = d * GROUP_WARPS + warp;
        if (k < k_blocks) words[d] = load_once(tile.weights + k * 32 + lane);
    }
    u32 rows = *args.count, of_block = COLUMNS / digits, first = blockIdx.y * of_block;
    if (first >= rows) return;
    const i8* x[N];
    UNROLL for (u32 n = 0; n < N; n++) {
        u32 column = first * digits + n * N_TILE + lane / 4;
        if (column >= rows * digits) column = rows * digits - 1;
        x[n] = args.x + u64(column) * (k_blocks * K_BLOCK) + lane % 4 * 16;
    }
    float y[OUTPUTS] = {};
    for (u32 start = 0; start < k_blocks; start += ROUND) {
        u32 end = start + ROUND < k_blocks ? start + ROUND : k_blocks;
        uint4 of_x[DEPTH][2][N];
        UNROLL for (u32 d = 0; d < DEPTH; d++) {
            u32 k = start + d * GROUP_WARPS + warp;
            if (k >= end) continue;
            UNROLL for (u32 i = 0; i < 2 * N; i++) of_x[d][i / N][i % N] = load_constant(x[i % N] + k * K_BLOCK + i / N * 64);
        }
        UNROLL for (u32 d = 0; d < DEPTH; d++) {
            u32 k = start + d * GROUP_WARPS + warp;
            if (k >= end) continue;
            i32 low[N][4] = {}, high[N][4] = {};
            multiply_half<N>(words[d].x, words[d].y, of_x[d][0], low);
            multiply_half<N>(words[d].z, words[d].w, of_x[d][1], high);
            if (k + ROUND < k_blocks) words[d] = load_once(tile.weights + (k + ROUND) * 32 + lane);
            if (whole) {
                UNROLL for (u32 i = 0; i < N * 4; i++) low[i / 4][i % 4] += high[i / 4][i % 4];
                store_sums<N>(low, sums + (k - start) * OF_GROUP);
            } else {
                store_sums<N>(low, sums + 2 * (k - start) * OF_GROUP);
                store_sums<N>(high, sums + (2 * (k - start) + 1) * OF_GROUP);
            }
        }
        __syncthreads();
        UNROLL for (u32 o = 0; o < OUTPUTS; o++) {
            u32 i = o * THREADS + threadIdx.x, token = i / TILE_ROWS, feature = i % TILE_ROWS;
            if (token >= of_block || first + token >= rows) continue;
            Output output = {sums + token * digits * SUMS_STRIDE + feature, args.blocks + u64(first + token) * k_blocks,
                             tile.scales + feature, segment.groups, digits, OF_GROUP};
            y[o] = whole ? join_round<true>(output, start, end, y[o]) : join_round<false>(output, start, end, y[o]);
        }
        __syncthreads();
    }
    UNROLL for (u32 o = 0; o < OUTPUTS; o++) {
        u32 i = o * THREADS + threadIdx.x, token = i / TILE_ROWS, feature = tile.first + i % TILE_ROWS;
        if (token >= of_block || first + token >= rows || feature >= segment.rows) continue;
        float* at = segment.out + u64(first + token) * segment.stride + feature;
        *at = args.mode == LINEAR_ADD ? __fadd_rn(*at, y[o]) : y[o];
    }
}

KERNEL(256) group_n8(const GroupLinearArgs args) { group_few<1, 4>(args); }
KERNEL(256) group_n16(const GroupLinearArgs args) { group_few<2, 4>(args); }
KERNEL(256) group_n32(const GroupLinearArgs args) { group_few<4, 2>(args); }
