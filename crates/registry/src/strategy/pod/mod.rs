//! Pod.

mod container;
mod defaults;
mod source;
mod table;
mod valid;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodSpec, PodStatus};
use serde_json::Value;

use cleat_apimachinery::column::Column;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct Pods;

/// What the template of a pod gets that its author left out.
pub(super) fn default_template(spec: &mut PodSpec) {
    defaults::spec(spec);
}

/// What is wrong with the template of a pod, whose specification is at `path`.
pub(super) fn check_template(path: &str, spec: &PodSpec) -> Vec<FieldError> {
    valid::spec(path, None, spec)
}

/// No scheduler looks at such a pod, so it says from the start why it waits.
fn gated() -> PodCondition {
    PodCondition {
        type_: "PodScheduled".into(),
        status: "False".into(),
        reason: Some("SchedulingGated".into()),
        message: Some("Scheduling is blocked due to non-empty scheduling gates".into()),
        ..Default::default()
    }
}

impl Strategy for Pods {
    type Object = Pod;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Pod", "pods").short(&["po"]).category("all").with_status()
    }

    fn default(pod: &mut Pod) {
        defaults::pod(pod.spec.get_or_insert_default());
        pod.status.get_or_insert_default().phase.get_or_insert_with(|| "Pending".into());
    }

    fn prepare_create(pod: &mut Pod, _now: Timestamp) {
        pod.metadata.generation = Some(1);
        let class = pod.spec.as_ref().map(defaults::quality);
        let is_gated =
            pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
        pod.status = Some(PodStatus {
            phase: Some("Pending".into()),
            qos_class: class.map(Into::into),
            conditions: is_gated.then(|| vec![gated()]),
            ..Default::default()
        });
    }

    fn prepare_update(new: &mut Pod, old: &Pod) {
        new.status = old.status.clone();
        if new.spec != old.spec {
            new.metadata.generation = old.metadata.generation.map(|g| g + 1);
        }
    }

    fn prepare_status(new: &mut Pod, old: &Pod, _now: Timestamp) {
        new.spec = old.spec.clone();
        let status = new.status.get_or_insert_default();
        if status.qos_class.is_none() {
            status.qos_class = old.status.as_ref().and_then(|s| s.qos_class.clone());
        }
    }

    fn validate(pod: &Pod) -> Vec<FieldError> {
        let name = pod.metadata.name.as_deref();
        pod.spec.as_ref().map(|spec| valid::spec("spec", name, spec)).unwrap_or_default()
    }

    fn validate_update(new: &Pod, old: &Pod) -> Vec<FieldError> {
        valid::update(new, old)
    }

    fn fields() -> &'static [&'static str] {
        &[
            "spec.nodeName",
            "spec.host",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ]
    }

    fn field(pod: &Pod, name: &str) -> String {
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let value = match name {
            "spec.nodeName" | "spec.host" => spec.and_then(|s| s.node_name.clone()),
            "spec.restartPolicy" => spec.and_then(|s| s.restart_policy.clone()),
            "spec.schedulerName" => spec.and_then(|s| s.scheduler_name.clone()),
            "spec.serviceAccountName" => spec.and_then(|s| s.service_account_name.clone()),
            "spec.hostNetwork" => Some(spec.and_then(|s| s.host_network).unwrap_or(false).to_string()),
            "status.phase" => status.and_then(|s| s.phase.clone()),
            "status.podIP" => status.and_then(|s| s.pod_ip.clone()),
            "status.nominatedNodeName" => status.and_then(|s| s.nominated_node_name.clone()),
            _ => None,
        };
        value.unwrap_or_default()
    }

    fn columns() -> &'static [Column] {
        table::COLUMNS
    }

    fn cells(pod: &Pod, now: Timestamp) -> Vec<Value> {
        table::cells(pod, now)
    }

    fn row_conditions(pod: &Pod) -> Option<Value> {
        table::conditions(pod)
    }
}
