//! How often drafts are accepted.

use super::{
    MATCH_MAX,
    guide::{AGREEMENT_MAX, Agreement},
};

/// Kinds of drafts with a probability of their own.
const KINDS: usize = MATCH_MAX + AGREEMENT_MAX + 1;
/// Expected share of accepted drafts of each kind, before any is known: after matches of 1 to [`MATCH_MAX`] tokens, and with
/// agreements of 0 to [`AGREEMENT_MAX`].
const PRIOR: [f64; KINDS] =
    [0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.1, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95];
/// Drafts that the prior of a kind, and the engine's share for a request, count as.
const PRIOR_WEIGHT: f64 = 4.0;
/// What older drafts of a request count with each new proposal.
const REQUEST_KEEPS: f64 = 0.95;
/// What older drafts of the engine count with each new one.
const ENGINE_KEEPS: f64 = 0.999;
/// What a request's drafts count with each step in which it could have had some but got nothing: after refused drafts, a
/// request gets others after a while.
const IDLE_KEEPS: f64 = 0.99;
/// What the engine's drafts of the first one's kind count then.
const ENGINE_IDLE_KEEPS: f64 = 0.999;

/// Decided drafts: each draft up to the first refused one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counts {
    accepted: f64,
    decided: f64,
}

impl Counts {
    fn add(&mut self, keeps: f64, accepted: usize, decided: usize) {
        self.accepted = self.accepted * keeps + accepted as f64;
        self.decided = self.decided * keeps + decided as f64;
    }

    /// Returns the share of accepted ones, if `prior` counts as [`PRIOR_WEIGHT`] drafts.
    fn share(&self, prior: f64) -> f64 {
        (self.accepted + prior * PRIOR_WEIGHT) / (self.decided + PRIOR_WEIGHT)
    }
}

/// What a draft follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// So many of the newest tokens occurred before it.
    Match(usize),
    /// The guide has it here, with this agreement of earlier answers.
    Guide(Agreement),
}

impl Reason {
    /// Returns the index of the kind.
    fn kind(self) -> usize {
        match self {
            Self::Match(tokens) => tokens.clamp(1, MATCH_MAX) - 1,
            Self::Guide(agreement) => MATCH_MAX + usize::from(agreement).min(AGREEMENT_MAX),
        }
    }
}

/// Accepted drafts of one choice that followed from matches. Agreements say enough of a guide's.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chances(Counts);

/// Accepted drafts of an engine, by their kind.
#[derive(Debug, Clone, Default)]
pub struct Acceptance([Counts; KINDS]);

impl Acceptance {
    /// Returns the probability that a draft is accepted if the one before it is.
    pub fn probability(&self, reason: Reason, chances: Chances) -> f64 {
        let kind = reason.kind();
        let of_kind = self.0[kind].share(PRIOR[kind]);
        match reason {
            Reason::Match(_) => chances.0.share(of_kind),
            Reason::Guide(_) => of_kind,
        }
    }

    /// Records a step in which a choice could have had drafts but got none, and what its first one would have followed from.
    pub fn record_idle(&mut self, chances: &mut Chances, first: Reason) {
        chances.0.add(IDLE_KEEPS, 0, 0);
        self.0[first.kind()].add(ENGINE_IDLE_KEEPS, 0, 0);
    }

    /// Records the decided drafts of one choice in a step, of which the first were accepted.
    pub fn record(
        &mut self,
        chances: &mut Chances,
        reasons: impl Iterator<Item = Reason>,
        accepted: usize,
    ) {
        for (draft, reason) in reasons.enumerate() {
            let keeps = if draft == 0 { REQUEST_KEEPS } else { 1.0 };
            let is_accepted = usize::from(draft < accepted);
            if let Reason::Match(_) = reason {
                chances.0.add(keeps, is_accepted, 1);
            }
            self.0[reason.kind()].add(ENGINE_KEEPS, is_accepted, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_learn_from_their_own_drafts_and_from_others() {
        let (mut engine, mut good, mut bad) =
            (Acceptance::default(), Chances::default(), Chances::default());
        let prior = engine.probability(Reason::Match(3), good);
        assert!((prior - PRIOR[2]).abs() < 1e-9);
        for _ in 0..20 {
            engine.record(&mut good, [Reason::Match(3); 4].into_iter(), 4);
            engine.record(&mut bad, [Reason::Match(3); 1].into_iter(), 0);
        }
        assert!(engine.probability(Reason::Match(3), good) > 0.9);
        assert!(engine.probability(Reason::Match(3), bad) < 0.2);
        let new = engine.probability(Reason::Match(3), Chances::default());
        assert!((0.7..0.9).contains(&new), "80 of 100 were accepted: {new}");
        let longer = engine.probability(Reason::Match(5), Chances::default());
        assert!((longer - PRIOR[4]).abs() < 1e-9);
        let guided = engine.probability(Reason::Guide(1), good);
        assert!((guided - PRIOR[MATCH_MAX + 1]).abs() < 1e-9, "of another kind");
    }

    #[test]
    fn drafts_count_for_their_own_agreements() {
        let mut engine = Acceptance::default();
        let reasons = [Reason::Guide(7), Reason::Guide(0)];
        (0..200).for_each(|_| engine.record(&mut Chances::default(), reasons.into_iter(), 1));
        let probability =
            |agreement| engine.probability(Reason::Guide(agreement), Chances::default());
        assert!(probability(7) > 0.95 && probability(0) < 0.05);
    }

    #[test]
    fn refused_requests_are_tried_again_after_a_while() {
        let (mut engine, mut bad) = (Acceptance::default(), Chances::default());
        (0..20).for_each(|_| engine.record(&mut bad, [Reason::Match(8); 1].into_iter(), 0));
        let others =
            |_| engine.record(&mut Chances::default(), [Reason::Match(8); 4].into_iter(), 4);
        (0..2000).for_each(others);
        let refused = engine.probability(Reason::Match(8), bad);
        (0..500).for_each(|_| engine.record_idle(&mut bad, Reason::Match(8)));
        assert!(refused < 0.4 && engine.probability(Reason::Match(8), bad) > 0.8);
        let guided = Reason::Guide(7);
        (0..100).for_each(|_| engine.record(&mut bad, [guided].into_iter(), 0));
        let refused = engine.probability(guided, bad);
        (0..3000).for_each(|_| engine.record_idle(&mut bad, guided));
        assert!(refused < 0.1 && engine.probability(guided, bad) > 0.3, "all requests");
    }
}
