// Ternary linears of many rows with scales of groups: 64 features by 64 columns per block, where a row has one column per
// digit.
//
// Weights, int8 columns and scales come through a ring in shared memory, one k block at a time. A warp computes the sums
// of a k block for one of its products at a time and joins them at once, so it has few integers and many outputs in
// registers. Both digits of a row are in the same lane: columns 2 t and 2 t + 1 of a product.

#include "group.cuh"
#include "tiles.cuh"

// A stage: weights and columns as in tiles.cuh, then the input blocks of the rows, then the scales of the tiles.
template <class S, int DIGITS> struct GroupStage {
    static constexpr u32 ROWS = S::TOKENS / DIGITS;
    static constexpr u32 BLOCKS = S::STAGE_BYTES, SCALES = BLOCKS + ROWS * sizeof(InputBlock);
    static constexpr u32 OF_TILE = 2 * TILE_ROWS * sizeof(u16);  // of at most two groups
    static constexpr u32 BYTES = SCALES + S::TILES * OF_TILE;
    // Outputs of a product per lane.
    static constexpr u32 OUTPUTS = 4 / DIGITS;
    typedef float Outputs[S::WARP_M][S::WARP_N][OUTPUTS];
    static_assert(ROWS <= S::THREADS && S::TILES * 4 <= S::THREADS, "a thread copies at most one of each");
};

// What a thread copies beside weights and columns.
struct ScaleCopies {
    const InputBlock* blocks;  // of one row
    const u16* scales;         // eight of the scales of one tile, in the first k block
    u32 in_group;              // group of these scales in a k block
    u32 per_block, groups;     // groups of a k block and of a row; 0 of a k block if there is nothing to copy
};

template <class S, class Stage>
__device__ __forceinline__ void fetch_group_stage(const uint4* const (&weights)[S::WEIGHT_COPIES], const GroupLinearArgs& args,
                                                  const ScaleCopies& copies, u32 first, u32 count, u32 k, u8* stage) {
    fetch_stage<S>(weights, args.x, first, count, k, args.k_blocks, stage);
    u32 i = threadIdx.x, group = k * copies.per_block + copies.in_group;
    if (i < Stage::ROWS) copy_async16(stage + Stage::BLOCKS + i * sizeof(InputBlock), copies.blocks + k);
    if (copies.in_group < copies.per_block && group < copies.groups) {
        copy_async16(stage + Stage::SCALES + i * 16, copies.scales + u64(k) * copies.per_block * TILE_ROWS);
    }
}

// Joins the sums of one product, its halves apart, to the outputs of a lane. // y: (rows of the lane, feature g + 8 high)
template <class S, int DIGITS>
__device__ __forceinline__ void join_product(const u8* stage, u32 m, u32 n, u32 halves, u32 groups, const i32 (&sums)[2][4],
                                             float (&y)[4 / DIGITS]) {
    typedef GroupStage<S, DIGITS> Stage;
    u32 lane = threadIdx.x % 32;
    const auto* scales = reinterpret_cast<const u16*>(stage + Stage::SCALES + m * Stage::OF_TILE) + lane / 4;
    UNROLL for (u32 i = 0; i < Stage::OUTPUTS; i++) {
        constexpr u32 ODD = 2 / DIGITS;  // rows of the lane
        u32 odd = i % ODD, high = i / ODD, row = n * (N_TILE / DIGITS) + lane % 4 * ODD + odd;
        const auto* block = reinterpret_cast<const uint4*>(stage + Stage::BLOCKS) + row;
        uint4 words = *block;
        float of_row = __uint_as_float(words.x);
        i32 both[2];
        UNROLL for (u32 h = 0; h < 2; h++) {
            const i32* at = sums[h] + high * 2;
            both[h] = (DIGITS == 2 ? 256 * at[0] + at[1] : at[odd]) - i32(h ? words.z : words.y);
        }
        float first = widen_f16(scales[high * 8]);
        if (halves == 2) {
            y[i] = joined(both[0] + both[1], first, of_row, y[i]);
        } else {
            y[i] = joined(both[0], first, of_row, y[i]);
            if (groups > 1) y[i] = joined(both[1], widen_f16(scales[TILE_ROWS + high * 8]), of_row, y[i]);
        }
    }
}

// Multiplies one k block, of which each tile has `left` groups or more.
template <class S, int DIGITS>
__device__ __forceinline__ void multiply_group_stage(const u8* stage, u32 warp_m, u32 warp_n, const u32 (&halves)[S::WARP_M],
                                                     const u32 (&left)[S::WARP_M], typename GroupStage<S, DIGITS>::Outputs& y) {
    u32 lane = threadIdx.x % 32;
    uint4 b[S::WARP_N][2];
    UNROLL for (u32 i = 0; i < 2 * S::WARP_N; i++) {
        u32 column = (warp_n * S::WARP_N + i / 2) * N_TILE + lane / 4;
        b[i / 2][i % 2] = *reinterpret_cast<const uint4*>(stage + S::WEIGHT_BYTES + chunk_at(column, i % 2 * 4 + lane % 4));
    }
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        u32 tile = warp_m * S::WARP_M + m, a[4][4];
        typename S::W w;
        w.load(reinterpret_cast<const uint4*>(stage + tile * S::TILE_BYTES) + lane);
        UNROLL for (u32 s = 0; s < 4; s++) w.fragment(s, a[s]);
        UNROLL for (u32 n = 0; n < S::WARP_N; n++) {
            i32 sums[2][4] = {};
            UNROLL for (u32 h = 0; h < 2; h++) {
                mma_s8(sums[h], a[2 * h], b[n][h].x, b[n][h].y);
                mma_s8(sums[h], a[2 * h + 1], b[n][h].z, b[n][h].w);
            }
            join_product<S, DIGITS>(stage, tile, warp_n * S::WARP_N + n, halves[m], left[m], sums, y[m][n]);
        }
    }
}

template <class S, int DIGITS> __device__ __forceinline__ void group_tiles(const GroupLinearArgs& args) {
    start_after_previous();
    typedef GroupStage<S, DIGITS> Stage;
    DYNAMIC_SHARED(stages);  // (S::STAGES, Stage::BYTES)
    u32 rows = *args.count, first = blockIdx.y * Stage::ROWS, k_blocks = args.k_blocks;
    if (first >= rows) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % S::WARPS_M, warp_n = warp / S::WARPS_M;
    const uint4* weights[S::WEIGHT_COPIES];
    UNROLL for (u32 i = 0; i < S::WEIGHT_COPIES; i++) {
        weights[i] = find_group_tile(args, blockIdx.x * S::TILES + i * S::TILES_AT_ONCE + warp).weights + lane;
    }
    u32 row = first + threadIdx.x < rows ? first + threadIdx.x : rows - 1;
    ScaleCopies copies = {args.blocks + u64(row) * k_blocks, nullptr, threadIdx.x % 4 / 2, 0, 0};
    if (threadIdx.x < S::TILES * 4) {
        GroupTile tile = find_group_tile(args, blockIdx.x * S::TILES + threadIdx.x / 4);
        const GroupSegment& segment = args.segments[tile.segment];
        copies.scales = tile.scales + threadIdx.x % 4 * 8;
        copies.per_block = 2 / segment.halves, copies.groups = segment.groups;
    }
    GroupTile tiles[S::WARP_M];
    u32 halves[S::WARP_M], groups[S::WARP_M];
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        tiles[m] = find_group_tile(args, blockIdx.x * S::TILES + warp_m * S::WARP_M + m);
        halves[m] = args.segments[tiles[m].segment].halves, groups[m] = args.segments[tiles[m].segment].groups;
    }
    u32 columns = rows * DIGITS, first_column = first * DIGITS;
    UNROLL for (u32 k = 0; k < S::STAGES - 1; k++) {
        if (k < k_blocks) fetch_group_stage<S, Stage>(weights, args, copies, first_column, columns, k, stages + k * Stage::BYTES);
        copy_async_commit();
    }
    typename Stage::Outputs y = {};
    for (u32 k = 0; k < k_blocks; k++) {
        copy_async_wait<S::STAGES - 2>();
        __syncthreads();
        u32 next = k + S::STAGES - 1;
        if (next < k_blocks) {
            u8* stage = stages + next % S::STAGES * Stage::BYTES;
            fetch_group_stage<S, Stage>(weights, args, copies, first_column, columns, next, stage);
        }
        copy_async_commit();
        u32 left[S::WARP_M];
        UNROLL for (u32 m = 0; m < S::WARP_M; m++) left[m] = halves[m] == 2 ? 1 : groups[m] - 2 * k;
        multiply_group_stage<S, DIGITS>(stages + k % S::STAGES * Stage::BYTES, warp_m, warp_n, halves, left, y);
    }
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        const GroupSegment& segment = args.segments[tiles[m].segment];
        UNROLL for (u32 i = 0; i < S::WARP_N * Stage::OUTPUTS; i++) {
            constexpr u32 ODD = 2 / DIGITS;
            u32 n = i / Stage::OUTPUTS, o = i % Stage::OUTPUTS, feature = tiles[m].first + lane / 4 + o / ODD * 8;
            u32 token = first + (warp_n * S::WARP_N + n) * (N_TILE / DIGITS) + lane % 4 * ODD + o % ODD;
            if (token >= rows || feature >= segment.rows) continue;
            put(args.mode, segment.out + u64(token) * segment.stride + feature, biased(y[m][n][o], segment.bias, feature));
        }
    }
}

typedef Shape<Ternary, 4, 64, 2, 2, 4> GroupTile64;

KERNEL_BY(128, 3) group_tile_int8(const GroupLinearArgs args) { group_tiles<GroupTile64, 1>(args); }
KERNEL_BY(128, 4) group_tile_int16(const GroupLinearArgs args) { group_tiles<GroupTile64, 2>(args); }
