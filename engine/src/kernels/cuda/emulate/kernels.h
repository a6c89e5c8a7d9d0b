// Includes every kernel; a table maps names to kernels. In a namespace without a name, arrays of templates can be in a section.

#pragma once

namespace {
#include "activate.cu"
#include "attend.cu"
#include "attend_short.cu"
#include "attend_split.cu"
#include "experimental/attend_tile.cu"
#include "digits.cu"
#include "distribution.cu"
#include "embed.cu"
#include "embed_ternary.cu"
#include "filtered_draw.cu"
#include "final_norm.cu"
#include "group_few.cu"
#include "group_quantize.cu"
#include "group_tile.cu"
#include "head.cu"
#include "linear_few.cu"
#include "linear_one.cu"
#include "linear_tile.cu"
#include "experimental/linear_wgmma.cu"
#include "norm_heads.cu"
#include "norm_quantize.cu"
#include "peaks.cu"
#include "rotate_store.cu"
#include "screen.cu"
#include "screen_select.cu"
#include "screen_tile.cu"
}  // namespace

namespace emulate {

struct Entry {
    const char* name;
    void (*run)(void** args);
};

template <class Args, void (*kernel)(Args)> void run(void** args) { kernel(*static_cast<Args*>(args[0])); }

#define ENTRY(Args, name) {#name, run<const Args, name>}

static const Entry ENTRIES[] = {
    ENTRY(ActivateArgs, activate),
    ENTRY(EmbedArgs, embed),
    ENTRY(EmbedTernaryArgs, embed_ternary),
    ENTRY(NormHeadsArgs, norm_heads),
    ENTRY(NormQuantizeArgs, norm_quantize),
    ENTRY(GroupQuantizeArgs, group_quantize),
    ENTRY(GroupLinearArgs, group_n8),
    ENTRY(GroupLinearArgs, group_n16),
    ENTRY(GroupLinearArgs, group_n32),
    ENTRY(GroupLinearArgs, group_tile_int8),
    ENTRY(GroupLinearArgs, group_tile_int16),
    ENTRY(LinearArgs, linear_n8),
    ENTRY(LinearArgs, linear_n16),
    ENTRY(LinearArgs, linear_n32),
    ENTRY(LinearArgs, linear_n64),
    ENTRY(LinearArgs, gate_n8),
    ENTRY(LinearArgs, gate_n16),
    ENTRY(LinearArgs, gate_n32),
    ENTRY(LinearArgs, gate_n64),
    ENTRY(NormLinearArgs, linear_one),
    ENTRY(NormLinearArgs, gate_one),
    ENTRY(LinearArgs, linear_tile),
    ENTRY(LinearArgs, gate_tile),
    ENTRY(LinearArgs, linear_tile64),
    ENTRY(LinearArgs, gate_tile64),
    ENTRY(LinearArgs, linear_wgmma),
    ENTRY(LinearArgs, gate_wgmma),
    ENTRY(LinearArgs, linear_wgmma64),
    ENTRY(LinearArgs, gate_wgmma64),
    ENTRY(RotateStoreArgs, rotate_store_f16),
    ENTRY(RotateStoreArgs, rotate_store_f32),
    ENTRY(RotateStoreArgs, rotate_store_q8),
    ENTRY(AttentionArgs, attend4_f16),
    ENTRY(AttentionArgs, attend4_f32),
    ENTRY(AttentionArgs, attend4_q8),
    ENTRY(AttentionArgs, attend8_f16),
    ENTRY(AttentionArgs, attend8_f32),
    ENTRY(AttentionArgs, attend8_q8),
    ENTRY(AttentionArgs, attend_tile128_q8),
    ENTRY(AttentionArgs, attend_tile256_q8),
    ENTRY(RotateScoresArgs, rotate_scores_f16),
    ENTRY(RotateScoresArgs, rotate_scores_f32),
    ENTRY(RotateScoresArgs, rotate_scores_q8),
    ENTRY(AttentionArgs, attend_values_f16),
    ENTRY(AttentionArgs, attend_values_f32),
    ENTRY(AttentionArgs, attend_values_q8),
    ENTRY(RotateScoresArgs, attend_short_f16),
    ENTRY(RotateScoresArgs, attend_short_f32),
    ENTRY(RotateScoresArgs, attend_short_q8),
    ENTRY(FinalNormArgs, final_norm),
    ENTRY(HeadArgs, head_f32),
    ENTRY(HeadArgs, head_f16),
    ENTRY(HeadArgs, head_bf16),
    ENTRY(HeadArgs, head_i8),
    ENTRY(DistributionArgs, distribution),
    ENTRY(DigitsArgs, digits),
    ENTRY(ScreenArgs, screen_n8),
    ENTRY(ScreenArgs, screen_n16),
    ENTRY(ScreenArgs, screen_n32),
    ENTRY(ScreenArgs, screen_n64),
    ENTRY(ScreenArgs, screen_tile),
    ENTRY(LogitBoundsArgs, logit_bounds),
    ENTRY(SelectArgs, screen_select),
    ENTRY(TakeChangedArgs, take_changed),
    ENTRY(DrawArgs, draw),
    ENTRY(WeighRestArgs, weigh_rest),
    ENTRY(FilteredDrawArgs, filtered_draw),
    ENTRY(RescoreArgs, rescore_f32),
    ENTRY(RescoreArgs, rescore_f16),
    ENTRY(RescoreArgs, rescore_bf16),
    ENTRY(RescoreArgs, rescore_i8),
    ENTRY(PeakArgs, peak_read),
    ENTRY(PeakArgs, peak_mma_s8),
    ENTRY(PeakArgs, peak_fma_f32),
};

}  // namespace emulate
