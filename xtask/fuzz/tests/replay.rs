//! Runs every target on its corpus and on a fixed set of mutations of it.

use tritmill_fuzz::{TARGETS, mutate};

/// Mutated inputs for each target: about one second in total.
const MUTATIONS: u64 = 3_000;

#[test]
fn targets_return_on_their_corpus() {
    for target in TARGETS {
        let corpus = target.corpus().expect("every target has a corpus");
        assert!(corpus.len() >= 3, "{}: {} inputs", target.name, corpus.len());
        corpus.iter().for_each(|(_, input)| (target.run)(input));
    }
}

#[test]
fn targets_return_on_mutations_of_their_corpus() {
    for target in TARGETS {
        let corpus = target.corpus().expect("every target has a corpus");
        let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, bytes)| bytes).collect();
        (0..MUTATIONS).for_each(|number| (target.run)(&mutate::input(&inputs, 0, number)));
    }
}
