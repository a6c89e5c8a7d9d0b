//! Mutations of known inputs, for fuzzing without coverage.
//!
//! An input is a function of the corpus, the seed and its number, so that a failure can be reproduced
//! from the printed numbers.

use tritmill_servers::Random;

/// Longest input; the parsers are linear, so longer inputs only take more time.
const BYTES_MAX: usize = 1 << 20;

/// Boundary values of lengths, counts and offsets.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    u64::MAX >> 1,
    u64::MAX - 1,
    u64::MAX,
];

/// Returns the input with this number and seed: one of `inputs`, changed in one to eight places.
pub fn input(inputs: &[Vec<u8>], seed: u64, number: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    let mut bytes = match inputs.len() {
        0 => Vec::new(),
        count => inputs[random.below(count)].clone(),
    };
    for _ in 0..=random.below(8) {
        mutate(&mut bytes, inputs, &mut random);
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn mutate(bytes: &mut Vec<u8>, inputs: &[Vec<u8>], random: &mut Random) {
    let at = position(bytes.len(), random);
    match random.below(9) {
        0 => overwrite(bytes, at, &[random.bits() as u8]),
        1 => {
            let flipped = bytes.get(at).map_or(0, |byte| byte ^ (1 << random.below(8)));
            overwrite(bytes, at, &[flipped]);
        }
        2 => overwrite(bytes, at, &EDGES[random.below(EDGES.len())].to_le_bytes()),
        3 => overwrite(bytes, at, &(EDGES[random.below(EDGES.len())] as u32).to_le_bytes()),
        4 => bytes.truncate(at),
        5 => {
            let end = at + random.below(bytes.len() - at + 1).min(64);
            bytes.drain(at..end);
        }
        6 => {
            let end = at + random.below(bytes.len() - at + 1).min(256);
            let copy = bytes[at..end].to_vec();
            splice(bytes, at, &copy);
        }
        7 => {
            // Parts of numbers and of the structure in text formats.
            let words: [&[u8]; 8] =
                [b"-", b"0", b"9999999999999999999999", b"1e999", b"\"", b"[", b"{", b"null"];
            splice(bytes, at, words[random.below(words.len())]);
        }
        _ => {
            let other = inputs.get(random.below(inputs.len())).map_or(&[][..], Vec::as_slice);
            let from = position(other.len(), random);
            let end = from + random.below(other.len() - from + 1).min(512);
            splice(bytes, at, &other[from..end]);
        }
    }
}

/// Returns a position in the input: in half of the calls near its beginning, where headers are.
fn position(length: usize, random: &mut Random) -> usize {
    let reach = if random.below(2) == 0 { length.min(256) } else { length };
    random.below(reach + 1)
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (byte, with) in bytes[at..].iter_mut().zip(with) {
        *byte = *with;
    }
}

fn splice(bytes: &mut Vec<u8>, at: usize, insert: &[u8]) {
    bytes.splice(at..at, insert.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_depend_only_on_corpus_seed_and_number() {
        let corpus = [b"hello".to_vec(), vec![7; 300]];
        for number in 0..50 {
            assert_eq!(input(&corpus, 1, number), input(&corpus, 1, number));
        }
        let distinct: std::collections::HashSet<_> =
            (0..200).map(|number| input(&corpus, 1, number)).collect();
        assert!(distinct.len() > 100, "{} of 200 inputs differ", distinct.len());
    }

    #[test]
    fn empty_corpus_still_produces_inputs() {
        assert!((0..200).any(|number| !input(&[], 3, number).is_empty()));
    }
}
