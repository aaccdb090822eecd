//! What a driver answers: one JSON object, whose keys count in any case.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;

/// A call that succeeded, and what it brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Where the volume is on its node; empty where the driver has nothing to say.
    pub device: String,
    pub attached: bool,
    pub capabilities: Capabilities,
}

/// What a driver can do. What it does not mention is as here.
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
pub enum AnswerError {
    #[error("Not supported")]
    NotSupported,
    #[error("status: {status}, reason: {message}")]
    Failed { status: String, message: String },
    #[error("the answer is not one JSON object: {why}; it begins {begins:?}")]
    Unintelligible { why: String, begins: String },
}

const SUCCESS: &str = "Success";
const NOT_SUPPORTED: &str = "Not supported";
/// So much of an answer that nobody understands is shown.
const SHOWN: usize = 200;

/// Everything that the driver wrote, on either of its outputs, is the answer.
pub(crate) fn read(output: &[u8]) -> Result<Answer, AnswerError> {
    let unintelligible = |why: String| {
        let text = String::from_utf8_lossy(output);
        let begins = text.trim_start();
        AnswerError::Unintelligible { why, begins: begins[..begins.floor_char_boundary(SHOWN)].to_owned() }
    };
    let fields: Option<Fields> = serde_json::from_slice(output).map_err(|error| unintelligible(error.to_string()))?;
    let fields = fields.unwrap_or_default();
    let (status, answer) = fields.answer().map_err(unintelligible)?;
    match status.as_str() {
        SUCCESS => Ok(answer),
        NOT_SUPPORTED => Err(AnswerError::NotSupported),
        _ => Err(AnswerError::Failed { message: fields.text("message").unwrap_or_default(), status }),
    }
}

/// A JSON object by its keys in small letters; of several the last counts.
#[derive(Default)]
struct Fields(BTreeMap<String, Value>);

impl Fields {
    fn answer(&self) -> Result<(String, Answer), String> {
        let status = self.text("status")?;
        self.text("message")?;
        let answer =
            Answer { device: self.text("device")?, attached: self.flag("attached", false)?, capabilities: self.can()? };
        Ok((status, answer))
    }

    fn can(&self) -> Result<Capabilities, String> {
        let Some(value) = self.present("capabilities") else { return Ok(Capabilities::default()) };
        let said = Self::deserialize(value).map_err(|error| format!("capabilities: {error}"))?;
        let unsaid = Capabilities::default();
        Ok(Capabilities {
            attach: said.flag("attach", unsaid.attach)?,
            selinux_relabel: said.flag("selinuxrelabel", unsaid.selinux_relabel)?,
            supports_metrics: said.flag("supportsmetrics", unsaid.supports_metrics)?,
            fs_group: said.flag("fsgroup", unsaid.fs_group)?,
            requires_fs_resize: said.flag("requiresfsresize", unsaid.requires_fs_resize)?,
        })
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn text(&self, key: &str) -> Result<String, String> {
        match self.present(key) {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(format!("{key} is not a string")),
        }
    }

    fn flag(&self, key: &str, unsaid: bool) -> Result<bool, String> {
        match self.present(key) {
            None => Ok(unsaid),
            Some(Value::Bool(said)) => Ok(*said),
            Some(_) => Err(format!("{key} is neither true nor false")),
        }
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AnyCase)
    }
}

struct AnyCase;

impl<'de> Visitor<'de> for AnyCase {
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
    fn an_answer_is_read_as_drivers_write_it() {
        let plain = Answer::default();
        let no_attach = Capabilities { attach: false, ..Capabilities::default() };
        for (case, said, want) in [
            ("nothing but the status", r#"{"status":"Success"}"#, Ok(plain.clone())),
            ("with space around it", "\n {\"status\": \"Success\"}\n\n", Ok(plain.clone())),
            ("keys in any case", r#"{"STATUS":"Success","Device":"/dev/a"}"#, Ok(device("/dev/a"))),
            ("the last of two keys counts", r#"{"status":"Failure","Status":"Success"}"#, Ok(plain.clone())),
            ("what nobody knows is ignored", r#"{"status":"Success","colour":[1]}"#, Ok(plain.clone())),
            ("null is as good as nothing", r#"{"status":"Success","device":null,"capabilities":null}"#, Ok(plain)),
            ("attached", r#"{"status":"Success","attached":true}"#, Ok(Answer { attached: true, ..Answer::default() })),
            (
                "one capability, the others as they are by default",
                r#"{"status":"Success","Capabilities":{"Attach":false}}"#,
                Ok(Answer { capabilities: no_attach, ..Answer::default() }),
            ),
            ("not supported", r#"{"status":"Not supported"}"#, Err("Not supported")),
            ("the value's case counts", r#"{"status":"not supported"}"#, Err("status: not supported, reason: ")),
            ("a failure", r#"{"status":"Failure","message":"no"}"#, Err("status: Failure, reason: no")),
            ("no status", "{}", Err("status: , reason: ")),
            ("nothing at all", "null", Err("status: , reason: ")),
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
            match (read(said.as_bytes()), want) {
                (Ok(answer), Ok(want)) => assert_eq!(answer, want, "{case}"),
                (Err(error), Err(want)) => assert!(error.to_string().starts_with(want), "{case}: {error}"),
                (got, want) => panic!("{case}: {got:?} instead of {want:?}"),
            }
        }
    }

    fn device(path: &str) -> Answer {
        Answer { device: path.to_owned(), ..Answer::default() }
    }

    #[test]
    fn of_a_long_answer_only_the_beginning_is_shown() {
        let AnswerError::Unintelligible { begins, .. } = read("ä".repeat(10_000).as_bytes()).unwrap_err() else {
            panic!("understood")
        };
        assert!(begins.len() <= SHOWN);
    }
}
