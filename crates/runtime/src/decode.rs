//! Decodes objects and watch events without `managedFields`, and watch events without their objects.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

/// The part of a watch event that identifies its object and revision.
#[derive(Deserialize)]
pub(crate) struct EventHeader<'a> {
    #[serde(borrow, rename = "type")]
    pub(crate) event_type: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) object: EventObject<'a>,
}

#[derive(Deserialize)]
pub(crate) struct EventObject<'a> {
    #[serde(borrow, default)]
    pub(crate) metadata: EventMetadata<'a>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventMetadata<'a> {
    #[serde(borrow)]
    pub(crate) namespace: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) resource_version: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct EventContent<T> {
    object: T,
}

/// Decodes the object of a watch event.
pub(crate) fn event_object<T: DeserializeOwned>(event: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<EventContent<T>>(&without_managed_fields(event)).map(|content| content.object)
}

/// Removes every `managedFields` list from JSON before it is decoded: no component of this process reads them.
///
/// Quotes within a JSON string are escaped, so that the search can only find a key. A `managedFields` that is not a complete list
/// is left in place; the decoder then reports the error.
pub(crate) fn without_managed_fields(json: &[u8]) -> Cow<'_, [u8]> {
    const KEY: &[u8] = b"\"managedFields\":[";
    let mut output: Option<Vec<u8>> = None;
    let mut rest = json;
    while let Some(at) = memchr::memmem::find(rest, KEY) {
        let Some(length) = list_length(&rest[at + KEY.len() - 1..]) else { break };
        let end = at + KEY.len() - 1 + length;
        let output = output.get_or_insert_with(|| Vec::with_capacity(json.len()));
        // The comma after the list is removed with it, or else the comma before it.
        let (before, after) = match (rest[..at].last(), rest.get(end)) {
            (_, Some(b',')) => (&rest[..at], &rest[end + 1..]),
            (Some(b','), _) => (&rest[..at - 1], &rest[end..]),
            _ => (&rest[..at], &rest[end..]),
        };
        output.extend_from_slice(before);
        rest = after;
    }
    match output {
        None => Cow::Borrowed(json),
        Some(mut output) => {
            output.extend_from_slice(rest);
            Cow::Owned(output)
        }
    }
}

/// The length in bytes of the list at the start of the JSON; `None` if it is incomplete.
fn list_length(json: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(json).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::{Value, json};

    #[test]
    fn managed_fields_are_removed_at_every_position() {
        let fields = json!([{ "manager": "a]\"", "fieldsV1": { "f:data": { "k:{\"a\":[1]}": {} } } }]);
        let fields = fields.to_string();
        for (case, text) in [
            ("between", format!(r#"{{"metadata":{{"labels":{{}},"managedFields":{fields},"name":"n"}}}}"#)),
            ("first", format!(r#"{{"metadata":{{"managedFields":{fields},"name":"n"}}}}"#)),
            ("last", format!(r#"{{"metadata":{{"name":"n","managedFields":{fields}}}}}"#)),
            ("alone", format!(r#"{{"metadata":{{"managedFields":{fields}}}}}"#)),
            (
                "in a list of objects",
                format!(
                    r#"{{"items":[{{"metadata":{{"managedFields":{fields},"name":"n"}}}},{{"metadata":{{"managedFields":{fields}}}}}]}}"#
                ),
            ),
        ] {
            let mut want: Value = serde_json::from_str(&text).unwrap();
            drop_managed(&mut want);
            let got: Value = serde_json::from_slice(&without_managed_fields(text.as_bytes()))
                .unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(got, want, "{case}");
        }
    }

    fn drop_managed(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("managedFields");
                fields.values_mut().for_each(drop_managed);
            }
            Value::Array(items) => items.iter_mut().for_each(drop_managed),
            _ => {}
        }
    }

    #[test]
    fn strings_and_invalid_lists_stay() {
        for text in [
            json!({ "data": { "a": "{\"managedFields\":[1]}" } }).to_string(),
            r#"{"metadata":{"managedFields":[{"a""#.to_owned(),
            r#"{"metadata":{"managedFields":null}}"#.to_owned(),
        ] {
            assert_eq!(without_managed_fields(text.as_bytes()), text.as_bytes());
        }
    }

    #[test]
    fn the_header_of_an_event_is_decoded_alone() {
        let line = br#"{"type":"MODIFIED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"7","managedFields":[{}],"name":"n","namespace":"s"},"data":{"a":"b"}}}"#;
        let header: EventHeader<'_> = serde_json::from_slice(line).unwrap();
        let metadata = header.object.metadata;
        assert_eq!(
            (&*header.event_type, metadata.name.as_deref(), metadata.namespace.as_deref()),
            ("MODIFIED", Some("n"), Some("s"))
        );
        assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        let map: ConfigMap = event_object(line).unwrap();
        assert_eq!(map.metadata.managed_fields, None);
        assert_eq!(map.data.unwrap()["a"], "b");
    }
}
