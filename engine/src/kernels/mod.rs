//! CPU kernels. `scalar` is the reference; every other ISA is compared with it bit for bit.
//!
//! [`gemm`] multiplies tiles of a [`crate::formats::PackedMatrix`] by all rows of a step on the calling
//! thread; the caller distributes tiles over threads. Sums are exact int32, so a result does not
//! depend on the ISA, the distribution or the other rows.

#[doc(hidden)]
pub mod float;

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod activations;
#[cfg(test)]
mod conformance;
mod gemm;
mod generic;
mod group_activations;
#[cfg(test)]
mod group_conformance;
mod group_gemm;
mod isa;
mod order;
pub(crate) mod prefetch;
mod product;
mod scalar;
pub(crate) mod screen;
mod self_check;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[doc(hidden)]
pub use activations::{ActivationRows, Activations};
#[doc(hidden)]
pub use gemm::gemm;
pub(crate) use gemm::{peak_products_per_s, tile_store};
pub use group_activations::Digits;
#[doc(hidden)]
pub use group_activations::{GroupActivations, GroupRows, GroupShape, SCALED_INPUTS};
#[doc(hidden)]
pub use group_gemm::gemm_groups;
pub use isa::{Isa, IsaUnavailable, select};
pub use self_check::self_check;
pub(crate) use self_check::{agrees_with_scalar, groups_agree_with_scalar, wave};
