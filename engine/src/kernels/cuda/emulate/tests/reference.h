// The definitions that the kernels are compared with, written from the Rust sources (`float/lanes.rs`,
// `float/ops.rs`, `float/attention.rs`, `backend/cpu`) as a sequence of scalar operations; and functions that make
// inputs for tests.

#pragma once
#ifndef EMULATE
#define EMULATE
#endif
#include "args.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using std::vector;

extern "C" int launch(const char* kernel, const u32 grid[3], const u32 block[3], u32 shared, void** args);

template <class Args> void run(const char* name, dim3 grid, u32 threads, u32 shared, Args args) {
    u32 grid_size[3] = {grid.x, grid.y, grid.z}, block_size[3] = {threads, 1, 1};
    void* pointers[1] = {&args};
    int code = launch(name, grid_size, block_size, shared, pointers);
    if (code != 0) printf("launch of %s: %d\n", name, code), exit(1);
}

inline u32 up(u32 value, u32 multiple) { return (value + multiple - 1) / multiple; }
inline u32 padded(u32 value, u32 multiple) { return up(value, multiple) * multiple; }

// A deterministic random number generator.
struct Random {
    u64 state;
    explicit Random(u64 seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
    u32 next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return u32(state >> 16);
    }
    u32 below(u32 end) { return next() % end; }
    // Returns a number; magnitudes vary widely.
    float value() {
        float unit = float(i32(next())) * 0x1p-31f;
        static const float spread[4] = {0.01f, 1.0f, 1.0f, 30.0f};
        return unit * spread[next() % 4];
    }
    vector<float> values(size_t count) {
        vector<float> out(count);
        for (float& v : out) v = value();
        return out;
    }
};

inline u32 bits_of(float v) { return __float_as_uint(v); }

// Compares bits; all NaNs are equal.
inline void expect_same(const vector<float>& got, const vector<float>& want, const std::string& what) {
    if (got.size() != want.size()) printf("%s: %zu, not %zu\n", what.c_str(), got.size(), want.size()), exit(1);
    for (size_t i = 0; i < got.size(); i++) {
        if (std::isnan(got[i]) && std::isnan(want[i])) continue;
        if (bits_of(got[i]) != bits_of(want[i])) {
            printf("%s: element %zu is %g (%08x), not %g (%08x)\n", what.c_str(), i, got[i], bits_of(got[i]), want[i],
                   bits_of(want[i]));
            exit(1);
        }
    }
}

template <class T> void expect_equal(const vector<T>& got, const vector<T>& want, const std::string& what) {
    for (size_t i = 0; i < want.size(); i++) {
        if (got[i] != want[i]) printf("%s: element %zu is %lld, not %lld\n", what.c_str(), i, (long long)got[i], (long long)want[i]), exit(1);
    }
}

namespace reference {

inline float max_of(float a, float b) { return a > b ? a : b; }
inline float min_of(float a, float b) { return a < b ? a : b; }

inline float exp_of(float v) {
    float x = max_of(min_of(v, 87.3f), -87.3f);
    float n = nearbyintf(x * 1.44269504088896340736f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fmaf(p, r, c);
    p = fmaf(p, r * r, r + 1.0f);
    return p * ldexpf(1.0f, int(n));
}

inline float sum_of(float (&lanes)[16]) {
    for (int width : {8, 4, 2, 1})
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] + lanes[i + width];
    return lanes[0];
}

inline float dot(const float* a, const float* b, u32 count) {
    float lanes[16] = {};
    for (u32 i = 0; i < count; i++) lanes[i % 16] = fmaf(a[i], b[i], lanes[i % 16]);
    return sum_of(lanes);
}

inline vector<float> rms_norm(const float* x, const float* weight, u32 width, float eps) {
    float mean = dot(x, x, width) / float(width);
    float inverse = 1.0f / sqrtf(mean + eps);
    vector<float> out(width);
    for (u32 i = 0; i < width; i++) out[i] = weight[i] * (x[i] * inverse);
    return out;
}

inline float quantize(const vector<float>& x, i8* q) {
    float largest = 0.0f;
    for (float v : x) largest = fabsf(v) > largest ? fabsf(v) : largest;
    float s = 127.0f / (largest > 1e-5f ? largest : 1e-5f);
    for (size_t i = 0; i < x.size(); i++) {
        float v = x[i] * s;
        v = v < 127.0f ? v : 127.0f;
        v = v > -128.0f ? v : -128.0f;
        q[i] = i8(nearbyintf(v));
    }
    return s;
}

inline float rescale(i32 a, float s, float scale, bool divide) {
    return divide ? float(a) / (s * scale) : (float(a) / s) * scale;
}

inline float gate(u32 activation, float g, float u) {
    if (activation == ACTIVATION_SQUARED_RELU) {
        float r = g > 0.0f ? g : 0.0f;
        return (r * r) * u;
    }
    return g / (exp_of(0.0f - g) + 1.0f) * u;
}

inline float saturated(float v) { return max_of(min_of(v, 65504.0f), -65504.0f); }
inline u16 narrow(float v) { return _cvtss_sh(saturated(v), 0); }
inline float widen(u16 v) { return _cvtsh_ss(v); }
inline float int8_scale(const float* x, u32 count) {
    float largest = 1e-5f;
    for (u32 i = 0; i < count; i++) largest = max_of(fabsf(saturated(x[i])), largest);
    return largest / 127.0f;
}
inline i8 narrow_int8(float v, float scale) { return i8(nearbyintf(saturated(v) / scale)); }

}  // namespace reference

// Packs trits into the layout of the device, bit by bit as described in README.md. // trits: (rows, cols)
inline vector<uint4> pack_ternary(const vector<i8>& trits, u32 rows, u32 cols) {
    u32 tiles = up(rows, 16), blocks = up(cols, 128);
    vector<uint4> packed(size_t(tiles) * blocks * 32);
    u8* bytes = reinterpret_cast<u8*>(packed.data());
    for (u32 t = 0; t < tiles; t++)
        for (u32 b = 0; b < blocks; b++)
            for (u32 l = 0; l < 32; l++)
                for (u32 s = 0; s < 4; s++)
                    for (u32 i = 0; i < 4; i++)
                        for (u32 j = 0; j < 4; j++) {
                            u32 row = 16 * t + l / 4 + 8 * (j & 1);
                            u32 col = 128 * b + 64 * (s / 2) + 16 * (l % 4) + 8 * (s % 2) + 4 * (j / 2) + i;
                            i8 trit = row < rows && col < cols ? trits[size_t(row) * cols + col] : 0;
                            bytes[((size_t(t) * blocks + b) * 32 + l) * 16 + 4 * s + i] |= u8((trit + 1) << (2 * j));
                        }
    return packed;
}
