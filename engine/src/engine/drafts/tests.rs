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
    let mut keep = |tokens: &[u32]| answers.keep(&root(b"a"), tokens, 2, &Guide::default());
    keep(&[1, 2, 3, 4, 5]);
    keep(&[9, 2, 3, 4, 6, 7]);
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
fn guide_is_the_newest_answer_to_a_similar_prompt() {
    let mut answers = Answers::default();
    let mut keep = |tokens: &[u32]| answers.keep(&root(b"a"), tokens, 3, &Guide::default());
    keep(&[1, 2, 3, 10]);
    keep(&[1, 2, 4, 11]);
    keep(&[1, 5, 6, 12]);
    let begins_with = |tenant, prompt: &[u32]| {
        let mut guide = Guide::default();
        guide.follow(&[], || answers.guide(&root(tenant), prompt));
        guide.following().next().map(|(token, _)| token)
    };
    assert_eq!(begins_with(b"a", &[1, 2, 3, 9]), Some(10));
    assert_eq!(begins_with(b"a", &[1, 2, 9]), Some(11));
    assert_eq!(begins_with(b"a", &[]), Some(12));
    assert_eq!(begins_with(b"b", &[1, 2, 3]), None, "another tenant");
}

#[test]
fn answers_take_bounded_memory() {
    let mut answers = Answers::default();
    let answer: Vec<u32> = (0..1000).collect();
    for i in 0..200 {
        answers.keep(&root(b"a"), &answer, 0, &Guide::default());
        answers.keep(&root(&[i]), &answer, 0, &Guide::default());
    }
    assert!(answers.following(&root(b"a"), &[5, 6, 7]).is_some());
    assert!(answers.following(&root(&[0]), &[5, 6, 7]).is_none(), "the oldest tenant");
    assert!(answers.following(&root(&[199]), &[5, 6, 7]).is_some());
    answers.keep(&root(b"a"), &vec![1; 1 << 20], 0, &Guide::default());
}

/// Returns drafts for steps of which further rows take this share of a step with one row.
fn with_times(share: f64) -> Drafts {
    let mut drafts = Drafts::default();
    for rows in [1, 2, 5, 9] {
        (0..50).for_each(|_| drafts.record_time(rows, 1.0 + share * (rows - 1) as f64));
    }
    drafts
}

/// Returns how many drafts each of `sequences` gets, if further rows take this share of a step with one row.
fn proposed(share: f64, sequences: usize, accepted: usize) -> usize {
    let mut drafts = with_times(share);
    let mut choices = vec![ChoiceDrafts::default(); sequences];
    for _ in 0..50 {
        let expected = vec![(Reason::Match(MATCH_MAX), 0.5); 4];
        drafts.record(&mut choices[0], expected, (4, accepted), false);
    }
    let tokens = [7; 20];
    let lists = chosen(&mut drafts, &mut choices, (&tokens, 10), 8);
    lists.iter().map(Vec::len).sum::<usize>() / sequences
}

/// Returns the drafts of a step with these choices, all with the same tokens.
fn chosen(
    drafts: &mut Drafts,
    choices: &mut [ChoiceDrafts],
    tokens: (&[u32], usize),
    most: usize,
) -> Vec<Vec<u32>> {
    let mut lists = vec![Vec::new(); choices.len()];
    drafts.begin(choices.len(), most);
    for (choice, list) in choices.iter_mut().zip(&mut lists) {
        drafts.propose(&root(b""), choice, tokens, (most, &[]), list);
    }
    drafts.decide(usize::MAX);
    for (choice, list) in choices.iter_mut().zip(&mut lists) {
        drafts.keep_chosen(choice, list);
    }
    lists
}

#[test]
fn drafts_are_proposed_where_they_pay() {
    assert_eq!(proposed(0.02, 1, 4), 8, "cheap rows, good drafts");
    assert!((2..8).contains(&proposed(0.12, 1, 3)));
    assert_eq!(proposed(0.9, 1, 2), 0, "a row takes as long as a step");
    assert_eq!(proposed(0.12, 1, 0), 0, "none is accepted");
    assert!(proposed(0.12, 64, 3) <= 1, "a full step has no cheap rows");
}

#[test]
fn probable_drafts_of_later_choices_come_before_equal_ones_of_earlier_choices() {
    // Three rows more cost nothing, others much.
    let mut drafts = Drafts::default();
    for rows in 1..=12 {
        (0..50).for_each(|_| drafts.record_time(rows, if rows <= 7 { 1.0 } else { 5.0 }));
    }
    drafts.begin(4, 8);
    let of = |probability| ChoiceDrafts {
        proposed: vec![(Reason::Match(8), probability)],
        ..ChoiceDrafts::default()
    };
    let mut choices = [0.5, 0.5, 0.5, 0.9].map(of);
    drafts.proposal.probabilities = vec![0.5, 0.5, 0.5, 0.9];
    drafts.decide(usize::MAX);
    let mut kept = |choice| {
        let mut list = vec![1];
        drafts.keep_chosen(choice, &mut list);
        list.len()
    };
    assert_eq!(choices.each_mut().map(&mut kept), [1, 1, 0, 1]);
    drafts.proposal.probabilities = vec![0.5, 0.9];
    drafts.decide(1);
    assert_eq!(drafts.proposal.least, 0.9, "the step has room for one");
}

#[test]
fn nothing_is_proposed_that_ends_an_answer() {
    let mut drafts = with_times(0.02);
    drafts.keep(&root(b""), &ChoiceDrafts::default(), (&[1, 2, 3, 4, 5, 6, 0], 3));
    let mut proposed = |end_tokens: &[u32]| {
        let (mut choice, mut list) = (ChoiceDrafts::default(), Vec::new());
        drafts.begin(1, 8);
        let tokens = (&[9, 9, 9, 4][..], 3);
        drafts.propose(&root(b""), &mut choice, tokens, (8, end_tokens), &mut list);
        list
    };
    assert_eq!(proposed(&[]), [5, 6, 0]);
    assert_eq!(proposed(&[0]), [5, 6]);
    assert!(proposed(&[5]).is_empty());
}

/// Returns the steps of an answer, of which one token is known at first, and how many drafts were accepted.
fn steps(drafts: &mut Drafts, tokens: &[u32], prompt: usize) -> (usize, usize) {
    let (mut choice, mut known, mut steps, mut accepted_all) =
        (ChoiceDrafts::default(), prompt + 1, 0, 0);
    while known < tokens.len() {
        let most = 8.min(tokens.len() - known - 1);
        let choices = std::slice::from_mut(&mut choice);
        let list = chosen(drafts, choices, (&tokens[..known], prompt), most).remove(0);
        let accepted = list.iter().zip(&tokens[known..]).take_while(|(a, b)| a == b).count();
        let expected = choice.take_expected();
        known += accepted + 1;
        drafts.record(&mut choice, expected, (list.len(), accepted), known >= tokens.len());
        (steps, accepted_all) = (steps + 1, accepted_all + accepted);
    }
    drafts.keep(&root(b""), &choice, (tokens, prompt));
    (steps, accepted_all)
}

#[test]
fn answers_of_one_form_take_few_steps_though_their_values_differ() {
    let mut drafts = with_times(0.12);
    // Tokens of a form are below 20, values differ each time and from one another.
    let answer = |line: u32| {
        let value = |place: u32| 1000 * (1 + place) + line;
        let prompt = [value(7), value(8), value(9)];
        let names = vec![value(3); 1 + line as usize % 3];
        let form = [&[1, 2, 3, 4], &[value(0)][..], &[5], &[value(1)], &[5], &[value(2)], &[6, 7]];
        let tokens = [&form.concat()[..], &names, &[8, 9, 10]].concat();
        [&prompt[..], &tokens].concat()
    };
    let mut taken: Vec<_> = (0..30).map(|line| steps(&mut drafts, &answer(line), 3)).collect();
    let last = taken.split_off(20);
    assert_eq!(taken[0].1, 0, "the first one has no guide");
    // A step up to each of three values and each token of the name, one for the rest, and one for the end of the name, which is
    // not known.
    for (line, (steps, accepted)) in (20..).zip(&last) {
        let of_name = 1 + line % 3;
        assert!(*steps <= 5 + of_name, "line {line}: {steps} steps, {accepted} accepted");
    }
}
