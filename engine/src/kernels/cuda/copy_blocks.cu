// Copy-on-write of KV blocks.

#include "args.cuh"

// Copies whole blocks, all layers at once: pair y of (from, to), 16 bytes a thread.
KERNEL(256) copy_blocks(const CopyBlocksArgs args) {
    u32 pair = blockIdx.y;
    if (pair >= args.count) return;
    const auto* from = reinterpret_cast<const uint4*>(args.pool + args.pairs[2 * pair] * args.block_bytes);
    auto* to = reinterpret_cast<uint4*>(args.pool + args.pairs[2 * pair + 1] * args.block_bytes);
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < args.block_bytes / 16; i += stride) to[i] = from[i];
}
