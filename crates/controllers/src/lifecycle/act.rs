//! Writes the decisions about nodes and pods.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::json;
use tracing::{debug, info, warn};

use super::LifecycleController;
use super::decide::{LifecyclePodDecision, NodePlan};

impl LifecycleController {
    pub(super) async fn apply_to_node(&self, node: &Arc<Node>, plan: NodePlan) -> Result<(), WriteError> {
        let key = Key::of(&node.metadata);
        let mut revision = node.metadata.resource_version.clone();
        if let Some(conditions) = plan.conditions {
            let patch = json!({ "metadata": { "resourceVersion": revision }, "status": { "conditions": conditions } });
            let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await?;
            warn!(node = %key, "node stopped reporting, its conditions are Unknown");
            let message = format!("Node {key} status is now: NodeNotReady");
            self.recorder.normal(node.as_ref(), "NodeNotReady", message);
            revision = written.metadata.resource_version.clone();
            self.observer.nodes.observe_write(written);
        }
        if let Some(taints) = plan.taints {
            let taints = Some(taints).filter(|taints| !taints.is_empty());
            let patch = json!({ "metadata": { "resourceVersion": revision }, "spec": { "taints": taints } });
            let written = write::merge::<Node>(&self.context.client, Part::Whole, &key, &patch).await?;
            debug!(node = %key, "node taints updated");
            self.observer.nodes.observe_write(written);
        }
        Ok(())
    }

    pub(super) async fn apply_to_pod(
        &self,
        pod: &Pod,
        node: &str,
        decision: LifecyclePodDecision,
    ) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        match decision {
            LifecyclePodDecision::Keep | LifecyclePodDecision::RecheckAt(_) => {}
            LifecyclePodDecision::MarkNotReady => self.mark_not_ready(pod, node).await?,
            LifecyclePodDecision::Evict => {
                info!(pod = %key, node, "evicting pod from its node");
                self.recorder.normal(pod, "TaintManagerEviction", format!("Marking for deletion Pod {key}"));
                write::delete(&self.context.client, pod).await?;
            }
            LifecyclePodDecision::DeleteOutOfService => {
                info!(pod = %key, node, "deleting pod of an out-of-service node");
                write::delete_immediately(&self.context.client, pod).await?;
            }
            LifecyclePodDecision::DeleteOrphaned => {
                info!(pod = %key, node, "deleting pod of a missing node");
                write::delete_immediately(&self.context.client, pod).await?;
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
        written.map(|pod| self.observer.pods.observe_write(pod)).or_else(WriteError::ignore_not_found)?;
        info!(pod = %key, node, "pod marked not ready, its node is not ready");
        self.recorder.warning(pod, "NodeNotReady", "Node is not ready".to_owned());
        Ok(())
    }
}
