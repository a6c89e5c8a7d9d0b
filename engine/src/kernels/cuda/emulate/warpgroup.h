// The products of warpgroups by the text of the PTX ISA, for emulate.cpp: registers, matrix descriptors, and the groups of
// products that wait to be executed.

#pragma once
#include <vector>

#include "run.h"

namespace emulate {

constexpr u32 WARPGROUP_THREADS = 128;

// One product, of one thread.
struct Product {
    u32 n;
    i32* c;
    const u32* a;
    u64 b;
    bool is_fenced;  // whether a fence stood between the group before and this product
};

// What one thread of a warpgroup has begun.
struct Warpgroup {
    std::vector<Product> closed, open;
    bool is_fenced = false;
};

// A matrix descriptor.
struct Matrix {
    u32 start, leading, stride, base;
    u32 row_bytes;  // of a swizzle pattern of eight rows; 16 without a swizzle

    explicit Matrix(u64 bits) {
        auto decoded = [&](u32 from) { return u32(bits >> from & 0x3fff) << 4; };
        start = decoded(0), leading = decoded(16), stride = decoded(32), base = u32(bits >> 49 & 7);
        u32 mode = u32(bits >> 62);
        row_bytes = mode == 0 ? 16 : 256 >> mode;
    }

    // Patterns that start elsewhere than at a multiple of their size need a base offset, which is not emulated.
    bool is_emulated() const {
        if (row_bytes == 16) return base == 0;
        return base == 0 && start % (8 * row_bytes) + 32 <= row_bytes && stride % (8 * row_bytes) == 0;
    }

    // Returns the address of byte k of a row, K-major.
    u32 address(u32 row, u32 k) const {
        u32 of_rows = start + row / 8 * stride + row % 8 * row_bytes;
        if (row_bytes == 16) return of_rows + k / 16 * leading + k % 16;
        u32 plain = of_rows + k;
        return plain ^ (plain >> 7 & (row_bytes / 16 - 1)) << 4;
    }
};

// Executes a product of a warpgroup. `byte(address)` returns a byte of shared memory.
template <class Byte> void execute(const Product* const (&threads)[WARPGROUP_THREADS], Byte byte) {
    static i8 left[64][32], right[256][32];
    static i32 product[64][256];
    u32 n = threads[0]->n;
    Matrix b(threads[0]->b);
    for (u32 row = 0; row < n; row++)
        for (u32 k = 0; k < 32; k++) right[row][k] = i8(byte(b.address(row, k)));
    // Thread t has rows 16 (t / 32) + (t % 32) / 4, and 8 more, of A and C.
    for (u32 t = 0; t < WARPGROUP_THREADS; t++) {
        u32 row = t / 32 * 16 + t % 32 / 4;
        for (u32 r = 0; r < 4; r++) {
            u32 codes = threads[t]->is_fenced ? threads[t]->a[r] : 0xcdcdcdcdu;
            memcpy(&left[row + 8 * (r % 2)][16 * (r / 2) + t % 4 * 4], &codes, 4);
        }
    }
    for (u32 column = 0; column < n; column += 8) multiply(product[0] + column, 256, left, 64, right + column);
    for (u32 t = 0; t < WARPGROUP_THREADS; t++) {
        for (u32 r = 0; r < n / 2; r++) {
            threads[t]->c[r] += product[t / 32 * 16 + t % 32 / 4 + r / 2 % 2 * 8][r / 4 * 8 + t % 4 * 2 + r % 2];
        }
    }
}

}  // namespace emulate
