//! Strategy of Event (v1, the core group). `events_v1_event` serves the same objects under other field names.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use cleat_apimachinery::column::{self, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;
use cleat_apimachinery::names::NameRule;

pub(super) struct CoreEventStrategy;

impl Strategy for CoreEventStrategy {
    type Object = Event;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Event", "events").short_names(&["ev"]).deletes_with_status().put_creates()
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn validate(event: &Event) -> Vec<FieldError> {
        let object_namespace = event.involved_object.namespace.as_deref().unwrap_or_default();
        let namespace = event.metadata.namespace.as_deref().unwrap_or_default();
        // Events about cluster-scoped objects are in `default`; components may also create them in kube-system.
        let is_matching_namespace = if object_namespace.is_empty() {
            ["default", "kube-system"].contains(&namespace)
        } else {
            object_namespace == namespace
        };
        let mut errors = Vec::new();
        if !is_matching_namespace {
            errors.push(FieldError::invalid(
                "involvedObject.namespace",
                object_namespace,
                "does not match event.namespace",
            ));
        }
        if event.event_time.is_some() {
            errors.extend(check_reporter(event));
        }
        errors
    }

    fn selectable_fields() -> &'static [&'static str] {
        &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ]
    }

    fn selectable_value(event: &Event, name: &str) -> String {
        let involved = &event.involved_object;
        let value = match name {
            "involvedObject.kind" => involved.kind.clone(),
            "involvedObject.namespace" => involved.namespace.clone(),
            "involvedObject.name" => involved.name.clone(),
            "involvedObject.uid" => involved.uid.clone(),
            "involvedObject.apiVersion" => involved.api_version.clone(),
            "involvedObject.resourceVersion" => involved.resource_version.clone(),
            "involvedObject.fieldPath" => involved.field_path.clone(),
            "reason" => event.reason.clone(),
            "reportingComponent" => event.reporting_component.clone(),
            "source" => {
                let component = event.source.as_ref().and_then(|s| s.component.clone());
                component.or_else(|| event.reporting_component.clone())
            }
            "type" => event.type_.clone(),
            _ => None,
        };
        value.unwrap_or_default()
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            Column::text("Last Seen", "When the event was last seen."),
            Column::text("Type", "Normal or Warning."),
            Column::text("Reason", "Short name of what happened."),
            Column::text("Object", "Object the event is about."),
            Column::text("Subobject", "Part of the object the event is about.").wide(),
            Column::text("Source", "Component that saw the event.").wide(),
            Column::text("Message", "What happened."),
            Column::text("First Seen", "When the event was first seen.").wide(),
            Column::text("Count", "How often the event was seen.").with_type("integer").wide(),
            NAME.wide(),
        ];
        COLUMNS
    }

    fn cells(event: &Event, now: Timestamp) -> Vec<Value> {
        let micro = event.event_time.as_ref().map(|t| Time(t.0));
        let first = event.first_timestamp.clone().or_else(|| micro.clone());
        let series = event.series.as_ref();
        let last = series
            .and_then(|s| s.last_observed_time.as_ref().map(|t| Time(t.0)))
            .or_else(|| event.last_timestamp.clone())
            .or_else(|| first.clone());
        let count = series.and_then(|s| s.count).or(event.count).unwrap_or(1);
        let involved = &event.involved_object;
        let object = format!(
            "{}/{}",
            involved.kind.as_deref().unwrap_or_default().to_lowercase(),
            involved.name.as_deref().unwrap_or_default()
        );
        let source = event.source.clone().unwrap_or_default();
        let component = source.component.filter(|c| !c.is_empty()).or_else(|| event.reporting_component.clone());
        let parts: Vec<String> = component.into_iter().chain(source.host).filter(|p| !p.is_empty()).collect();
        vec![
            column::since(last.as_ref(), now).into(),
            event.type_.clone().unwrap_or_default().into(),
            event.reason.clone().unwrap_or_default().into(),
            object.into(),
            involved.field_path.clone().unwrap_or_default().into(),
            parts.join(", ").into(),
            event.message.as_deref().unwrap_or_default().trim().into(),
            column::since(first.as_ref(), now).into(),
            count.into(),
            column::name(&event.metadata),
        ]
    }
}

/// Limit of `reportingInstance`, `action` and `reason`.
const MAX_SHORT_FIELD_BYTES: usize = 128;
const MAX_MESSAGE_BYTES: usize = 1024;

/// Rules of the events.k8s.io API, which hold for every event with `eventTime`: it names its reporter, and the lengths of
/// its texts are limited.
pub(super) fn check_reporter(event: &Event) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match event.reporting_component.as_deref().unwrap_or_default() {
        "" => errors.push(FieldError::required("reportingController", "")),
        name => {
            if let Err(why) = names::validate_qualified_name(name) {
                errors.push(FieldError::invalid("reportingController", name, why));
            }
        }
    }
    for (field, text) in
        [("reportingInstance", &event.reporting_instance), ("action", &event.action), ("reason", &event.reason)]
    {
        match text.as_deref().unwrap_or_default() {
            "" => errors.push(FieldError::required(field, "")),
            long if long.len() > MAX_SHORT_FIELD_BYTES => {
                let why = format!("can have at most {MAX_SHORT_FIELD_BYTES} characters");
                errors.push(FieldError::invalid(field, "", why));
            }
            _ => {}
        }
    }
    if event.message.as_deref().is_some_and(|m| m.len() > MAX_MESSAGE_BYTES) {
        errors.push(FieldError::invalid("message", "", format!("can have at most {MAX_MESSAGE_BYTES} characters")));
    }
    errors
}
