//! The table row of a pod: what `kubectl get pods` shows.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::strategy::table_cells::or_none;
use cleat_apimachinery::column::{self, AGE, Column, NAME};

pub(super) const COLUMNS: &[Column] = &[
    NAME,
    Column::text("Ready", "Ready containers of all containers."),
    Column::text("Status", "State of the pod."),
    Column::text("Restarts", "How often its containers were restarted, and when last."),
    AGE,
    Column::text("IP", "Address of the pod.").wide(),
    Column::text("Node", "Node the pod is on.").wide(),
    Column::text("Nominated Node", "Node that is being cleared for the pod.").wide(),
    Column::text("Readiness Gates", "Extra conditions that count for readiness.").wide(),
];

pub(super) fn cells(pod: &Pod, now: Timestamp) -> Vec<Value> {
    let spec = pod.spec.clone().unwrap_or_default();
    let status = pod.status.clone().unwrap_or_default();
    let summary = PodSummary::of(pod, &spec, &status);
    let restarts = match &summary.last_restart {
        Some(time) if summary.restarts > 0 => {
            format!("{} ({} ago)", summary.restarts, column::since(Some(time), now))
        }
        _ => summary.restarts.to_string(),
    };
    let gates = spec.readiness_gates.unwrap_or_default();
    let met = gates.iter().filter(|gate| {
        status.conditions.iter().flatten().any(|c| c.type_ == gate.condition_type && c.status == "True")
    });
    let gates = if gates.is_empty() { String::new() } else { format!("{}/{}", met.count(), gates.len()) };
    vec![
        column::name(&pod.metadata),
        format!("{}/{}", summary.ready_containers, summary.total_containers).into(),
        summary.reason.into(),
        restarts.into(),
        column::age(&pod.metadata, now),
        or_none(status.pod_ip.as_deref()),
        or_none(spec.node_name.as_deref()),
        or_none(status.nominated_node_name.as_deref()),
        or_none(Some(&gates)),
    ]
}

pub(super) fn conditions(pod: &Pod) -> Option<Value> {
    let phase = pod.status.as_ref()?.phase.as_deref()?;
    let message = match phase {
        "Succeeded" => "The pod has completed successfully.",
        "Failed" => "The pod failed.",
        _ => return None,
    };
    Some(json!([{ "type": "Completed", "status": "True", "reason": phase, "message": message }]))
}

/// What the columns Ready, Status and Restarts show.
struct PodSummary {
    ready_containers: usize,
    total_containers: usize,
    reason: String,
    restarts: i32,
    last_restart: Option<Time>,
}

impl PodSummary {
    fn of(pod: &Pod, spec: &PodSpec, status: &PodStatus) -> Self {
        let phase = status.phase.clone().unwrap_or_default();
        let sidecars = spec.init_containers.iter().flatten().filter(|c| c.restart_policy.as_deref() == Some("Always"));
        let mut summary = Self {
            ready_containers: 0,
            total_containers: spec.containers.len() + sidecars.count(),
            reason: status.reason.clone().filter(|r| !r.is_empty()).unwrap_or(phase.clone()),
            restarts: 0,
            last_restart: None,
        };
        let gated = spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty());
        if gated && spec.node_name.is_none() && status.reason.is_none() {
            summary.reason = "SchedulingGated".into();
        }
        if !summary.scan_init_containers(spec, status) {
            summary.scan_containers(status);
        }
        if pod.metadata.deletion_timestamp.is_some() {
            if status.reason.as_deref() == Some("NodeLost") {
                summary.reason = "Unknown".into();
            } else if !["Succeeded", "Failed"].contains(&phase.as_str()) {
                summary.reason = "Terminating".into();
            }
        }
        summary
    }

    fn count_restarts(&mut self, status: &ContainerStatus) {
        self.restarts += status.restart_count;
        let ended = status.last_state.as_ref().and_then(|s| s.terminated.as_ref()).and_then(|t| t.finished_at.clone());
        self.last_restart = self.last_restart.take().max(ended);
    }

    /// Returns true if an init container has not completed; the status is then derived from that container.
    fn scan_init_containers(&mut self, spec: &PodSpec, status: &PodStatus) -> bool {
        let init = spec.init_containers.as_deref().unwrap_or_default();
        for (i, container) in status.init_container_statuses.iter().flatten().enumerate() {
            self.count_restarts(container);
            let is_sidecar =
                init.iter().any(|c| c.name == container.name && c.restart_policy.as_deref() == Some("Always"));
            let state = container.state.clone().unwrap_or_default();
            if let Some(ended) = &state.terminated {
                if ended.exit_code == 0 {
                    continue;
                }
                self.reason = format!("Init:{}", termination_reason(&ended.reason, ended.signal, ended.exit_code));
            } else if is_sidecar && container.started == Some(true) {
                self.ready_containers += usize::from(container.ready);
                continue;
            } else if let Some(reason) =
                state.waiting.and_then(|w| w.reason).filter(|r| !r.is_empty() && r != "PodInitializing")
            {
                self.reason = format!("Init:{reason}");
            } else {
                self.reason = format!("Init:{i}/{}", init.len());
            }
            return true;
        }
        false
    }

    fn scan_containers(&mut self, status: &PodStatus) {
        let mut running = false;
        let mut completed = false;
        let statuses = status.container_statuses.as_deref().unwrap_or_default();
        for container in statuses.iter().rev() {
            self.count_restarts(container);
            let state = container.state.clone().unwrap_or_default();
            if let Some(reason) = state.waiting.and_then(|w| w.reason).filter(|r| !r.is_empty()) {
                self.reason = reason;
            } else if let Some(ended) = state.terminated {
                self.reason = termination_reason(&ended.reason, ended.signal, ended.exit_code);
                completed |= self.reason == "Completed";
            } else if container.ready && state.running.is_some() {
                running = true;
                self.ready_containers += 1;
            }
        }
        if completed && self.reason == "Completed" && running {
            let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
            self.reason = if ready { "Running" } else { "NotReady" }.into();
        }
    }
}

fn termination_reason(reason: &Option<String>, signal: Option<i32>, code: i32) -> String {
    match (reason.as_deref().filter(|r| !r.is_empty()), signal.filter(|s| *s != 0)) {
        (Some(reason), _) => reason.into(),
        (None, Some(signal)) => format!("Signal:{signal}"),
        (None, None) => format!("ExitCode:{code}"),
    }
}
