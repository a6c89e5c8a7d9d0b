// Estimates of all logits from the head's int8 copy and the digits of hidden rows.

#include "few.cuh"
#include "screen.cuh"

// Groups of sixteen tokens by columns of digits: estimates, and each group's largest lower and upper
// bounds. Reads the copy once for 8 N columns, 1 byte a weight.
template <int M, int N, int AHEAD> __device__ __forceinline__ void screen(const ScreenArgs& args) {
    __shared__ Sums<M, N> sums;
    u32 digit_count = args.digit_count, groups = (args.vocab + TILE_ROWS - 1) / TILE_ROWS;
    u32 first = blockIdx.y * (N * N_TILE), columns = args.step->screened * digit_count;
    if (first >= columns) return;
    const uint4* tiles[M];
    UNROLL for (u32 m = 0; m < M; m++) {
        u32 group = blockIdx.x * M + m < groups ? blockIdx.x * M + m : groups - 1;
        tiles[m] = args.head + u64(group) * args.k_blocks * 4 * 32;
    }
    multiply_few<Bytes, M, N, AHEAD>(tiles, args.digits, first, columns, args.k_blocks, sums);
    u32 rows = N * N_TILE / digit_count, first_row = first / digit_count;
    // Sixteen neighbouring threads have a group; warps are whole in this loop.
    for (u32 i = threadIdx.x; i < rows * M * TILE_ROWS; i += blockDim.x) {
        u32 token = blockIdx.x * M * TILE_ROWS + i % (M * TILE_ROWS), of_block = i / (M * TILE_ROWS);
        u32 row = first_row + of_block, group = token / TILE_ROWS;
        const i32* at = sums.at + of_block * digit_count * Sums<M, N>::STRIDE + i % (M * TILE_ROWS);
        Interval bounds = {minus_infinity(), minus_infinity()};
        if (row < args.step->screened && token < args.vocab) {
            i64 sum = digit_count == 1 ? at[0] : i64(at[0]) * 256 + at[Sums<M, N>::STRIDE];
            DigitRow of_row = args.rows[row];
            float estimate = __fmul_rn(__ll2float_rn(sum), __fmul_rn(args.scales[token], of_row.step));
            args.estimates[u64(row) * groups * TILE_ROWS + token] = estimate;
            bounds = interval(estimate, of_row, args.errors[token], args.norms[token]);
        }
        for (u32 width = 8; width > 0; width /= 2) {
            bounds.lowest = larger(__shfl_xor_sync(FULL_WARP, bounds.lowest, width), bounds.lowest);
            bounds.highest = larger(__shfl_xor_sync(FULL_WARP, bounds.highest, width), bounds.highest);
        }
        if (row < args.step->screened && group < groups && i % TILE_ROWS == 0) {
            args.lowest[u64(row) * groups + group] = bounds.lowest;
            args.highest[u64(row) * groups + group] = bounds.highest;
        }
    }
}

KERNEL(256) screen_n8(const ScreenArgs args) { screen<1, 1, 2>(args); }
KERNEL(256) screen_n16(const ScreenArgs args) { screen<1, 2, 2>(args); }
KERNEL(256) screen_n32(const ScreenArgs args) { screen<2, 4, 1>(args); }
KERNEL(256) screen_n64(const ScreenArgs args) { screen<2, 8, 1>(args); }
