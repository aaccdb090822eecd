//! Writes the decision about one pod, and records events. Every write is conditional on the revision that the decision
//! is based on; the reply goes to the cache. Makes no decisions.

use std::sync::Arc;

use cleat_api::condition::{next_pod_condition, pod_condition};
use cleat_api::key::Key;
use cleat_runtime::Recorder;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use tokio::sync::Semaphore;
use tracing::{debug, info};

use super::decide::ScheduleDecision;
use super::observe::ScheduleObserver;
use crate::Context;

#[derive(Clone)]
pub(super) struct DecisionWriter {
    pub(super) context: Context,
    pub(super) observer: ScheduleObserver,
    pub(super) recorder: Recorder,
    /// Limits the number of decisions that are written concurrently.
    pub(super) permits: Arc<Semaphore>,
}

impl DecisionWriter {
    pub(super) async fn write(&self, pod: &Pod, decision: &ScheduleDecision) -> Result<(), WriteError> {
        match decision {
            ScheduleDecision::AwaitVolumes => Ok(()),
            ScheduleDecision::Reserve { node, volumes, claims } => {
                debug!(pod = %Key::of(&pod.metadata), node, "node reserved");
                for volume in volumes {
                    self.write_volume(volume).await?;
                    cleat_crash::point("schedule:volume-reserved");
                }
                for claim in claims {
                    self.write_claim(claim).await?;
                    cleat_crash::point("schedule:node-selected");
                }
                Ok(())
            }
            ScheduleDecision::Bind { node } => self.bind(pod, node).await,
            ScheduleDecision::MarkUnschedulable(reason) => {
                self.write_condition(pod, "Unschedulable", reason.to_string()).await
            }
            ScheduleDecision::ReleaseNode { message } => {
                self.write_condition(pod, "SchedulerError", message.clone()).await
            }
        }
    }

    async fn write_volume(&self, volume: &PersistentVolume) -> Result<(), WriteError> {
        let written = write::replace(&self.context.client, Part::Whole, volume).await?;
        self.observer.volumes.observe_write(written);
        Ok(())
    }

    async fn write_claim(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let written = write::replace(&self.context.client, Part::Whole, claim).await?;
        self.observer.claims.observe_write(written);
        Ok(())
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        write::bind_pod(&self.context.client, pod, node).await.or_else(WriteError::ignore_not_found)?;
        cleat_crash::point("schedule:pod-bound");
        info!(pod = %key, node, "pod bound to node");
        self.recorder.normal(pod, "Scheduled", format!("Successfully assigned {key} to {node}"));
        Ok(())
    }

    /// Sets `PodScheduled` to false. Writes nothing if the condition has this reason and message already.
    async fn write_condition(&self, pod: &Pod, reason: &str, message: String) -> Result<(), WriteError> {
        let current = pod_condition(pod, "PodScheduled");
        let now = self.context.clock.time();
        let next = next_pod_condition(current, "PodScheduled", "False", Some(reason), Some(&message), now);
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
        written.map(|pod| self.observer.pods.observe_write(pod)).or_else(WriteError::ignore_not_found)
    }
}
