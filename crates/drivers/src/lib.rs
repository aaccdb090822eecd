//! The CSI drivers that Cleat ships. A driver knows its storage and the machine, never Kubernetes: everything it is told
//! arrives over CSI.

pub mod block;
