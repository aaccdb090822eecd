//! Request checks every driver owes its callers. Each refusal is INVALID_ARGUMENT and names the field.
use tonic::Status;

/// Limits the spec sets on strings.
pub const MAX_STRING: usize = 128;
pub const MAX_NODE_ID: usize = 256;

/// The field has to be present and within the general string limit.
pub fn text<'a>(field: &'static str, value: &'a str) -> Result<&'a str, Status> {
    bounded(field, value, MAX_STRING)
}

/// A path may be as long as the kernel allows, has to be absolute, and may not climb.
pub fn path<'a>(field: &'static str, value: &'a str) -> Result<&'a std::path::Path, Status> {
    use std::path::{Component, Path};
    let value = Path::new(bounded(field, value, 4095)?);
    if !value.is_absolute() || value.components().any(|part| part == Component::ParentDir) {
        return Err(Status::invalid_argument(format!("{field} must be an absolute path without ..")));
    }
    Ok(value)
}

pub fn bounded<'a>(field: &'static str, value: &'a str, limit: usize) -> Result<&'a str, Status> {
    if value.is_empty() {
        return Err(missing(field));
    }
    if value.len() > limit {
        return Err(Status::invalid_argument(format!("{field} is longer than {limit} bytes")));
    }
    if value.contains('\0') {
        return Err(Status::invalid_argument(format!("{field} contains a NUL byte")));
    }
    Ok(value)
}

pub fn present<'a, T>(field: &'static str, value: &'a Option<T>) -> Result<&'a T, Status> {
    value.as_ref().ok_or_else(|| missing(field))
}

pub fn not_empty<'a, T>(field: &'static str, values: &'a [T]) -> Result<&'a [T], Status> {
    if values.is_empty() { Err(missing(field)) } else { Ok(values) }
}

fn missing(field: &'static str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_field() {
        for (case, result) in [
            ("empty", text("volume_id", "").err()),
            ("too long", text("volume_id", &"x".repeat(129)).err()),
            ("NUL", text("volume_id", "a\0b").err()),
            ("relative path", path("volume_id", "a/b").err()),
            ("climbing path", path("volume_id", "/a/../b").err()),
            ("absent message", present("volume_id", &None::<u8>).err()),
            ("empty list", not_empty::<u8>("volume_id", &[]).err()),
        ] {
            let status = result.unwrap_or_else(|| panic!("{case} was accepted"));
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{case}");
            assert!(status.message().contains("volume_id"), "{case}: {}", status.message());
        }
        assert!(text("volume_id", &"x".repeat(128)).is_ok());
        assert!(path("target_path", "/a/b").is_ok());
    }
}
