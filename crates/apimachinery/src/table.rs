//! Table output: the form in which `kubectl get` asks for objects, so that columns are the server's choice.

use bytes::{BufMut, BytesMut};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::kind::{Kind, Source};
use crate::render::{self, Stored};

/// Which form of the object a row carries: the request's `includeObject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Include {
    None,
    Metadata,
    Object,
}

/// Appends a Table's beginning up to its rows.
pub fn open(out: &mut BytesMut, kind: &dyn Kind, metadata: &Value, columns: bool) {
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

pub fn close(out: &mut BytesMut) {
    out.put_slice(b"]}");
}

/// Appends one row.
pub fn row(out: &mut BytesMut, kind: &dyn Kind, stored: &Stored, include: Include, now: Timestamp) {
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
