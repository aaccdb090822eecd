//! Volume plugins: one module per kind of volume, with the calls that mount and unmount it.
//!
//! A plugin imports only `desired` and `layout`. It keeps no state of the node, decides nothing, and does not know the
//! queues: `act` calls it, and owns the order of records and calls.

pub(crate) mod csi;
