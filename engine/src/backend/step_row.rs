//! A row of a step, as the sampler asks it.

use super::{PositionLogits, ScreenedRow, Screening, StepError};
use crate::sampling::{Largest, LogitsRow, Remainder, Threshold, TokenLogit};

/// The logits of one position, and what the backend knows besides.
pub enum StepRow<'a> {
    /// All logits. // (vocab,)
    Whole(&'a mut [f32]),
    /// Logits that a screen has found.
    Screened {
        /// What the draw asks for first, by ascending token.
        found: &'a [TokenLogit],
        /// What answers further questions. `None` if the first answer decides every draw.
        further: Option<(ScreenedRow<'a>, &'a mut dyn Screening)>,
        /// Room for all logits, empty until they are needed.
        all: &'a mut Vec<f32>,
    },
}

impl<'a> StepRow<'a> {
    /// Returns the row of a position; `None` if the backend has drawn its token.
    pub fn new(
        (logits, kept): (PositionLogits<'a>, Option<ScreenedRow<'a>>),
        screening: Option<&'a mut dyn Screening>,
        all: &'a mut Vec<f32>,
    ) -> Option<Self> {
        match logits {
            PositionLogits::Drawn(_) => None,
            PositionLogits::All(all) => Some(Self::Whole(all)),
            PositionLogits::Largest(found) => {
                all.clear();
                Some(Self::Screened { found, further: kept.zip(screening), all })
            }
        }
    }

    /// Returns whether the logits that the step found did not decide the draw.
    pub fn was_undecided(&self) -> bool {
        matches!(self, Self::Screened { all, .. } if !all.is_empty())
    }
}

/// Returns whether a list has these tokens.
fn lists(found: &[TokenLogit], tokens: &[u32]) -> bool {
    found.iter().map(|found| &found.id).eq(tokens)
}

/// Why a row can be asked further: its [first question](Largest::others_follow) said so.
const KEPT: &str = "the first question announced others";

impl LogitsRow for StepRow<'_> {
    type Error = StepError;

    fn is_whole(&self) -> bool {
        matches!(self, Self::Whole(_))
    }

    fn has_found(&self, tokens: &[u32]) -> bool {
        match self {
            Self::Whole(_) => true,
            Self::Screened { found, .. } => lists(found, tokens),
        }
    }

    fn largest(&mut self, _: &Largest, found: &mut Vec<TokenLogit>) -> Result<(), StepError> {
        found.clear();
        match self {
            Self::Whole(all) => found.extend(crate::sampling::row::every(all)),
            Self::Screened { found: of_step, .. } => found.extend_from_slice(of_step),
        }
        Ok(())
    }

    fn at_least(
        &mut self,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, StepError> {
        match self {
            Self::Whole(_) => Ok(None),
            Self::Screened { further, .. } => {
                let (row, screening) = further.as_mut().expect(KEPT);
                screening.at_least(*row, threshold, found)
            }
        }
    }

    fn logits_of(&mut self, tokens: &[u32], found: &mut Vec<TokenLogit>) -> Result<(), StepError> {
        match self {
            Self::Whole(all) => {
                found.extend(tokens.iter().map(|&id| TokenLogit { id, logit: all[id as usize] }));
                Ok(())
            }
            Self::Screened { found: of_step, .. } if lists(of_step, tokens) => {
                found.extend_from_slice(of_step);
                Ok(())
            }
            Self::Screened { further, .. } => {
                let (row, screening) = further.as_mut().expect(KEPT);
                screening.logits_of(*row, tokens, found)
            }
        }
    }

    fn all(&mut self) -> Result<&mut [f32], StepError> {
        match self {
            Self::Whole(all) => Ok(all),
            Self::Screened { further, all, .. } => {
                let (row, screening) = further.as_mut().expect(KEPT);
                screening.all(*row, all)?;
                Ok(all)
            }
        }
    }
}
