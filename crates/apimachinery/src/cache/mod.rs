//! Caches on the path of every request. Each is an optimisation only: without it the same code computes the same result.
//! `docs/performance.md` says what each one saves.

pub mod body_shape;
mod change_shape;
pub mod ownership;
pub mod two_generation;

use body_shape::BodyShapeCache;
use ownership::OwnershipCache;

/// The caches of one kind.
#[derive(Default)]
pub struct KindCaches {
    pub ownership: OwnershipCache,
    pub body_shapes: BodyShapeCache,
}
