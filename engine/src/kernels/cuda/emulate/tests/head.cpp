// Tests of the logits: all logits, and the largest logits by the screen.

#include "reference.h"
#include "tests.h"

#include "noise.cuh"

namespace {

struct HeadRows {
    u32 vocab, width;
    const char* suffix;
    vector<float> wide;  // the stored rows, widened
    vector<float> f32;
    vector<u16> words;
    vector<i8> bytes;
    vector<float> scales;
    const void* stored;

    // Each row but the first of so many consecutive rows repeats that one.
    HeadRows(Random& random, u32 vocab, u32 width, u32 dtype, u32 repeats = 1) : vocab(vocab), width(width), wide(random.values(size_t(vocab) * width)) {
        for (u32 row = 0; row < vocab; row++)
            if (row % repeats) std::copy_n(&wide[size_t(row / repeats * repeats) * width], width, &wide[size_t(row) * width]);
        static const char* names[4] = {"_f32", "_f16", "_bf16", "_i8"};
        suffix = names[dtype];
        words.resize(wide.size()), bytes.resize(wide.size());
        for (size_t i = 0; i < wide.size(); i++) {
            if (dtype == DTYPE_F16) words[i] = reference::narrow(wide[i]), wide[i] = reference::widen(words[i]);
            if (dtype == DTYPE_BF16) words[i] = u16(bits_of(wide[i]) >> 16), wide[i] = __uint_as_float(u32(words[i]) << 16);
            if (dtype == DTYPE_I8) bytes[i] = i8(wide[i] * 4), wide[i] = bytes[i];
        }
        if (dtype == DTYPE_I8) scales = random.values(vocab);
        f32 = wide;
        stored = dtype == DTYPE_F32 ? (void*)f32.data() : dtype == DTYPE_I8 ? (void*)bytes.data() : (void*)words.data();
    }
    float logit(u32 row, const float* x) const {
        float sum = reference::dot(&wide[size_t(row) * width], x, width);
        return scales.empty() ? sum : sum * scales[row];
    }
    const float* scales_or_null() const { return scales.empty() ? nullptr : scales.data(); }
};

void all_logits() {
    for (u32 dtype : {DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8}) {
        for (auto [vocab, width, rows] : {std::array<u32, 3>{130, 64, 1}, {77, 100, 5}, {300, 640, 9}, {3, 16, 2}}) {
            Random random(vocab + dtype);
            HeadRows head(random, vocab, width, dtype);
            Step step{0, 0, rows, 0};
            vector<float> x = random.values(rows * width), out(rows * vocab, NAN), want;
            for (u32 r = 0; r < rows; r++)
                for (u32 v = 0; v < vocab; v++) want.push_back(head.logit(v, &x[r * width]));
            run((std::string("head") + head.suffix).c_str(), {up(rows, 4) + 1, up(vocab, 128), 1}, 128, 0,
                HeadArgs{&step, head.stored, head.scales_or_null(), x.data(), out.data(), width, vocab});
            expect_same(out, want, std::string("head") + head.suffix);
        }
    }
}

// The int8 copy of the head in the layout of the device, quantized as in backend/cpu/screen.rs.
struct Copy {
    u32 groups, k_blocks;
    vector<uint4> packed;
    vector<float> scales, errors, norms;

    explicit Copy(const HeadRows& head) : groups(up(head.vocab, 16)), k_blocks(up(head.width, 128)) {
        packed.assign(size_t(groups) * k_blocks * 4 * 32, {});
        scales.assign(groups * 16, 0.0f);
        errors = norms = scales;
        vector<i8> plain(size_t(groups) * 16 * k_blocks * 128, 0);
        for (u32 row = 0; row < head.vocab; row++) {
            const float* w = &head.wide[size_t(row) * head.width];
            float largest = 0.0f;
            for (u32 k = 0; k < head.width; k++) largest = fmaxf(largest, fabsf(w[k]));
            float scale = scales[row] = largest > 0.0f ? largest / 127.0f : 1.0f;
            double error = 0, norm = 0;
            for (u32 k = 0; k < head.width; k++) {
                float nearest = nearbyintf(std::clamp(w[k] / scale, -127.0f, 127.0f));
                double value = double(nearest) * scale, left = w[k] - value;
                error += left * left, norm += value * value;
                plain[size_t(row) * k_blocks * 128 + k] = i8(nearest);
            }
            errors[row] = float(sqrt(error)) * 1.00001f, norms[row] = float(sqrt(norm)) * 1.00001f;
        }
        i8* bytes = reinterpret_cast<i8*>(packed.data());
        for (u32 t = 0; t < groups; t++)
            for (u32 c = 0; c < 2 * k_blocks; c++)
                for (u32 s = 0; s < 2; s++)
                    for (u32 l = 0; l < 32; l++)
                        for (u32 j = 0; j < 4; j++)
                            for (u32 i = 0; i < 4; i++) {
                                u32 row = 16 * t + l / 4 + 8 * (j & 1);
                                u32 col = 64 * c + 16 * (l % 4) + 8 * s + 4 * (j / 2) + i;
                                bytes[((size_t(t) * 4 * k_blocks + 2 * c + s) * 32 + l) * 16 + 4 * j + i] = plain[size_t(row) * k_blocks * 128 + col];
                            }
    }
};

struct Variant {
    const char* name;
    u32 groups, columns, warps, shared;
};

// A question of each kind in turn: largest logits, with noise, the first token of either, and all within some distance.
RowQuestion some_ranking(Random& random, u32 groups, u32 row) {
    RowQuestion question = {1 + random.below(std::min(groups, 24u)), 0.0f, 0.0f, 0, {}};
    for (u32& key : question.keys) key = random.below(~0u);
    // Logits are of the order of a thousand.
    if (row % 2) question.temperature = row % 3 ? 500.0f : 50.0f;
    if (row % 4 > 1) question.count = question.single = 1;
    if (row % 5 == 4) question.within = 700.0f, question.single = 0;
    return question;
}

// `GumbelNoise::of_token` of engine/src/sampling/gumbel.rs, with the logarithm of the C library.
double noise_from(u32 first, u32 second) { return -log(-log1p(-(double(2 * (u64(first) << 20 | second >> 12) + 1) / 9007199254740992.0))); }

double noise(const RowQuestion& question, u32 token) {
    return noise_from(noise_bits(token, question.keys[0], question.keys[1]), noise_bits(token, question.keys[2], question.keys[3]));
}

void noise_values_and_bounds() {
    Random random(5);
    for (u32 i = 0; i < 3000000; i++) {
        u32 first = i < 1000 ? i : i < 2000 ? ~0u - (i - 1000) : i < 4000 ? (1u << 27) - 1000 + i - 2000 : random.below(~0u);
        if (i % 3 == 0) first >>= random.below(20);
        float lowest, highest;
        noise_bounds(first, lowest, highest);
        double least = noise_from(first, ~0u), most = noise_from(first, 0);
        if (!(lowest <= least && most <= highest)) printf("bits %x: %f to %f, bounds %f, %f\n", first, least, most, lowest, highest), exit(1);
        bool is_close = least > 0.0 && most < 11;
        if (is_close && highest - lowest > 0.7) printf("bits %x: loose bounds %f, %f\n", first, lowest, highest), exit(1);
        u32 keys[4] = {first, i, i * 7, first ^ i};
        double value = noise_of(keys, i), wanted = noise_from(noise_bits(i, first, i), noise_bits(i, i * 7, first ^ i));
        if (!(fabs(value - wanted) <= 1e-13 * (1 + fabs(wanted)))) printf("noise %.17g, not %.17g\n", value, wanted), exit(1);
    }
}

u32 decided, undecided;

// The first token of a row that needs a single one, unless several have its value or a candidate is NaN.
void check_drawn(const RowQuestion& question, const vector<double>& values, Found drawn, const vector<float>& logits, u32 after, u32 candidates, u32 capacity) {
    u32 best = 0, equal = 0;
    bool unordered = false;
    for (double value : values) unordered |= std::isnan(value);
    for (u32 v = 1; v < values.size(); v++) {
        if (values[v] > values[best]) best = v, equal = 0;
        else equal += values[v] == values[best];
    }
    if (question.single) (equal || unordered ? undecided : decided)++;
    if (!question.single) {
        if (drawn.token != ~0u || after != candidates) printf("a row drew that needs several tokens\n"), exit(1);
    } else if (equal || unordered) {
        if (after != capacity + 1) printf("an undecided row drew %u of %u\n", drawn.token, candidates), exit(1);
    } else if (drawn.token != best || drawn.logit != logits[best] || after != candidates) {
        printf("drew %u, not %u\n", drawn.token, best), exit(1);
    }
}

void check_screen(u32 vocab, u32 width, u32 rows, u32 dtype, u32 digit_count, Variant variant, u32 index) {
    Random random(vocab + rows + dtype);
    bool odd = index % 7 == 0, loose = index % 3 == 1;
    HeadRows head(random, vocab, width, dtype, index % 10 == 5 ? 64 : index % 5 == 0 ? 2 : 1);
    Copy copy(head);
    // Bounds may be loose: then there are many candidates.
    if (loose) for (float& error : copy.errors) error *= 60;
    u32 stride = copy.k_blocks * 128, capacity = vocab, residual_rows = rows + 3;
    Step step{residual_rows, 0, 0, rows};
    vector<float> residual = random.values(residual_rows * width), weight = random.values(width), x(rows * width, NAN);
    if (odd) residual[width] = INFINITY;
    vector<u32> wanted(rows), found_counts(rows);
    vector<RowQuestion> questions(rows);
    for (u32 r = 0; r < rows; r++) wanted[r] = (r + 1) % residual_rows, questions[r] = some_ranking(random, copy.groups, r);
    vector<i8> digits(size_t(rows) * digit_count * stride, 99);
    vector<DigitRow> of_rows(rows);
    vector<float> estimates(size_t(rows) * copy.groups * 16), lowest(rows * copy.groups), highest(rows * copy.groups);
    vector<Found> found(size_t(rows) * capacity, {~0u, NAN});
    run("digits", {rows + 1, 1, 1}, 256, 4 * stride,
        DigitsArgs{&step, wanted.data(), residual.data(), weight.data(), x.data(), digits.data(), of_rows.data(), width, stride, digit_count, 1e-5f});
    dim3 grid = {up(copy.groups, variant.groups), up(rows * digit_count, variant.columns), 1};
    if (variant.columns == 128) std::swap(grid.x, grid.y);
    run(variant.name, grid, variant.warps * 32, variant.warps * variant.shared,
        ScreenArgs{&step, copy.packed.data(), copy.scales.data(), copy.errors.data(), copy.norms.data(), digits.data(), of_rows.data(), questions.data(),
                   estimates.data(), lowest.data(), highest.data(), vocab, copy.k_blocks, digit_count, 0});
    run("screen_select", {rows + 1, 1, 1}, 1024, 0,
        SelectArgs{&step, questions.data(), nullptr, {copy.errors.data(), copy.norms.data(), of_rows.data(), estimates.data()}, lowest.data(),
                   highest.data(), found_counts.data(), found.data(), nullptr, vocab, capacity});
    run((std::string("rescore") + head.suffix).c_str(), {3, rows, 1}, 128, 0,
        RescoreArgs{&step, head.stored, head.scales_or_null(), x.data(), nullptr, found_counts.data(), found.data(), width, capacity});
    vector<Found> drawn(rows, {~0u, NAN}), firsts = drawn;
    vector<u32> carried(rows + 5, ~0u);
    step.carry = 5;
    vector<u32> candidates = found_counts;
    run("draw", {rows + 1, 1, 1}, 32, 0, DrawArgs{&step, questions.data(), found_counts.data(), found.data(), nullptr, firsts.data(), drawn.data(), carried.data(), capacity, 0});
    size_t total = 0;
    for (u32 r = 0; r < rows; r++) {
        auto normed = reference::rms_norm(&residual[wanted[r] * width], weight.data(), width, 1e-5f);
        expect_same(vector<float>(x.begin() + r * width, x.begin() + (r + 1) * width), normed, "screened rows");
        vector<float> logits;
        for (u32 v = 0; v < vocab; v++) logits.push_back(head.logit(v, normed.data()));
        vector<bool> is_found(vocab, false);
        for (u32 i = 0; i < candidates[r]; i++) {
            Found f = found[size_t(r) * capacity + i];
            if (f.token >= vocab || is_found[f.token]) printf("token %u found twice or not there\n", f.token), exit(1);
            is_found[f.token] = true;
            expect_same({f.logit}, {logits[f.token]}, "logit of a candidate");
        }
        vector<double> values;
        for (u32 v = 0; v < vocab; v++) values.push_back(logits[v] + (questions[r].temperature ? questions[r].temperature * noise(questions[r], v) : 0.0));
        vector<double> sorted = values;
        std::sort(sorted.begin(), sorted.end(), std::greater<double>());
        double least = sorted[questions[r].count - 1] - questions[r].within;
        for (u32 v = 0; v < vocab; v++)
            if (values[v] >= least && !is_found[v]) printf("token %u of row %u is missing\n", v, r), exit(1);
        u32 wanted_carried = !questions[r].single ? ~0u : found_counts[r] > capacity ? 0 : drawn[r].token;
        if (carried[5 + r] != wanted_carried) printf("carried %u, not %u\n", carried[5 + r], wanted_carried), exit(1);
        check_drawn(questions[r], values, drawn[r], logits, found_counts[r], candidates[r], capacity);
        total += candidates[r];
    }
    // A screen that keeps every token is safe but useless, so the number of candidates is limited.
    if (!odd && !loose && vocab > 1000 && total * 3 > size_t(rows) * vocab) printf("%zu candidates of %u × %u\n", total, rows, vocab), exit(1);
}

void screens() {
    const Variant variants[] = {{"screen_n8", 2, 8, 8, 10240}, {"screen_n16", 2, 16, 3, 12288}, {"screen_n32", 2, 32, 4, 8192}, {"screen_n64", 2, 64, 1, 8192},
                                {"screen_tile", 8, 128, 8, 12288}};
    u32 index = 0;
    for (u32 rows : {1, 2, 7, 9, 33, 70})
        for (const Variant& variant : variants)
            for (u32 digit_count : {1, 2}) {
                u32 dtype = index++ % 3;
                check_screen(index % 2 ? 1200 : 530, index % 4 ? 256 : 100, rows, dtype, digit_count, variant, index);
            }
    if (decided < 300 || undecided < 30) printf("%u rows are decided, %u are not\n", decided, undecided), exit(1);
}

// The candidates of rows with all logits known, and their first tokens.
void known_logits() {
    for (u32 vocab : {33, 530, 1200}) {
        Random random(vocab);
        u32 rows = 41, groups = up(vocab, 16), capacity = vocab;
        Step step{0, 0, 0, rows, 2};
        vector<float> logits(size_t(rows) * groups * 16, NAN), lowest(rows * groups), highest(rows * groups);
        vector<RowQuestion> questions;
        for (u32 r = 0; r < rows; r++) {
            questions.push_back(some_ranking(random, groups, r));
            for (u32 v = 0; v < vocab; v++) logits[size_t(r) * groups * 16 + v] = random.value() * 300.0f;
            // Equal largest logits, and a row with one that is not a number.
            if (r % 7 == 0) logits[size_t(r) * groups * 16 + 5] = logits[size_t(r) * groups * 16 + vocab - 1] = 1e5f;
        }
        logits[size_t(9) * groups * 16 + vocab / 2] = NAN;
        vector<u32> found_counts(rows), carried(rows + 2, ~0u);
        vector<Found> found(size_t(rows) * capacity, {~0u, NAN}), drawn(rows, {~0u, NAN}), firsts = drawn;
        run("logit_bounds", {up(groups, 256) + 1, rows + 1, 1}, 256, 0,
            LogitBoundsArgs{&step, questions.data(), nullptr, {nullptr, nullptr, nullptr, logits.data()}, lowest.data(), highest.data(), vocab, 0});
        run("screen_select", {rows + 1, 1, 1}, 1024, 0,
            SelectArgs{&step, questions.data(), nullptr, {nullptr, nullptr, nullptr, logits.data()}, lowest.data(), highest.data(), found_counts.data(), found.data(), nullptr,
                       vocab, capacity});
        vector<u32> candidates = found_counts;
        run("draw", {rows + 1, 1, 1}, 32, 0, DrawArgs{&step, questions.data(), found_counts.data(), found.data(), nullptr, firsts.data(), drawn.data(), carried.data(), capacity, 0});
        for (u32 r = 0; r < rows; r++) {
            vector<float> of_row(&logits[size_t(r) * groups * 16], &logits[size_t(r) * groups * 16 + vocab]);
            vector<double> values;
            for (u32 v = 0; v < vocab; v++) values.push_back(of_row[v] + (questions[r].temperature ? questions[r].temperature * noise(questions[r], v) : 0.0));
            vector<bool> is_found(vocab, false);
            for (u32 i = 0; i < candidates[r]; i++) {
                Found f = found[size_t(r) * capacity + i];
                if (f.token >= vocab || is_found[f.token]) printf("token %u found twice or not there\n", f.token), exit(1);
                is_found[f.token] = true;
                expect_same({f.logit}, {of_row[f.token]}, "a known logit");
            }
            vector<double> sorted;
            for (double value : values) sorted.push_back(std::isnan(value) ? INFINITY : value);
            std::sort(sorted.begin(), sorted.end(), std::greater<double>());
            double least = sorted[questions[r].count - 1] - questions[r].within;
            for (u32 v = 0; v < vocab; v++)
                if (!(values[v] < least) && !is_found[v]) printf("token %u of row %u is missing\n", v, r), exit(1);
            check_drawn(questions[r], values, drawn[r], of_row, found_counts[r], candidates[r], capacity);
            if (questions[r].single && carried[2 + r] != (found_counts[r] > capacity ? 0 : drawn[r].token)) printf("carried %u\n", carried[2 + r]), exit(1);
        }
    }
}

// Distributions of rows after others that need all logits, and rows that the host has to decide.
void distributions() {
    for (u32 vocab : {3, 33, 1024, 5000}) {
        Random random(vocab);
        u32 before = 2, rows = 9, whole = before + rows;
        Step step{0, 0, whole, 0, 0, rows};
        vector<float> logits(size_t(whole) * vocab);
        for (float& logit : logits) logit = roundf(random.value() * 8.0f) * (vocab > 33 ? 0.25f : 1.0f);
        float* first = &logits[before * vocab];
        for (u32 v = 0; v < vocab; v++) {
            first[v] = 2.0f;  // all equal
            first[vocab + v] = v == vocab / 2 ? 1.0f : -INFINITY;
            first[2 * vocab + v] = -INFINITY;
            first[6 * vocab + v] *= 300.0f;  // most terms are 0
        }
        first[3 * vocab + vocab - 1] = NAN;
        first[4 * vocab + 1] = INFINITY;
        first[5 * vocab] = -0.0f;
        vector<u32> tops(whole);
        for (u32 r = 0; r < whole; r++) tops[r] = r == 5 ? 0 : r == 6 ? 1 : 20 - r;
        Distribution unset{};
        unset.is_known = 7, unset.sum = NAN;
        for (Found& found : unset.top) found = {~0u, NAN};
        vector<Distribution> out(rows, unset);
        run("distribution", {rows + 1, 1, 1}, 1024, 0, DistributionArgs{&step, tops.data(), logits.data(), out.data(), vocab, 0});
        for (u32 r = 0; r < rows; r++) {
            const float* row = first + r * vocab;
            if (out[r].is_known != (r < 2 || r > 4)) printf("row %u: %u\n", r, out[r].is_known), exit(1);
            if (!out[r].is_known) continue;
            vector<u32> order(vocab);
            for (u32 v = 0; v < vocab; v++) order[v] = v;
            std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return row[a] > row[b]; });
            double sum = 0.0;
            for (u32 v = 0; v < vocab; v++) sum += exp(double(row[v]) - row[order[0]]);
            if (out[r].largest != row[order[0]] || !(fabs(out[r].sum - sum) <= 1e-12 * sum)) printf("sum %.17g, not %.17g\n", out[r].sum, sum), exit(1);
            for (u32 i = 0; i < 20; i++) {
                Found found = out[r].top[i], wanted = unset.top[i];
                if (i < std::min(tops[before + r], vocab)) wanted = {order[i], row[order[i]]};
                if (found.token != wanted.token || !(found.logit == wanted.logit || std::isnan(wanted.logit)))
                    printf("place %u of row %u: token %u, not %u\n", i, r, found.token, wanted.token), exit(1);
            }
        }
    }
}

}  // namespace

void test_head() {
    test("all logits", all_logits);
    test("distributions", distributions);
    test("noise", noise_values_and_bounds);
    test("screens", screens);
    test("known logits", known_logits);
}
