//! Writes the taints, if nobody wrote the node since they were read: the list is sent whole.

use cleat_api::key::Key;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{Node, Taint};
use serde_json::json;
use tracing::info;

use crate::Context;

pub(super) async fn write(context: &Context, node: &Node, taints: &[Taint]) -> Result<(), WriteError> {
    let key = Key::of(&node.metadata);
    let taints = Some(taints).filter(|t| !t.is_empty());
    let patch = json!({
        "metadata": { "resourceVersion": node.metadata.resource_version },
        "spec": { "taints": taints },
    });
    let written = match write::merge::<Node>(&context.client, Part::Whole, &key, &patch).await {
        Err(error) if error.is_not_found() => return Ok(()),
        written => written?,
    };
    info!(node = %key, "the node is ready and takes pods");
    context.caches.nodes().observe_write(written);
    Ok(())
}
