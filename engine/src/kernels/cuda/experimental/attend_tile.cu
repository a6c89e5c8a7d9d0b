// Attention of prefill with int8 keys and values, on int8 tensor cores. `attention_q8.cuh` has the definition.
//
// A block takes a task of at most 64 queries, a warp sixteen of them: the rows of its products. Keys and values come
// through a ring in shared memory, a segment at a time, which all warps of the block read: 2 · padded_dim bytes of
// keys and padded_dim bytes of values per position for 64 queries.
//
// The weights of a position depend on the largest score of all positions. Scores are therefore computed twice: first
// for the largest one of each query, then for the weights. Scores of a second product take less time than scores that
// are written to memory and read again, and nothing is stored but the outputs.
//
// The scores of a segment, the columns of a product, become weights, the rows of the next product, in the registers of
// the same lane. For this, positions 4 t .. 4 t + 3 of a KV block must be columns 2 t, 2 t + 1 of two products, so the
// ring has the keys of a block in that order. A lane thereby has the same four positions of every KV block, as each lane
// of the divisor's sum has one.
//
// A weight w has fifteen bits and two digits, w = 256 · high + low. high ≤ 127 is a signed byte and low ≤ 255 an unsigned
// one. Over a segment, |Σ high · V| and |Σ low · V| are at most 255 · 128 · 128 < 2²², 256 times the first at most
// 256 · 127 · 128 · 128 < 2³⁰, and the whole sum at most 32767 · 128 · 128 < 2²⁹: all fit 32 bits.

#include "attention.cuh"

// Warps of a block, and queries of a warp.
constexpr u32 TILE_WARPS = 4, WARP_QUERIES = 16;
// Elements of the output that a lane's registers have room for; more take several rounds.
constexpr u32 ROUND_ELEMENTS = 128;
// KV blocks of a segment, and segments of keys or values in the ring.
constexpr u32 SEGMENT_BLOCKS = SEGMENT / BLOCK_TOKENS, RING_SLOTS = 3;
// 1.5 · 2²³: a float that has an integer in its low 22 bits and their sign, as in exp_lane.
constexpr u32 WHOLE_BITS = 0x4b400000u;
static_assert(128 * 128 * 256 <= 1 << 22, "the products of a score fit these bits");

// Returns the position in a KV block of a row of keys in the ring: row 8 j + 2 t + i has position 4 t + 2 j + i.
__device__ __forceinline__ u32 position_of_row(u32 row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

// The ring, and what is copied to it next. A slot has SEGMENT rows of padded_dim bytes, then SEGMENT scales of keys and
// SEGMENT scales of values:
//   keys:   (8 blocks, padded_dim / 16, 16 positions, 16 elements), with the scales of the keys and of the values
//   values: (8 blocks, elements of a round, 16 positions)
struct SegmentRing {
    const KvPool& pool;
    const Work& work;
    u8* slots;
    u32 slot_bytes, read, written;  // the slots that are read and written next
    u32 segment, first;     // first: element of the round
    bool scoring, values;  // scoring: the first time, for which only keys are needed

    __device__ __forceinline__ SegmentRing(const KvPool& pool, const Work& work, u8* slots)
        : pool(pool), work(work), slots(slots), slot_bytes(SEGMENT * (pool.padded_dim + 8)), read(0), written(0), segment(0),
          first(0), scoring(true), values(false) {
        UNROLL for (u32 i = 0; i < RING_SLOTS - 1; i++) fetch();
    }

    // Starts the copies of this warp's blocks of the next segment.
    __device__ __forceinline__ void fetch() {
        if (first < pool.padded_dim) {
            copy_segment(slots + written * slot_bytes);
            advance();
        }
        copy_async_commit();
        written = written + 1 < RING_SLOTS ? written + 1 : 0;
    }

    __device__ __forceinline__ void copy_segment(u8* slot) {
        u32 lane = threadIdx.x % 32, rows = values ? elements() : pool.padded_dim;
        UNROLL_BY(1) for (u32 b = threadIdx.x / 32; b < SEGMENT_BLOCKS; b += TILE_WARPS) {
            u32 position = segment * SEGMENT + b * BLOCK_TOKENS;
            if (position > work.last) break;
            u32 block = work.blocks[position / BLOCK_TOKENS], head = values ? pool.kv_heads + work.kv_head : work.kv_head;
            const i8* from = keys_of<KvQ8>(pool, block, head) + (values ? first * BLOCK_TOKENS : 0);
            u8* to = slot + b * rows * 16;
            UNROLL_BY(4) for (u32 row = lane; row < rows; row += 32) {
                u32 of_pool = values ? row : row / 16 * 16 + position_of_row(row % 16);
                copy_async16(to + row * 16, from + of_pool * 16);
            }
            if (!values && lane < 8) {
                const float* scales = scales_of<KvQ8>(pool, block, lane / 4 * pool.kv_heads + work.kv_head);
                u32 at = lane / 4 * SEGMENT + b * BLOCK_TOKENS + lane % 4 * 4;
                copy_async16(slot + SEGMENT * pool.padded_dim + at * 4, scales + lane % 4 * 4);
            }
        }
    }

    // Returns the number of elements of the round.
    __device__ __forceinline__ u32 elements() const {
        return pool.padded_dim - first < ROUND_ELEMENTS ? pool.padded_dim - first : ROUND_ELEMENTS;
    }

    __device__ __forceinline__ void advance() {
        values = !scoring && !values;
        if (values || ++segment * SEGMENT <= work.last) return;
        segment = 0;
        if (!scoring) first += ROUND_ELEMENTS;
        scoring = false;
    }

    // Waits for the next segment of keys or values, and returns its slot. The slot before it is free from here on.
    __device__ __forceinline__ const u8* next() {
        copy_async_wait<RING_SLOTS - 2>();
        __syncthreads();
        fetch();
        const u8* slot = slots + read * slot_bytes;
        read = read + 1 < RING_SLOTS ? read + 1 : 0;
        return slot;
    }
};

// The sixteen queries of a warp. A lane has rows g = lane / 4 and g + 8 of them. DIM: largest padded_dim.
template <u32 DIM> struct TileQueries {
    static constexpr u32 STEPS = DIM / 32;
    u32 fragments[STEPS][4];  // int8 queries as the A of products over 32 elements
    u32 steps;
    u32 limits[2];          // last position that each row sees
    u32 least_last, last;  // least and largest of these limits in the warp
    float factors[2], largest[2];

    // Loads and narrows the queries from `query` on, with zeros for missing queries and elements.
    __device__ __forceinline__ void load(const AttentionArgs& args, const Work& work, u32 query) {
        u32 lane = threadIdx.x % 32, end = query + WARP_QUERIES < work.count ? query + WARP_QUERIES : work.count;
        steps = (args.pool.padded_dim + 31) / 32;
        least_last = limit_of(work, query), last = limit_of(work, end - 1);
        UNROLL for (u32 r = 0; r < 2; r++) {
            u32 q = query + lane / 4 + 8 * r;
            bool exists = q < end;
            const float* from = args.queries + (exists ? query_at(args, work, q) : 0);
            float values[STEPS][8], most = 0.0f;
            UNROLL for (u32 s = 0; s < STEPS; s++) {
                UNROLL for (u32 e = 0; e < 8; e++) {
                    u32 d = 32 * s + 16 * (e / 4) + 4 * (lane % 4) + e % 4;
                    values[s][e] = exists && d < args.pool.head_dim ? from[d] : 0.0f;
                    most = larger(magnitude(values[s][e]), most);
                }
            }
            float scale = int8_scale_of(largest_of_quad(most));
            UNROLL for (u32 s = 0; s < STEPS; s++) {
                const float* v = values[s];
                fragments[s][r] = narrow4(make_float4(v[0], v[1], v[2], v[3]), scale);
                fragments[s][r + 2] = narrow4(make_float4(v[4], v[5], v[6], v[7]), scale);
            }
            limits[r] = limit_of(work, exists ? q : end - 1);
            factors[r] = __fmul_rn(args.scale, scale);
            largest[r] = minus_infinity();
        }
    }

    // Returns the largest value of the four lanes that have the same rows.
    static __device__ __forceinline__ float largest_of_quad(float v) {
        UNROLL for (u32 width = 1; width < 4; width *= 2) v = fmaxf(__shfl_xor_sync(FULL_WARP, v, width), v);
        return v;
    }

    // Computes the scores of a KV block. scores[j][c]: position 4 t + 2 j + c % 2, row g + 8 (c / 2). `keys` is the address
    // of the block in the ring for this lane.
    __device__ __forceinline__ void score(SharedAddress keys, const float* key_scales, float (&scores)[2][4]) const {
        i32 sums[2][4];
        UNROLL for (u32 i = 0; i < 8; i++) sums[i / 4][i % 4] = i32(WHOLE_BITS);
        // If padded_dim is an odd multiple of 16, the last step reads 16 more bytes per position, which belong to the next
        // block or are scales; the queries are zero there.
        UNROLL for (u32 s = 0; s < STEPS; s++) {
            if (s >= steps) break;
            u32 b[4];
            load_matrices(b, keys + s * 32 * BLOCK_TOKENS);
            mma_s8(sums[0], fragments[s], b[0], b[1]);
            mma_s8(sums[1], fragments[s], b[2], b[3]);
        }
        float4 scales = *reinterpret_cast<const float4*>(key_scales + threadIdx.x % 4 * 4);
        float of_position[4] = {scales.x, scales.y, scales.z, scales.w};
        UNROLL for (u32 i = 0; i < 8; i++) {
            u32 j = i / 4, c = i % 4;
            float sum = __fsub_rn(__uint_as_float(u32(sums[j][c])), __uint_as_float(WHOLE_BITS));
            scores[j][c] = __fmul_rn(sum, __fmul_rn(of_position[2 * j + c % 2], factors[c / 2]));
        }
    }

    // Returns whether a row sees element [j][c] of the scores of the block from position `base` on.
    __device__ __forceinline__ bool sees(u32 base, u32 j, u32 c) const {
        return base + threadIdx.x % 4 * 4 + 2 * j + c % 2 <= limits[c / 2];
    }
    __device__ __forceinline__ bool all_see(u32 base) const { return base + BLOCK_TOKENS - 1 <= least_last; }
};

// Returns the address in a slot from which this lane loads matrices of keys: of two chunks of elements by two times eight
// rows.
__device__ __forceinline__ SharedAddress keys_of_lane(const u8* slot) {
    u32 lane = threadIdx.x % 32;
    return shared_address(slot) + (lane / 8 % 2 * BLOCK_TOKENS + lane / 16 * 8 + lane % 8) * 16;
}

// Raises the largest scores by those of a segment.
template <u32 DIM>
__device__ __forceinline__ void raise_largest(const KvPool& pool, u32 base, const u8* slot, TileQueries<DIM>& queries) {
    SharedAddress keys = keys_of_lane(slot);
    const float* scales = reinterpret_cast<const float*>(slot + SEGMENT * pool.padded_dim);
    UNROLL_BY(2) for (u32 b = 0; b < SEGMENT_BLOCKS; b++) {
        u32 first = base + b * BLOCK_TOKENS;
        if (first > queries.last) break;
        float scores[2][4];
        queries.score(keys + b * BLOCK_TOKENS * pool.padded_dim, scales + b * BLOCK_TOKENS, scores);
        if (!queries.all_see(first)) {
            UNROLL for (u32 i = 0; i < 8; i++) {
                if (!queries.sees(first, i / 4, i % 4)) scores[i / 4][i % 4] = minus_infinity();
            }
        }
        UNROLL for (u32 i = 0; i < 8; i++) queries.largest[i % 4 / 2] = fmaxf(scores[i / 4][i % 4], queries.largest[i % 4 / 2]);
    }
}

// The integer weights of a segment, as the A of products over 32 positions.
struct WeightDigits {
    u32 high[SEGMENT / 32][4], low[SEGMENT / 32][4];
    float units[2];  // what multiplies the sums of each row

    // `factors` are of each block, as the scores; `most` is the largest factor of each row in this lane.
    __device__ __forceinline__ void of(const float (&factors)[SEGMENT_BLOCKS][2][4], float (&most)[2]) {
        u32 lane = threadIdx.x % 32;
        UNROLL for (u32 r = 0; r < 2; r++) most[r] = TileQueries<32>::largest_of_quad(most[r]);
        // Each of the four lanes divides once, as in narrow_weights.
        float largest = lane % 2 == 0 ? most[0] : most[1];
        bool inverts = lane % 4 < 2;
        float quotient = __fdiv_rn(inverts ? WEIGHT_MAX : largest, inverts ? largest : WEIGHT_MAX);
        UNROLL for (u32 r = 0; r < 2; r++) {
            float inverse = __shfl_sync(FULL_WARP, quotient, lane / 4 * 4 + r);
            units[r] = __shfl_sync(FULL_WARP, quotient, lane / 4 * 4 + 2 + r);
            UNROLL for (u32 b = 0; b < SEGMENT_BLOCKS; b++) {
                const float(&of_block)[2][4] = factors[b];
                u32 x = rounded(of_block[0][2 * r], inverse), y = rounded(of_block[0][2 * r + 1], inverse);
                u32 z = rounded(of_block[1][2 * r], inverse), w = rounded(of_block[1][2 * r + 1], inverse);
                u32 xy = __byte_perm(x, y, 0x5140), zw = __byte_perm(z, w, 0x5140);
                low[b / 2][b % 2 * 2 + r] = __byte_perm(xy, zw, 0x5410);
                high[b / 2][b % 2 * 2 + r] = __byte_perm(xy, zw, 0x7632);
            }
        }
    }
};

// The outputs of a warp's queries for the elements of a round, before the division.
struct TileOutputs {
    static constexpr u32 PAIRS = ROUND_ELEMENTS / 16;
    float out[PAIRS][2][4];  // [n][j][c]: element 16 n + 8 j + 2 t + c % 2, row g + 8 (c / 2)
    float lane_sums[2][4];   // of each row: the weights of positions 4 t .. 4 t + 3 of every block

    // Computes the weights of a segment.
    template <u32 DIM>
    __device__ __forceinline__ void weights(const KvPool& pool, u32 base, const u8* slot, const TileQueries<DIM>& queries,
                                            WeightDigits& digits) {
        SharedAddress keys = keys_of_lane(slot);
        const float* key_scales = reinterpret_cast<const float*>(slot + SEGMENT * pool.padded_dim);
        const float* value_scales = key_scales + SEGMENT;
        float factors[SEGMENT_BLOCKS][2][4], most[2] = {FACTOR_MIN, FACTOR_MIN};
        UNROLL for (u32 b = 0; b < SEGMENT_BLOCKS; b++) {
            u32 first = base + b * BLOCK_TOKENS;
            if (first > queries.last) {
                UNROLL for (u32 i = 0; i < 8; i++) factors[b][i / 4][i % 4] = 0.0f;
                continue;
            }
            float scores[2][4];
            queries.score(keys + b * BLOCK_TOKENS * pool.padded_dim, key_scales + b * BLOCK_TOKENS, scores);
            float4 scales = *reinterpret_cast<const float4*>(value_scales + b * BLOCK_TOKENS + threadIdx.x % 4 * 4);
            float of_position[4] = {scales.x, scales.y, scales.z, scales.w};
            float of_block[2][4];
            UNROLL for (u32 i = 0; i < 8; i++) {
                u32 j = i / 4, c = i % 4;
                // No score that a row sees is larger than the largest.
                of_block[j][c] = exp_in_range(fmaxf(__fsub_rn(scores[j][c], queries.largest[c / 2]), -87.3f));
                factors[b][j][c] = __fmul_rn(of_block[j][c], of_position[2 * j + c % 2]);
            }
            if (!queries.all_see(first)) {
                UNROLL for (u32 i = 0; i < 8; i++) {
                    if (!queries.sees(first, i / 4, i % 4)) of_block[i / 4][i % 4] = factors[b][i / 4][i % 4] = 0.0f;
                }
            }
            UNROLL for (u32 i = 0; i < 8; i++) {
                u32 j = i / 4, c = i % 4;
                float& sum = lane_sums[c / 2][2 * j + c % 2];
                sum = __fadd_rn(sum, of_block[j][c]);
                most[c / 2] = fmaxf(factors[b][j][c], most[c / 2]);
            }
        }
        digits.of(factors, most);
    }

    // Adds the values of a segment. // slot: (8, elements, 16)
    __device__ __forceinline__ void weigh(const u8* slot, u32 elements, const WeightDigits& digits) {
        u32 lane = threadIdx.x % 32;
        SharedAddress values = shared_address(slot) + (lane / 8 % 2 * elements + lane / 16 * 8 + lane % 8) * 16;
        UNROLL for (u32 n = 0; n < PAIRS; n++) {
            if (16 * n >= elements) break;
            i32 high[2][4] = {}, low[2][4] = {};
            UNROLL for (u32 s = 0; s < SEGMENT / 32; s++) {
                u32 b[4];
                load_matrices(b, values + (2 * s * elements + 16 * n) * 16);
                UNROLL for (u32 j = 0; j < 2; j++) {
                    mma_s8(high[j], digits.high[s], b[2 * j], b[2 * j + 1]);
                    mma_u8_s8(low[j], digits.low[s], b[2 * j], b[2 * j + 1]);
                }
            }
            UNROLL for (u32 i = 0; i < 8; i++) {
                u32 j = i / 4, c = i % 4;
                out[n][j][c] = add_segment(high[j][c] * 256 + low[j][c], digits.units[c / 2], out[n][j][c]);
            }
        }
    }

    // Divides, and writes the outputs of the queries from `query` on.
    __device__ __forceinline__ void store(const AttentionArgs& args, const Work& work, u32 query, u32 first) const {
        u32 lane = threadIdx.x % 32;
        UNROLL for (u32 r = 0; r < 2; r++) {
            float sums[4];
            UNROLL for (u32 p = 0; p < 4; p++) {
                // Lane p + 4 t of the sum: lanes + 8, then + 4, are in other threads, lanes + 2 and + 1 in this thread.
                float sum = __fadd_rn(lane_sums[r][p], __shfl_xor_sync(FULL_WARP, lane_sums[r][p], 2));
                sums[p] = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 1));
            }
            float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
            u32 q = query + lane / 4 + 8 * r;
            if (q >= work.count) continue;
            float* to = args.attended + query_at(args, work, q);
            UNROLL for (u32 i = 0; i < PAIRS * 4; i++) {
                u32 d = first + 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (lane % 4) + i % 2;
                if (d < args.pool.head_dim) to[d] = __fdiv_rn(out[i / 4][i / 2 % 2][2 * r + i % 2], sum);
            }
        }
    }
};

// Attention for tasks of at most 64 queries. // shared: (RING_SLOTS, SEGMENT, padded_dim + 8)
template <u32 DIM> __device__ __forceinline__ void attend_tile(const AttentionArgs& args) {
    start_after_previous();
    DYNAMIC_SHARED(bytes);
    const KvPool& pool = args.pool;
    for (u32 index = blockIdx.x; index < args.step->tasks; index += gridDim.x) {
        // The warps may still read the ring of the task before.
        __syncthreads();
        Work work = work_of(args, index);
        u32 query = threadIdx.x / 32 * WARP_QUERIES;
        // A warp without queries only copies.
        bool computes = query < work.count;
        SegmentRing ring(pool, work, bytes);
        TileQueries<DIM> queries;
        if (computes) queries.load(args, work, query);
        for (u32 base = 0; base <= work.last; base += SEGMENT) {
            const u8* keys = ring.next();
            if (computes && base <= queries.last) raise_largest(pool, base, keys, queries);
        }
        UNROLL for (u32 r = 0; r < 2; r++) queries.largest[r] = queries.largest_of_quad(queries.largest[r]);
        for (u32 first = 0; first < pool.padded_dim; first += ROUND_ELEMENTS) {
            u32 elements = pool.padded_dim - first < ROUND_ELEMENTS ? pool.padded_dim - first : ROUND_ELEMENTS;
            TileOutputs outputs = {};
            for (u32 base = 0; base <= work.last; base += SEGMENT) {
                WeightDigits digits;
                const u8* keys = ring.next();
                bool sees = computes && base <= queries.last;
                if (sees) outputs.weights(pool, base, keys, queries, digits);
                const u8* values = ring.next();
                if (sees) outputs.weigh(values, elements, digits);
            }
            if (computes) outputs.store(args, work, query, first);
        }
    }
}

KERNEL_BY(128, 2) attend_tile128_q8(const AttentionArgs args) { attend_tile<128>(args); }
KERNEL_BY(128, 2) attend_tile256_q8(const AttentionArgs args) { attend_tile<256>(args); }
