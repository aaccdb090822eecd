//! Table output: the form in which `kubectl get` asks for objects, so that columns are the server's choice.

use bytes::{BufMut, BytesMut};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};

use crate::http::query::Include;
use crate::kind::{Kind, Source};
use crate::render::{self, Stored};

#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnOf<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: &'a str,
    pub(crate) format: &'a str,
    pub(crate) priority: i32,
    pub(crate) description: &'a str,
}

/// A column known when the server was built.
pub(crate) type Column = ColumnOf<'static>;

pub(crate) const NAME: Column = Column {
    name: "Name",
    kind: "string",
    format: "name",
    priority: 0,
    description: "Name of the object, unique within its namespace or cluster.",
};
pub(crate) const AGE: Column =
    Column::text("Age", "Time since the object was created, as the server saw it when it answered.");

/// For kinds without columns of their own.
pub(crate) const CREATED: Column =
    Column { kind: "date", ..Column::text("Created At", "When the object was created.") };

impl ColumnOf<'static> {
    pub(crate) const fn text(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "string", format: "", priority: 0, description }
    }

    pub(crate) const fn of(self, kind: &'static str) -> Self {
        Self { kind, ..self }
    }

    pub(crate) const fn wide(self) -> Self {
        Self { priority: 1, ..self }
    }

    pub(crate) const fn format(self, format: &'static str) -> Self {
        Self { format, ..self }
    }
}

/// Appends a Table's beginning up to its rows.
pub(crate) fn open(out: &mut BytesMut, kind: &dyn Kind, metadata: &Value, columns: bool) {
    out.put_slice(br#"{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":"#);
    out.put_slice(metadata.to_string().as_bytes());
    out.put_slice(br#","columnDefinitions":"#);
    let shown = if columns { kind.columns() } else { Vec::new() };
    let definitions: Vec<Value> = shown
        .iter()
        .map(|c| {
            json!({
                "name": c.name, "type": c.kind, "format": c.format, "description": c.description,
                "priority": c.priority,
            })
        })
        .collect();
    out.put_slice(Value::from(definitions).to_string().as_bytes());
    out.put_slice(br#","rows":["#);
}

pub(crate) fn close(out: &mut BytesMut) {
    out.put_slice(b"]}");
}

/// Appends one row.
pub(crate) fn row(out: &mut BytesMut, kind: &dyn Kind, stored: &Stored, include: Include, now: Timestamp) {
    let decoded = kind.decode(Source::Bytes(&stored.value)).ok();
    let cells = decoded.as_ref().map(|o| kind.cells(&**o, now)).unwrap_or_default();
    out.put_slice(br#"{"cells":"#);
    out.put_slice(Value::from(cells).to_string().as_bytes());
    if let Some(conditions) = decoded.as_ref().and_then(|o| kind.row_conditions(&**o)) {
        out.put_slice(br#","conditions":"#);
        out.put_slice(conditions.to_string().as_bytes());
    }
    match include {
        Include::None => {}
        Include::Metadata => {
            out.put_slice(br#","object":"#);
            render::partial(out, stored);
        }
        Include::Object => {
            out.put_slice(br#","object":"#);
            render::object(out, kind.descriptor(), stored);
        }
    }
    out.put_slice(b"}");
}

pub(crate) fn name(meta: &ObjectMeta) -> Value {
    meta.name.clone().into()
}

pub(crate) fn created(meta: &ObjectMeta) -> Value {
    meta.creation_timestamp.as_ref().map(|t| t.0.to_string()).into()
}

pub(crate) fn age(meta: &ObjectMeta, now: Timestamp) -> Value {
    since(meta.creation_timestamp.as_ref(), now).into()
}

/// A time as the span until now, in the words kubectl users know.
pub(crate) fn since(time: Option<&Time>, now: Timestamp) -> String {
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
