//! Writes what was decided about a node or a pod.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::json;
use tracing::{debug, info, warn};

use super::Lifecycle;
use super::decide::{NodePlan, PodDecision};

impl Lifecycle {
    pub(super) async fn settle_node(&self, node: &Arc<Node>, plan: NodePlan) -> Result<(), WriteError> {
        let key = Key::of(&node.metadata);
        let mut revision = node.metadata.resource_version.clone();
        if let Some(conditions) = plan.conditions {
            let patch = json!({ "metadata": { "resourceVersion": revision }, "status": { "conditions": conditions } });
            let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await?;
            warn!(node = %key, "the node is silent");
            let message = format!("Node {key} status is now: NodeNotReady");
            self.recorder.normal(node.as_ref(), "NodeNotReady", message);
            revision = written.metadata.resource_version.clone();
            self.nodes.observe_write(written);
        }
        if let Some(taints) = plan.taints {
            let taints = Some(taints).filter(|taints| !taints.is_empty());
            let patch = json!({ "metadata": { "resourceVersion": revision }, "spec": { "taints": taints } });
            let written = write::merge::<Node>(&self.context.client, Part::Whole, &key, &patch).await?;
            debug!(node = %key, "taints brought up to date");
            self.nodes.observe_write(written);
        }
        Ok(())
    }

    pub(super) async fn settle_pod(&self, pod: &Pod, node: &str, decision: PodDecision) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        match decision {
            PodDecision::Keep | PodDecision::LookAt(_) => {}
            PodDecision::MarkNotReady => self.mark_not_ready(pod, node).await?,
            PodDecision::Evict => {
                info!(pod = %key, node, "pod leaves its node");
                self.recorder.normal(pod, "TaintManagerEviction", format!("Marking for deletion Pod {key}"));
                write::delete(&self.context.client, pod).await?;
            }
            PodDecision::Finish => {
                info!(pod = %key, node, "pod of a machine out of service removed");
                write::delete_immediately(&self.context.client, pod).await?;
            }
            PodDecision::Collect => {
                if write::get_live::<Node>(&self.context.client, &Key::cluster(node)).await?.is_none() {
                    info!(pod = %key, node, "pod of a node that is gone removed");
                    write::delete_immediately(&self.context.client, pod).await?;
                }
            }
        }
        Ok(())
    }
    async fn mark_not_ready(&self, pod: &Pod, node: &str) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        let now = self.context.clock.time();
        let mut conditions: Vec<_> = pod.status.iter().flat_map(|s| s.conditions.clone().unwrap_or_default()).collect();
        for ready in conditions.iter_mut().filter(|c| c.type_ == "Ready") {
            ready.status = "False".to_owned();
            ready.last_transition_time = Some(now.clone());
        }
        let patch = json!({
            "metadata": { "resourceVersion": pod.metadata.resource_version },
            "status": { "conditions": conditions },
        });
        let written = write::merge::<Pod>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|pod| self.pods.observe_write(pod)).or_else(WriteError::ignore_not_found)?;
        info!(pod = %key, node, "pod of a node that is not ready marked");
        self.recorder.warning(pod, "NodeNotReady", "Node is not ready".to_owned());
        Ok(())
    }
}
