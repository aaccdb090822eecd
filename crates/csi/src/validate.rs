//! Checks of request fields that every driver needs. Each error is INVALID_ARGUMENT and names the field.
use tonic::Status;

/// The kernel's `PATH_MAX`, without the terminating NUL.
const MAX_PATH_BYTES: usize = 4095;
/// The specification's limit for strings in general.
pub const MAX_STRING_BYTES: usize = 128;
/// The specification's limit for node ids.
pub const MAX_NODE_ID_BYTES: usize = 256;

/// The value must not be empty, and must not be longer than [`MAX_STRING_BYTES`].
pub fn text<'a>(field: &'static str, value: &'a str) -> Result<&'a str, Status> {
    bounded(field, value, MAX_STRING_BYTES)
}

/// The path must be absolute, without `..`, and not longer than [`MAX_PATH_BYTES`].
pub fn path<'a>(field: &'static str, value: &'a str) -> Result<&'a std::path::Path, Status> {
    use std::path::{Component, Path};
    let value = Path::new(bounded(field, value, MAX_PATH_BYTES)?);
    if !value.is_absolute() || value.components().any(|part| part == Component::ParentDir) {
        return Err(Status::invalid_argument(format!("{field} must be an absolute path without ..")));
    }
    Ok(value)
}

/// The value must not be empty, longer than `limit` bytes, or contain a NUL byte.
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
    fn errors_name_the_field() {
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
