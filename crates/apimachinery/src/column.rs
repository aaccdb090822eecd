//! The columns of a kind in `kubectl get`, and the cells that most kinds share.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::Value;

#[derive(Clone, Copy, Debug)]
pub struct ColumnOf<'a> {
    pub name: &'a str,
    pub kind: &'a str,
    pub format: &'a str,
    pub priority: i32,
    pub description: &'a str,
}

/// A column known when the server was built.
pub type Column = ColumnOf<'static>;

pub const NAME: Column = Column {
    name: "Name",
    kind: "string",
    format: "name",
    priority: 0,
    description: "Name of the object, unique within its namespace or cluster.",
};
pub const AGE: Column =
    Column::text("Age", "Time since the object was created, as the server saw it when it answered.");

/// For kinds without columns of their own.
pub const CREATED: Column = Column { kind: "date", ..Column::text("Created At", "When the object was created.") };

impl ColumnOf<'static> {
    pub const fn text(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "string", format: "", priority: 0, description }
    }

    pub const fn of(self, kind: &'static str) -> Self {
        Self { kind, ..self }
    }

    pub const fn wide(self) -> Self {
        Self { priority: 1, ..self }
    }

    pub const fn format(self, format: &'static str) -> Self {
        Self { format, ..self }
    }
}

pub fn name(meta: &ObjectMeta) -> Value {
    meta.name.clone().into()
}

pub fn created(meta: &ObjectMeta) -> Value {
    meta.creation_timestamp.as_ref().map(|t| t.0.to_string()).into()
}

pub fn age(meta: &ObjectMeta, now: Timestamp) -> Value {
    since(meta.creation_timestamp.as_ref(), now).into()
}

/// A time as the span until now, in the words kubectl users know.
pub fn since(time: Option<&Time>, now: Timestamp) -> String {
    time.map_or_else(|| "<unknown>".into(), |t| span(now.as_second() - t.0.as_second()))
}

fn span(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let pair = |big: i64, unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{unit}"),
        small => format!("{big}{unit}{small}{small_unit}"),
    };
    match seconds {
        ..-1 => "<invalid>".into(),
        -1 => "0s".into(),
        0..120 => format!("{seconds}s"),
        120..600 => pair(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => pair(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => pair(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        63_072_000..252_288_000 => pair(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::span;

    #[test]
    fn ages_read_as_kubectl_users_know_them() {
        for (seconds, want) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (125, "2m5s"),
            (180, "3m"),
            (3_600, "60m"),
            (10_800, "3h"),
            (11_000, "3h3m"),
            (30_000, "8h"),
            (180_000, "2d2h"),
            (864_000, "10d"),
        ] {
            assert_eq!(span(seconds), want, "{seconds}");
        }
    }
}
