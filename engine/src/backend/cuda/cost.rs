//! The fewest bytes and operations that a launch needs, computed from its kernel's struct: every input read once,
//! every output written once, and the products of linears, head and attention. Other computation is not counted: it
//! takes less time than its memory traffic.

use std::mem::offset_of;

use super::{
    args::{
        ActivateArgs, DigitsArgs, Distribution, EmbedArgs, EmbedTernaryArgs, FinalNormArgs, Found,
        GroupLinearArgs, GroupQuantizeArgs, GroupSegment, HeadArgs, InputBlock, LINEAR_ADD,
        LinearArgs, NormHeadsArgs, NormLinearArgs, NormQuantizeArgs, RescoreArgs, RowQuestion,
        ScreenArgs, Step,
    },
    device::{Address, Launch},
    layout::{K_BLOCK, TILE_ROWS, scale_bytes, ternary_bytes},
    shape::Shape,
};

/// Bytes and operations; a multiply-add counts as two operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes read and written.
    pub bytes: usize,
    /// Operations on int8, which tensor cores would do fastest.
    pub int8: usize,
    /// Operations on f32.
    pub f32: usize,
}

/// Sizes of a step.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub shape: Shape,
    pub rows: usize,
    /// Rows that need all logits, on the host or for their distributions.
    pub whole: usize,
    /// Rows with distributions.
    pub reported: usize,
    pub screened: usize,
    /// Positions of all sequences; their keys and values are read.
    pub positions: usize,
    /// Sum of the positions that each row attends to.
    pub seen: usize,
    /// Candidates with computed exact logits.
    pub found: usize,
}

/// Returns the cost of a launch, and the shape of a linear (empty for other kernels).
pub fn compute(launch: &Launch, load: &Load) -> (Cost, String) {
    let (kernel, args) = (launch.kernel, &launch.args);
    let nameless = |cost| (cost, String::new());
    match kernel {
        "linear_one" | "gate_one" => {
            let args = args.get::<NormLinearArgs>();
            let norms = [args.weight, args.weight2].iter().filter(|norm| **norm != 0).count();
            linear(kernel, &args.linear, load.rows, (load.rows + norms) * args.width as usize * 4)
        }
        _ if kernel.starts_with("linear_") || kernel.starts_with("gate_") => {
            let args = args.get::<LinearArgs>();
            linear(kernel, &args, load.rows, load.rows * (args.k_blocks as usize * K_BLOCK + 8))
        }
        "group_quantize" => nameless(bytes({
            let args = args.get::<GroupQuantizeArgs>();
            let norms = [args.weight, args.weight2].iter().filter(|norm| **norm != 0).count();
            let (width, stride) = (args.width as usize, args.stride as usize);
            let of_row = width * 4 + args.digits as usize * stride + of_blocks(stride);
            rows_of(args.count, load) * of_row + norms * width * 4
        })),
        _ if kernel.starts_with("group_") => group_linear(&args.get(), load),
        "embed_ternary" => nameless(bytes({
            let args = args.get::<EmbedTernaryArgs>();
            let width = args.width as usize;
            load.rows * (width / 4 + args.groups as usize * 2 + width * 4)
        })),
        "norm_heads" => nameless(bytes({
            let args = args.get::<NormHeadsArgs>();
            let (heads, dim) = ((args.heads + args.kv_heads) as usize, args.head_dim as usize);
            (2 * load.rows * heads + 2) * dim * 4
        })),
        "embed" => nameless(bytes({
            let args = args.get::<EmbedArgs>();
            let element = [4, 2, 2, 1][args.dtype as usize & 3];
            load.rows * args.width as usize * (element + 4)
        })),
        "norm_quantize" => nameless(bytes({
            let args = args.get::<NormQuantizeArgs>();
            let norms = [args.weight, args.weight2].iter().filter(|norm| **norm != 0).count();
            let width = args.width as usize;
            load.rows * (width * 4 + args.stride as usize + 8) + norms * width * 4
        })),
        "activate" => {
            nameless(bytes(load.rows * args.get::<ActivateArgs>().width as usize * 3 * 4))
        }
        _ if kernel.contains("rotate_") || kernel.starts_with("attend") => {
            nameless(attention(kernel, load))
        }
        _ => nameless(head(launch, load)),
    }
}

fn bytes(bytes: usize) -> Cost {
    Cost { bytes, ..Cost::default() }
}

/// Returns the cost of ternary products with `input` bytes of activations.
fn linear(kernel: &str, args: &LinearArgs, rows: usize, input: usize) -> (Cost, String) {
    let cols = args.k_blocks as usize * K_BLOCK;
    let segments = &args.segments[..args.segment_count as usize];
    let features: usize = segments.iter().map(|segment| segment.rows as usize).sum();
    let weights: usize = segments.iter().map(|s| ternary_bytes(s.rows as usize, cols)).sum();
    // Gate and up have one joined output; sums into the residual stream are also read.
    let outputs = if kernel.starts_with("gate") { features / 2 } else { features };
    let passes = if args.mode == LINEAR_ADD { 2 } else { 1 };
    let cost = Cost {
        bytes: weights + input + rows * outputs * 4 * passes,
        int8: 2 * rows * features * cols,
        f32: 0,
    };
    (cost, format!("{features} × {cols}"))
}

/// Returns the number of rows that a kernel reads from a field of the [`Step`], which is aligned to 16 bytes.
fn rows_of(count: Address, load: &Load) -> usize {
    const WHOLE: usize = offset_of!(Step, whole);
    const SCREENED: usize = offset_of!(Step, screened);
    match count as usize % 16 {
        WHOLE => load.whole,
        SCREENED => load.screened,
        _ => load.rows,
    }
}

/// Returns the bytes of the scales and sums of a row's inputs.
fn of_blocks(stride: usize) -> usize {
    stride / K_BLOCK * size_of::<InputBlock>()
}

/// Returns the cost of products with scales of groups.
fn group_linear(args: &GroupLinearArgs, load: &Load) -> (Cost, String) {
    let (cols, digits) = (args.k_blocks as usize * K_BLOCK, args.digits as usize);
    let rows = rows_of(args.count, load);
    let segments = &args.segments[..args.segment_count as usize];
    let features: usize = segments.iter().map(|segment| segment.rows as usize).sum();
    let of_segment = |s: &GroupSegment| {
        let rows = s.rows as usize;
        ternary_bytes(rows, cols) + scale_bytes(rows, s.groups as usize)
    };
    let weights: usize = segments.iter().map(of_segment).sum();
    let passes = if args.mode == LINEAR_ADD { 2 } else { 1 };
    let cost = Cost {
        bytes: weights + rows * (digits * cols + of_blocks(cols) + features * 4 * passes),
        int8: 2 * rows * digits * features * cols,
        f32: 0,
    };
    (cost, format!("{features} × {cols}"))
}

fn attention(kernel: &str, load: &Load) -> Cost {
    let Load { shape, rows, positions, seen, .. } = load;
    let (queries, keys) = (shape.query_width(), shape.kv_width());
    let of_position = keys * shape.kv.size_bytes() + shape.kv_heads * shape.kv.scale_bytes();
    let cached = positions * of_position;
    // Keys and values as the linears wrote them, and in their blocks; the rotation.
    let stored = rows * (2 * (4 * keys + of_position) + shape.head_dim * 4);
    let scores = seen * shape.heads * 4;
    let is_int8 = shape.kv.scale_bytes() > 0;
    let cost = |bytes, products| {
        let (int8, f32) = if is_int8 { (products, 0) } else { (0, products) };
        Cost { bytes, int8, f32 }
    };
    let products = 2 * seen * queries;
    let row_bytes = rows * queries * 4;
    match kernel {
        _ if kernel.starts_with("rotate_store") => bytes(stored + 2 * row_bytes),
        _ if kernel.starts_with("rotate_scores") => {
            cost(cached + stored + row_bytes + scores, products)
        }
        _ if kernel.starts_with("attend_short") => {
            cost(2 * cached + stored + 2 * row_bytes, 2 * products)
        }
        _ if kernel.starts_with("attend_values") => cost(cached + row_bytes + scores, products),
        // Tensor cores multiply both digits of a weight.
        _ if kernel.starts_with("attend_tile") => cost(2 * cached + 2 * row_bytes, 3 * products),
        // A warp writes its scores to scratch memory and reads them again.
        _ => cost(2 * cached + 2 * row_bytes, 2 * products),
    }
}

fn head(launch: &Launch, load: &Load) -> Cost {
    let Load { shape, whole, reported, screened, found, .. } = load;
    let (kernel, args) = (launch.kernel, &launch.args);
    let element = match kernel.rsplit('_').next() {
        Some("f32") => 4,
        Some("i8") => 1,
        _ => 2,
    };
    let padded = shape.groups() * TILE_ROWS;
    match kernel {
        "final_norm" => bytes((2 * whole + 1) * args.get::<FinalNormArgs>().width as usize * 4),
        "digits" => bytes({
            let args = args.get::<DigitsArgs>();
            screened * (args.width as usize * 8 + (args.digit_count * args.stride) as usize + 16)
        }),
        "distribution" => bytes(reported * (shape.vocab * 4 + size_of::<Distribution>())),
        // The estimates of all tokens are read.
        "weigh_rest" => bytes(screened * padded * 4),
        // Changes are not counted, here and in `rescore_*`.
        "take_changed" => bytes(screened * size_of::<RowQuestion>()),
        "filtered_draw" => bytes(screened * (size_of::<RowQuestion>() + size_of::<Found>())),
        // All logits are read for the bounds of their groups.
        "logit_bounds" => bytes(screened * (padded + shape.groups() * 2) * 4),
        "screen_select" => bytes(screened * shape.groups() * 2 * 4),
        "draw" => {
            bytes(screened * size_of::<RowQuestion>() + (found + screened) * size_of::<Found>())
        }
        _ if kernel.starts_with("screen_") => {
            let args = args.get::<ScreenArgs>();
            let (cols, digits) = (args.k_blocks as usize * K_BLOCK, args.digit_count as usize);
            let outputs = screened * (padded * 4 + shape.groups() * 2 * 4);
            Cost {
                bytes: padded * (cols + 3 * 4) + screened * digits * cols + outputs,
                int8: 2 * screened * digits * padded * cols,
                f32: 0,
            }
        }
        _ if kernel.starts_with("rescore_") => {
            let width = args.get::<RescoreArgs>().width as usize;
            let bytes = found * (width * element + 8) + screened * width * 4;
            Cost { bytes, f32: 2 * found * width, int8: 0 }
        }
        _ if kernel.starts_with("head_") => {
            let HeadArgs { width, vocab, .. } = args.get();
            let (width, vocab) = (width as usize, vocab as usize);
            let bytes = vocab * width * element + whole * (width + vocab) * 4;
            Cost { bytes, f32: 2 * whole * vocab * width, int8: 0 }
        }
        _ => Cost::default(),
    }
}
