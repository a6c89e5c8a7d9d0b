// Compares all kernels with their definitions. The engine's tests run it; by hand:
//
//     sh emulate/build_tests.sh /tmp/cuda_tests && /tmp/cuda_tests

#include "tests.h"

#include <chrono>
#include <cstdio>

void test(const char* name, void (*run)()) {
    auto start = std::chrono::steady_clock::now();
    run();
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    printf("%-40s ok  %.1f s\n", name, took.count());
    fflush(stdout);
}

int main() {
    test_linear();
    test_group();
    test_attention();
    test_head();
    test_draw();
    test_overlap();
}
