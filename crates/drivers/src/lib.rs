//! The CSI drivers that Cleat contains. A driver knows its storage and the host, and nothing of Kubernetes: all its
//! input arrives over CSI.

pub mod block;
