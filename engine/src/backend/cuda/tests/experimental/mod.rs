//! Experimental kernels, and what chooses them.

mod attention;
mod choices;
mod launches;
mod overlap;
mod tuning;
mod widths;

use super::{experimental as options, *};
