//! The query string, and the options of a request that come in it.

use std::time::Duration;

use cleat_store::Revision;

use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::table::Include;

const MANAGER_LIMIT: usize = 128;

#[derive(Clone, Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

/// What to do about unknown fields in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// Does the request only want to know what would happen?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Write,
    DryRun,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    Exact,
    NotOlderThan,
}

/// Parameters of a list or watch, checked one by one but not yet against each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListOptions {
    pub(crate) label_selector: String,
    pub(crate) field_selector: String,
    /// Absent if the parameter is missing or empty.
    pub(crate) version: Option<Revision>,
    pub(crate) version_match: Option<Match>,
    pub(crate) limit: Option<usize>,
    pub(crate) token: Option<String>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) bookmarks: bool,
    pub(crate) initial_events: Option<bool>,
    pub(crate) watch: bool,
}

impl Query {
    pub(crate) fn parse(text: Option<&str>) -> Self {
        let pairs = form_urlencoded::parse(text.unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn all(&self, name: &'static str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn present(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|v| !v.is_empty())
    }

    /// Boolean parameters are true unless they say otherwise: `?watch` and `?watch=1` both are.
    fn flag(&self, name: &str) -> Option<bool> {
        self.get(name).map(|v| !matches!(v.to_ascii_lowercase().as_str(), "false" | "0"))
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.flag("watch").unwrap_or(false)
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, ApiError> {
        self.present(name)
            .map(|v| v.parse().map_err(|_| ApiError::BadRequest(format!("invalid value for {name}: {v:?}"))))
            .transpose()
    }

    pub(crate) fn effect(&self, options_kind: &str) -> Result<Effect, ApiError> {
        match self.present("dryRun") {
            None => Ok(Effect::Write),
            Some("All") => Ok(Effect::DryRun),
            Some(other) => {
                let error = FieldError::not_supported("dryRun", other, &["All"]);
                Err(ApiError::invalid_option(options_kind, error))
            }
        }
    }

    pub(crate) fn field_validation(&self, options_kind: &str) -> Result<FieldValidation, ApiError> {
        match self.present("fieldValidation") {
            None | Some("Warn") => Ok(FieldValidation::Warn),
            Some("Strict") => Ok(FieldValidation::Strict),
            Some("Ignore") => Ok(FieldValidation::Ignore),
            Some(other) => {
                let error = FieldError::not_supported("fieldValidation", other, &["", "Ignore", "Strict", "Warn"]);
                Err(ApiError::invalid_option(options_kind, error))
            }
        }
    }

    /// Who the change is recorded for: named by the request, or by the client's name for itself.
    pub(crate) fn field_manager(&self, options_kind: &str, agent: &str) -> Result<String, ApiError> {
        let Some(name) = self.present("fieldManager") else {
            let prefix = agent.split('/').next().unwrap_or_default();
            return Ok(prefix.chars().take_while(|c| !c.is_control()).take(MANAGER_LIMIT).collect());
        };
        let error = if name.len() > MANAGER_LIMIT {
            FieldError::too_long("fieldManager", MANAGER_LIMIT)
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
        let version = self.present("resourceVersion");
        Ok(ListOptions {
            label_selector: self.get("labelSelector").unwrap_or_default().into(),
            field_selector: self.get("fieldSelector").unwrap_or_default().into(),
            version: version
                .map(|v| v.parse().map_err(|_| ApiError::BadRequest(format!("invalid resource version: {v:?}"))))
                .transpose()?,
            version_match: match self.present("resourceVersionMatch") {
                None => None,
                Some("Exact") => Some(Match::Exact),
                Some("NotOlderThan") => Some(Match::NotOlderThan),
                Some(other) => return Err(bad_match(other)),
            },
            limit: self.number("limit")?.filter(|n| *n > 0),
            token: self.present("continue").map(Into::into),
            timeout: self.number("timeoutSeconds")?.filter(|n| *n > 0).map(Duration::from_secs),
            bookmarks: self.flag("allowWatchBookmarks").unwrap_or(false),
            initial_events: self.flag("sendInitialEvents"),
            watch: self.is_watch(),
        })
    }

    /// How much of each object a Table row carries.
    pub(crate) fn include_object(&self) -> Result<Include, ApiError> {
        match self.present("includeObject") {
            None | Some("Metadata") => Ok(Include::Metadata),
            Some("None") => Ok(Include::None),
            Some("Object") => Ok(Include::Object),
            Some(other) => Err(ApiError::BadRequest(format!("unrecognized includeObject value: {other:?}"))),
        }
    }
}
