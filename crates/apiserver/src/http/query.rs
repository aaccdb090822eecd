//! The query string and the request options in it.

use std::time::Duration;

use cleat_store::Revision;

use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::table::IncludeObject;

/// The longest field manager name, in bytes. A name taken from the user agent is cut to as many characters.
const MAX_FIELD_MANAGER_LEN: usize = 128;

/// The decoded parameters in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

/// The parameter `fieldValidation`: the treatment of unknown and duplicate fields in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// The parameter `dryRun`: whether the result of a write is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteMode {
    Persist,
    DryRun,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResourceVersionMatch {
    Exact,
    NotOlderThan,
}

/// The parameters of a list or watch. Each is valid by itself; their combination is not checked yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListOptions {
    pub(crate) label_selector: String,
    pub(crate) field_selector: String,
    /// None if the parameter is missing or empty.
    pub(crate) resource_version: Option<Revision>,
    pub(crate) resource_version_match: Option<ResourceVersionMatch>,
    pub(crate) limit: Option<usize>,
    pub(crate) continue_token: Option<String>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) allow_bookmarks: bool,
    pub(crate) send_initial_events: Option<bool>,
    pub(crate) watch: bool,
}

impl Query {
    pub(crate) fn parse(query: Option<&str>) -> Self {
        let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn all(&self, name: &'static str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The value, if the parameter is there and not empty.
    fn non_empty(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|v| !v.is_empty())
    }

    /// A boolean parameter is false if its value is `false` or `0`, and true otherwise: also `?watch` without a value.
    fn flag(&self, name: &str) -> Option<bool> {
        self.get(name).map(|v| !matches!(v.to_ascii_lowercase().as_str(), "false" | "0"))
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.flag("watch").unwrap_or(false)
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, ApiError> {
        self.non_empty(name)
            .map(|v| v.parse().map_err(|_| ApiError::BadRequest(format!("invalid value for {name}: {v:?}"))))
            .transpose()
    }

    pub(crate) fn write_mode(&self, options_kind: &str) -> Result<WriteMode, ApiError> {
        match self.non_empty("dryRun") {
            None => Ok(WriteMode::Persist),
            Some("All") => Ok(WriteMode::DryRun),
            Some(other) => {
                let error = FieldError::not_supported("dryRun", other, &["All"]);
                Err(ApiError::invalid_option(options_kind, error))
            }
        }
    }

    pub(crate) fn field_validation(&self, options_kind: &str) -> Result<FieldValidation, ApiError> {
        match self.non_empty("fieldValidation") {
            None | Some("Warn") => Ok(FieldValidation::Warn),
            Some("Strict") => Ok(FieldValidation::Strict),
            Some("Ignore") => Ok(FieldValidation::Ignore),
            Some(other) => {
                let error = FieldError::not_supported("fieldValidation", other, &["", "Ignore", "Strict", "Warn"]);
                Err(ApiError::invalid_option(options_kind, error))
            }
        }
    }

    /// The manager that owns the changed fields: the parameter, or else the user agent up to its first slash.
    pub(crate) fn field_manager(&self, options_kind: &str, user_agent: &str) -> Result<String, ApiError> {
        let Some(name) = self.non_empty("fieldManager") else {
            let prefix = user_agent.split('/').next().unwrap_or_default();
            return Ok(prefix.chars().take_while(|c| !c.is_control()).take(MAX_FIELD_MANAGER_LEN).collect());
        };
        let error = if name.len() > MAX_FIELD_MANAGER_LEN {
            FieldError::too_long("fieldManager", MAX_FIELD_MANAGER_LEN)
        } else if name.chars().any(char::is_control) {
            FieldError::invalid("fieldManager", name, "should only contain printable characters")
        } else {
            return Ok(name.into());
        };
        Err(ApiError::invalid_option(options_kind, error))
    }

    pub(crate) fn force(&self) -> Option<bool> {
        self.flag("force")
    }

    pub(crate) fn grace_period(&self) -> Result<Option<i64>, ApiError> {
        self.number("gracePeriodSeconds")
    }

    pub(crate) fn list_options(&self) -> Result<ListOptions, ApiError> {
        let bad_match = |v: &str| {
            let error = FieldError::not_supported("resourceVersionMatch", v, &["", "Exact", "NotOlderThan"]);
            ApiError::invalid_option("ListOptions", error)
        };
        let resource_version = self.non_empty("resourceVersion");
        Ok(ListOptions {
            label_selector: self.get("labelSelector").unwrap_or_default().into(),
            field_selector: self.get("fieldSelector").unwrap_or_default().into(),
            resource_version: resource_version
                .map(|v| v.parse().map_err(|_| ApiError::BadRequest(format!("invalid resource version: {v:?}"))))
                .transpose()?,
            resource_version_match: match self.non_empty("resourceVersionMatch") {
                None => None,
                Some("Exact") => Some(ResourceVersionMatch::Exact),
                Some("NotOlderThan") => Some(ResourceVersionMatch::NotOlderThan),
                Some(other) => return Err(bad_match(other)),
            },
            limit: self.number("limit")?.filter(|n| *n > 0),
            continue_token: self.non_empty("continue").map(Into::into),
            timeout: self.number("timeoutSeconds")?.filter(|n| *n > 0).map(Duration::from_secs),
            allow_bookmarks: self.flag("allowWatchBookmarks").unwrap_or(false),
            send_initial_events: self.flag("sendInitialEvents"),
            watch: self.is_watch(),
        })
    }

    /// The part of each object that a Table row contains.
    pub(crate) fn include_object(&self) -> Result<IncludeObject, ApiError> {
        match self.non_empty("includeObject") {
            None | Some("Metadata") => Ok(IncludeObject::Metadata),
            Some("None") => Ok(IncludeObject::None),
            Some("Object") => Ok(IncludeObject::Object),
            Some(other) => Err(ApiError::BadRequest(format!("unrecognized includeObject value: {other:?}"))),
        }
    }
}
