//! How volumes of each kind are mounted.

pub(crate) mod csi;
