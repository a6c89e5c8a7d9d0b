// Ternary linears of few rows with scales of groups: up to 32 columns per block, where a row has one column per digit.
//
// A block has one tile of sixteen features. Its warps share the k blocks and write the sums of each group to shared
// memory, with the scales that belong to it; then one thread per output joins the groups in order, which is a chain of
// fused multiply-adds that waits for no other memory. A round is so many k blocks that every warp has DEPTH of them; their
// weights are loaded together, before the groups of the round before are joined.

#include "group.cuh"

constexpr u32 GROUP_WARPS = 8;
// Integers from one column of sums to the next; avoids bank conflicts.
constexpr u32 SUMS_STRIDE = TILE_ROWS + 4;
// Weight scales of a k block: of two groups of 64 inputs or one of 128.
constexpr u32 SCALES = 2 * TILE_ROWS;

// What a thread reads of a round in shared memory, from the first k block on.
struct Output {
    const i32* sums;      // of the row's first column
    const float* scales;  // of the feature
    const uint4* blocks;  // of the row
    u32 digits;
};

// Joins the groups of `count` k blocks, which have `groups` groups or more, to y. WHOLE: groups have 128 inputs and not 64.
template <bool WHOLE, u32 COLUMNS>
__device__ __forceinline__ float join_round(const Output& output, u32 count, u32 groups, float y) {
    const i32* sums = output.sums;
    UNROLL_BY(2) for (u32 k = 0; k < count; k++) {
        uint4 block = output.blocks[k * COLUMNS];
        float of_row = __uint_as_float(block.x);
        UNROLL for (u32 half = 0; half < (WHOLE ? 1 : 2); half++) {
            i32 sum = output.digits == 2 ? 256 * sums[0] + sums[SUMS_STRIDE] : sums[0];
            sum -= WHOLE ? i32(block.y + block.z) : i32(half ? block.z : block.y);
            sums += COLUMNS * SUMS_STRIDE;
            if (WHOLE || 2 * k + half < groups) y = joined(sum, output.scales[k * SCALES + half * TILE_ROWS], of_row, y);
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

// The weights of a k block for one lane, and the scales that the lane copies.
struct Loaded {
    uint4 words;
    u16 scale;  // 0 where the lane has none

    __device__ __forceinline__ void load(const GroupTile& tile, const GroupSegment& segment, u32 k, u32 k_blocks) {
        if (k >= k_blocks) return;
        u32 lane = threadIdx.x % 32, per_block = 2 / segment.halves, group = k * per_block + lane / TILE_ROWS;
        words = load_once(tile.weights + k * 32 + lane);
        bool has_scale = lane / TILE_ROWS < per_block && group < segment.groups;
        scale = has_scale ? tile.scales[group * TILE_ROWS + lane % TILE_ROWS] : 0;
    }
};

// N: tiles of eight columns.
// shared, for the k blocks of a round: (SCALES) of f32; (8 · N) input blocks; (groups of a k block, 8 · N, SUMS_STRIDE) of i32
template <int N, int DEPTH> __device__ __forceinline__ void group_few(const GroupLinearArgs& args) {
    constexpr u32 COLUMNS = N * N_TILE, OF_GROUP = COLUMNS * SUMS_STRIDE, ROUND = GROUP_WARPS * DEPTH;
    constexpr u32 THREADS = GROUP_WARPS * 32, OUTPUTS = (COLUMNS * TILE_ROWS + THREADS - 1) / THREADS;
    DYNAMIC_SHARED(shared);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_blocks = args.k_blocks, digits = args.digits;
    u32 together = k_blocks < ROUND ? k_blocks : ROUND;
    float* scales = reinterpret_cast<float*>(shared);
    uint4* blocks = reinterpret_cast<uint4*>(scales + together * SCALES);
    i32* sums = reinterpret_cast<i32*>(blocks + together * COLUMNS);
    GroupTile tile = find_group_tile(args, blockIdx.x);
    const GroupSegment& segment = args.segments[tile.segment];
    bool whole = segment.halves == 2;
    let_next_start();
    Loaded loaded[DEPTH];
    UNROLL for (u32 d = 0; d < DEPTH; d++) loaded[d].load(tile, segment, d * GROUP_WARPS + warp, k_blocks);
    wait_for_previous();
    u32 rows = *args.count, of_block = COLUMNS / digits, first = blockIdx.y * of_block;
    if (first >= rows) return;
    u32 row = first + lane < rows ? first + lane : rows - 1;
    const InputBlock* of_row = args.blocks + u64(row) * k_blocks;
    const i8* x[N];
    UNROLL for (u32 n = 0; n < N; n++) {
        u32 column = first * digits + n * N_TILE + lane / 4;
        if (column >= rows * digits) column = rows * digits - 1;
        x[n] = args.x + u64(column) * (k_blocks * K_BLOCK) + lane % 4 * 16;
    }
    float y[OUTPUTS] = {};
    for (u32 start = 0; start < k_blocks; start += ROUND) {
        u32 count = k_blocks - start < ROUND ? k_blocks - start : ROUND;
        uint4 of_x[DEPTH][2][N], of_rows[DEPTH];
        UNROLL for (u32 d = 0; d < DEPTH; d++) {
            u32 at = d * GROUP_WARPS + warp, k = start + at;
            if (at >= count) continue;
            UNROLL for (u32 i = 0; i < 2 * N; i++) of_x[d][i / N][i % N] = load_constant(x[i % N] + k * K_BLOCK + i / N * 64);
            if (lane < of_block) of_rows[d] = load_constant(of_row + k);
        }
        UNROLL for (u32 d = 0; d < DEPTH; d++) {
            u32 at = d * GROUP_WARPS + warp;
            if (at >= count) continue;
            i32 low[N][4] = {}, high[N][4] = {};
            multiply_half<N>(loaded[d].words.x, loaded[d].words.y, of_x[d][0], low);
            multiply_half<N>(loaded[d].words.z, loaded[d].words.w, of_x[d][1], high);
            scales[at * SCALES + lane] = widen_f16(loaded[d].scale);
            if (lane < of_block) blocks[at * COLUMNS + lane] = of_rows[d];
            loaded[d].load(tile, segment, start + ROUND + at, k_blocks);
            if (whole) {
                UNROLL for (u32 i = 0; i < N * 4; i++) low[i / 4][i % 4] += high[i / 4][i % 4];
                store_sums<N>(low, sums + at * OF_GROUP);
            } else {
                store_sums<N>(low, sums + 2 * at * OF_GROUP);
                store_sums<N>(high, sums + (2 * at + 1) * OF_GROUP);
            }
        }
        __syncthreads();
        UNROLL for (u32 o = 0; o < OUTPUTS; o++) {
            u32 i = o * THREADS + threadIdx.x, token = i / TILE_ROWS, feature = i % TILE_ROWS;
            if (token >= of_block) continue;
            Output output = {sums + token * digits * SUMS_STRIDE + feature, scales + feature, blocks + token, digits};
            y[o] = whole ? join_round<true, COLUMNS>(output, count, 0, y[o])
                         : join_round<false, COLUMNS>(output, count, segment.groups - 2 * start, y[o]);
        }
        __syncthreads();
    }
    UNROLL for (u32 o = 0; o < OUTPUTS; o++) {
        u32 i = o * THREADS + threadIdx.x, token = i / TILE_ROWS, feature = tile.first + i % TILE_ROWS;
        if (token >= of_block || first + token >= rows || feature >= segment.rows) continue;
        put(args.mode, segment.out + u64(first + token) * segment.stride + feature, biased(y[o], segment.bias, feature));
    }
}

KERNEL_BY(256, 2) group_n8(const GroupLinearArgs args) { group_few<1, 4>(args); }
KERNEL_BY(256, 2) group_n16(const GroupLinearArgs args) { group_few<2, 4>(args); }
KERNEL_BY(256, 2) group_n32(const GroupLinearArgs args) { group_few<4, 2>(args); }
