//! oxibonsai beside Tritmill: loads a GGUF file and checks or measures the crate's engine.
//!
//! Reads one [`Ask`] as JSON from standard input and prints the answer as JSON; `run.py` sends it. All work is
//! done inside of rayon's pool: a product that a pool thread starts does not have to wake another thread first.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use oxibonsai_core::gguf::reader::GgufFile;
use oxibonsai_runtime::{InferenceEngine, sampling::SamplingParams};
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Logits to print.
const TOP: usize = 10;

#[derive(Deserialize)]
struct Ask {
    model: PathBuf,
    threads: usize,
    what: What,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum What {
    /// Whether the engine computes what it says, on a short prompt.
    Check { prompt: Vec<u32>, generate: usize },
    /// Rates of one prefill, and of decodes after `short` with each number of sequences.
    Measure { prompt: Vec<u32>, short: Vec<u32>, generate: usize, batches: Vec<usize> },
}

/// An engine with the file that it borrows, which lives as long as the process.
struct Loaded {
    engine: InferenceEngine<'static>,
    file: &'static GgufFile<'static>,
}

impl Loaded {
    fn open(model: &Path, context: usize) -> Fallible<Self> {
        let (engine, file) = InferenceEngine::from_gguf_path_leaked(model, greedy(), 0, context)?;
        Ok(Self { engine, file })
    }

    /// Another engine on the same weights, with a KV cache of its own.
    fn replica(&self, context: usize) -> Fallible<InferenceEngine<'static>> {
        let embedding = self.engine.model_token_embd();
        Ok(InferenceEngine::from_gguf_static_with_embd(self.file, greedy(), 0, context, embedding)?)
    }
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, repetition_penalty: 1.0, ..SamplingParams::default() }
}

fn main() -> Fallible<()> {
    let ask: Ask = serde_json::from_reader(io::stdin())?;
    rayon::ThreadPoolBuilder::new().num_threads(ask.threads).build_global()?;
    let answer = rayon::scope(|_| match &ask.what {
        What::Check { prompt, generate } => check(&ask.model, prompt, *generate),
        What::Measure { prompt, short, generate, batches } => {
            measure(&ask.model, prompt, short, *generate, batches)
        }
    })?;
    println!("{answer}");
    Ok(())
}

/// Computes the same prompt in one call, token by token, and with another first token, and continues it.
fn check(model: &Path, prompt: &[u32], generate: usize) -> Fallible<Value> {
    let mut engine = Loaded::open(model, prompt.len() + generate)?.engine;
    let mut at_once = |tokens: &[u32]| -> Fallible<(Vec<f32>, f64)> {
        engine.reset();
        let began = Instant::now();
        let logits = engine.prefill_from_pos(tokens, 0)?;
        Ok((logits, began.elapsed().as_secs_f64()))
    };
    let (logits, _) = at_once(prompt)?; // reads the file's pages
    let half = &prompt[..prompt.len() / 2];
    let (mut half_seconds, mut seconds) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..2 {
        half_seconds = half_seconds.min(at_once(half)?.1);
        seconds = seconds.min(at_once(prompt)?.1);
    }
    let first = prompt.first().ok_or("a check needs a prompt")?;
    let changed: Vec<u32> = [first ^ 1].into_iter().chain(prompt[1..].iter().copied()).collect();
    let (of_changed, _) = at_once(&changed)?;
    engine.reset();
    let mut by_token = Vec::new();
    for (position, &token) in prompt.iter().enumerate() {
        by_token = engine.decode_step(token, position)?;
    }
    engine.reset();
    let generated = engine.generate(prompt, generate)?;
    Ok(json!({
        "tier": engine.kernel_tier().to_string(),
        "seconds": seconds,
        "half_seconds": half_seconds,
        "far_by_token": far(&by_token, &logits),
        "far_changed": far(&of_changed, &logits),
        "top": top(&logits),
        "generated": generated,
    }))
}

fn measure(
    model: &Path,
    prompt: &[u32],
    short: &[u32],
    generate: usize,
    batches: &[usize],
) -> Fallible<Value> {
    let context = short.len() + generate;
    let mut loaded = Loaded::open(model, prompt.len().max(context))?;
    // Reads the file's pages and takes the memory of its buffers.
    loaded.engine.prefill_from_pos(short, 0)?;
    loaded.engine.reset();
    let began = Instant::now();
    let logits = loaded.engine.prefill_from_pos(prompt, 0)?;
    let prefill = prompt.len() as f64 / began.elapsed().as_secs_f64();
    let mut decode = Vec::new();
    for &batch in batches {
        let sequence = |_| -> Fallible<(InferenceEngine<'static>, Vec<f32>)> {
            let mut engine = loaded.replica(context)?;
            let logits = engine.prefill_from_pos(short, 0)?;
            Ok((engine, logits))
        };
        let mut sequences = (0..batch).map(sequence).collect::<Fallible<Vec<_>>>()?;
        let began = Instant::now();
        sequences.par_iter_mut().with_max_len(1).try_for_each(
            |(engine, logits)| -> Fallible<()> {
                for position in short.len()..context {
                    let token = engine.sample(logits)?;
                    *logits = engine.decode_step(token, position)?;
                }
                Ok(())
            },
        )?;
        decode.push((batch * generate) as f64 / began.elapsed().as_secs_f64());
    }
    Ok(json!({ "prefill": prefill, "decode": decode, "top": top(&logits) }))
}

/// The largest difference, divided by the largest value of `from`.
fn far(values: &[f32], from: &[f32]) -> f32 {
    let largest = from.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let apart = values.iter().zip(from).map(|(value, from)| (value - from).abs());
    apart.fold(0.0, f32::max) / largest
}

/// The largest logits, as pairs of token and logit.
fn top(logits: &[f32]) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    all.truncate(TOP);
    all
}
