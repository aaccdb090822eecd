//! Which part of an object a write may change.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectPart {
    /// The main resource: everything but the status.
    Main,
    Status,
    /// `spec.finalizers` of a namespace.
    Finalize,
    /// The whole object, for writes by the server itself: nothing is restored from the stored object.
    Whole,
}
