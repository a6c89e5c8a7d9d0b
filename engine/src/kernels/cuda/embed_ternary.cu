// Embedding rows of models with scales of groups, from the packed matrix, which may be the head's, too.

#include "args.cuh"
#include "fragments.cuh"

// residual[row, i] = trit · scale of the group of i (exact) · factor, in row tokens[row] of the table. One block per row.
KERNEL(256) embed_ternary(const EmbedTernaryArgs args) {
    start_after_previous();
    u32 row = blockIdx.x, width = args.width;
    if (row >= args.step->rows) return;
    u32 token = args.tokens[row];
    if (token & IS_CARRIED) token = args.carried[token & ~IS_CARRIED];
    u32 tile = token / TILE_ROWS, in_tile = token % TILE_ROWS, k_blocks = (width + K_BLOCK - 1) / K_BLOCK;
    u32 inputs = width / args.groups;
    const auto* bytes = reinterpret_cast<const u8*>(args.weights + u64(tile) * k_blocks * 32);
    const u16* scales = args.scales + u64(tile) * args.groups * TILE_ROWS + in_tile;
    float* out = args.residual + u64(row) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        u32 block = i / K_BLOCK, col = i % K_BLOCK, lane = 4 * (in_tile % 8) + col / 16 % 4;
        u32 step = 2 * (col / 64) + col / 8 % 2, part = in_tile / 8 + 2 * (col / 4 % 2);
        i32 code = bytes[(block * 32 + lane) * 16 + 4 * step + col % 4] >> (2 * part) & 3;
        float element = __fmul_rn(__int2float_rn(code - 1), widen_f16(scales[i / inputs * TILE_ROWS]));
        out[i] = __fmul_rn(element, args.factor);
    }
}
