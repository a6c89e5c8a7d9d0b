// Estimates of all logits, from the int8 copy of the head and the digits of hidden rows.

#include "few.cuh"
#include "screen.cuh"

// Multiplies groups of sixteen tokens by columns of digits; writes the estimates and the largest lower and upper
// bound of each group. The kernel reads the copy once for 8 N columns, 1 byte per weight.
template <class F> __device__ __forceinline__ void screen(const ScreenArgs& args) {
    __shared__ typename F::Sums sums;
    constexpr u32 M = F::M, ROWS = F::ROWS;
    u32 digit_count = args.digit_count, groups = (args.vocab + TILE_ROWS - 1) / TILE_ROWS, first = blockIdx.y * F::TOKENS;
    const uint4* tiles[M];
    UNROLL for (u32 m = 0; m < M; m++) {
        u32 group = blockIdx.x * M + m < groups ? blockIdx.x * M + m : groups - 1;
        tiles[m] = args.head + u64(group) * args.k_blocks * 4 * 32;
    }
    const u32* count = &args.step->screened;
    if (!multiply_few<F>(tiles, args.digits, first, count, digit_count, args.k_blocks, sums, [](u32) {})) return;
    u32 screened = *count;
    u32 rows = F::TOKENS / digit_count, first_row = first / digit_count;
    // Sixteen neighbouring threads have one group. All threads of a warp take part in every round of this loop.
    for (u32 i = threadIdx.x; i < rows * ROWS; i += blockDim.x) {
        u32 token = blockIdx.x * ROWS + i % (ROWS), of_block = i / (ROWS);
        u32 row = first_row + of_block, group = token / TILE_ROWS;
        const i32* at = sums + of_block * digit_count * F::STRIDE + i % (ROWS);
        Interval bounds = {minus_infinity(), minus_infinity()};
        if (row < screened && token < args.vocab) {
            DigitRow of_row = args.rows[row];
            float estimate = estimate_of(digit_count, of_row, args.scales[token], at[0], at[digit_count == 1 ? 0 : F::STRIDE]);
            args.estimates[u64(row) * groups * TILE_ROWS + token] = estimate;
            Interval of_logit = interval(estimate, of_row, args.errors[token], args.norms[token]);
            bounds = value_bounds(of_logit, args.questions[row], token);
        }
        for (u32 width = 8; width > 0; width /= 2) {
            bounds.lowest = larger(__shfl_xor_sync(FULL_WARP, bounds.lowest, width), bounds.lowest);
            bounds.highest = larger(__shfl_xor_sync(FULL_WARP, bounds.highest, width), bounds.highest);
        }
        if (row < screened && group < groups && i % TILE_ROWS == 0) {
            args.lowest[u64(row) * groups + group] = bounds.lowest;
            args.highest[u64(row) * groups + group] = bounds.highest;
        }
    }
}

KERNEL(256) screen_n8(const ScreenArgs args) { screen<Few<Bytes, 2, 1, 2>>(args); }
KERNEL(256) screen_n16(const ScreenArgs args) { screen<Few<Bytes, 2, 2, 2>>(args); }
KERNEL(256) screen_n32(const ScreenArgs args) { screen<Few<Bytes, 2, 4, 2>>(args); }
KERNEL(256) screen_n64(const ScreenArgs args) { screen<Few<Bytes, 2, 8, 2>>(args); }
