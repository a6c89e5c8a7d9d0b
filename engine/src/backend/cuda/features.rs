//! What makes the steps of a device faster and may be given up: whether it is used, how often, and if not, why.

use std::{fmt, str::FromStr};

use crate::names::{UnknownName, names};

/// A way to make steps faster. Answers are the same with and without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Kernels as machine code (cubins), instead of PTX that the driver compiles.
    Cubin,
    /// Passes that are recorded once and replayed (CUDA graphs).
    Graphs,
    /// Kernels that start while the one before them runs (programmatic dependent launch).
    Overlap,
    /// Products of warpgroups.
    Warpgroups,
    /// Attention in tiles.
    Tiles,
    /// Decodes that the device begins before they are asked for.
    Ahead,
}

names!(
    Feature,
    "feature of a GPU",
    Cubin = "cubin",
    Graphs = "graphs",
    Overlap = "pdl",
    Warpgroups = "wgmma",
    Tiles = "tiles",
    Ahead = "ahead"
);

/// Some features, written as their names with commas between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FeatureSet(u8);

impl FeatureSet {
    /// Returns whether the set has a feature.
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 >> feature as u8 & 1 == 1
    }
}

impl FromStr for FeatureSet {
    type Err = UnknownName;

    fn from_str(names: &str) -> Result<Self, UnknownName> {
        let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(Feature::from_str).try_fold(Self::default(), |Self(all), feature| {
            feature.map(|feature| Self(all | 1 << feature as u8))
        })
    }
}

impl fmt::Display for FeatureSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Feature::ALL.into_iter().filter(|feature| self.contains(*feature));
        f.write_str(&names.map(Feature::name).collect::<Vec<_>>().join(","))
    }
}

/// Whether a feature is used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum State {
    #[default]
    Allowed,
    /// It is not wanted, or the device or the model has none.
    Off(&'static str),
    /// The check that failed, and what it found.
    GivenUp(String),
}

/// The features of an open device.
#[derive(Debug, Clone, Default)]
pub struct Features {
    states: [State; Feature::ALL.len()],
    uses: [u64; Feature::ALL.len()],
}

/// A feature and what became of it, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureReport {
    /// The feature.
    pub feature: Feature,
    /// How often it was used: modules loaded, passes replayed, kernels launched or recorded, decodes taken.
    pub uses: u64,
    /// Why it is not used; `None` if it may be.
    pub given_up: Option<String>,
}

impl Features {
    /// Creates the features of a device, all allowed but some.
    pub fn new(disabled: FeatureSet) -> Self {
        let state = |feature: Feature| {
            if disabled.contains(feature) { State::Off("disabled") } else { State::Allowed }
        };
        Self { states: Feature::ALL.map(state), ..Self::default() }
    }

    /// Returns whether a feature may be used.
    pub fn allows(&self, feature: Feature) -> bool {
        self.states[feature as usize] == State::Allowed
    }

    /// Counts a use.
    pub fn count(&mut self, feature: Feature) {
        self.count_many(feature, 1);
    }

    /// Counts several uses.
    pub fn count_many(&mut self, feature: Feature, uses: usize) {
        self.uses[feature as usize] += uses as u64;
    }

    /// Does without a feature, for a reason that is not a failure.
    pub fn turn_off(&mut self, feature: Feature, why: &'static str) {
        let state = &mut self.states[feature as usize];
        if *state == State::Allowed {
            *state = State::Off(why);
        }
    }

    /// Ends the use of a feature, with a warning that says why.
    pub fn give_up(&mut self, feature: Feature, why: impl fmt::Display) {
        let state = &mut self.states[feature as usize];
        if *state == State::Allowed {
            let why = why.to_string();
            tracing::warn!(feature = feature.name(), why, "a feature of the GPU is not used");
            *state = State::GivenUp(why);
        }
    }

    /// Returns what became of each feature.
    pub fn report(&self) -> Vec<FeatureReport> {
        let report = |feature: Feature| FeatureReport {
            feature,
            uses: self.uses[feature as usize],
            given_up: match &self.states[feature as usize] {
                State::Allowed => None,
                State::Off(why) => Some((*why).to_owned()),
                State::GivenUp(why) => Some(why.clone()),
            },
        };
        Feature::ALL.into_iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_from_names() {
        let set: FeatureSet = "graphs, pdl".parse().expect("two names");
        assert!(set.contains(Feature::Graphs) && set.contains(Feature::Overlap));
        assert!(!set.contains(Feature::Ahead));
        assert_eq!(set.to_string(), "graphs,pdl");
        assert_eq!("".parse(), Ok(FeatureSet::default()));
        let error = "graphs,warp".parse::<FeatureSet>().expect_err("there is no such feature");
        assert!(error.to_string().contains("'warp'"), "{error}");
    }

    #[test]
    fn the_first_reason_stays() {
        let mut features = Features::new("pdl".parse().expect("a name"));
        features.count(Feature::Graphs);
        features.give_up(Feature::Overlap, "other results");
        features.give_up(Feature::Warpgroups, "first");
        features.give_up(Feature::Warpgroups, "second");
        let reason = |feature: Feature| features.report()[feature as usize].given_up.clone();
        assert_eq!(reason(Feature::Overlap).as_deref(), Some("disabled"));
        assert_eq!(reason(Feature::Warpgroups).as_deref(), Some("first"));
        assert_eq!(reason(Feature::Graphs), None);
        assert!(!features.allows(Feature::Warpgroups) && features.allows(Feature::Graphs));
        assert_eq!(features.report()[Feature::Graphs as usize].uses, 1);
    }
}
