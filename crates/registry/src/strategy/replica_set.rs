//! Strategy of ReplicaSet (apps/v1).

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetStatus};
use serde_json::Value;

use super::field_checks::{check_immutable, check_non_negative};
use super::pod_template::{
    CONTAINERS_COLUMN, IMAGES_COLUMN, SELECTOR_COLUMN, bump_generation, check_always_restarts,
    check_selector_and_template, container_cells, default_template,
};
use super::table_cells::selector_cell;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::{Descriptor, ScalePaths};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct ReplicaSetStrategy;

impl Strategy for ReplicaSetStrategy {
    type Object = ReplicaSet;

    fn descriptor() -> Descriptor {
        Descriptor::new("apps", "v1", "ReplicaSet", "replicasets")
            .short_names(&["rs"])
            .category("all")
            .with_status()
            .with_scale(ScalePaths::of_workload())
            .deletes_with_status()
    }

    fn set_defaults(set: &mut ReplicaSet) {
        let spec = &mut set.spec;
        spec.replicas.get_or_insert(1);
        default_template(spec.template.get_or_insert_default());
        set.status.get_or_insert_default();
    }

    fn prepare_create(set: &mut ReplicaSet, _now: Timestamp) {
        set.metadata.generation = Some(1);
        set.status = Some(ReplicaSetStatus::default());
    }

    fn prepare_update(new: &mut ReplicaSet, old: &ReplicaSet) {
        new.status = old.status.clone();
        bump_generation(&mut new.metadata, &old.metadata, (&new.spec, &old.spec));
    }

    fn prepare_status(new: &mut ReplicaSet, old: &ReplicaSet, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate(set: &ReplicaSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = set.spec.clone();
        check_non_negative("spec.replicas", spec.replicas.map(Into::into), &mut errors);
        check_non_negative("spec.minReadySeconds", spec.min_ready_seconds.map(Into::into), &mut errors);
        let template = spec.template.unwrap_or_default();
        check_selector_and_template(&spec.selector, &template, &mut errors);
        check_always_restarts(&template, "ReplicaSet", &mut errors);
        errors
    }

    fn validate_update(new: &ReplicaSet, old: &ReplicaSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let selector = |s: &ReplicaSet| s.spec.selector.clone();
        check_immutable("spec.selector", &selector(new), &selector(old), &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Desired", "How many pods are wanted.").with_type("integer"),
            Column::text("Current", "How many pods there are.").with_type("integer"),
            Column::text("Ready", "How many pods are ready.").with_type("integer"),
            AGE,
            CONTAINERS_COLUMN,
            IMAGES_COLUMN,
            SELECTOR_COLUMN,
        ];
        COLUMNS
    }

    fn cells(set: &ReplicaSet, now: Timestamp) -> Vec<Value> {
        let spec = set.spec.clone();
        let status = set.status.clone().unwrap_or_default();
        let [containers, images] = container_cells(spec.template.as_ref());
        vec![
            column::name(&set.metadata),
            spec.replicas.unwrap_or(0).into(),
            status.replicas.into(),
            status.ready_replicas.unwrap_or(0).into(),
            column::age(&set.metadata, now),
            containers,
            images,
            selector_cell(Some(&spec.selector)),
        ]
    }
}
