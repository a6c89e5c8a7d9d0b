// All logits of some rows, and the logits of the candidates that the screen found.

#include "norm.cuh"

// Loads eight consecutive elements at any alignment. The first `count` exist; the others are set to zero.
template <class E> __device__ __forceinline__ void load_some(const typename E::Stored* from, u32 count, float (&out)[8]) {
    UNROLL for (u32 i = 0; i < 8; i++) out[i] = i < count ? E::widen(from[i]) : 0.0f;
}

// Loads eight consecutive elements, aligned to their total size.
template <class E> __device__ __forceinline__ void load_eight(const typename E::Stored* from, float (&out)[8]) {
    if constexpr (E::CHUNK == 16) {
        const auto* words = reinterpret_cast<const u32*>(from);
        u32 two[2] = {words[0], words[1]};
        UNROLL for (u32 i = 0; i < 8; i++) out[i] = __int2float_rn(i8(two[i / 4] >> (8 * (i % 4))));
    } else {
        UNROLL for (u32 c = 0; c < 8; c += E::CHUNK) {
            float part[E::CHUNK];
            E::widen_chunk(load_constant(from + c), part);
            UNROLL for (u32 i = 0; i < E::CHUNK; i++) out[c + i] = part[i];
        }
    }
}

// Head rows per thread, and hidden rows per thread.
constexpr u32 HEAD_R = 2, HEAD_X = 4;

// logits[x, row] = Σ_k w[row, k] · x[k] in lane order, as in ops::dot_tile; for int8 rows times the scale of the row.
//
// Two threads share HEAD_R rows. Each thread has eight of the sixteen lanes: it loads 16 bytes of f16 at a time and
// has 8 · HEAD_R · HEAD_X chains. The blocks of all hidden rows for the same head rows start together (x), so that these are read from
// memory once.
template <class E> __device__ __forceinline__ void head(const HeadArgs& args) {
    start_after_previous();
    u32 width = args.width, whole = args.step->whole, half = threadIdx.x % 2;
    u32 first = blockIdx.y * blockDim.x + threadIdx.x / 2 * HEAD_R, first_x = blockIdx.x * HEAD_X;
    if (first_x >= whole) return;
    const typename E::Stored* rows[HEAD_R];
    const float* xs[HEAD_X];
    UNROLL for (u32 r = 0; r < HEAD_R; r++) {
        u32 row = first + r < args.vocab ? first + r : args.vocab - 1;
        rows[r] = static_cast<const typename E::Stored*>(args.rows) + u64(row) * width + half * 8;
    }
    UNROLL for (u32 i = 0; i < HEAD_X; i++) {
        u32 x = first_x + i < whole ? first_x + i : whole - 1;
        xs[i] = args.x + u64(x) * width + half * 8;
    }
    float sums[HEAD_R][HEAD_X][8] = {};
    bool aligned = width % LANES == 0;
    UNROLL_BY(2) for (u32 k = 0; k < width; k += LANES) {
        u32 left = width - k > half * 8 ? width - k - half * 8 : 0;
        float w[HEAD_R][8];
        UNROLL for (u32 r = 0; r < HEAD_R; r++) {
            if (aligned) load_eight<E>(rows[r] + k, w[r]);
            else load_some<E>(rows[r] + k, left, w[r]);
        }
        UNROLL for (u32 i = 0; i < HEAD_X; i++) {
            float x[8];
            if (aligned) load_eight<F32>(xs[i] + k, x);
            else load_some<F32>(xs[i] + k, left, x);
            UNROLL for (u32 r = 0; r < HEAD_R; r++) {
                UNROLL for (u32 j = 0; j < 8; j++) sums[r][i][j] = __fmaf_rn(w[r][j], x[j], sums[r][i][j]);
            }
        }
    }
    UNROLL for (u32 r = 0; r < HEAD_R; r++) {
        UNROLL for (u32 i = 0; i < HEAD_X; i++) {
            float* lanes = sums[r][i];
            UNROLL for (u32 j = 0; j < 8; j++) lanes[j] = __fadd_rn(lanes[j], __shfl_xor_sync(FULL_WARP, lanes[j], 1));
            UNROLL for (u32 j = 0; j < 4; j++) lanes[j] = __fadd_rn(lanes[j], lanes[j + 4]);
            float logit = __fadd_rn(__fadd_rn(lanes[0], lanes[2]), __fadd_rn(lanes[1], lanes[3]));
            if (half != 0 || first + r >= args.vocab || first_x + i >= whole) continue;
            if (args.scales) logit = __fmul_rn(logit, args.scales[first + r]);
            args.logits[u64(first_x + i) * args.vocab + first + r] = logit;
        }
    }
}

KERNEL(128) head_f32(const HeadArgs args) { head<F32>(args); }
KERNEL(128) head_f16(const HeadArgs args) { head<F16>(args); }
KERNEL(128) head_bf16(const HeadArgs args) { head<Bf16>(args); }
KERNEL(128) head_i8(const HeadArgs args) { head<I8>(args); }

// Computes the logits of the candidates of row blockIdx.y: one lane per thread, two candidates per warp. The sums
// are the same as in `head`.
template <class E> __device__ __forceinline__ void rescore(const RescoreArgs& args) {
    start_after_previous();
    constexpr u32 AHEAD = 16;
    u32 index = blockIdx.y, width = args.width, lane = threadIdx.x % LANES;
    if (index >= args.step->screened || args.filters && !args.filters[index].is_on) return;
    u32 count = args.found_counts[index];
    if (count > args.capacity) return;
    const float* x = args.x + u64(index) * width;
    Found* found = args.found + u64(index) * args.capacity;
    u32 stride = gridDim.x * blockDim.x / LANES;
    // Both halves of a warp continue while either half has a candidate.
    for (u32 at = (blockIdx.x * blockDim.x + threadIdx.x) / LANES; (at & ~1u) < count; at += stride) {
        u32 token = found[at < count ? at : count - 1].token;
        const auto* row = static_cast<const typename E::Stored*>(args.rows) + u64(token) * width;
        float sum = 0.0f;
        u32 k = lane;
        for (; k + (AHEAD - 1) * LANES < width; k += AHEAD * LANES) {
            typename E::Stored w[AHEAD];
            UNROLL for (u32 i = 0; i < AHEAD; i++) w[i] = row[k + i * LANES];
            UNROLL for (u32 i = 0; i < AHEAD; i++) sum = __fmaf_rn(E::widen(w[i]), x[k + i * LANES], sum);
        }
        for (; k < width; k += LANES) sum = __fmaf_rn(E::widen(row[k]), x[k], sum);
        float logit = sum_of_lanes(sum);
        if (args.scales) logit = __fmul_rn(logit, args.scales[token]);
        if (lane == 0 && at < count) found[at].logit = logit;
    }
}

KERNEL(128) rescore_f32(const RescoreArgs args) { rescore<F32>(args); }
KERNEL(128) rescore_f16(const RescoreArgs args) { rescore<F16>(args); }
KERNEL(128) rescore_bf16(const RescoreArgs args) { rescore<Bf16>(args); }
KERNEL(128) rescore_i8(const RescoreArgs args) { rescore<I8>(args); }
