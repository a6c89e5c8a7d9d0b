//! The wire format: committed examples of every version keep decoding, and bad bytes are typed
//! errors.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::path::PathBuf;

use proptest::prelude::*;
use tritmill_queue::{
    Choice, Completion, Conversation, ErrorKind, FinishReason, Grammar, Job, JobError, JobEvent,
    JobId, JobState, Message, NewLogprobs, Outcome, Part, Priority, Prompt, QueueName, Role,
    Sampling, Tenant, Timestamp, TokenLogprob, Tool, ToolCall, ToolChoice, TopLogprob, Usage,
    wire::{WireError, decode, encode},
};

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/wire").join(name)
}

fn plain_job() -> Job {
    Job {
        id: JobId::from_bytes(&[1, 0x90, 0xb7, 0xa0, 0, 0, 0x70, 0, 0x80, 0, 0, 0, 0, 0, 0, 7])
            .unwrap(),
        tenant: Tenant("größe".into()),
        queue: QueueName { model: "tiny".into(), format: "i2_s".into() },
        priority: Priority::High,
        prompt: Prompt::Messages(Conversation::new(vec![Message {
            name: Some("Ada".into()),
            ..Message::new(Role::User, "Why is the sky blue?")
        }])),
        sampling: Sampling {
            max_tokens: Some(256),
            temperature: 0.5,
            stop: vec!["\n\n".into()],
            logit_bias: vec![(5, -1.5)],
            logprobs: Some(2),
            ..Sampling::default()
        },
        seed: u64::MAX,
        attempts_max: 3,
        run_at: None,
        expires_at: Some(Timestamp(1_700_000_000_000)),
        stream: false,
        traceparent: None,
        task: tritmill_queue::Task::Generate,
        echo: serde_json::Map::new(),
        line_key: None,
        billing: tritmill_queue::Billing::default(),
        line_shape: None,
        custom_id: None,
    }
}

fn long_job() -> Job {
    let prompt = Prompt::Text("All work and no play makes Jack a dull boy. ".repeat(200));
    let run_at = Some(Timestamp(1_700_000_000_000));
    Job { prompt, run_at, expires_at: None, ..plain_job() }
}

fn traced_job() -> Job {
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse();
    Job { traceparent: Some(traceparent.unwrap()), stream: true, ..plain_job() }
}

fn outcome() -> Outcome {
    let top = vec![TopLogprob { token: 9, bytes: b"B".to_vec(), logprob: -2.5 }];
    let logprob = TokenLogprob { token: 8, bytes: vec![0xc3], logprob: -0.25, top };
    Outcome::Completed(Completion {
        model: "tiny".into(),
        fingerprint: "f00d".into(),
        choices: vec![Choice {
            logprobs: Some(vec![logprob]),
            ..Choice::new(0, "Because.", FinishReason::Stop)
        }],
        usage: Usage {
            prompt_tokens: 12,
            completion_tokens: 3,
            cached_tokens: 0,
            reasoning_tokens: 0,
        },
        ..Completion::default()
    })
}

fn refusal() -> Outcome {
    Outcome::Error(JobError {
        kind: ErrorKind::InvalidRequest,
        code: "context_length_exceeded".into(),
        message: "the prompt is too long".into(),
        param: Some("messages".into()),
    })
}

fn delta(choice: u32, offset: u64, text: String) -> JobEvent {
    JobEvent::Delta { choice, part: Part::Content, offset, text, logprobs: None }
}

fn event() -> JobEvent {
    delta(1, 0, "Be".into())
}

/// Returns the examples: file name and present encoding.
fn examples() -> [(&'static str, Vec<u8>); 6] {
    [
        ("1-job-plain.bin", encode(&plain_job())),
        ("1-job-compressed.bin", encode(&long_job())),
        ("1-job-traced.bin", encode(&traced_job())),
        ("1-outcome-completed.bin", encode(&outcome())),
        ("1-outcome-error.bin", encode(&refusal())),
        ("1-event-delta.bin", encode(&event())),
    ]
}

#[test]
#[ignore = "writes the examples of the current version; a version once released stays as it is"]
fn examples_are_written() {
    for (name, bytes) in examples() {
        std::fs::write(file(name), bytes).unwrap();
    }
}

#[test]
fn committed_examples_decode() {
    let read = |name: &str| std::fs::read(file(name)).unwrap();
    assert_eq!(decode::<Job>(&read("1-job-plain.bin")).unwrap(), plain_job());
    assert_eq!(decode::<Job>(&read("1-job-traced.bin")).unwrap(), traced_job());
    let long = read("1-job-compressed.bin");
    assert_eq!(long[..2], [1, 1], "version 1, compressed");
    assert_eq!(decode::<Job>(&long).unwrap(), long_job());
    assert_eq!(decode::<Outcome>(&read("1-outcome-completed.bin")).unwrap(), outcome());
    assert_eq!(decode::<Outcome>(&read("1-outcome-error.bin")).unwrap(), refusal());
    assert_eq!(decode::<JobEvent>(&read("1-event-delta.bin")).unwrap(), event());
}

#[test]
fn other_versions_and_encodings_are_distinct_errors() {
    let mut bytes = encode(&plain_job());
    assert!(matches!(decode::<Job>(&[]), Err(WireError::Short(0))));
    assert!(matches!(decode::<Job>(&bytes[..1]), Err(WireError::Short(1))));
    bytes[1] = 7;
    assert!(matches!(decode::<Job>(&bytes), Err(WireError::Encoding(7))));
    bytes[0] = 2;
    assert!(matches!(decode::<Job>(&bytes), Err(WireError::Version(2))));
}

#[test]
fn truncated_value_is_an_error() {
    for bytes in [encode(&plain_job()), encode(&long_job())] {
        for end in 2..bytes.len() {
            let error = decode::<Job>(&bytes[..end]).expect_err("a part is not the whole");
            assert!(matches!(error, WireError::Value(_) | WireError::Compression(_)), "{error}");
        }
    }
}

#[test]
fn invalid_trace_does_not_invalidate_the_job() {
    let written = encode(&traced_job());
    let at = written.windows(3).position(|part| part == b"00-").unwrap();
    let mut odd = written.clone();
    odd[at..at + 2].copy_from_slice(b"zz");
    assert_eq!(decode::<Job>(&odd).unwrap(), Job { traceparent: None, ..traced_job() });
}

#[test]
fn decompression_is_limited() {
    let bomb = zstd::bulk::compress(&vec![0; 65 << 20], 19).unwrap();
    assert!(bomb.len() < 64 << 10);
    let bytes = [vec![1, 1], bomb].concat();
    assert!(matches!(decode::<Job>(&bytes), Err(WireError::Compression(_))));
}

#[test]
fn readers_ignore_unknown_fields() {
    #[derive(serde::Serialize)]
    struct Later {
        prompt_tokens: u64,
        completion_tokens: u64,
        audio_tokens: u64,
    }
    let later = Later { prompt_tokens: 1, completion_tokens: 2, audio_tokens: 3 };
    let usage: Usage = decode(&encode(&later)).unwrap();
    // Fields that are not written have defaults.
    assert_eq!(
        usage,
        Usage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: 0, reasoning_tokens: 0 }
    );
}

fn prompts() -> impl Strategy<Value = Prompt> {
    let role = prop_oneof![
        Just(Role::System),
        Just(Role::Developer),
        Just(Role::User),
        Just(Role::Assistant),
        Just(Role::Tool)
    ];
    let call = (any::<String>(), any::<String>()).prop_map(|(name, arguments)| ToolCall {
        id: "call_1".into(),
        name,
        arguments,
    });
    let calls = prop::collection::vec(call, 0..2);
    let message = (role, any::<String>(), any::<Option<String>>(), calls).prop_map(
        |(role, content, name, tool_calls)| Message {
            name,
            tool_calls,
            ..Message::new(role, content)
        },
    );
    let tool = any::<String>().prop_map(|name| {
        let function = serde_json::json!({ "name": name, "parameters": { "type": "object" } });
        Tool { name, function: function.as_object().cloned().unwrap() }
    });
    let conversation = (prop::collection::vec(message, 0..8), prop::collection::vec(tool, 0..3));
    let conversation = conversation.prop_map(|(messages, tools)| {
        // Without tools, nothing is written about them.
        let tool_choice = match tools.as_slice() {
            [] => ToolChoice::Auto,
            [first, ..] => ToolChoice::RequiredOf(vec![first.name.clone()]),
        };
        let one_call = !tools.is_empty();
        let template_arguments = serde_json::Map::new();
        Conversation { messages, tools, tool_choice, one_call, template_arguments }
    });
    prop_oneof![
        any::<String>().prop_map(Prompt::Text),
        "[a-z ]{0,9000}".prop_map(Prompt::Question),
        conversation.prop_map(Prompt::Messages),
        prop::collection::vec(any::<u32>(), 0..3000).prop_map(Prompt::Tokens),
    ]
}

fn jobs() -> impl Strategy<Value = Job> {
    let sampling = (
        (any::<u32>(), any::<u32>(), -1e9_f32..1e9, any::<u32>(), any::<bool>()),
        prop::collection::vec((any::<u32>(), -100.0_f32..100.0), 0..5),
        prop::collection::vec(any::<String>(), 0..5),
        any::<Option<u32>>(),
        prop_oneof![
            Just(None),
            Just(Some(Grammar::JsonObject)),
            any::<String>().prop_map(|text| Some(Grammar::JsonSchema(text))),
            any::<String>().prop_map(|text| Some(Grammar::Regex(text))),
            any::<Vec<String>>().prop_map(|texts| Some(Grammar::Choice(texts))),
        ],
    );
    let sampling =
        sampling.prop_map(|((max, min, temperature, n, ignore), bias, stop, logprobs, grammar)| {
            Sampling {
                max_tokens: Some(max),
                min_tokens: min,
                temperature,
                n,
                ignore_eos: ignore,
                logit_bias: bias,
                stop,
                logprobs,
                grammar,
                ..Sampling::default()
            }
        });
    let times = (any::<Option<i64>>(), any::<Option<i64>>());
    let rest = (any::<[u8; 16]>(), any::<[String; 3]>(), 0..3_usize, any::<u64>(), any::<u32>());
    (rest, prompts(), sampling, times).prop_map(|(rest, prompt, sampling, (run_at, expires_at))| {
        let (id, [tenant, model, format], priority, seed, attempts_max) = rest;
        Job {
            id: JobId::from_bytes(&id).unwrap(),
            tenant: Tenant(tenant),
            queue: QueueName { model, format },
            priority: Priority::ALL[priority],
            prompt,
            sampling,
            seed,
            attempts_max,
            run_at: run_at.map(Timestamp),
            expires_at: expires_at.map(Timestamp),
            stream: false,
            traceparent: None,
            task: tritmill_queue::Task::Generate,
            echo: serde_json::Map::new(),
            line_key: None,
            billing: tritmill_queue::Billing::default(),
            line_shape: None,
            custom_id: None,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_job_round_trips(job in jobs()) {
        prop_assert_eq!(decode::<Job>(&encode(&job)).unwrap(), job);
    }

    #[test]
    fn any_bytes_decode_or_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), head in 0..3_u8) {
        // Plausible headers reach the decoders.
        let bytes = [&[1, head], &bytes[..]].concat();
        let _ = decode::<Job>(&bytes);
        let _ = decode::<Outcome>(&bytes);
    }

    #[test]
    fn events_round_trip(choice: u32, call: u32, offset: u64, text: String, state in 0..JobState::ALL.len()) {
        let finished = JobEvent::Finished { state: JobState::ALL[state] };
        let logprob = TokenLogprob { token: 7, bytes: vec![0xe2], logprob: -0.5, top: vec![] };
        let rich = JobEvent::Delta {
            choice,
            part: Part::Arguments(call),
            offset,
            text: text.clone(),
            logprobs: Some(NewLogprobs { offset, tokens: vec![logprob] }),
        };
        let begins = JobEvent::Call { choice, call, name: text.clone() };
        let text = delta(choice, offset, text);
        for event in [JobEvent::Queued, JobEvent::Started, text, rich, begins, finished] {
            prop_assert_eq!(decode::<JobEvent>(&encode(&event)).unwrap(), event);
        }
    }
}
