//! Parses a driver's response: one JSON object, whose keys are compared without regard to case.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;

/// The response to a call that succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverResponse {
    /// The device path of the volume on its node. Empty if the driver did not send one.
    pub device: String,
    pub attached: bool,
    pub capabilities: Capabilities,
}

/// The capabilities of a driver. [`Capabilities::default`] applies to the keys that its response to `init` omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Volumes are attached to nodes before they are mounted there.
    pub attach: bool,
    pub selinux_relabel: bool,
    pub supports_metrics: bool,
    pub fs_group: bool,
    pub requires_fs_resize: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { attach: true, selinux_relabel: true, supports_metrics: false, fs_group: true, requires_fs_resize: true }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ResponseError {
    #[error("Not supported")]
    NotSupported,
    #[error("status: {status}, reason: {message}")]
    Failed { status: String, message: String },
    #[error("the answer is not one JSON object: {why}; it begins {excerpt:?}")]
    Malformed { why: String, excerpt: String },
}

const SUCCESS: &str = "Success";
const NOT_SUPPORTED: &str = "Not supported";
/// The length of the excerpt that the error shows of a malformed response.
const MAX_EXCERPT_BYTES: usize = 200;

/// `output` is everything that the driver wrote to its standard output and standard error.
pub(crate) fn parse(output: &[u8]) -> Result<DriverResponse, ResponseError> {
    let malformed = |why: String| {
        let text = String::from_utf8_lossy(output);
        let excerpt = text.trim_start();
        ResponseError::Malformed { why, excerpt: excerpt[..excerpt.floor_char_boundary(MAX_EXCERPT_BYTES)].to_owned() }
    };
    let fields: Option<Fields> = serde_json::from_slice(output).map_err(|error| malformed(error.to_string()))?;
    let fields = fields.unwrap_or_default();
    let (status, response) = fields.response().map_err(malformed)?;
    match status.as_str() {
        SUCCESS => Ok(response),
        NOT_SUPPORTED => Err(ResponseError::NotSupported),
        _ => Err(ResponseError::Failed { message: fields.string("message").unwrap_or_default(), status }),
    }
}

/// A JSON object with its keys in lower case. Of several equal keys the last one counts.
#[derive(Default)]
struct Fields(BTreeMap<String, Value>);

impl Fields {
    fn response(&self) -> Result<(String, DriverResponse), String> {
        let status = self.string("status")?;
        self.string("message")?;
        let response = DriverResponse {
            device: self.string("device")?,
            attached: self.boolean("attached", false)?,
            capabilities: self.capabilities()?,
        };
        Ok((status, response))
    }

    fn capabilities(&self) -> Result<Capabilities, String> {
        let Some(value) = self.present("capabilities") else { return Ok(Capabilities::default()) };
        let given = Self::deserialize(value).map_err(|error| format!("capabilities: {error}"))?;
        let default = Capabilities::default();
        Ok(Capabilities {
            attach: given.boolean("attach", default.attach)?,
            selinux_relabel: given.boolean("selinuxrelabel", default.selinux_relabel)?,
            supports_metrics: given.boolean("supportsmetrics", default.supports_metrics)?,
            fs_group: given.boolean("fsgroup", default.fs_group)?,
            requires_fs_resize: given.boolean("requiresfsresize", default.requires_fs_resize)?,
        })
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn string(&self, key: &str) -> Result<String, String> {
        match self.present(key) {
            None => Ok(String::new()),
            Some(Value::String(string)) => Ok(string.clone()),
            Some(_) => Err(format!("{key} is not a string")),
        }
    }

    fn boolean(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.present(key) {
            None => Ok(default),
            Some(Value::Bool(given)) => Ok(*given),
            Some(_) => Err(format!("{key} is neither true nor false")),
        }
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LowercaseKeys)
    }
}

struct LowercaseKeys;

impl<'de> Visitor<'de> for LowercaseKeys {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            fields.insert(key.to_lowercase(), value);
        }
        Ok(Fields(fields))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Fields, E> {
        Ok(Fields::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_parsed_as_drivers_write_them() {
        let plain = DriverResponse::default();
        let no_attach = Capabilities { attach: false, ..Capabilities::default() };
        for (case, given, want) in [
            ("nothing but the status", r#"{"status":"Success"}"#, Ok(plain.clone())),
            ("white space around it", "\n {\"status\": \"Success\"}\n\n", Ok(plain.clone())),
            ("keys in any case", r#"{"STATUS":"Success","Device":"/dev/a"}"#, Ok(device("/dev/a"))),
            ("the last of two keys counts", r#"{"status":"Failure","Status":"Success"}"#, Ok(plain.clone())),
            ("unknown keys are ignored", r#"{"status":"Success","colour":[1]}"#, Ok(plain.clone())),
            ("null counts as absent", r#"{"status":"Success","device":null,"capabilities":null}"#, Ok(plain)),
            (
                "attached",
                r#"{"status":"Success","attached":true}"#,
                Ok(DriverResponse { attached: true, ..DriverResponse::default() }),
            ),
            (
                "one capability is given, the others have their defaults",
                r#"{"status":"Success","Capabilities":{"Attach":false}}"#,
                Ok(DriverResponse { capabilities: no_attach, ..DriverResponse::default() }),
            ),
            ("not supported", r#"{"status":"Not supported"}"#, Err("Not supported")),
            ("the value's case counts", r#"{"status":"not supported"}"#, Err("status: not supported, reason: ")),
            ("a failure", r#"{"status":"Failure","message":"no"}"#, Err("status: Failure, reason: no")),
            ("no status", "{}", Err("status: , reason: ")),
            ("null", "null", Err("status: , reason: ")),
            ("no output", "", Err("the answer is not one JSON object: ")),
            ("words before", r#"+ set -x {"status":"Success"}"#, Err("the answer is not one JSON object: ")),
            ("words after", r#"{"status":"Success"} done"#, Err("the answer is not one JSON object: ")),
            ("a list", r#"["Success"]"#, Err("the answer is not one JSON object: ")),
            (
                "another type",
                r#"{"status":"Success","device":1}"#,
                Err("the answer is not one JSON object: device is not"),
            ),
            (
                "another type of a capability",
                r#"{"status":"Success","capabilities":{"attach":"no"}}"#,
                Err("the answer is not one JSON object: attach is neither"),
            ),
        ] {
            match (parse(given.as_bytes()), want) {
                (Ok(response), Ok(want)) => assert_eq!(response, want, "{case}"),
                (Err(error), Err(want)) => assert!(error.to_string().starts_with(want), "{case}: {error}"),
                (got, want) => panic!("{case}: {got:?} instead of {want:?}"),
            }
        }
    }

    fn device(path: &str) -> DriverResponse {
        DriverResponse { device: path.to_owned(), ..DriverResponse::default() }
    }

    #[test]
    fn the_error_shows_only_the_beginning_of_a_long_response() {
        let ResponseError::Malformed { excerpt, .. } = parse("ä".repeat(10_000).as_bytes()).unwrap_err() else {
            panic!("a malformed response was accepted")
        };
        assert!(excerpt.len() <= MAX_EXCERPT_BYTES);
    }
}
