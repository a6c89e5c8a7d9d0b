//! An earlier answer as a guide. Lines of a batch often have answers of one form, such as JSON with the same fields, which differ
//! in some tokens only. So an answer is compared with an earlier one token by token, also beyond tokens that differ: what
//! follows in the earlier one may follow in this one.

use std::sync::Arc;

/// Tokens of an answer that are kept.
const TOKENS_MAX: usize = 1 << 11;
/// Tokens of the beginning of a prompt that are kept with an answer.
const PROMPT_MAX: usize = 64;
/// Places before and after the expected one where a token is looked for.
const NEAR: usize = 16;
/// Largest [`Agreement`].
pub const AGREEMENT_MAX: usize = 7;
/// The agreement of a token that was not compared yet.
const AGREEMENT_FIRST: Agreement = 2;

/// How well earlier answers agreed on a token of an answer: one more with each that had the same, half with each that had
/// another one in its place, at most [`AGREEMENT_MAX`]. 0 if it stood between two tokens of the earlier answer.
pub type Agreement = u8;

/// An answer that later ones are compared with.
#[derive(Debug)]
pub struct Answer {
    /// The beginning of the prompt.
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Of each token.
    agreements: Vec<Agreement>,
}

/// Where a token is in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is the one here.
    Same(usize),
    /// It is not in the answer, and stands for the one here.
    InsteadOf(usize),
    /// It is not in the answer, and stands before the one here.
    Before(usize),
}

impl Place {
    /// Returns the place of the token that may follow.
    fn next(self) -> usize {
        match self {
            Self::Same(at) | Self::InsteadOf(at) => at + 1,
            Self::Before(at) => at,
        }
    }
}

impl Answer {
    /// Keeps an answer, and compares it with an earlier one, if there is any.
    pub fn new(prompt: &[u32], tokens: &[u32], earlier: Option<&Self>) -> Self {
        let tokens = &tokens[..tokens.len().min(TOKENS_MAX)];
        let agreements = match earlier {
            None => vec![AGREEMENT_FIRST; tokens.len()],
            Some(earlier) => earlier.agreements_with(tokens),
        };
        let prompt = prompt[..prompt.len().min(PROMPT_MAX)].to_vec();
        Self { prompt, tokens: tokens.to_vec(), agreements }
    }

    /// Returns how many tokens this answer's prompt and another prompt begin with that are equal, as far as they are kept.
    pub fn common_prompt(&self, prompt: &[u32]) -> usize {
        self.prompt.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    fn agreements_with(&self, tokens: &[u32]) -> Vec<Agreement> {
        let mut agreements = Vec::with_capacity(tokens.len());
        let of = |at: usize| self.agreements.get(at).copied().unwrap_or(AGREEMENT_FIRST);
        let agreed = |at: usize| (of(at) + 1).min(AGREEMENT_MAX as Agreement);
        let mut expected = 0;
        for end in 1..=tokens.len() {
            let place = self.place_of(&tokens[..end], expected, true);
            agreements.push(match place {
                Place::Same(at) => agreed(at),
                Place::InsteadOf(at) => of(at) / 2,
                Place::Before(_) => 0,
            });
            if let (Place::Same(at), Some(before)) = (place, end.checked_sub(2)) {
                // The token before was not found where it was expected, but this one tells where it is.
                let is_known = at == expected || at == 0;
                if !is_known && self.tokens[at - 1] == tokens[before] {
                    agreements[before] = agreed(at - 1);
                }
            }
            expected = place.next();
        }
        agreements
    }

    /// Finds the place of the newest token of another answer: the expected one, or a near one of a token that earlier answers
    /// agreed on, and with `by_pairs` of one where the token before is the same, too. Tokens that differ each time say little about
    /// the place.
    fn place_of(&self, tokens: &[u32], expected: usize, by_pairs: bool) -> Place {
        let (newest, before) = match tokens {
            [.., before, newest] => (*newest, Some(before)),
            [newest] => (*newest, None),
            [] => return Place::Before(expected),
        };
        if self.tokens.get(expected) == Some(&newest) {
            return Place::Same(expected);
        }
        let is_agreed = |at: usize| self.agreements.get(at).is_some_and(|a| *a > AGREEMENT_FIRST);
        let follows = |at: usize| by_pairs && at > 0 && before == self.tokens.get(at - 1);
        let near = (1..=NEAR).flat_map(|by| [expected.checked_add(by), expected.checked_sub(by)]);
        let is_here =
            |at: &usize| self.tokens.get(*at) == Some(&newest) && (is_agreed(*at) || follows(*at));
        match near.flatten().find(is_here) {
            Some(at) => Place::Same(at),
            None if is_agreed(expected) => Place::Before(expected),
            None => Place::InsteadOf(expected),
        }
    }
}

/// The comparison of a growing answer with an earlier one.
#[derive(Debug, Clone, Default)]
pub struct Guide {
    answer: Option<Arc<Answer>>,
    /// Tokens of the growing answer that are compared.
    compared: usize,
    /// The place in the earlier answer of what may follow them.
    expected: usize,
}

impl Guide {
    /// Returns the earlier answer.
    pub fn answer(&self) -> Option<Arc<Answer>> {
        self.answer.clone()
    }

    /// Compares new tokens of the growing answer. `choose` returns an earlier answer, if there is any yet.
    pub fn follow(&mut self, tokens: &[u32], choose: impl FnOnce() -> Option<Arc<Answer>>) {
        if self.answer.is_none() {
            self.answer = choose();
        }
        let Some(answer) = &self.answer else { return };
        for end in self.compared + 1..=tokens.len() {
            self.expected = answer.place_of(&tokens[..end], self.expected, false).next();
        }
        self.compared = tokens.len();
    }

    /// Returns the tokens that may follow, each with its agreement.
    pub fn following(&self) -> impl Iterator<Item = (u32, Agreement)> + Clone {
        self.answer.iter().flat_map(|answer| {
            let tokens = answer.tokens.get(self.expected..).unwrap_or_default();
            let agreements = answer.agreements.get(self.expected..).unwrap_or_default();
            tokens.iter().copied().zip(agreements.iter().copied())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps texts as answers one after the other, a token for each byte; returns the last one.
    fn kept(texts: &[&str]) -> Arc<Answer> {
        let mut guide = Guide::default();
        for text in texts {
            let answer = Arc::new(Answer::new(&[], &tokens(text), guide.answer.as_deref()));
            guide = Guide { answer: Some(answer), ..Guide::default() };
        }
        guide.answer.expect("some text")
    }

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// Returns what may follow a text, and the agreement on the first token of it.
    fn after(answer: &Arc<Answer>, text: &str) -> (String, Option<Agreement>) {
        let mut guide = Guide::default();
        // Token by token, as an answer grows.
        let tokens = tokens(text);
        for end in 0..=tokens.len() {
            guide.follow(&tokens[..end], || Some(Arc::clone(answer)));
        }
        let following: Vec<_> = guide.following().collect();
        let text = following.iter().map(|(token, _)| char::from(*token as u8)).collect();
        (text, following.first().map(|(_, agreement)| *agreement))
    }

    #[test]
    fn what_follows_is_found_after_tokens_that_differ() {
        let once = kept(&["d=12-04;"]);
        assert_eq!(after(&once, ""), ("d=12-04;".to_owned(), Some(AGREEMENT_FIRST)));
        assert_eq!(after(&once, "d=35").0, "-04;");
        assert_eq!(after(&once, "d=35-66").0, ";");
        assert_eq!(after(&once, "d=12-04;"), (String::new(), None));
        assert_eq!(after(&once, "d=12-04;more"), (String::new(), None));
    }

    #[test]
    fn agreed_tokens_tell_the_place_after_values_of_other_lengths() {
        let names = ["{a:tom,b:lee}", "{a:ann,b:kim}", "{a:joe,b:sue}"];
        let answer = kept(&names);
        let (rest, agreement) = after(&answer, "{a:robert,");
        assert_eq!((&*rest, agreement), ("b:sue}", Some(AGREEMENT_FIRST + 2)));
        assert_eq!(after(&answer, "{a:al,b:").0, "sue}");
        assert_eq!(after(&answer, "{a:,b:joanna}").0, "");
        // Not yet the end of the name, as far as it is known.
        assert_eq!(after(&answer, "{a:mirk").0, ",b:sue}");
        let agreements = kept(&["{a:tom}", "{a:ann}", "{a:robert}", "{a:sue}"]).agreements.clone();
        assert_eq!(agreements, [5, 5, 5, 0, 0, 0, 5]);
    }

    #[test]
    fn longest_answers_are_kept_in_part() {
        let long = vec![7; 3 * TOKENS_MAX];
        let answer = Arc::new(Answer::new(&long, &long, None));
        assert_eq!((answer.tokens.len(), answer.prompt.len()), (TOKENS_MAX, PROMPT_MAX));
        assert_eq!(answer.common_prompt(&[7, 7, 1, 7]), 2);
        let mut guide = Guide::default();
        guide.follow(&long, || Some(answer));
        assert_eq!(guide.following().count(), 0);
    }
}
