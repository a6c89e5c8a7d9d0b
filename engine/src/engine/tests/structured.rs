//! Answers that must match a grammar: what may be drawn depends on the request alone.

use tritmill_grammar::{Compiler, Word};

use super::*;
use crate::{Grammar, scheduler::Fork};

fn compiler() -> Compiler {
    let letters = Letters::new();
    let word = |token| match letters.is_special(token) {
        true => Word::Special,
        false => Word::Text(letters.bytes(token)),
    };
    Compiler::new((0..VOCAB as u32).map(word), &[EOS]).expect("there is an end")
}

/// Requests with grammars of several kinds, and some without one between them.
fn requests() -> Vec<Request> {
    let compiler = compiler();
    let grammars = [
        Some(Grammar::Regex("(the|ab)( [a-f]{3,9})+\\.".to_owned())),
        None,
        Some(Grammar::Choice(vec!["the".to_owned(), "thebat".to_owned(), "äh".to_owned()])),
        Some(Grammar::Lark("start: \"a\" start \"b\" | \"c\"".to_owned())),
    ];
    (0..12)
        .map(|kind| {
            let mut request = request(kind, 10 + 7 * kind as usize, 40);
            let grammar = &grammars[kind as usize % grammars.len()];
            let compiled = grammar.as_ref().map(|g| compiler.compile(g).expect("it can be used"));
            request.constraint = compiled;
            request.sampling.ignore_eos = grammar.is_none();
            request.sampling.n = 1 + kind as usize / 6;
            match kind % 5 {
                0 => request.sampling.temperature = 0.0,
                1 => request.sampling.top_p = 0.8,
                2 => request.sampling.min_tokens = 8,
                _ => {}
            }
            request
        })
        .collect()
}

fn matches(index: usize, choice: &Choice) -> bool {
    let text = choice.text.as_str();
    if choice.finish_reason == FinishReason::Length {
        return index % 4 != 2;
    }
    match index % 4 {
        0 => (text.starts_with("the ") || text.starts_with("ab ")) && text.ends_with('.'),
        1 => true,
        2 => ["the", "thebat", "äh"].contains(&text),
        _ => {
            let depth = text.find('c').expect("one c");
            text == format!("{}c{}", "a".repeat(depth), "b".repeat(depth))
        }
    }
}

fn alone(request: &Request) -> Vec<Choice> {
    Harness::new(EngineConfig { draft_tokens: 0, ..config() }, 60).choices(request)
}

#[test]
fn answers_match_and_are_the_same_alone_and_in_any_batch() {
    let requests = requests();
    let mut finished = 0;
    for ahead in [false, true] {
        let mut harness = Harness::on(config(), 80, ahead);
        let ids: Vec<RequestId> = requests.iter().map(|request| harness.submit(request)).collect();
        harness.run();
        for (index, (id, request)) in ids.iter().zip(&requests).enumerate() {
            let choices = &harness.output(*id).choices;
            assert_eq!(*choices, alone(request), "request {index}");
            assert!(choices.iter().all(|choice| matches(index, choice)), "{index}: {choices:?}");
            finished += choices.iter().filter(|c| c.finish_reason == FinishReason::Stop).count();
        }
    }
    assert!(finished > 12, "most answers end by their grammar: {finished}");
}

#[test]
fn resumed_answers_go_on_as_without_the_interruption() {
    for request in requests().iter().filter(|request| request.sampling.n == 1) {
        let whole = alone(request).remove(0);
        let ends = 1..whole.tokens.len();
        let taken = [1, whole.tokens.len() / 2, whole.tokens.len() - 1];
        for taken in taken.into_iter().filter(|taken| ends.contains(taken)) {
            let resume = whole.tokens[..taken].to_vec();
            let mut harness = Harness::new(EngineConfig { draft_tokens: 0, ..config() }, 60);
            let id = harness.submit(&Request { resume: resume.clone(), ..request.clone() });
            // The events of a resumed answer leave out its earlier tokens.
            harness.deltas.insert((id, 0), (resume, String::new()));
            harness.run();
            assert_eq!(harness.output(id).choices[0], whole, "after {taken} tokens");
        }
    }
}

/// Returns the choices of a request that a harness computes alone, and the number of steps.
fn counted(harness: &mut Harness, request: &Request) -> (Vec<Choice>, u64) {
    let before = harness.engine.stats().steps;
    (harness.choices(request), harness.engine.stats().steps - before)
}

#[test]
fn tokens_that_must_come_take_no_step_of_their_own() {
    // Of every other letter there is one token, so 24 of 26 tokens must come.
    let grammar = Grammar::Regex("[xy](cdefghcdefgh){2}[xy]".to_owned());
    let compiled = compiler().compile(&grammar).expect("it can be used");
    let request = |ignore_eos| {
        let mut request = Request { constraint: Some(compiled.clone()), ..request(3, 20, 40) };
        request.sampling.ignore_eos = ignore_eos;
        request
    };
    for ahead in [false, true] {
        for request in [request(true), request(false)] {
            let mut without = Harness::on(EngineConfig { draft_tokens: 0, ..config() }, 60, ahead);
            let mut with = Harness::on(EngineConfig { draft_tokens: 8, ..config() }, 60, ahead);
            let (choices, slow) = counted(&mut without, &request);
            let (same, fast) = counted(&mut with, &request);
            assert_eq!(same, choices);
            assert_eq!(choices[0].tokens.len(), 26);
            assert!(fast + 20 <= slow, "{fast} steps, {slow} without");
        }
    }
}

#[test]
fn drafts_that_a_grammar_allows_take_fewer_steps() {
    let accepted = |ahead| {
        let mut harness = Harness::on(EngineConfig { draft_tokens: 8, ..config() }, 60, ahead);
        let (mut first, mut second) = (0, 0);
        for request in requests() {
            let (choices, steps) = counted(&mut harness, &request);
            let (again, fewer) = counted(&mut harness, &request);
            assert_eq!(choices, alone(&request));
            assert_eq!(again, choices);
            (first, second) = (first + steps, second + fewer);
        }
        assert!(3 * second < 2 * first, "{second} steps for what took {first}");
        harness.engine.stats().accepted_tokens
    };
    assert!(accepted(false) > 100 && accepted(true) > 100);
}

#[test]
fn tokens_to_resume_from_that_do_not_match_start_the_answer_again() {
    let request = requests().remove(0);
    let resumed = Request { resume: vec![25, 24], ..request.clone() };
    assert_eq!(alone(&resumed), alone(&request));
}

#[test]
fn forks_of_constrained_answers_go_on_the_same_way() {
    for kind in [Fork::Shared, Fork::Deep] {
        let requests = requests();
        let mut harness = Harness::new(config(), 120);
        let ids: Vec<RequestId> = requests.iter().map(|request| harness.submit(request)).collect();
        (0..9).for_each(|_| drop(harness.step()));
        let mut fork = harness.fork(kind);
        harness.run_beside_others();
        fork.run_beside_others();
        for id in ids {
            assert_eq!(harness.output(id).choices, fork.output(id).choices, "{kind:?}");
        }
    }
}
