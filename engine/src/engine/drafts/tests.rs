//! What is found, and when it is worth its rows.

use super::*;

fn root(tenant: &[u8]) -> BlockHash {
    BlockHash::root("class", tenant)
}

#[test]
fn longest_and_latest_match_is_found() {
    let found =
        |tokens: &[u32]| last_match(tokens).map(|found| (found.following.to_vec(), found.matched));
    assert_eq!(found(&[]), None);
    assert_eq!(found(&[1, 2, 3]), None);
    assert_eq!(found(&[1, 2, 1]), None, "one token is too short");
    assert_eq!(found(&[1, 2, 9, 1, 2]), Some((vec![9, 1, 2], 2)));
    assert_eq!(found(&[1, 2, 8, 1, 2, 9, 1, 2]), Some((vec![9, 1, 2], 2)), "the latest");
    let longer = [5, 1, 2, 8, 0, 1, 2, 9, 5, 1, 2];
    assert_eq!(found(&longer), Some((vec![8, 0, 1, 2, 9, 5, 1, 2], 3)), "the longest");
    let repeated = [7; 20];
    assert_eq!(found(&repeated).map(|(_, matched)| matched), Some(MATCH_MAX));
}

#[test]
fn earlier_answers_of_the_same_tenant_are_found() {
    let mut answers = Answers::default();
    answers.keep(&root(b"a"), &[1, 2, 3, 4, 5]);
    answers.keep(&root(b"a"), &[9, 2, 3, 4, 6, 7]);
    let following = |tenant, tokens: &[u32]| {
        answers.following(&root(tenant), tokens).map(|f| (f.following.to_vec(), f.matched))
    };
    assert_eq!(following(b"a", &[0, 2, 3, 4]), Some((vec![6, 7], 3)), "the latest");
    assert_eq!(following(b"a", &[1, 2, 3]), Some((vec![4, 5], 3)));
    assert_eq!(following(b"a", &[2, 3, 5]), None);
    assert_eq!(following(b"a", &[3, 4, 5]), None, "nothing follows");
    assert_eq!(following(b"a", &[3, 4]), None);
    assert_eq!(following(b"b", &[1, 2, 3]), None, "another tenant");
}

#[test]
fn answers_take_bounded_memory() {
    let mut answers = Answers::default();
    let answer: Vec<u32> = (0..1000).collect();
    for i in 0..200 {
        answers.keep(&root(b"a"), &answer);
        answers.keep(&root(&[i]), &answer);
    }
    assert!(answers.following(&root(b"a"), &[5, 6, 7]).is_some());
    assert!(answers.following(&root(&[0]), &[5, 6, 7]).is_none(), "the oldest tenant");
    assert!(answers.following(&root(&[199]), &[5, 6, 7]).is_some());
    answers.keep(&root(b"a"), &vec![1; 1 << 20]);
}

/// Returns how many drafts each of `sequences` gets, if further rows take this share of a step with one row.
fn proposed(share: f64, sequences: usize, accepted: usize) -> usize {
    let mut drafts = Drafts::default();
    for rows in [1, 2, 5, 9] {
        (0..50).for_each(|_| drafts.record_time(rows, 1.0 + share * (rows - 1) as f64));
    }
    let mut chances = Chances::default();
    for _ in 0..50 {
        drafts.record(&mut chances, MATCH_MAX, 4, accepted);
    }
    drafts.begin(sequences);
    let tokens = [7; 20];
    let mut all = 0;
    for _ in 0..sequences {
        let mut list = Vec::new();
        drafts.propose(&root(b""), &chances, &tokens, 8, &mut list);
        all += list.len();
    }
    all / sequences
}

#[test]
fn drafts_are_proposed_where_they_pay() {
    assert_eq!(proposed(0.02, 1, 4), 8, "cheap rows, good drafts");
    assert!((2..8).contains(&proposed(0.12, 1, 3)));
    assert_eq!(proposed(0.9, 1, 2), 0, "a row takes as long as a step");
    assert_eq!(proposed(0.12, 1, 0), 0, "none is accepted");
    assert!(proposed(0.12, 64, 3) <= 1, "a full step has no cheap rows");
}
