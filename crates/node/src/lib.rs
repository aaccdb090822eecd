//! The node agent: what the kubelet's volume manager does, for one node.
//!
//! A pod that was placed on this node gets its volumes mounted where a kubelet would mount them, through the drivers that
//! registered here; when it ends they are unmounted, and only then its object goes.
//!
//! # The way of a volume
//!
//! ```text
//! pod, claim, volume ─► desired ─┐
//! disk, driver's answers ─► actual ├─► decide ─► act ─► actual
//! Node, VolumeAttachment ────────┘
//! ```
//!
//! [`decide`](decide::decide) is asked by one visitor per volume at a time and answers with one step or a reason to wait.
//!
//! # Guarantees
//!
//! - A volume that needs attachment is touched only after the server acknowledged it in `volumesInUse`, and a Node no older
//!   than that lists it in `volumesAttached`. It leaves `volumesInUse` only after it was unstaged.
//! - Nothing is unpublished on the strength of a missing cache entry: the server is asked. Nothing is unpublished under a pod
//!   that lives, whatever became of its claim.
//! - The record on disk (`vol_data.json`) exists before the call it is about leaves, and until its inverse succeeded.
//! - A pod that is being deleted keeps its object until nothing of it is, or may be, mounted.
//! - A restart disturbs nothing that is mounted and wanted; what is found is treated as uncertain, and confirmed by repeating
//!   the driver's idempotent calls.
//! - Directories are removed only when empty.
//!
//! # Crash points
//!
//! `node:in-use-reported`, `node:stage-recorded`, `node:staged`, `node:published`, `node:mounted-reported`,
//! `node:unpublished`, `node:unstaged`, `node:in-use-dropped`; each directly after the effect it names.
//!
//! # Not here yet
//!
//! Volumes that are not CSI, raw block, node expansion, fsGroup, subPath, containers. Pods with such volumes are told so in
//! their condition `cleat.dev/VolumesMounted`.

mod act;
pub mod actual;
mod agent;
pub mod decide;
pub mod desired;
mod drivers;
pub mod layout;
mod plugin;
mod pods;
pub mod reconstruct;
mod registration;
mod registry;
pub mod report;
mod state;
mod status;
mod volumes;

pub use act::{MountError, UnmountError};
pub use agent::{Agent, AgentError, Config, TurnError};
pub use registration::RegistrationError;
pub use registry::RegistryError;
