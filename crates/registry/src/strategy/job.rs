//! Strategy of Job (batch/v1).

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobSpec, JobStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

use super::field_checks::{check_immutable, check_label_selector, check_non_negative, check_supported};
use super::pod_template::{
    CONTAINERS_COLUMN, IMAGES_COLUMN, SELECTOR_COLUMN, TEMPLATE_PATH, bump_generation, check_selector_matches_template,
    check_template, container_cells, default_template,
};
use super::table_cells::selector_cell;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct JobStrategy;

const CONTROLLER_UID_LABEL: &str = "batch.kubernetes.io/controller-uid";
const JOB_NAME_LABEL: &str = "batch.kubernetes.io/job-name";
/// The same labels without a prefix, as older versions of Kubernetes set them; clients still select by them.
const LEGACY_CONTROLLER_UID_LABEL: &str = "controller-uid";
const LEGACY_JOB_NAME_LABEL: &str = "job-name";

impl Strategy for JobStrategy {
    type Object = Job;

    fn descriptor() -> Descriptor {
        Descriptor::new("batch", "v1", "Job", "jobs").category("all").with_status().deletes_with_status()
    }

    fn set_defaults(job: &mut Job) {
        let spec = job.spec.get_or_insert_default();
        if spec.completions.is_none() && spec.parallelism.is_none() {
            spec.completions = Some(1);
        }
        spec.parallelism.get_or_insert(1);
        let limits_each_index = spec.backoff_limit_per_index.is_some();
        spec.backoff_limit.get_or_insert(if limits_each_index { i32::MAX } else { 6 });
        spec.completion_mode.get_or_insert_with(|| "NonIndexed".into());
        spec.suspend.get_or_insert(false);
        spec.manual_selector.get_or_insert(false);
        let replacement = if spec.pod_failure_policy.is_some() { "Failed" } else { "TerminatingOrFailed" };
        spec.pod_replacement_policy.get_or_insert_with(|| replacement.into());
        default_template(&mut spec.template);
        if job.metadata.labels.as_ref().is_none_or(|l| l.is_empty()) {
            job.metadata.labels = spec.template.metadata.as_ref().and_then(|m| m.labels.clone());
        }
        job.status.get_or_insert_default();
    }

    fn prepare_create(job: &mut Job, _now: Timestamp) {
        job.metadata.generation = Some(1);
        job.status = Some(JobStatus::default());
        if job.spec.as_ref().is_some_and(|s| s.manual_selector != Some(true)) {
            generate_selector(job);
        }
    }

    fn prepare_update(new: &mut Job, old: &Job) {
        new.status = old.status.clone();
        bump_generation(&mut new.metadata, &old.metadata, (&new.spec, &old.spec));
    }

    fn prepare_status(new: &mut Job, old: &Job, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate_create(job: &Job) -> Vec<FieldError> {
        let spec = job.spec.clone().unwrap_or_default();
        let generated = LabelSelector {
            match_labels: Some(BTreeMap::from([(
                CONTROLLER_UID_LABEL.into(),
                job.metadata.uid.clone().unwrap_or_default(),
            )])),
            match_expressions: None,
        };
        if spec.manual_selector == Some(true) || spec.selector.as_ref() == Some(&generated) {
            return Vec::new();
        }
        vec![FieldError::invalid("spec.selector", &spec.selector, "`selector` not auto-generated")]
    }

    fn validate(job: &Job) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = job.spec.clone().unwrap_or_default();
        for (part, count) in [
            ("parallelism", spec.parallelism.map(i64::from)),
            ("completions", spec.completions.map(i64::from)),
            ("activeDeadlineSeconds", spec.active_deadline_seconds),
            ("backoffLimit", spec.backoff_limit.map(i64::from)),
            ("ttlSecondsAfterFinished", spec.ttl_seconds_after_finished.map(i64::from)),
            ("backoffLimitPerIndex", spec.backoff_limit_per_index.map(i64::from)),
            ("maxFailedIndexes", spec.max_failed_indexes.map(i64::from)),
        ] {
            check_non_negative(&format!("spec.{part}"), count, &mut errors);
        }
        check_supported("spec.completionMode", spec.completion_mode.as_ref(), &["Indexed", "NonIndexed"], &mut errors);
        if spec.completion_mode.as_deref() == Some("Indexed") && spec.completions.is_none() {
            errors.push(FieldError::required("spec.completions", "when completion mode is Indexed"));
        }
        match &spec.selector {
            Some(selector) => {
                check_label_selector("spec.selector", selector, &mut errors);
                check_selector_matches_template(selector, &spec.template, &mut errors);
            }
            None => errors.push(FieldError::required("spec.selector", "")),
        }
        check_template(&spec.template, &mut errors);
        if spec.template.spec.as_ref().and_then(|s| s.restart_policy.as_deref()) == Some("Always") {
            let why = "valid values: \"OnFailure\", \"Never\"";
            errors.push(FieldError::required(format!("{TEMPLATE_PATH}.spec.restartPolicy"), why));
        }
        errors
    }

    fn validate_update(new: &Job, old: &Job) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let was_started = old.status.as_ref().is_some_and(|s| s.start_time.is_some());
        let (new, old) = (new.spec.clone().unwrap_or_default(), old.spec.clone().unwrap_or_default());
        // An Indexed job may be scaled: completions and parallelism change together.
        let is_elastic_indexed = new.completion_mode.as_deref() == Some("Indexed")
            && new.completions == new.parallelism
            && old.completions == old.parallelism;
        if !is_elastic_indexed {
            check_immutable("spec.completions", &new.completions, &old.completions, &mut errors);
        }
        check_immutable("spec.selector", &new.selector, &old.selector, &mut errors);
        // A suspended job that never started may still change where its pods are scheduled.
        let may_change_scheduling = old.suspend == Some(true) && !was_started;
        let allowed = if may_change_scheduling { with_scheduling_of(&old, &new) } else { old.clone() };
        check_immutable(TEMPLATE_PATH, &new.template, &allowed.template, &mut errors);
        check_immutable("spec.completionMode", &new.completion_mode, &old.completion_mode, &mut errors);
        check_immutable("spec.podFailurePolicy", &new.pod_failure_policy, &old.pod_failure_policy, &mut errors);
        let limits = (&new.backoff_limit_per_index, &old.backoff_limit_per_index);
        check_immutable("spec.backoffLimitPerIndex", limits.0, limits.1, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Status", "State of the job."),
            Column::text("Completions", "How many of the wanted pods have succeeded."),
            Column::text("Duration", "How long the job ran, or has been running."),
            AGE,
            CONTAINERS_COLUMN,
            IMAGES_COLUMN,
            SELECTOR_COLUMN,
        ];
        COLUMNS
    }

    fn cells(job: &Job, now: Timestamp) -> Vec<Value> {
        let spec = job.spec.clone().unwrap_or_default();
        let status = job.status.clone().unwrap_or_default();
        let succeeded = status.succeeded.unwrap_or(0);
        let completions = match (spec.completions, spec.parallelism.unwrap_or(0)) {
            (Some(wanted), _) => format!("{succeeded}/{wanted}"),
            (None, many) if many > 1 => format!("{succeeded}/1 of {many}"),
            (None, _) => format!("{succeeded}/1"),
        };
        let ended = status.completion_time.as_ref().map_or(now, |t| t.0);
        let duration = status.start_time.as_ref().map(|start| column::since(Some(start), ended));
        let [containers, images] = container_cells(Some(&spec.template));
        vec![
            column::name(&job.metadata),
            status_cell(job, &status).into(),
            completions.into(),
            duration.unwrap_or_default().into(),
            column::age(&job.metadata, now),
            containers,
            images,
            selector_cell(spec.selector.as_ref()),
        ]
    }
}

/// Selects pods by the uid of the job, so that two jobs never select the same pod.
fn generate_selector(job: &mut Job) {
    let uid = job.metadata.uid.clone().unwrap_or_default();
    let name = job.metadata.name.clone().unwrap_or_default();
    let Some(spec) = &mut job.spec else { return };
    let labels = spec.template.metadata.get_or_insert_default().labels.get_or_insert_default();
    let has_template_labels = job.metadata.labels.as_ref() == Some(labels);
    for (key, value) in [
        (LEGACY_JOB_NAME_LABEL, &name),
        (LEGACY_CONTROLLER_UID_LABEL, &uid),
        (JOB_NAME_LABEL, &name),
        (CONTROLLER_UID_LABEL, &uid),
    ] {
        labels.insert(key.into(), value.clone());
    }
    if has_template_labels {
        job.metadata.labels = Some(labels.clone());
    }
    let selector = spec.selector.get_or_insert_default();
    selector.match_labels.get_or_insert_default().insert(CONTROLLER_UID_LABEL.into(), uid);
}

/// The old spec with the scheduling fields, labels and annotations of the new one's template.
fn with_scheduling_of(old: &JobSpec, new: &JobSpec) -> JobSpec {
    let mut allowed = old.clone();
    if let (Some(allowed), Some(new)) = (&mut allowed.template.spec, &new.template.spec) {
        allowed.node_selector = new.node_selector.clone();
        allowed.tolerations = new.tolerations.clone();
        allowed.affinity = new.affinity.clone();
        allowed.scheduling_gates = new.scheduling_gates.clone();
    }
    if let (Some(allowed), Some(new)) = (&mut allowed.template.metadata, &new.template.metadata) {
        allowed.labels = new.labels.clone();
        allowed.annotations = new.annotations.clone();
    }
    allowed
}

fn status_cell(job: &Job, status: &JobStatus) -> &'static str {
    let has_condition = |kind: &str| status.conditions.iter().flatten().any(|c| c.type_ == kind && c.status == "True");
    match () {
        () if has_condition("Complete") => "Complete",
        () if has_condition("Failed") => "Failed",
        () if job.metadata.deletion_timestamp.is_some() => "Terminating",
        () if has_condition("Suspended") => "Suspended",
        () if has_condition("FailureTarget") => "FailureTarget",
        () if has_condition("SuccessCriteriaMet") => "SuccessCriteriaMet",
        () => "Running",
    }
}
