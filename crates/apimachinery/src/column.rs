//! The columns of a kind in `kubectl get`, and the cells that most kinds share.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::Value;

/// A column definition of a Table.
#[derive(Clone, Copy, Debug)]
pub struct TableColumn<'a> {
    pub name: &'a str,
    /// The OpenAPI type: `string`, `integer`, `boolean` or `date`.
    pub value_type: &'a str,
    pub format: &'a str,
    /// 0 for a column that is always shown, 1 for one that `kubectl get -o wide` shows.
    pub priority: i32,
    pub description: &'a str,
}

/// A column of a built-in kind.
pub type Column = TableColumn<'static>;

pub const NAME: Column = Column {
    name: "Name",
    value_type: "string",
    format: "name",
    priority: 0,
    description: "Name of the object, unique within its namespace or cluster.",
};
pub const AGE: Column =
    Column::text("Age", "Time since the object was created, as the server saw it when it answered.");

/// The creation time, for kinds that show it instead of an age.
pub const CREATED: Column = Column { value_type: "date", ..Column::text("Created At", "When the object was created.") };

impl TableColumn<'static> {
    pub const fn text(name: &'static str, description: &'static str) -> Self {
        Self { name, value_type: "string", format: "", priority: 0, description }
    }

    pub const fn with_type(self, value_type: &'static str) -> Self {
        Self { value_type, ..self }
    }

    /// Shows the column with `-o wide` only.
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

/// The time that has passed since `time`, in the format of kubectl.
pub fn since(time: Option<&Time>, now: Timestamp) -> String {
    time.map_or_else(|| "<unknown>".into(), |t| human_duration(now.as_second() - t.0.as_second()))
}

/// Formats a duration with at most two units, as kubectl does. Clocks may differ by a second: -1 is shown as `0s`.
fn human_duration(seconds: i64) -> String {
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
    use super::human_duration;

    #[test]
    fn ages_have_the_format_of_kubectl() {
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
            assert_eq!(human_duration(seconds), want, "{seconds}");
        }
    }
}
