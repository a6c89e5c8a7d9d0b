// Estimates of all logits for many rows: the same results as screen.cu, with tiles as in linear_tile.cu.

#include "screen.cuh"
#include "tiles.cuh"

typedef Shape<Bytes, 8, 128, 2, 4, 3> ScreenShape;

// Scale, error and norm of a head row.
struct HeadRow {
    float scale, error, norm;
    bool exists;
};

// Writes the estimates of two tokens of a group, lane / 4 and lane / 4 + 8, for one hidden row, and the bounds of the
// group.
__device__ __forceinline__ void finish_pair(const ScreenArgs& args, u32 groups, u32 group, const HeadRow (&tokens)[2],
                                            u32 row, const i32 (&first)[2], const i32 (&second)[2]) {
    u32 lane = threadIdx.x % 32;
    bool exists = row < args.step->screened;
    DigitRow of_row = args.rows[exists ? row : 0];
    RowQuestion question = args.questions[exists ? row : 0];
    Interval bounds = {minus_infinity(), minus_infinity()};
    UNROLL for (u32 high = 0; high < 2; high++) {
        if (!exists || !tokens[high].exists) continue;
        float estimate = estimate_of(args.digit_count, of_row, tokens[high].scale, first[high], second[high]);
        args.estimates[(u64(row) * groups + group) * TILE_ROWS + lane / 4 + 8 * high] = estimate;
        Interval of_logit = interval(estimate, of_row, tokens[high].error, tokens[high].norm);
        Interval of_token = value_bounds(of_logit, question, group * TILE_ROWS + lane / 4 + 8 * high);
        bounds.lowest = larger(of_token.lowest, bounds.lowest);
        bounds.highest = larger(of_token.highest, bounds.highest);
    }
    // Eight lanes, four apart, share the group.
    for (u32 width = 16; width >= 4; width /= 2) {
        bounds.lowest = larger(__shfl_xor_sync(FULL_WARP, bounds.lowest, width), bounds.lowest);
        bounds.highest = larger(__shfl_xor_sync(FULL_WARP, bounds.highest, width), bounds.highest);
    }
    if (exists && group < groups && lane < 4) {
        args.lowest[u64(row) * groups + group] = bounds.lowest;
        args.highest[u64(row) * groups + group] = bounds.highest;
    }
}

// 128 tokens by 128 columns of digits. With two digits, the two columns of a product that a thread has belong to the
// same row.
KERNEL_BY(256, 2) screen_tile(const ScreenArgs args) {
    start_after_previous();
    typedef ScreenShape S;
    u32 groups = (args.vocab + TILE_ROWS - 1) / TILE_ROWS, columns = args.step->screened * args.digit_count;
    u32 first = blockIdx.x * S::TOKENS;
    if (first >= columns) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % S::WARPS_M, warp_n = warp / S::WARPS_M;
    const uint4* weights[S::WEIGHT_COPIES];
    UNROLL for (u32 i = 0; i < S::WEIGHT_COPIES; i++) {
        u32 group = blockIdx.y * S::TILES + i * S::TILES_AT_ONCE + warp;
        weights[i] = args.head + u64(group < groups ? group : groups - 1) * args.k_blocks * 4 * 32 + lane;
    }
    S::Sums sums = {};
    multiply_tiles<S>(weights, args.digits, first, columns, args.k_blocks, warp_m, warp_n, sums);
    UNROLL for (u32 m = 0; m < S::WARP_M; m++) {
        u32 group = blockIdx.y * S::TILES + warp_m * S::WARP_M + m;
        HeadRow tokens[2];
        UNROLL for (u32 high = 0; high < 2; high++) {
            u32 token = group * TILE_ROWS + lane / 4 + 8 * high;
            tokens[high].exists = token < args.vocab;
            if (!tokens[high].exists) continue;
            tokens[high] = {args.scales[token], args.errors[token], args.norms[token], true};
        }
        UNROLL for (u32 n = 0; n < S::WARP_N; n++) {
            u32 column = first + (warp_n * S::WARP_N + n) * N_TILE + lane % 4 * 2;
            i32 even[2] = {sums[m][n][0], sums[m][n][2]}, odd[2] = {sums[m][n][1], sums[m][n][3]};
            if (args.digit_count == 2) {
                finish_pair(args, groups, group, tokens, column / 2, even, odd);
            } else {
                finish_pair(args, groups, group, tokens, column, even, even);
                finish_pair(args, groups, group, tokens, column + 1, odd, odd);
            }
        }
    }
}
