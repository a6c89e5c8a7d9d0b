// Tests of the kernels of models with scales of groups: embedding, norms of heads, quantization and linears. The
// definitions are kernels/group_activations.rs and kernels/group_gemm.rs, written over again as scalar loops.

#include "reference.h"
#include "tests.h"

namespace {

constexpr float EPS = 1e-6f;

struct Matrix {
    u32 rows, cols, size, groups;  // size: inputs of a group
    vector<i8> trits;
    vector<u16> of_groups;  // (rows, groups) of f16
    vector<uint4> packed;
    vector<u16> scales;  // (tiles, groups, 16)
    vector<float> bias;  // empty: none

    Matrix(Random& random, u32 rows, u32 cols, u32 size)
        : rows(rows), cols(cols), size(size), groups(cols / size), trits(size_t(rows) * cols), of_groups(size_t(rows) * groups) {
        for (i8& trit : trits) trit = i8(random.below(3)) - 1;
        for (u16& scale : of_groups) scale = random.below(9) == 0 ? 0 : reference::narrow(fabsf(random.value()) * 0.1f);
        if (random.below(2)) bias = random.values(rows);
        // Sums are at their extremes where all trits of a row are equal.
        for (u32 row = 3; row < rows; row += 7) std::fill_n(&trits[size_t(row) * cols], cols, i8(row % 2 ? 1 : -1));
        packed = pack_ternary(trits, rows, cols);
        scales.assign(size_t(up(rows, 16)) * groups * 16, 0);
        for (u32 row = 0; row < rows; row++)
            for (u32 g = 0; g < groups; g++) scales[(size_t(row / 16) * groups + g) * 16 + row % 16] = of_groups[size_t(row) * groups + g];
    }
    GroupSegment segment(vector<float>& out, u32 stride) const {
        return {packed.data(), scales.data(), bias.empty() ? nullptr : bias.data(), out.data(), rows, stride, groups, size / 64};
    }
};

// Quantized rows: the integers, and a scale for each 128 inputs.
struct Input {
    u32 rows, cols, digits, stride;
    Step step;
    vector<i32> values;  // (rows, cols)
    vector<i8> q;        // (rows, digits, stride)
    vector<InputBlock> blocks;

    Input(Random& random, u32 rows, u32 cols, u32 digits)
        : rows(rows), cols(cols), digits(digits), stride(padded(cols, 128)), step{rows, 0, 0, 0}, values(size_t(rows) * cols) {
        i32 limit = digits == 1 ? 127 : 32639;
        blocks.assign(size_t(rows) * (stride / 128), {});
        for (u32 r = 0; r < rows; r++) {
            bool extreme = random.below(4) == 0;
            for (u32 k = 0; k < cols; k++) {
                i32 any = digits == 1 ? i32(random.below(256)) - 128 : i32(random.below(2 * 32639 + 1)) - 32639;
                values[size_t(r) * cols + k] = extreme ? (random.below(2) ? limit : -limit) : any;
            }
            for (u32 b = 0; b < stride / 128; b++) blocks[size_t(r) * (stride / 128) + b].scale = fabsf(random.value()) * 1e-3f;
        }
        // Infinite activations have an infinite scale.
        if (rows > 5) blocks[size_t(5) * (stride / 128)].scale = INFINITY;
        fill();
    }
    void fill() {
        q.assign(size_t(rows) * digits * stride, 0);
        for (u32 r = 0; r < rows; r++)
            for (u32 k = 0; k < cols; k++) {
                i32 v = values[size_t(r) * cols + k];
                i32 high = (v + 128) >> 8;
                i8* first = &q[size_t(r) * digits * stride + k];
                if (digits == 1) first[0] = i8(v);
                else first[0] = i8(high), first[stride] = i8(v - 256 * high);
                blocks[size_t(r) * (stride / 128) + k / 128].sums[k / 64 % 2] += v;
            }
    }
    float output(const Matrix& w, u32 row, u32 feature) const {
        float y = 0.0f;
        for (u32 g = 0; g < w.groups; g++) {
            i32 sum = 0;
            for (u32 k = g * w.size; k < (g + 1) * w.size; k++) sum += values[size_t(row) * cols + k] * w.trits[size_t(feature) * cols + k];
            float scale = reference::widen(w.of_groups[size_t(feature) * w.groups + g]) * blocks[size_t(row) * (stride / 128) + g * w.size / 128].scale;
            y = fmaf(float(sum), scale, y);
        }
        return w.bias.empty() ? y : y + w.bias[feature];
    }
    GroupLinearArgs args() { return {&step.rows, q.data(), blocks.data(), {}, 0, stride / 128, digits, 0}; }
};

struct Kernel {
    const char* name;
    u32 tiles, columns, threads, round;  // round: most k blocks that have room at a time; 0 for tiles
};

const Kernel KERNELS[] = {{"group_n8", 1, 8, 256, 32}, {"group_n16", 1, 16, 256, 32}, {"group_n32", 1, 32, 256, 16},
                          {"group_tile_int8", 4, 64, 128, 0}, {"group_tile_int16", 4, 64, 128, 0}};

u32 shared_bytes(const Kernel& kernel, u32 k_blocks, u32 digits) {
    if (kernel.round == 0) return 4 * (4 * 512 + 64 * 128 + 64 / digits * 16 + 4 * 64);
    return std::min(k_blocks, kernel.round) * (128 + kernel.columns * (16 + 2 * 80));
}

void check_linears(u32 rows, u32 cols, u32 digits, u32 case_index) {
    Random random(rows * 7 + cols + digits);
    // Segments of one launch may have groups of different sizes.
    bool mixed = cols % 128 == 0;
    Matrix a(random, 48 + rows % 16, cols, mixed ? 128 : 64), b(random, 20, cols, 64), c(random, 37, cols, mixed ? 128 : 64);
    const Matrix* all[3] = {&a, &b, &c};
    Input x(random, rows, cols, digits);
    u32 count = 1 + case_index % 3, tiles = 0, bucket = rows + case_index % 2 * 70;
    vector<float> initial[3], want[3];
    u32 mode = case_index % 2 ? LINEAR_ADD : LINEAR_STORE;
    for (u32 s = 0; s < count; s++) {
        u32 stride = all[s]->rows + s;
        initial[s] = want[s] = random.values(size_t(rows) * stride);
        for (u32 r = 0; r < rows; r++)
            for (u32 o = 0; o < all[s]->rows; o++) {
                float& at = want[s][size_t(r) * stride + o];
                at = mode == LINEAR_ADD ? at + x.output(*all[s], r, o) : x.output(*all[s], r, o);
            }
        tiles += up(all[s]->rows, 16);
    }
    for (const Kernel& kernel : KERNELS) {
        bool is_tile = kernel.round == 0;
        if (is_tile && (std::string(kernel.name) == "group_tile_int16") != (digits == 2)) continue;
        vector<float> out[3];
        GroupLinearArgs args = x.args();
        for (u32 s = 0; s < count; s++) {
            out[s] = initial[s];
            args.segments[s] = all[s]->segment(out[s], all[s]->rows + s);
        }
        args.segment_count = count, args.mode = mode;
        run(kernel.name, {up(tiles, kernel.tiles), up(bucket * digits, kernel.columns), 1}, kernel.threads, shared_bytes(kernel, args.k_blocks, digits), args);
        for (u32 s = 0; s < count; s++)
            expect_same(out[s], want[s], std::string(kernel.name) + ", " + std::to_string(rows) + " rows of " + std::to_string(cols) + ", segment " + std::to_string(s));
    }
}

void linears() {
    u32 index = 0;
    for (u32 digits : {1, 2})
        for (u32 rows : {1, 2, 4, 5, 8, 9, 17, 33, 70})
            for (u32 cols : {64, 128, 192, 640, 1024}) check_linears(rows, cols, digits, index++);
    // More k blocks than a round has, in an odd number.
    for (u32 digits : {1, 2})
        for (u32 cols : {4096 + 64, 2 * 4096 + 128 * 3}) check_linears(3, cols, digits, index++);
}

void quantization() {
    for (u32 width : {64, 128, 192, 640, 2624}) {
        Random random(width);
        u32 rows = 10, stride = padded(width, 128), blocks = stride / 128;
        Step step{0, 0, rows, 0};
        vector<float> x = random.values(rows * width), w = random.values(width), w2 = random.values(width);
        for (u32 i = 0; i < width; i++) {
            x[1 * width + i] *= 1e30f;   // squares overflow
            x[2 * width + i] *= 1e-30f;  // the smallest scale
            x[3 * width + i] = 0.0f;
            // Ties of both numbers of digits, and where the low digit changes its sign.
            x[6 * width + i] = (float(i32(i % 129)) - 64.5f) * 2.0f, x[7 * width + i] = i % 128 ? float(i * 128) - 0.5f : 32639.0f;
        }
        x[4 * width] = INFINITY;
        x[5 * width + width / 2] = NAN;
        x[8 * width + width / 2] = -INFINITY;
        vector<u32> wanted = {3, 0, 8, 1, 2, 4, 5, 9, 7, 6};
        for (u32 digits : {1, 2})
            for (u32 norm_count : {0, 1, 2}) {
                bool in_order = (digits + norm_count) % 2;
                vector<i8> q(rows * digits * stride, 77);
                vector<InputBlock> of_blocks(rows * blocks, {NAN, {9, 9}, 9});
                GroupQuantizeArgs args{&step.whole, in_order ? nullptr : wanted.data(), x.data(), norm_count > 0 ? w.data() : nullptr, norm_count > 1 ? w2.data() : nullptr,
                                       q.data(), of_blocks.data(), width, stride, EPS, 1e-5f, digits, 0};
                run("group_quantize", {rows + 2, 1, 1}, 256, 4 * stride, args);
                for (u32 r = 0; r < rows; r++) {
                    u32 from = in_order ? r : wanted[r];
                    vector<float> v(x.begin() + from * width, x.begin() + (from + 1) * width);
                    if (norm_count > 0) v = reference::rms_norm(v.data(), w.data(), width, EPS);
                    if (norm_count > 1) v = reference::rms_norm(v.data(), w2.data(), width, 1e-5f);
                    v.resize(stride, 0.0f);
                    float limit = digits == 1 ? 127.0f : 32639.0f, least = digits == 1 ? -128.0f : -limit;
                    vector<i8> want(digits * stride);
                    for (u32 b = 0; b < blocks; b++) {
                        float largest = 1e-5f;
                        for (u32 i = b * 128; i < (b + 1) * 128; i++) largest = reference::max_of(fabsf(v[i]), largest);
                        float scale = largest / limit;
                        i32 sums[2] = {};
                        for (u32 i = b * 128; i < (b + 1) * 128; i++) {
                            float nearest = nearbyintf(reference::max_of(reference::min_of(v[i] / scale, limit), least));
                            // As ops::quantize_groups, which has no integers.
                            float high = nearbyintf((nearest + 0.25f) * (1.0f / 256.0f));
                            if (digits == 1) want[i] = i8(nearest);
                            else want[i] = i8(high), want[stride + i] = i8(fmaf(high, -256.0f, nearest));
                            sums[i / 64 % 2] += i32(nearest);
                        }
                        const InputBlock& got = of_blocks[r * blocks + b];
                        expect_same({got.scale}, {scale}, "scale of a block");
                        expect_equal<i32>({got.sums[0], got.sums[1]}, {sums[0], sums[1]}, "sums of a block");
                    }
                    expect_equal(vector<i8>(&q[r * digits * stride], &q[(r + 1) * digits * stride]), want, "digits");
                }
            }
    }
}

void ternary_embeddings() {
    for (auto [width, size] : {std::array<u32, 2>{256, 128}, {192, 64}, {64, 64}}) {
        Random random(width);
        float factor = size == width ? 1.0f : 12.1f;
        u32 vocab = 75, rows = 7;
        Matrix table(random, vocab, width, size);
        Step step{rows, 0, 0, 0};
        vector<u32> tokens = {74, 0, 3, 3, 17, 20, 8}, carried = {5, 17, 74};
        vector<float> out(rows * width, NAN), want;
        for (u32 t : tokens)
            for (u32 i = 0; i < width; i++) want.push_back(float(table.trits[t * width + i]) * reference::widen(table.of_groups[t * table.groups + i / size]) * factor);
        // Two of them are carried.
        tokens[0] = IS_CARRIED | 2, tokens[4] = IS_CARRIED | 1;
        run("embed_ternary", {rows + 3, 1, 1}, 256, 0,
            EmbedTernaryArgs{&step, tokens.data(), carried.data(), table.packed.data(), table.scales.data(), out.data(), width, table.groups, factor, 0});
        expect_same(out, want, "embed_ternary");
    }
}

void head_norms() {
    for (u32 dim : {20, 64, 128, 250}) {
        Random random(dim);
        u32 rows = 5, heads = 6, kv_heads = 3;
        Step step{rows, 0, 0, 0};
        vector<float> queries = random.values(rows * heads * dim), keys = random.values(rows * kv_heads * dim);
        vector<float> of_query = random.values(dim), of_key = random.values(dim), want_queries, want_keys;
        queries[3] = INFINITY, keys[dim + 1] = NAN;
        for (u32 head = 0; head < rows * heads; head++) {
            auto normed = reference::rms_norm(&queries[head * dim], of_query.data(), dim, EPS);
            want_queries.insert(want_queries.end(), normed.begin(), normed.end());
        }
        for (u32 head = 0; head < rows * kv_heads; head++) {
            auto normed = reference::rms_norm(&keys[head * dim], of_key.data(), dim, EPS);
            want_keys.insert(want_keys.end(), normed.begin(), normed.end());
        }
        run("norm_heads", {rows + 2, 1, 1}, 256, 0, NormHeadsArgs{&step, queries.data(), keys.data(), of_query.data(), of_key.data(), heads, kv_heads, dim, EPS});
        expect_same(queries, want_queries, "norms of query heads");
        expect_same(keys, want_keys, "norms of key heads");
    }
}

}  // namespace

void test_group() {
    test("ternary embeddings", ternary_embeddings);
    test("norms of heads", head_norms);
    test("quantization by groups", quantization);
    test("linears with scales of groups", linears);
}
