//! Binds a pod to its node, or says on the pod why it waits.

use cleat_api::condition::{next_pod_condition, pod_condition};
use cleat_api::key::Key;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::Pod;
use tracing::info;

use super::Scheduler;
use super::decide::{Decision, Wait};

impl Scheduler {
    pub(super) async fn settle(&self, pod: &Pod, decision: Decision) -> Result<(), WriteError> {
        match decision {
            Decision::NotOurs => Ok(()),
            Decision::Bind(node) => self.bind(pod, &node).await,
            Decision::Wait(wait) => self.wait(pod, &wait).await,
        }
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        write::bind_pod(&self.context.client, pod, node).await.or_else(WriteError::absent_is_fine)?;
        info!(pod = %key, node, "pod placed");
        self.recorder.normal(pod, "Scheduled", format!("Successfully assigned {key} to {node}"));
        Ok(())
    }

    async fn wait(&self, pod: &Pod, wait: &Wait) -> Result<(), WriteError> {
        let message = match wait {
            Wait::NoReadyNode { nodes } => format!("0/{nodes} nodes are available: no node is ready."),
            Wait::Undetermined { nodes } => {
                format!("{nodes} nodes are ready and the pod names none: set spec.nodeName.")
            }
        };
        let current = pod_condition(pod, "PodScheduled");
        let reason = Some("Unschedulable");
        let now = self.context.clock.time();
        let next = next_pod_condition(current, "PodScheduled", "False", reason, Some(&message), now);
        let Some(condition) = next else { return Ok(()) };
        self.recorder.warning(pod, "FailedScheduling", message);
        let others = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let mut conditions: Vec<_> = others.filter(|c| c.type_ != "PodScheduled").cloned().collect();
        conditions.push(condition);
        let patch = serde_json::json!({
            "metadata": { "resourceVersion": pod.metadata.resource_version },
            "status": { "conditions": conditions },
        });
        let key = Key::of(&pod.metadata);
        let written = write::merge::<Pod>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|pod| self.context.caches.pods().observe_write(pod)).or_else(WriteError::absent_is_fine)
    }
}
