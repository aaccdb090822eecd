//! Event, in the core group.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use cleat_apimachinery::column::{self, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;
use cleat_apimachinery::names::NameRule;

pub(super) struct Events;

impl Strategy for Events {
    type Object = Event;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Event", "events").short(&["ev"]).deletes_with_status().put_creates()
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn validate(event: &Event) -> Vec<FieldError> {
        let about = event.involved_object.namespace.as_deref().unwrap_or_default();
        let lives = event.metadata.namespace.as_deref().unwrap_or_default();
        // Events about cluster-scoped objects live in `default`; components may also keep them in kube-system.
        let fits = if about.is_empty() { ["default", "kube-system"].contains(&lives) } else { about == lives };
        let mut errors = Vec::new();
        if !fits {
            errors.push(FieldError::invalid("involvedObject.namespace", about, "does not match event.namespace"));
        }
        if event.event_time.is_some() {
            errors.extend(check_reporter(event));
        }
        errors
    }

    fn fields() -> &'static [&'static str] {
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

    fn field(event: &Event, name: &str) -> String {
        let about = &event.involved_object;
        let value = match name {
            "involvedObject.kind" => about.kind.clone(),
            "involvedObject.namespace" => about.namespace.clone(),
            "involvedObject.name" => about.name.clone(),
            "involvedObject.uid" => about.uid.clone(),
            "involvedObject.apiVersion" => about.api_version.clone(),
            "involvedObject.resourceVersion" => about.resource_version.clone(),
            "involvedObject.fieldPath" => about.field_path.clone(),
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
            Column::text("Count", "How often the event was seen.").of("integer").wide(),
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
        let about = &event.involved_object;
        let object = format!(
            "{}/{}",
            about.kind.as_deref().unwrap_or_default().to_lowercase(),
            about.name.as_deref().unwrap_or_default()
        );
        let source = event.source.clone().unwrap_or_default();
        let component = source.component.filter(|c| !c.is_empty()).or_else(|| event.reporting_component.clone());
        let parts: Vec<String> = component.into_iter().chain(source.host).filter(|p| !p.is_empty()).collect();
        vec![
            column::since(last.as_ref(), now).into(),
            event.type_.clone().unwrap_or_default().into(),
            event.reason.clone().unwrap_or_default().into(),
            object.into(),
            about.field_path.clone().unwrap_or_default().into(),
            parts.join(", ").into(),
            event.message.as_deref().unwrap_or_default().trim().into(),
            column::since(first.as_ref(), now).into(),
            count.into(),
            column::name(&event.metadata),
        ]
    }
}

const SHORT: usize = 128;
const NOTE: usize = 1024;

/// An event of the newer kind says who saw what, briefly.
pub(super) fn check_reporter(event: &Event) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match event.reporting_component.as_deref().unwrap_or_default() {
        "" => errors.push(FieldError::required("reportingController", "")),
        name => {
            if let Err(why) = names::qualified(name) {
                errors.push(FieldError::invalid("reportingController", name, why));
            }
        }
    }
    for (field, text) in
        [("reportingInstance", &event.reporting_instance), ("action", &event.action), ("reason", &event.reason)]
    {
        match text.as_deref().unwrap_or_default() {
            "" => errors.push(FieldError::required(field, "")),
            long if long.len() > SHORT => {
                let why = format!("can have at most {SHORT} characters");
                errors.push(FieldError::invalid(field, "", why));
            }
            _ => {}
        }
    }
    if event.message.as_deref().is_some_and(|m| m.len() > NOTE) {
        errors.push(FieldError::invalid("message", "", format!("can have at most {NOTE} characters")));
    }
    errors
}
