//! The node agent: what the kubelet's volume manager does, for one node.
//!
//! It mounts the volumes of the pods on this node at the kubelet's paths, through the drivers that are registered here.
//! When a pod has terminated, its volumes are unmounted, and only then the Pod is deleted.
//!
//! # Data flow
//!
//! ```text
//! pod, claim, volume ─► desired ─┐
//! disk, driver responses ─► actual ├─► decide ─► act ─► actual
//! Node, VolumeAttachment ────────┘
//! ```
//!
//! One task at a time reconciles a volume. It calls [`decide`](decide::decide), which returns one step or reasons to
//! wait, and carries out the step.
//!
//! # Modules
//!
//! Each module imports only modules above it:
//!
//! | module | owns |
//! |---|---|
//! | `layout` | paths and records (`vol_data.json`) on disk |
//! | `actual`, `desired` | the mounted volumes; the volumes that the pods need |
//! | `reconstruct` | the volumes that earlier runs left mounted |
//! | `decide`, `condition` | the next step for a volume; the condition of a pod (both pure) |
//! | `state` | the actual and desired volumes of the node |
//! | `plugin` | how the volumes of one plugin are mounted: today CSI |
//! | `drivers` | the table of registered CSI drivers |
//! | `context` | what the modules below share |
//! | `csi_node`, `registration` | the CSINode; the sockets in `plugins_registry` |
//! | `act` | stage, publish, unpublish, unstage |
//! | `error` | the error of a reconcile |
//! | `volumes`, `pods`, `node_status` | the reconciles of a volume, a pod, the Node and its Lease |
//! | `subscriptions` | which change wakes which reconcile |
//! | `agent` | wiring, start and stop |
//!
//! # Guarantees
//!
//! - A volume that requires attachment is staged and published only after the server has acknowledged it in `volumesInUse`
//!   and a Node at least as new as that acknowledgement lists it in `volumesAttached`. It leaves `volumesInUse` only after it
//!   was unstaged.
//! - A pod that is missing in the cache is read from the server before its volumes are unpublished. The volumes of a running
//!   pod stay published, even if its claim or volume was deleted.
//! - The record on disk (`vol_data.json`) is written before NodeStageVolume or NodePublishVolume is called, and is
//!   deleted after the inverse call has succeeded.
//! - A Pod with a deletion timestamp is deleted only when none of its volumes is, or may be, mounted.
//! - A restart does not unmount volumes that are still needed. Volumes found on disk count as uncertain until a repeated,
//!   idempotent call to their driver confirms them.
//! - Directories are removed only when empty.
//!
//! # Crash points
//!
//! `node:in-use-reported`, `node:stage-recorded`, `node:staged`, `node:published`, `node:mounted-reported`,
//! `node:unpublished`, `node:unstaged`, `node:in-use-dropped`; each directly after the effect it names.
//!
//! # Not here yet
//!
//! Volumes that are not CSI, raw block, node expansion, fsGroup, subPath, containers. The condition
//! `cleat.dev/VolumesMounted` of a pod names its volumes that are not supported.

mod act;
pub mod actual;
mod agent;
pub mod condition;
mod context;
mod csi_node;
pub mod decide;
pub mod desired;
mod drivers;
mod error;
pub mod layout;
mod node_status;
mod plugin;
mod pods;
pub mod reconstruct;
mod registration;
mod state;
mod subscriptions;
mod volumes;

pub use act::{MountError, UnmountError};
pub use agent::{Agent, AgentError, Config};
pub use csi_node::CsiNodeError;
pub use error::ReconcileError;
pub use registration::RegistrationError;
