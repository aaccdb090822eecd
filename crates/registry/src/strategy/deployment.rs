//! Strategy of Deployment (apps/v1).

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::field_checks::{check_immutable, check_non_negative, check_supported};
use super::pod_template::{
    CONTAINERS_COLUMN, IMAGES_COLUMN, SELECTOR_COLUMN, check_always_restarts, check_count_or_percent,
    check_selector_and_template, container_cells, default_template, is_zero_count_or_percent,
};
use super::table_cells::selector_cell;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::{Descriptor, ScalePaths};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct DeploymentStrategy;

impl Strategy for DeploymentStrategy {
    type Object = Deployment;

    fn descriptor() -> Descriptor {
        Descriptor::new("apps", "v1", "Deployment", "deployments")
            .short_names(&["deploy"])
            .category("all")
            .with_status()
            .with_scale(ScalePaths::of_workload())
            .deletes_with_status()
    }

    fn set_defaults(deployment: &mut Deployment) {
        let spec = &mut deployment.spec;
        spec.replicas.get_or_insert(1);
        spec.revision_history_limit.get_or_insert(10);
        spec.progress_deadline_seconds.get_or_insert(600);
        let strategy = spec.strategy.get_or_insert_default();
        let rolling = strategy.type_.get_or_insert_with(|| "RollingUpdate".into()) == "RollingUpdate";
        if rolling {
            let quarter = || IntOrString::String("25%".into());
            let update = strategy.rolling_update.get_or_insert_default();
            update.max_surge.get_or_insert_with(quarter);
            update.max_unavailable.get_or_insert_with(quarter);
        }
        default_template(&mut spec.template);
        deployment.status.get_or_insert_default();
    }

    fn prepare_create(deployment: &mut Deployment, _now: Timestamp) {
        deployment.metadata.generation = Some(1);
        deployment.status = Some(DeploymentStatus::default());
    }

    fn prepare_update(new: &mut Deployment, old: &Deployment) {
        new.status = old.status.clone();
        // The deployment controller copies annotations to the ReplicaSets, so a changed annotation is a new generation.
        if new.spec != old.spec || new.metadata.annotations != old.metadata.annotations {
            new.metadata.generation = Some(old.metadata.generation.unwrap_or(0) + 1);
        }
    }

    fn prepare_status(new: &mut Deployment, old: &Deployment, _now: Timestamp) {
        new.spec = old.spec.clone();
        new.metadata.labels = old.metadata.labels.clone();
    }

    fn validate(deployment: &Deployment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = deployment.spec.clone();
        check_non_negative("spec.replicas", spec.replicas.map(Into::into), &mut errors);
        check_selector_and_template(&spec.selector, &spec.template, &mut errors);
        check_always_restarts(&spec.template, "ReplicaSet", &mut errors);
        let strategy = spec.strategy.unwrap_or_default();
        check_supported("spec.strategy.type", strategy.type_.as_ref(), &["Recreate", "RollingUpdate"], &mut errors);
        match (strategy.type_.as_deref(), &strategy.rolling_update) {
            (Some("Recreate"), Some(_)) => {
                let why = "may not be specified when strategy `type` is 'Recreate'";
                errors.push(FieldError::forbidden("spec.strategy.rollingUpdate", why));
            }
            (_, Some(update)) => {
                let path = "spec.strategy.rollingUpdate";
                let (max_unavailable, max_surge) = (update.max_unavailable.as_ref(), update.max_surge.as_ref());
                check_count_or_percent(&format!("{path}.maxUnavailable"), max_unavailable, &mut errors);
                check_count_or_percent(&format!("{path}.maxSurge"), max_surge, &mut errors);
                if is_zero_count_or_percent(max_unavailable) && is_zero_count_or_percent(max_surge) {
                    let why = "may not be 0 when `maxSurge` is 0";
                    errors.push(FieldError::invalid(format!("{path}.maxUnavailable"), max_unavailable, why));
                }
            }
            _ => {}
        }
        check_non_negative("spec.minReadySeconds", spec.min_ready_seconds.map(Into::into), &mut errors);
        check_non_negative("spec.revisionHistoryLimit", spec.revision_history_limit.map(Into::into), &mut errors);
        if let Some(deadline) = spec.progress_deadline_seconds {
            check_non_negative("spec.progressDeadlineSeconds", Some(deadline.into()), &mut errors);
            if deadline <= spec.min_ready_seconds.unwrap_or(0) {
                let why = "must be greater than minReadySeconds";
                errors.push(FieldError::invalid("spec.progressDeadlineSeconds", deadline, why));
            }
        }
        errors
    }

    fn validate_update(new: &Deployment, old: &Deployment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let selector = |d: &Deployment| d.spec.selector.clone();
        check_immutable("spec.selector", &selector(new), &selector(old), &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Ready", "How many of the wanted pods are ready."),
            Column::text("Up-to-date", "How many pods are of the newest template."),
            Column::text("Available", "How many pods have been ready for long enough."),
            AGE,
            CONTAINERS_COLUMN,
            IMAGES_COLUMN,
            SELECTOR_COLUMN,
        ];
        COLUMNS
    }

    fn cells(deployment: &Deployment, now: Timestamp) -> Vec<Value> {
        let spec = deployment.spec.clone();
        let status = deployment.status.clone().unwrap_or_default();
        let [containers, images] = container_cells(Some(&spec.template));
        vec![
            column::name(&deployment.metadata),
            format!("{}/{}", status.ready_replicas.unwrap_or(0), spec.replicas.unwrap_or(0)).into(),
            status.updated_replicas.unwrap_or(0).into(),
            status.available_replicas.unwrap_or(0).into(),
            column::age(&deployment.metadata, now),
            containers,
            images,
            selector_cell(Some(&spec.selector)),
        ]
    }
}
