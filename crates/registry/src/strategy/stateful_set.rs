//! Strategy of StatefulSet (apps/v1).

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec, StatefulSetStatus};
use serde_json::Value;

use super::field_checks::{check_immutable, check_non_negative, check_supported};
use super::persistent_volume_claim;
use super::pod_template::{
    CONTAINERS_COLUMN, IMAGES_COLUMN, bump_generation, check_always_restarts, check_selector_and_template,
    container_cells, default_template,
};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::{Descriptor, ScalePaths};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::meta;
use cleat_apimachinery::names;

pub(super) struct StatefulSetStrategy;

impl Strategy for StatefulSetStrategy {
    type Object = StatefulSet;

    fn descriptor() -> Descriptor {
        Descriptor::new("apps", "v1", "StatefulSet", "statefulsets")
            .short_names(&["sts"])
            .category("all")
            .with_status()
            .with_scale(ScalePaths::of_workload())
            .deletes_with_status()
    }

    fn set_defaults(set: &mut StatefulSet) {
        let spec = &mut set.spec;
        spec.replicas.get_or_insert(1);
        spec.revision_history_limit.get_or_insert(10);
        spec.pod_management_policy.get_or_insert_with(|| "OrderedReady".into());
        let retention = spec.persistent_volume_claim_retention_policy.get_or_insert_default();
        retention.when_deleted.get_or_insert_with(|| "Retain".into());
        retention.when_scaled.get_or_insert_with(|| "Retain".into());
        let strategy = spec.update_strategy.get_or_insert_default();
        let rolling = strategy.type_.get_or_insert_with(|| "RollingUpdate".into()) == "RollingUpdate";
        if rolling {
            strategy.rolling_update.get_or_insert_default().partition.get_or_insert(0);
        }
        default_template(&mut spec.template);
        for template in spec.volume_claim_templates.iter_mut().flatten() {
            meta::normalise(&mut template.metadata);
            persistent_volume_claim::PersistentVolumeClaimStrategy::set_defaults(template);
        }
        spec.volume_claim_templates.take_if(|t| t.is_empty());
        let status = set.status.get_or_insert_default();
        status.available_replicas.get_or_insert(0);
    }

    fn prepare_create(set: &mut StatefulSet, _now: Timestamp) {
        set.metadata.generation = Some(1);
        set.status = Some(StatefulSetStatus { available_replicas: Some(0), ..Default::default() });
    }

    fn prepare_update(new: &mut StatefulSet, old: &StatefulSet) {
        new.status = old.status.clone();
        bump_generation(&mut new.metadata, &old.metadata, (&new.spec, &old.spec));
    }

    fn prepare_status(new: &mut StatefulSet, old: &StatefulSet, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate(set: &StatefulSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = set.spec.clone();
        let policies = ["OrderedReady", "Parallel"];
        check_supported("spec.podManagementPolicy", spec.pod_management_policy.as_ref(), &policies, &mut errors);
        check_update_strategy(&spec, &mut errors);
        let retention = spec.persistent_volume_claim_retention_policy.clone().unwrap_or_default();
        for (part, policy) in [("whenDeleted", &retention.when_deleted), ("whenScaled", &retention.when_scaled)] {
            let path = format!("spec.persistentVolumeClaimRetentionPolicy.{part}");
            if let Some(policy) = policy.as_deref().filter(|p| !["Retain", "Delete"].contains(p)) {
                errors.push(FieldError::not_supported_in_order(path, policy, &["Retain", "Delete"]));
            }
        }
        check_non_negative("spec.replicas", spec.replicas.map(Into::into), &mut errors);
        check_non_negative("spec.minReadySeconds", spec.min_ready_seconds.map(Into::into), &mut errors);
        check_non_negative("spec.revisionHistoryLimit", spec.revision_history_limit.map(Into::into), &mut errors);
        if let Some(ordinals) = &spec.ordinals {
            check_non_negative("spec.ordinals.start", ordinals.start.map(Into::into), &mut errors);
        }
        check_selector_and_template(&spec.selector, &spec.template, &mut errors);
        check_always_restarts(&spec.template, "StatefulSet", &mut errors);
        for (i, template) in spec.volume_claim_templates.iter().flatten().enumerate() {
            let path = format!("spec.volumeClaimTemplates[{i}]");
            let name = template.metadata.name.as_deref().unwrap_or_default();
            if let Err(why) = names::validate_label(name) {
                errors.push(FieldError::invalid(format!("{path}.metadata.name"), name, why));
            }
            let spec = template.spec.clone().unwrap_or_default();
            persistent_volume_claim::validate_spec(&spec, &format!("{path}.spec"), &mut errors);
        }
        errors
    }

    fn validate_update(new: &StatefulSet, old: &StatefulSet) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let (new, old) = (new.spec.clone(), old.spec.clone());
        check_immutable("spec.selector", &new.selector, &old.selector, &mut errors);
        check_immutable("spec.serviceName", &new.service_name, &old.service_name, &mut errors);
        check_immutable(
            "spec.podManagementPolicy",
            &new.pod_management_policy,
            &old.pod_management_policy,
            &mut errors,
        );
        let templates = (&new.volume_claim_templates, &old.volume_claim_templates);
        check_immutable("spec.volumeClaimTemplates", templates.0, templates.1, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Ready", "How many of the wanted pods are ready."),
            AGE,
            CONTAINERS_COLUMN,
            IMAGES_COLUMN,
        ];
        COLUMNS
    }

    fn cells(set: &StatefulSet, now: Timestamp) -> Vec<Value> {
        let spec = set.spec.clone();
        let ready = set.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0);
        let [containers, images] = container_cells(Some(&spec.template));
        vec![
            column::name(&set.metadata),
            format!("{ready}/{}", spec.replicas.unwrap_or(0)).into(),
            column::age(&set.metadata, now),
            containers,
            images,
        ]
    }
}

fn check_update_strategy(spec: &StatefulSetSpec, errors: &mut Vec<FieldError>) {
    let strategy = spec.update_strategy.clone().unwrap_or_default();
    check_supported("spec.updateStrategy.type", strategy.type_.as_ref(), &["OnDelete", "RollingUpdate"], errors);
    match (strategy.type_.as_deref(), &strategy.rolling_update) {
        (Some("OnDelete"), Some(update)) => {
            let why = "only allowed for updateStrategy 'RollingUpdate'";
            errors.push(FieldError::invalid("spec.updateStrategy.rollingUpdate", update, why));
        }
        (_, Some(update)) => {
            let partition = update.partition.map(Into::into);
            check_non_negative("spec.updateStrategy.rollingUpdate.partition", partition, errors);
        }
        _ => {}
    }
}
