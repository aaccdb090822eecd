//! Strategy of Event (events.k8s.io/v1): the core Event under other field names. Both are stored as core Events, so that
//! each group shows the events written through the other.

use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as CoreEvent, EventSeries as CoreEventSeries};
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde_json::Value;

use super::core_event;
use cleat_apimachinery::column::Column;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::{Object as _, Strategy};
use cleat_apimachinery::kind_store::Conversion;
use cleat_apimachinery::names::NameRule;

pub(super) struct EventsV1EventStrategy;

/// Converts between this group's Event and the stored core Event.
struct EventConversion;

impl Conversion for EventConversion {
    fn to_served(&self, stored: &Bytes) -> Bytes {
        let shown = serde_json::from_slice::<CoreEvent>(stored).map(|event| from_core(event).encode());
        shown.map_or_else(|_| stored.clone(), Into::into)
    }

    fn to_stored(&self, served: Bytes) -> Bytes {
        match serde_json::from_slice::<Event>(&served) {
            Ok(event) => {
                let mut stored = to_core(event).encode();
                // The store keeps these bytes, and with them any spare capacity.
                stored.shrink_to_fit();
                stored.into()
            }
            Err(_) => served,
        }
    }
}

fn from_core(event: CoreEvent) -> Event {
    let unknown_time = || MicroTime(Timestamp::UNIX_EPOCH);
    Event {
        action: event.action,
        deprecated_count: event.count,
        deprecated_first_timestamp: event.first_timestamp,
        deprecated_last_timestamp: event.last_timestamp,
        deprecated_source: event.source,
        event_time: event.event_time,
        metadata: event.metadata,
        note: event.message,
        reason: event.reason,
        regarding: Some(event.involved_object),
        related: event.related,
        reporting_controller: event.reporting_component,
        reporting_instance: event.reporting_instance,
        series: event.series.map(|s| EventSeries {
            count: s.count.unwrap_or_default(),
            last_observed_time: s.last_observed_time.unwrap_or_else(unknown_time),
        }),
        type_: event.type_,
    }
}

fn to_core(event: Event) -> CoreEvent {
    CoreEvent {
        action: event.action,
        count: event.deprecated_count,
        first_timestamp: event.deprecated_first_timestamp,
        last_timestamp: event.deprecated_last_timestamp,
        source: event.deprecated_source,
        event_time: event.event_time,
        metadata: event.metadata,
        message: event.note,
        reason: event.reason,
        involved_object: event.regarding.unwrap_or_default(),
        related: event.related,
        reporting_component: event.reporting_controller,
        reporting_instance: event.reporting_instance,
        series: event
            .series
            .map(|s| CoreEventSeries { count: Some(s.count), last_observed_time: Some(s.last_observed_time) }),
        type_: event.type_,
    }
}

/// The core Event's name for a selectable field of this group.
fn core_field_name(name: &str) -> String {
    match name.strip_prefix("regarding.") {
        Some(field) => format!("involvedObject.{field}"),
        None if name == "reportingController" => "reportingComponent".into(),
        None => name.into(),
    }
}

impl Strategy for EventsV1EventStrategy {
    type Object = Event;

    fn descriptor() -> Descriptor {
        Descriptor::new("events.k8s.io", "v1", "Event", "events")
            .short_names(&["ev"])
            .deletes_with_status()
            .put_creates()
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn conversion() -> Option<Arc<dyn Conversion>> {
        Some(Arc::new(EventConversion))
    }

    fn validate(event: &Event) -> Vec<FieldError> {
        core_event::CoreEventStrategy::validate(&to_core(event.clone()))
    }

    fn validate_create(new: &Event) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if new.event_time.is_none() {
            errors.push(FieldError::required("eventTime", ""));
        }
        if !new.type_.as_deref().is_some_and(|t| ["Normal", "Warning"].contains(&t)) {
            errors.push(FieldError::invalid("type", new.type_.as_deref().unwrap_or_default(), "has invalid value"));
        }
        let unset = "needs to be unset";
        if new.deprecated_first_timestamp.is_some() {
            errors.push(FieldError::invalid("firstTimestamp", &new.deprecated_first_timestamp, unset));
        }
        if new.deprecated_last_timestamp.is_some() {
            errors.push(FieldError::invalid("lastTimestamp", &new.deprecated_last_timestamp, unset));
        }
        if let Some(count) = new.deprecated_count.filter(|c| *c != 0) {
            errors.push(FieldError::invalid("count", count, unset));
        }
        if let Some(source) = new.deprecated_source.as_ref().filter(|s| s.component.is_some() || s.host.is_some()) {
            errors.push(FieldError::invalid("source", source, unset));
        }
        if new.event_time.is_none() {
            errors.extend(core_event::check_reporter(&to_core(new.clone())));
        }
        errors
    }

    fn validate_update(new: &Event, old: &Event) -> Vec<FieldError> {
        // An event without `eventTime` was written through the core API, where every field may change.
        if old.event_time.is_none() {
            return Vec::new();
        }
        let immutable_part = |event: &Event| Event { series: None, metadata: Default::default(), ..event.clone() };
        let (after, before) = (immutable_part(new), immutable_part(old));
        let to_json = |event: &Event| serde_json::to_value(event).unwrap_or_default();
        let (after, before) = (to_json(&after), to_json(&before));
        let fields = ["regarding", "reason", "note", "type", "eventTime", "related", "action", "reportingController"];
        let more = ["reportingInstance", "deprecatedSource", "deprecatedCount", "deprecatedFirstTimestamp"];
        fields
            .iter()
            .chain(&more)
            .chain(&["deprecatedLastTimestamp"])
            .filter(|field| after[**field] != before[**field])
            .map(|field| FieldError::invalid(*field, &after[*field], "field is immutable"))
            .collect()
    }

    fn selectable_fields() -> &'static [&'static str] {
        &[
            "regarding.kind",
            "regarding.namespace",
            "regarding.name",
            "regarding.uid",
            "regarding.apiVersion",
            "regarding.resourceVersion",
            "regarding.fieldPath",
            "reason",
            "reportingController",
            "type",
        ]
    }

    fn selectable_value(event: &Event, name: &str) -> String {
        core_event::CoreEventStrategy::selectable_value(&to_core(event.clone()), &core_field_name(name))
    }

    fn columns() -> &'static [Column] {
        core_event::CoreEventStrategy::columns()
    }

    fn cells(event: &Event, now: Timestamp) -> Vec<Value> {
        core_event::CoreEventStrategy::cells(&to_core(event.clone()), now)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_groups_show_the_same_event() {
        let core = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e", "namespace": "n" },
            "involvedObject": { "kind": "Pod", "name": "p", "namespace": "n" }, "reason": "Because",
            "message": "it happened", "source": { "component": "c" }, "count": 3, "type": "Normal",
            "firstTimestamp": "2026-01-02T03:04:05Z", "lastTimestamp": "2026-01-02T03:04:06Z",
            "reportingComponent": "r", "reportingInstance": "i",
        });
        let stored = serde_json::from_value::<CoreEvent>(core.clone()).unwrap().encode().into();
        let shown = EventConversion.to_served(&stored);
        let decoded: Value = serde_json::from_slice(&shown).unwrap();
        assert_eq!(decoded["apiVersion"], "events.k8s.io/v1");
        assert_eq!(decoded["regarding"]["name"], "p");
        assert_eq!(decoded["note"], "it happened");
        assert_eq!(decoded["deprecatedCount"], 3);
        assert_eq!(decoded["reportingController"], "r");
        assert_eq!(EventConversion.to_stored(shown), stored, "converting back gives the stored bytes");
    }

    #[test]
    fn a_new_event_has_a_time_and_a_reporter() {
        let complete = json!({
            "metadata": { "namespace": "default" }, "eventTime": "2026-01-02T03:04:05.000006Z", "type": "Normal",
            "reportingController": "cleat.dev/c", "reportingInstance": "i", "action": "Act", "reason": "Because",
        });
        for (case, change, field) in [
            ("complete", json!({}), None),
            ("no time", json!({ "eventTime": null }), Some("eventTime")),
            ("no type", json!({ "type": "Odd" }), Some("type")),
            ("an old field", json!({ "deprecatedCount": 2 }), Some("count")),
        ] {
            let mut object = complete.clone();
            json_patch::merge(&mut object, &change);
            let event: Event = serde_json::from_value(object).unwrap();
            let errors = EventsV1EventStrategy::validate_create(&event);
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}");
        }
        let event: Event = serde_json::from_value(complete).unwrap();
        let repeated = Event {
            series: Some(EventSeries { count: 2, last_observed_time: MicroTime(Timestamp::UNIX_EPOCH) }),
            ..event.clone()
        };
        assert!(EventsV1EventStrategy::validate_update(&repeated, &event).is_empty(), "the series may grow");
        let other = Event { note: Some("other".into()), ..event.clone() };
        assert_eq!(EventsV1EventStrategy::validate_update(&other, &event).len(), 1);
    }
}
