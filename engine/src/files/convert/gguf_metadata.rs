//! Metadata of the GGUF files that [`super::convert()`] writes.
//!
//! Besides the keys that other engines read, a file has [`names::EOS_TOKENS_KEY`], the complete
//! list of end tokens: the format's own key holds only one.

use super::{
    gguf_pieces,
    target::{Target, refuse},
};
use crate::{
    chat::ChatTemplate,
    config::{DeltaNet, ModelConfig, Multipliers, Pooling, RopeScaling, Yarn},
    files::{
        error::{ModelError, Problem},
        gguf::{
            architecture::MULTIPLIER_KEYS,
            container, names, rotation,
            tokenizer::{self, SPECIAL_TOKENS},
            vocabulary::{TYPE_CONTROL, TYPE_NORMAL, TYPE_UNUSED, TYPE_USER_DEFINED},
            write::{self, Meta},
        },
    },
    tokenizer::{TokenKind, Tokenizer},
};

/// What metadata are written of a model.
pub(crate) struct ModelDescription<'a> {
    pub name: &'a str,
    pub config: &'a ModelConfig,
    pub tokenizer: &'a Tokenizer,
    pub chat_template: Option<&'a ChatTemplate>,
    pub eos_token: Option<u32>,
}

/// Returns the metadata of the model, in the order bitnet.cpp writes them.
pub(crate) fn metadata(
    model: &ModelDescription<'_>,
    architecture: &str,
    to: Target,
) -> Result<Vec<(String, Meta)>, ModelError> {
    let config = model.config;
    let number = |value: usize| Meta::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut metadata = vec![
        ("general.architecture".to_owned(), Meta::Text(architecture.to_owned())),
        ("general.name".to_owned(), Meta::Text(model.name.to_owned())),
        ("general.quantization_version".to_owned(), Meta::U32(2)),
    ];
    let file_type = match to {
        Target::GgufTq2_0 => Some(37),
        Target::GgufI2S => Some(40),
        _ => None,
    };
    metadata.extend(file_type.map(|kind| ("general.file_type".to_owned(), Meta::U32(kind))));
    for (key, value) in [
        ("vocab_size", number(config.vocab_size)),
        ("context_length", number(config.context_length)),
        ("embedding_length", number(config.hidden_size)),
        ("block_count", number(config.layer_count)),
        ("feed_forward_length", number(config.intermediate_size)),
        ("rope.dimension_count", number(config.rotary_dim())),
        ("rope.freq_base", Meta::F32(config.rope_theta)),
        ("attention.head_count", number(config.head_count)),
        ("attention.head_count_kv", number(config.kv_head_count)),
        ("attention.key_length", number(config.head_dim)),
        ("attention.value_length", number(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Meta::F32(config.rms_norm_eps)),
    ] {
        metadata.push((format!("{architecture}.{key}"), value));
    }
    if architecture == "minicpm" {
        let Multipliers { embedding, residual, logit_divisor } = config.multipliers;
        let values = [embedding, residual, logit_divisor];
        for (key, value) in MULTIPLIER_KEYS.into_iter().zip(values) {
            metadata.push((format!("{architecture}.{key}"), Meta::F32(value)));
        }
    }
    metadata.extend(hybrid(config, architecture));
    metadata.extend(experts(config, architecture));
    // The last token's, as llama.cpp numbers kinds.
    let pooling = config.pooling.map(|Pooling::LastToken| Meta::U32(3));
    metadata.extend(pooling.map(|kind| (format!("{architecture}.pooling_type"), kind)));
    let mut push = |key: &str, value| {
        metadata.push((format!("{architecture}.rope.scaling.{key}"), value));
    };
    match &config.rope_scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            push("type", Meta::Text("linear".to_owned()));
            push("factor", Meta::F32(*factor));
        }
        RopeScaling::Yarn(Yarn { factor, original_context }) => {
            push("type", Meta::Text("yarn".to_owned()));
            push("factor", Meta::F32(*factor));
            push("original_context_length", number(*original_context));
        }
        // The divisors are tensors; without others for longer texts, they need no key.
        RopeScaling::Divisors { long_factors: None, .. } => {}
        RopeScaling::Divisors { long_factors: Some(factors), .. } => {
            push("type", Meta::Text("longrope".to_owned()));
            push("original_context_length", number(factors.original_context));
        }
        RopeScaling::Llama3 { .. } => {
            let problem = Problem::Other("its RoPE frequencies are scaled one by one");
            return Err(refuse(names::ROPE_DIVISORS.to_owned(), to, problem));
        }
    }
    metadata.extend(tokenizer_metadata(model, to)?);
    Ok(metadata)
}

/// Returns the keys of recurrent layers and of a rotated basis, if the model has them.
fn hybrid(config: &ModelConfig, architecture: &str) -> Vec<(String, Meta)> {
    let number = |value: usize| Meta::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let Some(delta) = &config.delta_net else { return Vec::new() };
    let sizes = [
        ("full_attention_interval", delta.attention_interval),
        ("ssm.conv_kernel", DeltaNet::TAPS),
        ("ssm.state_size", delta.head_dim),
        ("ssm.group_count", delta.key_heads),
        ("ssm.time_step_rank", delta.value_heads),
        ("ssm.inner_size", delta.values()),
    ];
    let sizes =
        sizes.into_iter().map(|(key, size)| (format!("{architecture}.{key}"), number(size)));
    // llama.cpp requires it. Its parts have the same position in texts: text, height and width of a picture.
    let pairs = config.rotary_dim() / 2;
    let [height, width] = [(pairs + 1) / 3, pairs / 3];
    let of_text = pairs - height - width;
    let sections = [of_text, height, width, 0].map(|pairs| pairs as i32).to_vec();
    let sections = (format!("{architecture}.rope.dimension_sections"), Meta::I32s(sections));
    let rotation = config.rotation.iter().flat_map(|rotation| rotation::metadata(rotation, config));
    sizes.chain([sections]).chain(rotation).collect()
}

/// Returns the keys of experts and windows, if the model has them.
fn experts(config: &ModelConfig, architecture: &str) -> Vec<(String, Meta)> {
    let number = |value: usize| Meta::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let experts = config.experts.iter().flat_map(|experts| {
        [
            ("expert_count", number(experts.count)),
            ("expert_used_count", number(experts.used)),
            ("expert_feed_forward_length", number(config.intermediate_size)),
            ("swiglu_clamp_exp", Meta::F32s(experts.clamp.clone())),
        ]
    });
    let windows = config.windows.iter().flat_map(|windows| {
        [
            ("attention.sliding_window", number(windows.size)),
            ("attention.sliding_window_pattern", Meta::Bools(windows.layers.clone())),
        ]
    });
    experts.chain(windows).map(|(key, value)| (format!("{architecture}.{key}"), value)).collect()
}

fn tokenizer_metadata(
    model: &ModelDescription<'_>,
    to: Target,
) -> Result<Vec<(String, Meta)>, ModelError> {
    let ModelDescription { config, tokenizer, .. } = *model;
    let refused = |why| refuse("tokenizer.json".to_owned(), to, Problem::Other(why));
    let framed = tokenizer.encode("", true)?;
    let eos = model.eos_token;
    let add_bos = config.bos_token.is_some() && framed.first() == config.bos_token.as_ref();
    let add_eos = framed.len() > usize::from(add_bos);
    if framed.len() > 2 || (add_eos && framed.last() != eos.as_ref()) {
        return Err(refused("it puts more around a prompt than one BOS and EOS token"));
    }
    let mut metadata = match tokenizer.has_pieces() {
        true => gguf_pieces::metadata(tokenizer.json(), config.vocab_size).map_err(refused)?,
        false => byte_level(model)?
            .ok_or_else(|| refused("its pre-tokenizer has no name in the format"))?,
    };
    metadata.extend([
        ("tokenizer.ggml.add_bos_token", Meta::Bool(add_bos)),
        // The vector of a text is that of the end token.
        ("tokenizer.ggml.add_eos_token", Meta::Bool(add_eos || config.pooling.is_some())),
        (names::EOS_TOKENS_KEY, Meta::U32s(config.eos_tokens.clone())),
    ]);
    metadata.extend(config.bos_token.map(|id| ("tokenizer.ggml.bos_token_id", Meta::U32(id))));
    metadata.extend(eos.map(|id| ("tokenizer.ggml.eos_token_id", Meta::U32(id))));
    if let Some(template) = model.chat_template {
        // BOS and EOS are those of the configuration, above.
        for (name, key) in SPECIAL_TOKENS.into_iter().skip(2) {
            let text = template.special_tokens().get(name);
            let id = text.and_then(|text| tokenizer.token_id(text));
            metadata.extend(id.map(|id| (key, Meta::U32(id))));
        }
        metadata.push(("tokenizer.chat_template", Meta::Text(template.source().to_owned())));
    }
    let metadata: Vec<_> =
        metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    if tokenizer.has_pieces() && !reads_back(model, &metadata)? {
        return Err(refused("its settings have no keys in the format"));
    }
    Ok(metadata)
}

/// Returns whether readers get the same tokenizer from this metadata.
fn reads_back(
    model: &ModelDescription<'_>,
    metadata: &[(String, Meta)],
) -> Result<bool, ModelError> {
    const FILE: &str = "written metadata";
    let mut bytes = Vec::new();
    write::write_header(&mut bytes, metadata, &[])
        .map_err(|error| ModelError::io(FILE.as_ref(), error))?;
    let gguf = container::parse(FILE, &bytes)?;
    let text = tokenizer::read(FILE, &gguf, model.config)?;
    Ok(text.tokenizer.digest() == model.tokenizer.digest())
}

/// Returns the keys of a byte-level vocabulary; `None` if its pre-tokenizer has no name.
fn byte_level(
    model: &ModelDescription<'_>,
) -> Result<Option<Vec<(&'static str, Meta)>>, ModelError> {
    let vocab_size = model.config.vocab_size;
    let vocabulary = model.tokenizer.vocabulary()?;
    let Some(pre) = vocabulary.pre else { return Ok(None) };
    let mut texts = Vec::with_capacity(vocab_size);
    let mut kinds = Vec::with_capacity(vocab_size);
    for id in 0..vocab_size {
        let (text, kind) = match vocabulary.tokens.get(id).cloned().flatten() {
            None => (format!("[PAD{id}]"), TYPE_UNUSED),
            Some((text, TokenKind::Normal)) => (text, TYPE_NORMAL),
            Some((text, TokenKind::Added)) => (text, TYPE_USER_DEFINED),
            Some((text, TokenKind::Special)) => (text, TYPE_CONTROL),
        };
        texts.push(text);
        kinds.push(kind as i32);
    }
    Ok(Some(vec![
        ("tokenizer.ggml.model", Meta::Text("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Meta::Text(pre.to_owned())),
        ("tokenizer.ggml.tokens", Meta::Texts(texts)),
        ("tokenizer.ggml.token_type", Meta::I32s(kinds)),
        ("tokenizer.ggml.merges", Meta::Texts(vocabulary.merges)),
    ]))
}
