//! Carries one pod's decision out. Every write is conditional on the revision that was decided on, and its reply goes back to the
//! cache.

use cleat_api::condition::{next_pod_condition, pod_condition};
use cleat_api::key::Key;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use tracing::{debug, info};

use super::Scheduler;
use super::decide::Decision;

impl Scheduler {
    pub(super) async fn settle(&self, pod: &Pod, decision: &Decision) -> Result<(), WriteError> {
        match decision {
            Decision::Await => Ok(()),
            Decision::Reserve { node, volumes, claims } => {
                debug!(pod = %Key::of(&pod.metadata), node, "place reserved");
                for volume in volumes {
                    self.set_aside(volume).await?;
                    cleat_crash::point("schedule:volume-reserved");
                }
                for claim in claims {
                    self.select(claim).await?;
                    cleat_crash::point("schedule:node-selected");
                }
                Ok(())
            }
            Decision::Bind { node } => self.bind(pod, node).await,
            Decision::Wait(why) => self.refuse(pod, "Unschedulable", why.to_string()).await,
            Decision::GiveUp { message } => self.refuse(pod, "SchedulerError", message.clone()).await,
        }
    }

    async fn set_aside(&self, volume: &PersistentVolume) -> Result<(), WriteError> {
        let written = write::replace(&self.context.client, Part::Whole, volume).await?;
        self.observed.volumes.observe_write(written);
        Ok(())
    }

    async fn select(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let written = write::replace(&self.context.client, Part::Whole, claim).await?;
        self.observed.claims.observe_write(written);
        Ok(())
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), WriteError> {
        let key = Key::of(&pod.metadata);
        write::bind_pod(&self.context.client, pod, node).await.or_else(WriteError::ignore_not_found)?;
        cleat_crash::point("schedule:pod-bound");
        info!(pod = %key, node, "pod placed");
        self.recorder.normal(pod, "Scheduled", format!("Successfully assigned {key} to {node}"));
        Ok(())
    }

    async fn refuse(&self, pod: &Pod, reason: &str, message: String) -> Result<(), WriteError> {
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
        written.map(|pod| self.observed.pods.observe_write(pod)).or_else(WriteError::ignore_not_found)
    }
}
