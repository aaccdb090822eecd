//! Strategy of DaemonSet (apps/v1).

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::field_checks::{check_immutable, check_non_negative, check_supported};
use super::pod_template::{
    CONTAINERS_COLUMN, IMAGES_COLUMN, SELECTOR_COLUMN, bump_generation, check_always_restarts, check_count_or_percent,
    check_selector_and_template, container_cells, default_template, is_zero_count_or_percent,
};
use super::table_cells::{or_none, selector_cell};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct DaemonSetStrategy;

/// Counts changes of the template, for clients of API versions that had no ControllerRevisions.
const TEMPLATE_GENERATION_ANNOTATION: &str = "deprecated.daemonset.template.generation";

impl Strategy for DaemonSetStrategy {
    type Object = DaemonSet;

    fn descriptor() -> Descriptor {
        Descriptor::new("apps", "v1", "DaemonSet", "daemonsets")
            .short_names(&["ds"])
            .category("all")
            .with_status()
            .deletes_with_status()
    }

    fn set_defaults(set: &mut DaemonSet) {
        let spec = &mut set.spec;
        spec.revision_history_limit.get_or_insert(10);
        let strategy = spec.update_strategy.get_or_insert_default();
        let rolling = strategy.type_.get_or_insert_with(|| "RollingUpdate".into()) == "RollingUpdate";
        if rolling {
            let update = strategy.rolling_update.get_or_insert_default();
            update.max_unavailable.get_or_insert(IntOrString::Int(1));
            update.max_surge.get_or_insert(IntOrString::Int(0));
        }
        default_template(&mut spec.template);
        set.status.get_or_insert_default();
    }

    fn prepare_create(set: &mut DaemonSet, _now: Timestamp) {
        set.metadata.generation = Some(1);
        set.metadata.annotations.get_or_insert_default().insert(TEMPLATE_GENERATION_ANNOTATION.into(), "1".into());
        set.status = Some(DaemonSetStatus::default());
    }

    fn prepare_update(new: &mut DaemonSet, old: &DaemonSet) {
        new.status = old.status.clone();
        let count = |set: &DaemonSet| -> i64 {
            let text = set.metadata.annotations.as_ref().and_then(|a| a.get(TEMPLATE_GENERATION_ANNOTATION));
            text.and_then(|t| t.parse().ok()).unwrap_or(0)
        };
        let template = |set: &DaemonSet| set.spec.template.clone();
        let changed = i64::from(template(new) != template(old));
        let generation = (count(old) + changed).to_string();
        new.metadata.annotations.get_or_insert_default().insert(TEMPLATE_GENERATION_ANNOTATION.into(), generation);
        bump_generation(&mut new.metadata, &old.metadata, (&new.spec, &old.spec));
    }

    fn prepare_status(new: &mut DaemonSet, old: &DaemonSet, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate(set: &DaemonSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = set.spec.clone();
        check_selector_and_template(&spec.selector, &spec.template, &mut errors);
        check_always_restarts(&spec.template, "DaemonSet", &mut errors);
        check_non_negative("spec.minReadySeconds", spec.min_ready_seconds.map(Into::into), &mut errors);
        let strategy = spec.update_strategy.unwrap_or_default();
        let types = ["OnDelete", "RollingUpdate"];
        check_supported("spec.updateStrategy.type", strategy.type_.as_ref(), &types, &mut errors);
        if let Some(update) = &strategy.rolling_update {
            let path = "spec.updateStrategy.rollingUpdate";
            let (max_unavailable, max_surge) = (update.max_unavailable.as_ref(), update.max_surge.as_ref());
            check_count_or_percent(&format!("{path}.maxUnavailable"), max_unavailable, &mut errors);
            check_count_or_percent(&format!("{path}.maxSurge"), max_surge, &mut errors);
            match (is_zero_count_or_percent(max_unavailable), is_zero_count_or_percent(max_surge)) {
                (true, true) => {
                    let why = "cannot be 0 when maxSurge is 0";
                    errors.push(FieldError::required(format!("{path}.maxUnavailable"), why));
                }
                (false, false) => {
                    let why = "may not be set when maxUnavailable is non-zero";
                    errors.push(FieldError::invalid(format!("{path}.maxSurge"), max_surge, why));
                }
                _ => {}
            }
        }
        check_non_negative("spec.revisionHistoryLimit", spec.revision_history_limit.map(Into::into), &mut errors);
        errors
    }

    fn validate_update(new: &DaemonSet, old: &DaemonSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let selector = |s: &DaemonSet| s.spec.selector.clone();
        check_immutable("spec.selector", &selector(new), &selector(old), &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Desired", "How many nodes should have the pod.").with_type("integer"),
            Column::text("Current", "How many of them have it.").with_type("integer"),
            Column::text("Ready", "How many pods are ready.").with_type("integer"),
            Column::text("Up-to-date", "How many pods are of the newest template.").with_type("integer"),
            Column::text("Available", "How many pods have been ready for long enough.").with_type("integer"),
            Column::text("Node Selector", "Which nodes should have the pod."),
            AGE,
            CONTAINERS_COLUMN,
            IMAGES_COLUMN,
            SELECTOR_COLUMN,
        ];
        COLUMNS
    }

    fn cells(set: &DaemonSet, now: Timestamp) -> Vec<Value> {
        let spec = set.spec.clone();
        let status = set.status.clone().unwrap_or_default();
        let [containers, images] = container_cells(Some(&spec.template));
        let nodes = spec.template.spec.as_ref().and_then(|s| s.node_selector.clone()).unwrap_or_default();
        let nodes: Vec<String> = nodes.iter().map(|(key, value)| format!("{key}={value}")).collect();
        vec![
            column::name(&set.metadata),
            status.desired_number_scheduled.into(),
            status.current_number_scheduled.into(),
            status.number_ready.into(),
            status.updated_number_scheduled.unwrap_or(0).into(),
            status.number_available.unwrap_or(0).into(),
            or_none(Some(&nodes.join(","))),
            column::age(&set.metadata, now),
            containers,
            images,
            selector_cell(Some(&spec.selector)),
        ]
    }
}
