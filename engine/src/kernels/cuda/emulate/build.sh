#!/bin/sh
# Compiles the emulated driver: build.sh OUTPUT [FLAG…]. The output's name for the loader is libcuda.so.
set -e
cd "$(dirname "$0")/.."
output=$1
shift
exec g++ -O2 -std=c++17 -mavx2 -mfma -mf16c -ffp-contract=off -fno-strict-aliasing -fsanitize=alignment \
    -DEMULATE -fPIC -shared -Wl,-soname,libcuda.so -I. emulate/emulate.cpp emulate/driver.cpp -o "$output" "$@"
