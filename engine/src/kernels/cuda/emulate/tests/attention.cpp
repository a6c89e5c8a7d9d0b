// Compares RoPE, KV writes and both forms of attention with the definition, query by query. A step has several
// sequences; their earlier positions are in the pool.

#include "lanes.cuh"
#include "reference.h"
#include "tests.h"

namespace {

struct Shape {
    u32 heads, kv_heads, head_dim;
};

struct Sequence {
    u32 position, rows;  // first position and number of rows in the step
    vector<u32> blocks;
};

constexpr u32 LAYERS = 2, LAYER = 1;

// The element type of stored keys and values.
enum class Kv { F16, F32, Q8 };

// A step over some sequences, and a copy of the content of the pool as plain floats.
struct Setup {
    Shape shape;
    Kv kv;
    u32 padded_dim, size, block_count;
    vector<Sequence> sequences;
    vector<u8> pool_bytes;
    vector<float> keys_of_pool, values_of_pool;          // (block, 16, kv_head, head_dim)
    vector<float> key_scales_of_pool, value_scales_of_pool;  // (block, 16, kv_head): 1 for formats without scales
    Step step;
    vector<u32> positions, tables, blocks;
    vector<float> queries, keys, values, rotations;
    u32 context;

    Setup(Shape shape, Kv kv, const vector<std::pair<u32, u32>>& spans, u64 seed)
        : shape(shape), kv(kv), padded_dim(padded(shape.head_dim, 16)), size(kv == Kv::F16 ? 2 : kv == Kv::F32 ? 4 : 1) {
        Random random(seed);
        u32 needed = 0, rows = 0;
        context = 0;
        for (auto [position, count] : spans) {
            needed += up(position + count, 16), rows += count;
            context = std::max(context, position + count);
        }
        block_count = needed + 3;
        vector<u32> ids(block_count);
        for (u32 i = 0; i < block_count; i++) ids[i] = i;
        for (u32 i = block_count; i > 1; i--) std::swap(ids[i - 1], ids[random.below(i)]);
        u32 used = 0;
        for (auto [position, count] : spans) {
            u32 n = up(position + count, 16), start = u32(blocks.size());
            vector<u32> table(ids.begin() + used, ids.begin() + used + n);
            used += n;
            blocks.insert(blocks.end(), table.begin(), table.end());
            for (u32 i = 0; i < count; i++) positions.push_back(position + i), tables.push_back(start);
            sequences.push_back({position, count, table});
        }
        step = {rows, 0, 0, 0};
        // Unwritten values are NaN.
        pool_bytes.assign(block_count * block_bytes(), 0xff);
        keys_of_pool.assign(size_t(block_count) * 16 * shape.kv_heads * shape.head_dim, NAN);
        values_of_pool = keys_of_pool;
        key_scales_of_pool.assign(size_t(block_count) * 16 * shape.kv_heads, 1.0f);
        value_scales_of_pool = key_scales_of_pool;
        u32 width = shape.kv_heads * shape.head_dim;
        for (const Sequence& s : sequences) {
            for (u32 p = 0; p < s.position; p++) {
                auto k = random.values(width), v = random.values(width);
                for (float& x : k) x *= 0.1f;
                write(s.blocks[p / 16], p % 16, k, v);
            }
        }
        queries = random.values(rows * shape.heads * shape.head_dim);
        keys = random.values(rows * width);
        values = random.values(rows * width);
        for (float& x : keys) x *= 0.1f;
        values[0] = 1e6f, values[1] = -INFINITY, values[2] = 1e-7f;
        if (kv != Kv::F32) keys[3] = NAN;
        // Scores of this query are so far apart that whole segments have no weight.
        if (kv == Kv::Q8) queries.back() = INFINITY;
        rotations = random.values(context * shape.head_dim);
        for (float& x : rotations) x = cosf(x);
    }

    size_t head_bytes() const { return 16 * (padded_dim * size + (kv == Kv::Q8 ? 4 : 0)); }
    size_t block_bytes() const { return size_t(LAYERS) * 2 * shape.kv_heads * head_bytes(); }

    KvPool pool() {
        return {pool_bytes.data(), block_bytes(), LAYER * (block_bytes() / LAYERS), shape.kv_heads, shape.head_dim, padded_dim, shape.heads};
    }

    // Writes the keys or values of a head and position to the pool, in the layout of README.md, and as floats.
    void put(u32 block, u32 head, u32 slot, const float* from, bool keys, float* plain, float& scale) {
        u32 c = 16 / size;
        u8* at = &pool_bytes[block * block_bytes() + LAYER * (block_bytes() / LAYERS) + head * head_bytes()];
        if (kv == Kv::Q8) {
            scale = reference::int8_scale(from, shape.head_dim);
            memcpy(at + 16 * padded_dim + 4 * slot, &scale, 4);
        }
        for (u32 d = 0; d < shape.head_dim; d++) {
            u32 element = keys ? ((d / c) * 16 + slot) * c + d % c : (slot / c * padded_dim + d) * c + slot % c;
            u16 half = reference::narrow(from[d]);
            i8 byte = kv == Kv::Q8 ? reference::narrow_int8(from[d], scale) : i8(0);
            const void* stored = kv == Kv::F16 ? (void*)&half : kv == Kv::F32 ? (void*)&from[d] : (void*)&byte;
            memcpy(at + element * size, stored, size);
            plain[d] = kv == Kv::F16 ? reference::widen(half) : kv == Kv::F32 ? from[d] : float(byte);
        }
    }

    // Writes all heads of a position.
    void write(u32 block, u32 slot, const vector<float>& k, const vector<float>& v) {
        u32 dim = shape.head_dim;
        for (u32 head = 0; head < shape.kv_heads; head++) {
            size_t plain = (size_t(block) * 16 + slot) * shape.kv_heads + head;
            put(block, head, slot, &k[head * dim], true, &keys_of_pool[plain * dim], key_scales_of_pool[plain]);
            put(block, shape.kv_heads + head, slot, &v[head * dim], false, &values_of_pool[plain * dim], value_scales_of_pool[plain]);
        }
    }

    // Applies RoPE and writes keys and values for the whole step, by the definition.
    void rotate_and_write() {
        u32 dim = shape.head_dim, h = dim / 2, width = shape.kv_heads * dim;
        auto rotate = [&](float* head, u32 position) {
            const float *cos = &rotations[position * dim], *sin = cos + h;
            for (u32 j = 0; j < h; j++) {
                float a = head[j], b = head[j + h];
                head[j] = a * cos[j] - b * sin[j];
                head[j + h] = b * cos[j] + a * sin[j];
            }
        };
        for (u32 r = 0; r < step.rows; r++) {
            for (u32 i = 0; i < shape.heads; i++) rotate(&queries[(r * shape.heads + i) * dim], positions[r]);
            vector<float> k(keys.begin() + r * width, keys.begin() + (r + 1) * width);
            vector<float> v(values.begin() + r * width, values.begin() + (r + 1) * width);
            for (u32 i = 0; i < shape.kv_heads; i++) rotate(&k[i * dim], positions[r]);
            write(blocks[tables[r] + positions[r] / 16], positions[r] % 16, k, v);
        }
    }

    vector<float> attention() const {
        u32 dim = shape.head_dim, group = shape.heads / shape.kv_heads;
        vector<float> out(size_t(step.rows) * shape.heads * dim);
        for (u32 r = 0; r < step.rows; r++) {
            for (u32 head = 0; head < shape.heads; head++) {
                size_t query = (size_t(r) * shape.heads + head) * dim;
                vector<size_t> places(positions[r] + 1);
                for (u32 p = 0; p <= positions[r]; p++) {
                    places[p] = (size_t(blocks[tables[r] + p / 16]) * 16 + p % 16) * shape.kv_heads + head / group;
                }
                vector<float> weights = kv == Kv::Q8 ? scores_q8(&queries[query], places) : scores(&queries[query], places);
                float largest = -INFINITY, lanes[16] = {};
                for (float score : weights) largest = reference::max_of(score, largest);
                for (u32 p = 0; p < places.size(); p++) {
                    weights[p] = reference::exp_of(weights[p] - largest);
                    lanes[p % 16] = lanes[p % 16] + weights[p];
                }
                float total = reference::sum_of(lanes);
                vector<float> sums = kv == Kv::Q8 ? weighted_q8(weights, places) : weighted(weights, places);
                for (u32 d = 0; d < dim; d++) out[query + d] = sums[d] / total;
            }
        }
        return out;
    }

    // Scores of a query for the positions at `places` in the pool, and sums of their values.
    vector<float> scores(const float* query, const vector<size_t>& places) const {
        u32 dim = shape.head_dim;
        vector<float> out;
        for (size_t place : places) {
            float sum = 0.0f;
            for (u32 d = 0; d < dim; d++) sum = fmaf(query[d], keys_of_pool[place * dim + d], sum);
            out.push_back(sum * (1.0f / sqrtf(float(dim))));
        }
        return out;
    }
    vector<float> weighted(const vector<float>& weights, const vector<size_t>& places) const {
        u32 dim = shape.head_dim;
        vector<float> out(dim);
        for (u32 p = 0; p < places.size(); p++) {
            for (u32 d = 0; d < dim; d++) out[d] = fmaf(weights[p], values_of_pool[places[p] * dim + d], out[d]);
        }
        return out;
    }

    // The same for int8 keys and values.
    vector<float> scores_q8(const float* query, const vector<size_t>& places) const {
        u32 dim = shape.head_dim;
        float query_scale = reference::int8_scale(query, dim), factor = 1.0f / sqrtf(float(dim)) * query_scale;
        vector<float> out;
        for (size_t place : places) {
            i64 sum = 0;
            for (u32 d = 0; d < dim; d++) sum += i64(reference::narrow_int8(query[d], query_scale)) * i64(keys_of_pool[place * dim + d]);
            out.push_back(float(sum) * (key_scales_of_pool[place] * factor));
        }
        return out;
    }
    vector<float> weighted_q8(const vector<float>& weights, const vector<size_t>& places) const {
        u32 dim = shape.head_dim, count = u32(places.size());
        vector<float> out(dim);
        for (u32 first = 0; first < count; first += 128) {
            u32 end = std::min(first + 128, count);
            auto factor = [&](u32 p) { return weights[p] * value_scales_of_pool[places[p]]; };
            float largest = 1e-30f;
            for (u32 p = first; p < end; p++) largest = reference::max_of(factor(p), largest);
            for (u32 d = 0; d < dim; d++) {
                i64 sum = 0;
                for (u32 p = first; p < end; p++) {
                    sum += i64(nearbyintf(factor(p) * (32767.0f / largest))) * i64(values_of_pool[places[p] * dim + d]);
                }
                out[d] = fmaf(float(sum), largest / 32767.0f, out[d]);
            }
        }
        return out;
    }

    // Returns the tasks of the step, each with at most `queries_max` queries and `rows_max` rows.
    vector<AttentionTask> tasks(u32 queries_max, u32 rows_max) const {
        vector<AttentionTask> out;
        u32 group = shape.heads / shape.kv_heads, heads_max = std::min(group, queries_max), first = 0;
        for (const Sequence& s : sequences) {
            for (u32 kv = 0; kv < shape.kv_heads; kv++)
                for (u32 h = 0; h < group; h += heads_max) {
                    u32 heads = std::min(heads_max, group - h), step_rows = std::min(rows_max, queries_max / heads);
                    for (u32 r = 0; r < s.rows; r += step_rows)
                        out.push_back({first + r, std::min(step_rows, s.rows - r), kv * group + h, heads, s.position + r, tables[first]});
                }
            first += s.rows;
        }
        return out;
    }
};

// Compares attend_tile*_q8 on a step whose keys and values are in the pool; tasks have 64 queries or fewer.
void check_tiles(Setup& device, const vector<float>& attended, const std::string& what) {
    u32 padded_dim = device.padded_dim, head_dim = device.shape.head_dim;
    for (u32 variant = 0; variant < 3; variant++) {
        auto tasks = device.tasks(variant == 1 ? 23 : 64, 99);
        device.step.tasks = u32(tasks.size());
        tasks.resize(tasks.size() + 2);
        vector<float> out(attended.size(), NAN);
        AttentionArgs args{&device.step, tasks.data(), device.blocks.data(), device.queries.data(), out.data(), nullptr, nullptr,
                           device.pool(), 0, 1.0f / sqrtf(float(head_dim))};
        const char* kernel = variant == 2 || padded_dim > 128 ? "attend_tile256_q8" : "attend_tile128_q8";
        run(kernel, {1 + 2 * variant, 1, 1}, 128, 3 * 128 * (padded_dim + 8), args);
        expect_same(out, attended, kernel + (", variant " + std::to_string(variant)) + what);
    }
}

void check(Shape shape, Kv kv, const vector<std::pair<u32, u32>>& spans) {
    Setup device(shape, kv, spans, 7 + shape.head_dim), want(shape, kv, spans, 7 + shape.head_dim);
    std::string suffix = kv == Kv::F16 ? "_f16" : kv == Kv::F32 ? "_f32" : "_q8";
    std::string what = suffix + ", head_dim " + std::to_string(shape.head_dim);
    want.rotate_and_write();
    run(("rotate_store" + suffix).c_str(), {device.step.rows + 1, 1, 1}, 256, 0,
        RotateStoreArgs{&device.step, device.positions.data(), device.tables.data(), device.blocks.data(), device.queries.data(),
                        device.keys.data(), device.values.data(), device.rotations.data(), device.pool()});
    expect_same(device.queries, want.queries, "rotated queries" + what);
    expect_equal(device.pool_bytes, want.pool_bytes, "pool" + what);
    vector<float> attended = want.attention();
    u32 stride = padded(device.context, 128), padded_dim = device.padded_dim;
    bool single = true, is_short = true;
    for (auto [position, count] : spans) single &= count == 1, is_short &= position < (kv == Kv::F32 ? 256 : 512);
    for (u32 variant = 0; variant < (!single ? 3 : is_short ? 9 : 6); variant++) {
        u32 queries = variant == 1 ? 8 : 4;
        auto tasks = device.tasks(queries, variant >= 2 ? 1 : 9);
        device.step.tasks = u32(tasks.size());
        u32 warps = 3 + variant % 2, grid = 2 + variant;
        vector<float> scores(std::max(tasks.size(), size_t(grid) * warps) * queries * stride, NAN);
        vector<float> maxima(tasks.size() * 4 * stride / 32, NAN), out(attended.size(), NAN);
        tasks.resize(tasks.size() + 2);
        AttentionArgs args{&device.step, tasks.data(), device.blocks.data(), device.queries.data(),
                           out.data(), scores.data(), maxima.data(), device.pool(), stride, 1.0f / sqrtf(float(shape.head_dim))};
        if (variant < 3) {
            run(((queries == 8 ? "attend8" : "attend4") + suffix).c_str(), {grid, 1, 1}, warps * 32, warps * queries * (padded_dim + 128) * 4, args);
        } else {
            u32 bucket = u32(tasks.size());
            u32 shared = warps * 4 * padded_dim * 4, together = 1u << (variant % 3);
            Setup fresh(shape, kv, spans, 7 + shape.head_dim);
            args.queries = fresh.queries.data();
            args.pool = fresh.pool();
            device.pool_bytes = fresh.pool_bytes;
            args.pool.base = device.pool_bytes.data();
            RotateScoresArgs whole{args, device.keys.data(), device.values.data(), device.rotations.data()};
            if (variant >= 6) {
                u32 many = std::array<u32, 3>{4, 7, 16}[variant - 6];
                run(("attend_short" + suffix).c_str(), {bucket, up(padded_dim, 32), 1}, many * 32, many * 4 * padded_dim * 4, whole);
                expect_equal(device.pool_bytes, want.pool_bytes, "pool of attend_short" + what);
                expect_same(out, attended, "attention variant " + std::to_string(variant) + what);
                continue;
            }
            run(("rotate_scores" + suffix).c_str(), {bucket, variant, 1}, warps * 32, shared,
                whole);
            expect_equal(device.pool_bytes, want.pool_bytes, "pool of rotate_scores" + what);
            run(("attend_values" + suffix).c_str(), {bucket, up(padded_dim, 32), 4 / together}, together * 32, 0, args);
        }
        expect_same(out, attended, "attention variant " + std::to_string(variant) + what);
    }
    if (kv == Kv::Q8) check_tiles(device, attended, what);
}

void attention() {
    for (Kv kv : {Kv::F16, Kv::F32, Kv::Q8}) {
        check({4, 1, 128}, kv, {{0, 1}, {15, 1}, {16, 1}, {127, 1}, {128, 1}, {300, 1}, {3, 5}, {30, 19}});
        check({6, 2, 20}, kv, {{0, 33}, {500, 1}, {31, 2}});
        check({2, 2, 64}, kv, {{63, 9}, {0, 1}});
        check({4, 1, 128}, kv, {{0, 1}, {31, 1}, {32, 1}, {200, 1}});
        check({12, 2, 20}, kv, {{95, 1}, {7, 1}});
        check({4, 1, 48}, kv, {{255, 1}, {128, 1}, {127, 1}, {63, 1}, {64, 1}});
        check({4, 1, 32}, kv, {{511, 1}, {384, 1}, {256, 1}});
        check({10, 1, 80}, kv, {{40, 3}, {0, 2}});
        check({3, 1, 256}, kv, {{5, 4}, {140, 1}});
        // Block tables that span several windows.
        check({4, 1, 32}, kv, {{511, 1}, {512, 1}, {1023, 1}, {1700, 1}});
        check({2, 1, 32}, kv, {{1020, 9}, {505, 12}});
    }
}

// Groups of all sizes and elements that are odd multiples of 16, with tasks that begin inside a block or end after the
// first position of a segment.
void tiles() {
    check({5, 1, 112}, Kv::Q8, {{0, 140}, {7, 1}});
    check({8, 1, 48}, Kv::Q8, {{120, 30}, {250, 12}});
    check({4, 4, 96}, Kv::Q8, {{100, 29}, {255, 70}});
    check({16, 2, 144}, Kv::Q8, {{127, 3}, {370, 20}});
    check({70, 1, 16}, Kv::Q8, {{13, 5}, {128, 1}});
    // Tasks that leave warps idle; these copy the next task early.
    check({2, 1, 256}, Kv::Q8, {{190, 3}, {200, 2}});
}

// One position has nearly all the weight and values of zero, so the outputs are those of weights near 1e-30.
void least_factors() {
    Setup device({1, 1, 16}, Kv::Q8, {{130, 1}}, 1);
    for (u32 p = 0; p <= 130; p++) {
        vector<float> key(16, 0.0f), value(16, p == 0 ? 0.0f : float(p));
        if (p == 0) key[0] = 10.0f;
        device.write(device.blocks[p / 16], p % 16, key, value);
    }
    device.queries.assign(16, 0.0f);
    device.queries[0] = 28.0f;
    check_tiles(device, device.attention(), "_q8, least factors");
}

// Compares exponentials for every 997th float.
void exponentials() {
    for (u64 bits = 0; bits < 1ull << 32; bits += 997) {
        float x = __uint_as_float(u32(bits));
        if (bits_of(exp_lane(x)) != bits_of(reference::exp_of(x))) printf("exp(%a)\n", x), exit(1);
    }
    for (float x : {0.0f, -0.0f, INFINITY, -INFINITY}) expect_same({exp_lane(x)}, {reference::exp_of(x)}, "exp");
}

}  // namespace

void test_attention() {
    test("attention", attention);
    test("attention by tiles", tiles);
    test("least factors", least_factors);
    test("exponentials", exponentials);
}
