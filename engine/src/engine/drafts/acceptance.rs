//! How often drafts are accepted.

use super::MATCH_MAX;

/// Expected share of accepted drafts after a match of each length, before any is known. // (matched − 1)
const PRIOR: [f64; MATCH_MAX] = [0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85];
/// Drafts that the prior of a length, and the engine's share for a request, count as.
const PRIOR_WEIGHT: f64 = 4.0;
/// What older drafts of a request count with each new proposal.
const REQUEST_KEEPS: f64 = 0.95;
/// What older drafts of the engine count with each new proposal.
const ENGINE_KEEPS: f64 = 0.998;
/// What a request's drafts count with each step in which it could have had some but got nothing: after refused drafts, a
/// request gets others after a while.
const IDLE_KEEPS: f64 = 0.99;

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

/// Accepted drafts of one choice.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chances(Counts);

/// Accepted drafts of an engine, by length of the match.
#[derive(Debug, Clone, Default)]
pub struct Acceptance([Counts; MATCH_MAX]);

impl Acceptance {
    /// Returns the probability that a draft is accepted if the one before it is.
    pub fn probability(&self, matched: usize, chances: &Chances) -> f64 {
        let class = matched.clamp(1, MATCH_MAX) - 1;
        chances.0.share(self.0[class].share(PRIOR[class]))
    }

    /// Records the drafts of one choice in a step: after a match of this length so many were proposed and accepted.
    pub fn record(
        &mut self,
        chances: &mut Chances,
        matched: usize,
        proposed: usize,
        accepted: usize,
    ) {
        if matched == 0 {
            return;
        }
        if proposed == 0 {
            return chances.0.add(IDLE_KEEPS, 0, 0);
        }
        // The first refused draft is decided; those after it are not.
        let decided = proposed.min(accepted + 1);
        chances.0.add(REQUEST_KEEPS, accepted, decided);
        self.0[matched.min(MATCH_MAX) - 1].add(ENGINE_KEEPS, accepted, decided);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_learn_from_their_own_drafts_and_from_others() {
        let (mut engine, mut good, mut bad) =
            (Acceptance::default(), Chances::default(), Chances::default());
        let prior = engine.probability(3, &good);
        assert!((prior - PRIOR[2]).abs() < 1e-9);
        for _ in 0..20 {
            engine.record(&mut good, 3, 4, 4);
            engine.record(&mut bad, 3, 4, 0);
        }
        assert!(engine.probability(3, &good) > 0.9);
        assert!(engine.probability(3, &bad) < 0.2);
        let new = engine.probability(3, &Chances::default());
        assert!((0.7..0.9).contains(&new), "80 of 100 were accepted: {new}");
        assert!((engine.probability(5, &Chances::default()) - PRIOR[4]).abs() < 1e-9);
    }

    #[test]
    fn refused_requests_are_tried_again_after_a_while() {
        let (mut engine, mut bad) = (Acceptance::default(), Chances::default());
        (0..20).for_each(|_| engine.record(&mut bad, 8, 4, 0));
        (0..2000).for_each(|_| engine.record(&mut Chances::default(), 8, 4, 4));
        let refused = engine.probability(8, &bad);
        (0..500).for_each(|_| engine.record(&mut bad, 8, 0, 0));
        assert!(refused < 0.4 && engine.probability(8, &bad) > 0.9);
    }
}
