//! Job.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobSpec, JobStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

use super::{
    CONTAINERS, IMAGES, SELECTOR, TEMPLATE, check_count, check_labels, check_template, container_cells,
    count_generation, default_template, selector_cell,
};
use crate::strategy::{check_choice, check_selector, immutable};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(crate) struct Jobs;

const CONTROLLER: &str = "batch.kubernetes.io/controller-uid";
const JOB: &str = "batch.kubernetes.io/job-name";
/// The same two from before they had a prefix; selectors of others still use them.
const OLDER_CONTROLLER: &str = "controller-uid";
const OLDER_JOB: &str = "job-name";

impl Strategy for Jobs {
    type Object = Job;

    fn descriptor() -> Descriptor {
        Descriptor::new("batch", "v1", "Job", "jobs").category("all").with_status().deletes_with_status()
    }

    fn default(job: &mut Job) {
        let spec = job.spec.get_or_insert_default();
        if spec.completions.is_none() && spec.parallelism.is_none() {
            spec.completions = Some(1);
        }
        spec.parallelism.get_or_insert(1);
        let endless = spec.backoff_limit_per_index.is_some();
        spec.backoff_limit.get_or_insert(if endless { i32::MAX } else { 6 });
        spec.completion_mode.get_or_insert_with(|| "NonIndexed".into());
        spec.suspend.get_or_insert(false);
        spec.manual_selector.get_or_insert(false);
        let replaced = if spec.pod_failure_policy.is_some() { "Failed" } else { "TerminatingOrFailed" };
        spec.pod_replacement_policy.get_or_insert_with(|| replaced.into());
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
        count_generation(&mut new.metadata, &old.metadata, (&new.spec, &old.spec));
    }

    fn prepare_status(new: &mut Job, old: &Job, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate_new(job: &Job) -> Vec<FieldError> {
        let spec = job.spec.clone().unwrap_or_default();
        let own = LabelSelector {
            match_labels: Some(BTreeMap::from([(CONTROLLER.into(), job.metadata.uid.clone().unwrap_or_default())])),
            match_expressions: None,
        };
        if spec.manual_selector == Some(true) || spec.selector.as_ref() == Some(&own) {
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
            check_count(&format!("spec.{part}"), count, &mut errors);
        }
        check_choice("spec.completionMode", spec.completion_mode.as_ref(), &["Indexed", "NonIndexed"], &mut errors);
        if spec.completion_mode.as_deref() == Some("Indexed") && spec.completions.is_none() {
            errors.push(FieldError::required("spec.completions", "when completion mode is Indexed"));
        }
        match &spec.selector {
            Some(selector) => {
                check_selector("spec.selector", selector, &mut errors);
                check_labels(selector, &spec.template, &mut errors);
            }
            None => errors.push(FieldError::required("spec.selector", "")),
        }
        check_template(&spec.template, &mut errors);
        if spec.template.spec.as_ref().and_then(|s| s.restart_policy.as_deref()) == Some("Always") {
            let why = "valid values: \"OnFailure\", \"Never\"";
            errors.push(FieldError::required(format!("{TEMPLATE}.spec.restartPolicy"), why));
        }
        errors
    }

    fn validate_update(new: &Job, old: &Job) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let was_started = old.status.as_ref().is_some_and(|s| s.start_time.is_some());
        let (new, old) = (new.spec.clone().unwrap_or_default(), old.spec.clone().unwrap_or_default());
        let elastic = new.completion_mode.as_deref() == Some("Indexed")
            && new.completions == new.parallelism
            && old.completions == old.parallelism;
        if !elastic {
            immutable("spec.completions", &new.completions, &old.completions, &mut errors);
        }
        immutable("spec.selector", &new.selector, &old.selector, &mut errors);
        // Before it ever ran, a job may still be told where to run.
        let movable = old.suspend == Some(true) && !was_started;
        let allowed = if movable { with_placement(&old, &new) } else { old.clone() };
        immutable(TEMPLATE, &new.template, &allowed.template, &mut errors);
        immutable("spec.completionMode", &new.completion_mode, &old.completion_mode, &mut errors);
        immutable("spec.podFailurePolicy", &new.pod_failure_policy, &old.pod_failure_policy, &mut errors);
        let limits = (&new.backoff_limit_per_index, &old.backoff_limit_per_index);
        immutable("spec.backoffLimitPerIndex", limits.0, limits.1, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Status", "How the job is getting on."),
            Column::text("Completions", "How many of the wanted pods have succeeded."),
            Column::text("Duration", "How long the job ran, or has been running."),
            AGE,
            CONTAINERS,
            IMAGES,
            SELECTOR,
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
            progress(job, &status).into(),
            completions.into(),
            duration.unwrap_or_default().into(),
            column::age(&job.metadata, now),
            containers,
            images,
            selector_cell(spec.selector.as_ref()),
        ]
    }
}

/// Pods of a job are told apart by its uid, so that two jobs never fight over one.
fn generate_selector(job: &mut Job) {
    let uid = job.metadata.uid.clone().unwrap_or_default();
    let name = job.metadata.name.clone().unwrap_or_default();
    let Some(spec) = &mut job.spec else { return };
    let labels = spec.template.metadata.get_or_insert_default().labels.get_or_insert_default();
    let mirrored = job.metadata.labels.as_ref() == Some(labels);
    for (key, value) in [(OLDER_JOB, &name), (OLDER_CONTROLLER, &uid), (JOB, &name), (CONTROLLER, &uid)] {
        labels.insert(key.into(), value.clone());
    }
    if mirrored {
        job.metadata.labels = Some(labels.clone());
    }
    let selector = spec.selector.get_or_insert_default();
    selector.match_labels.get_or_insert_default().insert(CONTROLLER.into(), uid);
}

/// The old specification with the new one's choice of nodes.
fn with_placement(old: &JobSpec, new: &JobSpec) -> JobSpec {
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

fn progress(job: &Job, status: &JobStatus) -> &'static str {
    let is = |kind: &str| status.conditions.iter().flatten().any(|c| c.type_ == kind && c.status == "True");
    match () {
        () if is("Complete") => "Complete",
        () if is("Failed") => "Failed",
        () if job.metadata.deletion_timestamp.is_some() => "Terminating",
        () if is("Suspended") => "Suspended",
        () if is("FailureTarget") => "FailureTarget",
        () if is("SuccessCriteriaMet") => "SuccessCriteriaMet",
        () => "Running",
    }
}
