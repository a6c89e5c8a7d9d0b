#!/bin/sh
# Compiles the program that compares all kernels with their definitions: build_tests.sh OUTPUT [FLAG…].
set -e
cd "$(dirname "$0")/.."
output=$1
shift
exec g++ -O2 -std=c++17 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing -DEMULATE -I. \
    emulate/emulate.cpp emulate/tests/*.cpp -o "$output" "$@"
