//! Strategy of Pod (v1). The files beside it hold defaults, validation and the table row.

mod container;
mod defaults;
mod table_row;
mod validation;
mod volume_source;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodSpec, PodStatus};
use serde_json::Value;

use cleat_apimachinery::column::Column;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct PodStrategy;

/// Fills the fields that the spec of a pod template leaves out.
pub(super) fn default_template_spec(spec: &mut PodSpec) {
    defaults::default_spec(spec);
}

/// Validates the spec of a pod template. `path` is the path of the spec, for error messages.
pub(super) fn validate_template_spec(path: &str, spec: &PodSpec) -> Vec<FieldError> {
    validation::validate_spec(path, None, spec)
}

/// The condition of a new pod with scheduling gates. Set at creation, because no scheduler reports on such a pod.
fn scheduling_gated_condition() -> PodCondition {
    PodCondition {
        type_: "PodScheduled".into(),
        status: "False".into(),
        reason: Some("SchedulingGated".into()),
        message: Some("Scheduling is blocked due to non-empty scheduling gates".into()),
        ..Default::default()
    }
}

impl Strategy for PodStrategy {
    type Object = Pod;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Pod", "pods").short_names(&["po"]).category("all").with_status()
    }

    fn set_defaults(pod: &mut Pod) {
        defaults::default_pod_spec(pod.spec.get_or_insert_default());
        pod.status.get_or_insert_default().phase.get_or_insert_with(|| "Pending".into());
    }

    fn prepare_create(pod: &mut Pod, _now: Timestamp) {
        pod.metadata.generation = Some(1);
        let qos_class = pod.spec.as_ref().map(defaults::qos_class);
        let is_gated =
            pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
        pod.status = Some(PodStatus {
            phase: Some("Pending".into()),
            qos_class: qos_class.map(Into::into),
            conditions: is_gated.then(|| vec![scheduling_gated_condition()]),
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
        pod.spec.as_ref().map(|spec| validation::validate_spec("spec", name, spec)).unwrap_or_default()
    }

    fn validate_update(new: &Pod, old: &Pod) -> Vec<FieldError> {
        validation::validate_update(new, old)
    }

    fn selectable_fields() -> &'static [&'static str] {
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

    fn selectable_value(pod: &Pod, name: &str) -> String {
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
        table_row::COLUMNS
    }

    fn cells(pod: &Pod, now: Timestamp) -> Vec<Value> {
        table_row::cells(pod, now)
    }

    fn row_conditions(pod: &Pod) -> Option<Value> {
        table_row::conditions(pod)
    }
}
