//! Strategy of Node (v1).

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::Value;

use super::quantity::canonicalize_quantities;
use super::table_cells::or_none;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::kind::Strategy;

pub(super) struct NodeStrategy;

impl Strategy for NodeStrategy {
    type Object = Node;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Node", "nodes")
            .short_names(&["no"])
            .cluster_scoped()
            .with_status()
            .deletes_with_status()
            .stored_under("minions")
    }

    fn set_defaults(node: &mut Node) {
        let spec = node.spec.get_or_insert_default();
        if let (Some(range), None) = (spec.pod_cidr.as_ref().filter(|range| !range.is_empty()), &spec.pod_cidrs) {
            spec.pod_cidrs = Some(vec![range.clone()]);
        }
        let status = node.status.get_or_insert_default();
        canonicalize_quantities(&mut status.capacity);
        canonicalize_quantities(&mut status.allocatable);
        if status.allocatable.is_none() {
            status.allocatable = status.capacity.clone();
        }
    }

    fn prepare_update(new: &mut Node, old: &Node) {
        new.status = old.status.clone();
    }

    fn prepare_status(new: &mut Node, old: &Node, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn selectable_fields() -> &'static [&'static str] {
        &["spec.unschedulable"]
    }

    fn selectable_value(node: &Node, _name: &str) -> String {
        node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false).to_string()
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Status", "Whether the node is ready and takes pods."),
            Column::text("Roles", "Roles of the node."),
            AGE,
            Column::text("Version", "Version of the node agent."),
            Column::text("Internal-IP", "Address of the node inside the cluster.").wide(),
            Column::text("External-IP", "Address of the node outside the cluster.").wide(),
            Column::text("OS-Image", "Operating system of the node.").wide(),
            Column::text("Kernel-Version", "Kernel of the node.").wide(),
            Column::text("Container-Runtime", "What runs the containers of the node.").wide(),
        ];
        COLUMNS
    }

    fn cells(node: &Node, now: Timestamp) -> Vec<Value> {
        let status = node.status.clone().unwrap_or_default();
        let info = status.node_info.clone().unwrap_or_default();
        let address =
            |kind: &str| status.addresses.iter().flatten().find(|a| a.type_ == kind).map(|a| a.address.as_str());
        let or_unknown = |text: &str| Value::from(if text.is_empty() { "<unknown>" } else { text });
        let kernel = match info.architecture.as_str() {
            "" => info.kernel_version.clone(),
            arch if !info.kernel_version.is_empty() => format!("{} ({arch})", info.kernel_version),
            _ => String::new(),
        };
        vec![
            column::name(&node.metadata),
            readiness(node).into(),
            or_none(Some(&roles(node))),
            column::age(&node.metadata, now),
            info.kubelet_version.clone().into(),
            or_none(address("InternalIP")),
            or_none(address("ExternalIP")),
            or_unknown(&info.os_image),
            or_unknown(&kernel),
            or_unknown(&info.container_runtime_version),
        ]
    }
}

fn readiness(node: &Node) -> String {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    let ready = conditions.and_then(|c| c.iter().find(|c| c.type_ == "Ready"));
    let mut text = match ready.map(|c| c.status.as_str()) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    }
    .to_owned();
    if node.spec.as_ref().and_then(|s| s.unschedulable) == Some(true) {
        text += ",SchedulingDisabled";
    }
    text
}

fn roles(node: &Node) -> String {
    let roles: BTreeSet<&str> = node
        .metadata
        .labels
        .iter()
        .flatten()
        .filter_map(|(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
            Some(role) => Some(role),
            None if key == "kubernetes.io/role" => Some(value.as_str()),
            None => None,
        })
        .filter(|role| !role.is_empty())
        .collect();
    roles.into_iter().collect::<Vec<_>>().join(",")
}
