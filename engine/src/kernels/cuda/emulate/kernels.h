// Every kernel, and the table by which `launch` finds it.

#pragma once

#include "copy_blocks.cu"
#include "embed.cu"
#include "final_norm.cu"
#include "linear_few.cu"
#include "linear_tile.cu"
#include "norm_quantize.cu"
#include "rotate_store.cu"

namespace emulate {

struct Entry {
    const char* name;
    void (*run)(void** args);
};

template <class Args, void (*kernel)(Args)> void run(void** args) { kernel(*static_cast<Args*>(args[0])); }

#define ENTRY(Args, name) {#name, run<const Args, name>}

static const Entry ENTRIES[] = {
    ENTRY(EmbedArgs, embed),
    ENTRY(NormQuantizeArgs, norm_quantize),
    ENTRY(LinearArgs, linear_n8),
    ENTRY(LinearArgs, linear_n16),
    ENTRY(LinearArgs, linear_n32),
    ENTRY(LinearArgs, linear_n64),
    ENTRY(LinearArgs, gate_n8),
    ENTRY(LinearArgs, gate_n16),
    ENTRY(LinearArgs, gate_n32),
    ENTRY(LinearArgs, gate_n64),
    ENTRY(LinearArgs, linear_tile),
    ENTRY(LinearArgs, gate_tile),
    ENTRY(LinearArgs, linear_tile64),
    ENTRY(LinearArgs, gate_tile64),
    ENTRY(RotateStoreArgs, rotate_store_f16),
    ENTRY(RotateStoreArgs, rotate_store_f32),
    ENTRY(FinalNormArgs, final_norm),
    ENTRY(CopyBlocksArgs, copy_blocks),
};

}  // namespace emulate
