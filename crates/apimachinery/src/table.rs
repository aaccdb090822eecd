//! Table output, which `kubectl get` requests. The server chooses the columns.

use bytes::{BufMut, BytesMut};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::kind::{DecodeSource, Kind};
use crate::render::{self, StoredObject};

/// Which form of the object a row contains: the request's parameter `includeObject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncludeObject {
    None,
    Metadata,
    Object,
}

/// Appends the beginning of a Table up to its rows. Without `columns` the Table has no column definitions: in a watch only
/// the first Table has them.
pub fn open(out: &mut BytesMut, kind: &dyn Kind, metadata: &Value, columns: bool) {
    out.put_slice(br#"{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":"#);
    out.put_slice(metadata.to_string().as_bytes());
    out.put_slice(br#","columnDefinitions":"#);
    let columns = if columns { kind.columns() } else { Vec::new() };
    let definitions: Vec<Value> = columns
        .iter()
        .map(|c| {
            json!({
                "name": c.name, "type": c.value_type, "format": c.format, "description": c.description,
                "priority": c.priority,
            })
        })
        .collect();
    out.put_slice(Value::from(definitions).to_string().as_bytes());
    out.put_slice(br#","rows":["#);
}

/// Appends the end of a Table.
pub fn close(out: &mut BytesMut) {
    out.put_slice(b"]}");
}

/// Appends one row. An object that cannot be decoded has no cells.
pub fn write_row(out: &mut BytesMut, kind: &dyn Kind, stored: &StoredObject, include: IncludeObject, now: Timestamp) {
    let decoded = kind.decode(DecodeSource::Bytes(&stored.value)).ok();
    let cells = decoded.as_ref().map(|o| kind.cells(&**o, now)).unwrap_or_default();
    out.put_slice(br#"{"cells":"#);
    out.put_slice(Value::from(cells).to_string().as_bytes());
    if let Some(conditions) = decoded.as_ref().and_then(|o| kind.row_conditions(&**o)) {
        out.put_slice(br#","conditions":"#);
        out.put_slice(conditions.to_string().as_bytes());
    }
    match include {
        IncludeObject::None => {}
        IncludeObject::Metadata => {
            out.put_slice(br#","object":"#);
            render::write_partial_metadata(out, stored);
        }
        IncludeObject::Object => {
            out.put_slice(br#","object":"#);
            render::write_object(out, kind.descriptor(), stored);
        }
    }
    out.put_slice(b"}");
}
