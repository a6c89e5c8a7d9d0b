//! Experimental kernels, and what chooses them.

mod launches;
mod tuning;
mod widths;

use super::{experimental as options, *};
