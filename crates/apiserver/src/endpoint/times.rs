//! Times with microseconds are written in one way only, and read in no other: six digits after the point.

use serde::de::Error as _;
use serde_json::Value;

const LAYOUT: &str = "2006-01-02T15:04:05.000000Z07:00";

/// Refuses a time, at one of these JSON pointers, that is not written that way.
pub(super) fn check(pointers: &[&str], value: &Value) -> Result<(), serde_json::Error> {
    for text in pointers.iter().filter_map(|pointer| value.pointer(pointer).and_then(Value::as_str)) {
        if !is_micro(text) {
            return Err(serde_json::Error::custom(format!(
                "parsing time {text:?} as {LAYOUT:?}: cannot parse {text:?}"
            )));
        }
    }
    Ok(())
}

fn is_micro(text: &str) -> bool {
    let fraction = text.get(19..).and_then(|rest| rest.strip_prefix('.')).unwrap_or_default();
    let digits = fraction.bytes().take_while(u8::is_ascii_digit).count();
    digits == 6 && text.parse::<jiff::Timestamp>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_digits_or_nothing() {
        for (text, want) in [
            ("2020-02-03T04:05:06.000009Z", true),
            ("2020-02-03T04:05:06.123456+02:00", true),
            ("2020-02-03T04:05:06Z", false),
            ("2020-02-03T04:05:06.5Z", false),
            ("2020-02-03T04:05:06.1234567Z", false),
            ("soon", false),
        ] {
            assert_eq!(is_micro(text), want, "{text}");
        }
    }
}
