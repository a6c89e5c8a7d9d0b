// Parameters of the kernels. Each kernel takes one struct by value; a `repr(C)` struct on the host mirrors it.
//
// Everything that changes from step to step (row counts, positions, block tables, tasks) is in device buffers
// behind these pointers. A captured graph is therefore replayed with the structs of its capture. Grids may be
// larger than the step needs: blocks without work return.

#pragma once
#include "types.cuh"

// Counts of one step, in device memory. The host writes them before the step.
struct Step {
    u32 rows;      // tokens of the step
    u32 tasks;     // attention tasks
    u32 whole;     // rows that need all logits
    u32 screened;  // rows that need the first tokens of a question
    u32 carry;     // index in `carried` of the first screened row's token
    u32 reported;  // rows with distributions, the last of those that need all logits
    u32 unused[2];
};

// A bit of an element of `tokens`: the token is the element of `carried` with the index in the other bits.
constexpr u32 IS_CARRIED = 0x80000000u;

// Element types of the embedding and of the head.
enum Dtype : u32 { DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2, DTYPE_I8 = 3 };

struct EmbedArgs {
    const Step* step;
    const u32* tokens;  // (rows): tokens, or indices with IS_CARRIED
    const u32* carried;
    const void* table;  // (vocab, width) of dtype: f32, f16 or bf16
    float* residual;    // (rows, width)
    u32 width;
    u32 dtype;
    float factor;  // of every element
    u32 unused;
};

// Order of the bytes of a quantized row. ORDER_WGMMA: within 64 bytes, those of bytes 16 t + 4 c .. lie at 16 c + 4 t .., for
// linear_wgmma* and gate_wgmma*.
enum RowOrder : u32 { ORDER_PLAIN = 0, ORDER_WGMMA = 1 };

struct NormQuantizeArgs {
    const Step* step;
    const float* x;        // (rows, width)
    const float* weight;   // (width); null means no norm
    const float* weight2;  // (width); null means no second norm
    i8* q;                 // (rows, stride): quantized row, with zeros from width to stride, in `order`
    float* scales;         // (rows): 127 / max|x|
    i32* sums;             // (rows): exact sum of the q of the row
    u32 width;
    u32 stride;  // width rounded up to 128
    float eps;
    float eps2;
    u32 order;  // RowOrder
    u32 unused;
};

// A ternary matrix and the address of its outputs.
struct Segment {
    const uint4* weights;  // in the ternary layout, see README.md
    const float* bias;     // (rows); null means none
    float* out;            // (rows of the step, stride)
    float scale;
    u32 divide;  // 0: y = (a / s) * scale; 1: y = a / (s * scale)
    u32 rows;    // output features
    u32 stride;  // floats from one row of out to the next
};

enum LinearMode : u32 { LINEAR_STORE = 0, LINEAR_ADD = 1 };
enum ActivationKind : u32 { ACTIVATION_SQUARED_RELU = 0, ACTIVATION_SILU = 1 };

// Arguments of linear_* and gate_*. linear_*: up to three segments with the same input. gate_*: segment 0 is the
// gate, segment 1 is the up matrix of the same shape; outputs go to the address in segment 0.
struct LinearArgs {
    const Step* step;
    const i8* x;          // (rows, 128 * k_blocks)
    const float* scales;  // (rows)
    const i32* sums;      // (rows)
    Segment segments[3];
    u32 segment_count;
    u32 k_blocks;    // input features / 128, rounded up
    u32 mode;        // LinearMode; linear_* only
    u32 activation;  // ActivationKind; gate_* only
};

// Arguments of linear_one and gate_one: a linear with the norms and the quantization of its only row. The fields
// x, scales and sums of `linear` are not read.
struct NormLinearArgs {
    LinearArgs linear;
    const float* x;        // (width)
    const float* weight;   // (width); null means no norm
    const float* weight2;  // (width); null means no second norm
    u32 width;
    float eps;
    float eps2;
    u32 unused;
};

// Scale of 128 inputs of a row, and the exact sums of the integers of their first and second half.
struct InputBlock {
    float scale;
    i32 sums[2];
    u32 unused;
};

// The input of linears with scales of groups: rows of floats become one or two int8 digits.
struct GroupQuantizeArgs {
    const u32* count;      // number of rows: a field of the Step
    const u32* wanted;     // (rows): rows of x; null means all, in order
    const float* x;        // (rows of x, width)
    const float* weight;   // (width); null means no norm
    const float* weight2;  // (width); null means no second norm
    i8* q;                 // (rows, digits, stride), high digits first; zeros from width to stride
    InputBlock* blocks;    // (rows, stride / 128)
    u32 width;             // a multiple of 64
    u32 stride;            // width rounded up to 128
    float eps;
    float eps2;
    u32 digits;  // 1 or 2
    u32 unused;
};

// A ternary matrix with a scale for each output and group of inputs, and the address of its outputs.
struct GroupSegment {
    const uint4* weights;  // in the ternary layout, see README.md
    const u16* scales;     // (tiles, groups, 16) of f16
    const float* bias;     // (rows); null means none
    float* out;            // (rows, stride)
    u32 rows;              // output features
    u32 stride;            // floats from one row of out to the next
    u32 groups;            // of a row
    u32 halves;            // inputs of a group / 64: 1 or 2
};

// Arguments of group_n* and group_tile_*: up to three segments with the same input.
struct GroupLinearArgs {
    const u32* count;          // number of rows: a field of the Step
    const i8* x;               // (rows, digits, 128 * k_blocks)
    const InputBlock* blocks;  // (rows, k_blocks)
    GroupSegment segments[3];
    u32 segment_count;
    u32 k_blocks;  // input features / 128, rounded up
    u32 digits;    // 1 or 2
    u32 mode;      // LinearMode
};

// The embedding of models with scales of groups.
struct EmbedTernaryArgs {
    const Step* step;
    const u32* tokens;  // (rows): tokens, or indices with IS_CARRIED
    const u32* carried;
    const uint4* weights;  // (vocab, width) in the ternary layout
    const u16* scales;     // (tiles, groups, 16) of f16
    float* residual;       // (rows, width)
    u32 width;
    u32 groups;    // of a row
    float factor;  // of every element
    u32 unused;
};

// Norms of each query head and of each key head, in place, before RoPE.
struct NormHeadsArgs {
    const Step* step;
    float* queries;             // (rows, heads * head_dim)
    float* keys;                // (rows, kv_heads * head_dim)
    const float* query_weight;  // (head_dim)
    const float* key_weight;    // (head_dim)
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    float eps;
};

// Outputs of the gate and up matrices; the result replaces the gate outputs.
struct ActivateArgs {
    const Step* step;
    float* gate;      // (rows, width), changed in place
    const float* up;  // (rows, width)
    u32 width;
    u32 activation;  // ActivationKind
};

// Addresses of the keys and values of a layer, see README.md.
struct KvPool {
    u8* base;
    u64 block_bytes;   // bytes from one block to the next
    u64 layer_offset;  // offset of the layer in a block, in bytes
    u32 kv_heads;
    u32 head_dim;
    u32 padded_dim;  // head_dim rounded up to 16
    u32 heads;       // number of query heads, a multiple of kv_heads
};

struct RotateStoreArgs {
    const Step* step;
    const u32* positions;    // (rows)
    const u32* tables;       // (rows): index in `blocks` at which the block table of the row starts
    const u32* blocks;       // block tables, one after another
    float* queries;          // (rows, heads * head_dim), rotated in place
    const float* keys;       // (rows, kv_heads * head_dim), not rotated
    const float* values;     // (rows, kv_heads * head_dim)
    const float* rotations;  // (context, 2, head_dim / 2): cosines, then sines
    KvPool pool;
};

// Queries that share a sequence and a KV head: rows first_row.. of the step (consecutive rows of one sequence)
// times heads first_head.. (heads of one group). The struct has everything that attention needs, so that a task
// takes one load and not a chain of loads.
struct AttentionTask {
    u32 first_row;
    u32 row_count;
    u32 first_head;
    u32 head_count;
    u32 position;  // position of the first row
    u32 table;     // index in `blocks` at which the block table of the sequence starts
};

struct AttentionArgs {
    const Step* step;
    const AttentionTask* tasks;  // (tasks); the buffer has room for as many tasks as the grid has
    const u32* blocks;           // block tables, one after another
    const float* queries;  // (rows, heads * head_dim), rotated
    float* attended;       // (rows, heads * head_dim)
    float* scores;         // scratch, see README.md
    float* maxima;         // scratch for rotate_scores_* and attend_values_*
    KvPool pool;
    u32 scores_stride;  // positions that a query has room for, a multiple of 128
    float scale;        // 1 / sqrt(head_dim)
};

// Arguments of rotate_scores_*: queries, keys and values as the linears wrote them.
struct RotateScoresArgs {
    AttentionArgs attention;  // its queries are not rotated; the kernel does not change them
    const float* keys;        // (rows, kv_heads * head_dim)
    const float* values;      // (rows, kv_heads * head_dim)
    const float* rotations;   // (context, 2, head_dim / 2)
};

struct FinalNormArgs {
    const Step* step;
    const u32* wanted;      // (whole): rows of the step
    const float* residual;  // (rows, width)
    const float* weight;    // (width)
    float* out;             // (whole, width)
    u32 width;
    float eps;
};

struct HeadArgs {
    const Step* step;
    const void* rows;     // (vocab, width) of dtype
    const float* scales;  // (vocab); i8 rows only
    const float* x;       // (whole, width): normed
    float* logits;        // (whole, vocab)
    u32 width;
    u32 vocab;
};

// A token and its logit.
struct Found {
    u32 token;
    float logit;
};

// Most probable tokens of a distribution, at most.
constexpr u32 TOPS = 20;

// The distribution of a row, as `Distribution` in engine/src/backend/distribution.rs.
struct Distribution {
    float largest;  // logit
    u32 is_known;   // 0: the row is left to the host, and nothing else is set
    double sum;
    Found top[TOPS];  // as many as the row asks for or the vocabulary has; the others have no token, 0xffffffff
};

struct DistributionArgs {
    const Step* step;
    const u32* tops;              // (whole): numbers of most probable tokens
    const float* logits;          // (whole, vocab)
    Distribution* distributions;  // (reported)
    u32 vocab;
    u32 unused;
};

// Scale and error factors of the digits of one hidden row.
struct DigitRow {
    float step;      // x is about step * X, where X are the digits
    float by_error;  // an estimate is off by at most by_error * error + by_norm * norm of the head row
    float by_norm;
    u32 unused;
};

struct DigitsArgs {
    const Step* step;
    const u32* wanted;      // (screened): rows of the step
    const float* residual;  // (rows, width)
    const float* weight;    // (width)
    float* x;               // (screened, width): normed
    i8* digits;             // (screened, digit_count, stride), zeros from width to stride
    DigitRow* rows;         // (screened)
    u32 width;
    u32 stride;       // width rounded up to 128
    u32 digit_count;  // 1 or 2
    float eps;
};

// Which tokens a row needs, as `Ranking` in engine/src/backend/question.rs. A token's value is its logit, plus
// temperature · noise if the temperature is not 0.
struct RowQuestion {
    u32 count;          // at least this many tokens with the largest values, at least 1
    float within;       // further tokens with values at most this much below
    float temperature;  // 0: no noise
    u32 single;         // 1: only the first token is needed; count is 1 and within 0
    u32 keys[4];        // of the noise
    u32 first_change;   // index of the row's changes from the start of the inputs
    u32 changes;        // number of changes; only of rows that need a single token
};

// A change of a token's logit before the draw, as `LogitChange` in engine/src/backend/change.rs. Those of a row are by ascending token.
struct LogitChange {
    u32 token;
    float bias;     // added first
    float penalty;  // then logits below 0 are multiplied by this, and others divided
    float less;     // subtracted last
};

// What else decides a row's draw, as `Filters` in engine/src/backend/question.rs.
struct RowFilter {
    u32 is_on;    // 0: nothing; the draw is the question's first token
    u32 top_k;    // only tokens with a logit of at least the k-th largest; 0: all
    float top_p;  // of these, the most probable ones until their sum reaches this; 1: all
    float min_p;  // of these, those at least this probable, as a share of the most probable one
    float reach;  // without top-k: candidates are not looked for further below the largest logit than this
};

struct ScreenArgs {
    const Step* step;
    const uint4* head;        // in the int8 layout, see README.md
    const float* scales;      // (padded vocab): w is about scale * int8
    const float* errors;      // (padded vocab): norm of w - scale * int8, rounded up
    const float* norms;       // (padded vocab): norm of scale * int8, rounded up
    const i8* digits;         // (screened, digit_count, 128 * k_blocks)
    const DigitRow* rows;     // (screened)
    const RowQuestion* questions;  // (screened)
    float* estimates;         // (screened, padded vocab): of the logits
    float* lowest;            // (screened, groups): largest lower bound of a value in a group of 16 tokens
    float* highest;           // (screened, groups): largest upper bound of a value in a group
    u32 vocab;                // groups = vocab / 16 rounded up, padded vocab = 16 * groups
    u32 k_blocks;             // width / 128, rounded up
    u32 digit_count;
    u32 unused;
};

// Estimates of the logits of some rows, or the logits.
struct Estimates {
    const float* errors;   // as in ScreenArgs; null where the estimates are the logits
    const float* norms;    // not read where `errors` is null; the same for `rows`
    const DigitRow* rows;
    const float* values;   // (screened, padded vocab)
};

// Bounds of groups of tokens from the estimates of the tokens.
struct LogitBoundsArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    const RowFilter* filters;    // (screened); not null: bounds of the logits themselves, of rows with filters only
    Estimates estimates;
    float* lowest;               // as in ScreenArgs
    float* highest;
    u32 vocab;
    u32 unused;
};

struct SelectArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    const RowFilter* filters;    // (screened); not null: the candidates of filters, of rows with filters only
    Estimates estimates;
    const float* lowest;
    const float* highest;
    u32* found_counts;  // (screened): number of candidates; it includes those beyond the capacity
    Found* found;       // (screened, capacity): tokens, unordered, with their estimates
    float* thresholds;  // (screened): every token with at least this logit is a candidate; with filters only
    u32 vocab;
    u32 capacity;
};

// The tokens with changes are taken out of the estimates, and their logits are computed one by one.
struct TakeChangedArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    Estimates estimates;
    float* values;        // the same as estimates.values, for −∞ in place of the tokens with changes
    float* lowest;        // as in ScreenArgs, of the groups with such tokens
    float* highest;
    u32* changed_counts;  // (screened): numbers of these tokens
    Found* changed;       // (screened, changes_max): the tokens, with their estimates, in the order of the changes
    u32 vocab;
    u32 changes_max;
};

struct RescoreArgs {
    const Step* step;
    const void* rows;         // (vocab, width) of dtype, as in HeadArgs
    const float* scales;      // (vocab); i8 rows only
    const float* x;           // (screened, width)
    const RowFilter* filters;  // (screened); not null: the candidates of rows with filters only
    const u32* found_counts;  // (screened)
    Found* found;             // (screened, capacity): the kernel writes the logits
    u32 width;
    u32 capacity;
};

struct DrawArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    u32* found_counts;           // (screened): changed to capacity + 1 if the candidates do not decide the first token
    const Found* found;          // (screened, capacity)
    const Found* changed;        // (screened, changes_max): the tokens with changes, with the model's logits
    Found* firsts;               // (screened): the first token of the rows that need a single one, with its logit after a change
    Found* drawn;                // (screened): the same with the model's logit
    u32* carried;                // the same tokens from index step->carry on, for later passes; 0 if not decided
    u32 capacity;
    u32 changes_max;
};

// Bounds of what tokens weigh that are not among the candidates of filters, in units of a token with the threshold as its logit.
struct Rest {
    float least;
    float most;
    float before;  // at most; of those that may stand before the first token of the question
    u32 unused;
};

struct WeighRestArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    const RowFilter* filters;    // (screened)
    Estimates estimates;
    const float* thresholds;  // (screened)
    const Found* firsts;      // (screened): the first tokens of the questions
    Rest* rests;              // (screened, gridDim.x): of a part of the tokens each
    u32 vocab;
    u32 unused;
};

struct FilteredDrawArgs {
    const Step* step;
    const RowQuestion* questions;  // (screened)
    const RowFilter* filters;    // (screened)
    u32* found_counts;           // (screened): changed to capacity + 1 if the candidates do not decide the draw
    const u32* some_counts;      // (screened): numbers of candidates of the filters
    const Found* some;           // (screened, capacity): these candidates
    const float* thresholds;     // (screened)
    const Rest* rests;           // (screened, parts)
    const Found* changed;        // as in DrawArgs
    const Found* firsts;         // as in DrawArgs
    Found* drawn;                // (screened): the drawn token, with the model's logit
    u32* carried;                // as in DrawArgs
    u32 capacity;
    u32 parts;
    u32 changes_max;
    u32 unused;
};

// Arguments of peak_*, which measure the highest rates of a device.
struct PeakArgs {
    const uint4* from;  // (count); peak_read only
    u32* to;            // (1): written only for a sum that cannot occur
    u64 count;
    u32 rounds;  // peak_mma_s8 and peak_fma_f32 only
    u32 unused;
};
