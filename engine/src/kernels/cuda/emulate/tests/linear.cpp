// Tests of embeddings, norms with quantization, ternary linears and gates.

#include "emulate/run.h"
#include "linear.cuh"
#include "reference.h"
#include "tests.h"

namespace {

constexpr float EPS = 1e-5f;

// Returns rows in ORDER_WGMMA: within 64 bytes, word 4 t + c is word 4 c + t.
vector<i8> ordered(const vector<i8>& rows) {
    vector<i8> out(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        size_t word = i / 4 % 16;
        out[i / 64 * 64 + (word % 4 * 4 + word / 4) * 4 + i % 4] = rows[i];
    }
    return out;
}

struct Matrix {
    u32 rows, cols;
    vector<i8> trits;
    vector<uint4> packed;
    float scale;
    bool divide;
    vector<float> bias;  // empty: none
    Matrix(Random& random, u32 rows, u32 cols, bool divide) : rows(rows), cols(cols), trits(size_t(rows) * cols), divide(divide) {
        for (i8& t : trits) t = i8(random.below(3)) - 1;
        packed = pack_ternary(trits, rows, cols);
        scale = divide ? 57.3f : 0.0173f;
        if (random.below(2)) bias = random.values(rows);
    }
    i32 sum(const i8* q, u32 row) const {
        i32 sum = 0;
        for (u32 k = 0; k < cols; k++) sum += i32(trits[size_t(row) * cols + k]) * q[k];
        return sum;
    }
    float output(const i8* q, float s, u32 row) const {
        float y = reference::rescale(sum(q, row), s, scale, divide);
        return bias.empty() ? y : y + bias[row];
    }
    Segment segment(vector<float>& out) const {
        return {packed.data(), bias.empty() ? nullptr : bias.data(), out.data(), scale, divide, rows, rows};
    }
};

struct Input {
    u32 rows, stride;
    Step step;
    vector<i8> q, q_ordered;
    vector<float> scales;
    vector<i32> sums;
    Input(Random& random, u32 rows, u32 cols) : rows(rows), stride(padded(cols, 128)), step{rows, 0, 0, 0} {
        q.assign(size_t(rows) * stride, 0);
        scales.resize(rows);
        sums.assign(rows, 0);
        for (u32 r = 0; r < rows; r++) {
            bool extreme = random.below(5) == 0;
            for (u32 k = 0; k < cols; k++) {
                i8 v = extreme ? (random.below(2) ? 127 : -128) : i8(random.next());
                q[size_t(r) * stride + k] = v;
                sums[r] += v;
            }
            static const float odd[4] = {127.0f / 3e38f, 127.0f / 1e-5f, 1.0f, 0.99999994f};
            scales[r] = random.below(4) == 0 ? odd[random.below(4)] : 127.0f / (fabsf(random.value()) + 1e-3f);
        }
        q_ordered = ordered(q);
    }
    LinearArgs args(const std::string& kernel) {
        const i8* x = kernel.find("wgmma") == kernel.npos ? q.data() : q_ordered.data();
        return {&step, x, scales.data(), sums.data(), {}, 0, stride / 128, 0, 0};
    }
};

struct Kernel {
    const char* name;
    u32 tiles, tokens, warps, shared;
};

const Kernel LINEAR[] = {{"linear_n8", 1, 8, 3, 3 * 6144},    {"linear_n8", 1, 8, 1, 6144},      {"linear_n16", 1, 16, 2, 2 * 10240},
                         {"linear_n32", 2, 32, 4, 4 * 4096},  {"linear_n64", 2, 64, 2, 2 * 4096}, {"linear_tile", 8, 128, 8, 81920},
                         {"linear_tile64", 4, 64, 4, 40960},  {"linear_wgmma", 16, 128, 8, 148480},  {"linear_wgmma64", 16, 64, 8, 99328}};
const Kernel GATE[] = {{"gate_n8", 1, 8, 3, 3 * 8192},   {"gate_n16", 1, 16, 1, 12288},         {"gate_n32", 1, 32, 8, 8 * 4096},
                       {"gate_n64", 1, 64, 4, 4 * 4096}, {"gate_tile", 4, 128, 8, 81920}, {"gate_tile64", 2, 64, 4, 40960},
                       {"gate_wgmma", 8, 128, 8, 148480}, {"gate_wgmma64", 8, 64, 8, 99328}};

// Returns each kernel with late copies, and with early ones.
template <size_t N> vector<std::pair<Kernel, bool>> early_and_late(const Kernel (&kernels)[N]) {
    vector<std::pair<Kernel, bool>> out;
    for (bool early : {true, false})
        for (const Kernel& kernel : kernels) out.push_back({kernel, early});
    return out;
}

void linear_segments() {
    u32 case_index = 0;
    for (u32 rows : {1, 2, 3, 7, 8, 9, 16, 33, 130, 257}) {
        Random random(rows);
        u32 cols = rows == 3 ? 6912 : rows == 8 ? 100 : rows == 130 ? 1400 : rows % 2 ? 660 : 384, bucket = rows + case_index % 3 * 70;
        Matrix a(random, (rows % 16 == 1 ? 300 : 48) + rows % 16, cols, false), b(random, 20, cols, true), c(random, 37, cols, false);
        const Matrix* all[3] = {&a, &b, &c};
        Input x(random, rows, cols);
        u32 count = 1 + case_index++ % 3, tiles = 0;
        for (u32 mode : {LINEAR_STORE, LINEAR_ADD}) {
            vector<float> initial[3], want[3];
            for (u32 s = 0; s < count; s++) {
                initial[s] = random.values(size_t(rows) * all[s]->rows);
                want[s] = initial[s];
                for (u32 r = 0; r < rows; r++)
                    for (u32 o = 0; o < all[s]->rows; o++) {
                        float y = all[s]->output(&x.q[size_t(r) * x.stride], x.scales[r], o);
                        float& at = want[s][size_t(r) * all[s]->rows + o];
                        at = mode == LINEAR_ADD ? at + y : y;
                    }
            }
            tiles = 0;
            for (u32 s = 0; s < count; s++) tiles += up(all[s]->rows, 16);
            for (auto [kernel, early] : early_and_late(LINEAR)) {
                emulate::copies_early = early;
                vector<float> out[3];
                LinearArgs args = x.args(kernel.name);
                for (u32 s = 0; s < count; s++) {
                    out[s] = initial[s];
                    args.segments[s] = all[s]->segment(out[s]);
                }
                args.segment_count = count;
                args.mode = mode;
                run(kernel.name, {up(tiles, kernel.tiles), up(bucket, kernel.tokens), 1}, kernel.warps * 32, kernel.shared, args);
                for (u32 s = 0; s < count; s++)
                    expect_same(out[s], want[s], std::string(kernel.name) + ", rows " + std::to_string(rows));
            }
        }
    }
}

void gates() {
    for (u32 rows : {1, 2, 7, 8, 9, 16, 33, 130}) {
        Random random(rows + 100);
        u32 cols = rows == 2 ? 2560 : rows % 2 ? 300 : 640, width = (rows == 33 ? 280 : 40) + rows % 30;
        Matrix gate(random, width, cols, rows % 3 == 0), up_matrix(random, width, cols, rows % 4 == 0);
        Input x(random, rows, cols);
        for (u32 activation : {ACTIVATION_SQUARED_RELU, ACTIVATION_SILU}) {
            vector<float> want(size_t(rows) * width);
            for (u32 r = 0; r < rows; r++)
                for (u32 o = 0; o < width; o++) {
                    const i8* q = &x.q[size_t(r) * x.stride];
                    want[size_t(r) * width + o] = reference::gate(activation, gate.output(q, x.scales[r], o), up_matrix.output(q, x.scales[r], o));
                }
            for (auto [kernel, early] : early_and_late(GATE)) {
                emulate::copies_early = early;
                vector<float> out(want.size(), -7.0f);
                LinearArgs args = x.args(kernel.name);
                args.segments[0] = gate.segment(out);
                args.segments[1] = up_matrix.segment(out);
                args.segment_count = 2;
                args.activation = activation;
                u32 tiles = up(width, 16);
                run(kernel.name, {up(tiles, kernel.tiles), up(rows, kernel.tokens), 1}, kernel.warps * 32, kernel.shared, args);
                expect_same(out, want, std::string(kernel.name) + ", rows " + std::to_string(rows));
            }
        }
    }
}

// Compares a linear of one row with its norms with the separate definitions.
void one_row() {
    for (u32 cols : {101, 640, 1300}) {
        for (u32 norm_count : {0, 1, 2}) {
            Random random(cols + norm_count);
            u32 stride = padded(cols, 128), warps = 1 + norm_count * 2;
            Matrix a(random, 40, cols, false), b(random, 40, cols, true);
            vector<float> x = random.values(cols), w = random.values(cols), w2 = random.values(cols), v = x;
            if (norm_count > 0) v = reference::rms_norm(v.data(), w.data(), cols, EPS);
            if (norm_count > 1) v = reference::rms_norm(v.data(), w2.data(), cols, 1e-6f);
            vector<i8> q(stride);
            float s = reference::quantize(v, q.data());
            vector<float> residual = random.values(80), out_a(residual.begin(), residual.begin() + 40);
            vector<float> out_b(residual.begin() + 40, residual.end()), gate(40), want_a, want_b, want_gate;
            for (u32 o = 0; o < 40; o++) {
                float y = a.output(q.data(), s, o), z = b.output(q.data(), s, o);
                want_a.push_back(out_a[o] + y), want_b.push_back(out_b[o] + z);
                want_gate.push_back(reference::gate(ACTIVATION_SILU, y, z));
            }
            Step step{1, 0, 0, 0};
            LinearArgs linear{&step, nullptr, nullptr, nullptr, {a.segment(out_a), b.segment(out_b), {}}, 2, stride / 128, LINEAR_ADD, ACTIVATION_SILU};
            NormLinearArgs args{linear, x.data(), norm_count > 0 ? w.data() : nullptr, norm_count > 1 ? w2.data() : nullptr, cols, EPS, 1e-6f, 0};
            run("linear_one", {6, 1, 1}, warps * 32, warps * 2048 + stride * 5, args);
            expect_same(out_a, want_a, "linear_one"), expect_same(out_b, want_b, "linear_one");
            args.linear.segments[0].out = gate.data();
            run("gate_one", {3, 1, 1}, warps * 32, warps * 4096 + stride * 5, args);
            expect_same(gate, want_gate, "gate_one");
        }
    }
}

// Compares the division by a shared divisor with plain division.
void divisions() {
    Random random(11);
    for (u32 i = 0; i < 3000000; i++) {
        u32 bits = random.next() & 0x7fffffff;
        // All divisors; most have a magnitude that is typical of scales.
        float d = i % 4 == 0 ? __uint_as_float(bits) : __uint_as_float((bits & 0x0fffffff) + 0x38000000);
        if (i % 16 == 1) d = __uint_as_float(__float_as_uint(d) | 0x7fffff);
        i32 a = i32(random.next()) >> (i % 31);
        float got = divided(float(a), divisor(d)), want = float(a) / d;
        if (bits_of(got) != bits_of(want) && !(std::isnan(got) && std::isnan(want))) printf("%d / %a: %a, not %a\n", a, d, got, want), exit(1);
    }
}

void norms() {
    for (u32 width : {5, 16, 100, 640, 2561}) {
        Random random(width);
        u32 rows = 9, stride = padded(width, 128);
        Step step{rows, 0, rows, 0};
        vector<float> x = random.values(rows * width), w = random.values(width), w2 = random.values(width);
        for (u32 i = 0; i < width; i++) {
            x[1 * width + i] *= 1e30f;   // squares overflow
            x[2 * width + i] *= 1e-30f;  // squares vanish
            x[3 * width + i] = 0.0f;
        }
        x[4 * width] = INFINITY;
        x[5 * width + width / 2] = NAN;
        for (u32 norm_count : {0, 1, 2}) {
            vector<i8> q(rows * stride, 77), want(rows * stride, 0);
            vector<float> scales(rows), want_scales(rows);
            vector<i32> sums(rows), want_sums(rows, 0);
            for (u32 r = 0; r < rows; r++) {
                vector<float> v(x.begin() + r * width, x.begin() + (r + 1) * width);
                if (norm_count > 0) v = reference::rms_norm(v.data(), w.data(), width, EPS);
                if (norm_count > 1) v = reference::rms_norm(v.data(), w2.data(), width, 1e-6f);
                want_scales[r] = reference::quantize(v, &want[r * stride]);
                for (u32 i = 0; i < width; i++) want_sums[r] += want[r * stride + i];
            }
            NormQuantizeArgs args{&step, x.data(), norm_count > 0 ? w.data() : nullptr, norm_count > 1 ? w2.data() : nullptr,
                                  q.data(), scales.data(), sums.data(), width, stride, EPS, 1e-6f, ORDER_PLAIN, 0};
            for (u32 order : {ORDER_PLAIN, ORDER_WGMMA}) {
                args.order = order;
                run("norm_quantize", {rows + 2, 1, 1}, width % 2 ? 512 : width == 640 ? 32 : 256, 4 * stride, args);
                expect_same(scales, want_scales, "scales");
                expect_equal(q, order == ORDER_WGMMA ? ordered(want) : want, "quantized");
                expect_equal(sums, want_sums, "sums");
            }
        }
        vector<u32> wanted = {3, 0, 8, 1, 2, 4, 5, 6, 7};
        vector<float> out(rows * width), want;
        for (u32 r : wanted) {
            auto row = reference::rms_norm(&x[r * width], w.data(), width, EPS);
            want.insert(want.end(), row.begin(), row.end());
        }
        run("final_norm", {rows + 1, 1, 1}, 256, 4 * stride,
            FinalNormArgs{&step, wanted.data(), x.data(), w.data(), out.data(), width, EPS});
        expect_same(out, want, "final_norm");
    }
}

void embeddings() {
    Random random(3);
    u32 width = 100, vocab = 50, rows = 7;
    Step step{rows, 0, 0, 0};
    vector<float> wide = random.values(vocab * width);
    vector<u16> half(wide.size()), brain(wide.size());
    for (size_t i = 0; i < wide.size(); i++) half[i] = reference::narrow(wide[i] * 1e-6f), brain[i] = u16(bits_of(wide[i]) >> 16);
    vector<u32> tokens = {49, 0, 3, 3, 7, 20, 1}, carried = {5, 7, 49};
    // Two of them are carried.
    vector<u32> given = tokens;
    given[0] = IS_CARRIED | 2, given[4] = IS_CARRIED | 1;
    for (auto [dtype, factor] : {std::pair{DTYPE_F32, 12.1f}, {DTYPE_F16, 1.0f}, {DTYPE_F16, 0.7f}, {DTYPE_BF16, 12.1f}}) {
        const void* table = dtype == DTYPE_F32 ? (void*)wide.data() : dtype == DTYPE_F16 ? (void*)half.data() : (void*)brain.data();
        vector<float> out(rows * width), want;
        for (u32 t : tokens)
            for (u32 i = 0; i < width; i++) {
                u32 at = t * width + i;
                float element = dtype == DTYPE_F32 ? wide[at] : dtype == DTYPE_F16 ? reference::widen(half[at]) : __uint_as_float(u32(brain[at]) << 16);
                want.push_back(element * factor);
            }
        run("embed", {rows + 3, 1, 1}, 256, 0, EmbedArgs{&step, given.data(), carried.data(), table, out.data(), width, dtype, factor, 0});
        expect_same(out, want, "embed");
    }
}

}  // namespace

void test_linear() {
    test("embeddings", embeddings);
    test("norms and quantization", norms);
    test("linears", linear_segments);
    test("gates", gates);
    test("one row", one_row);
    test("divisions", divisions);
}
