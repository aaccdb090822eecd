//! LIST: one snapshot of the store, filtered by selectors, paged by `limit` and `continue`, in the negotiated
//! representation. A list larger than `CHUNK_BYTES` is encoded while it is sent, so that the whole reply is never in
//! memory.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bytes::{BufMut, Bytes, BytesMut};
use cleat_store::{ListError, Range, Revision, StoredEntry};
use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::http::ResourceRequest;
use crate::http::accept::{ReplyKind, Representation, negotiate};
use crate::http::body::ResponseBody;
use crate::http::query::{ListOptions, ResourceVersionMatch};
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::{self, StoredObject};
use cleat_apimachinery::selector::Selector;
use cleat_apimachinery::table;
use cleat_apimachinery::table::IncludeObject;

const CHUNK_BYTES: usize = 64 << 10;
const CONTINUE_TOKEN_VERSION: &str = "meta.k8s.io/v1";

/// The content of the `continue` parameter; the field names are those of Kubernetes.
#[derive(Debug, Serialize, Deserialize)]
struct ContinueToken {
    v: String,
    /// The revision of the first page; -1 means the latest revision.
    rv: i64,
    /// The first key of the next page, relative to the kind's prefix.
    start: String,
}

impl ContinueToken {
    fn encode(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(json!(self).to_string())
    }

    fn decode(encoded: &str) -> Result<Self, ApiError> {
        let bad = |why: String| ApiError::BadRequest(format!("continue key is not valid: {why}"));
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(encoded).map_err(|e| bad(e.to_string()))?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if token.v != CONTINUE_TOKEN_VERSION || token.start.split('/').any(|s| s == "..") {
            return Err(bad("unknown version or start".into()));
        }
        Ok(token)
    }
}

pub(crate) async fn list(
    state: &ServerState,
    request: &ResourceRequest,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
    options: ListOptions,
) -> Result<Reply, ApiError> {
    check_options(&options)?;
    let representation = negotiate(request.accept.as_deref(), ReplyKind::List)?;
    let d = kind.descriptor();
    let selector = Selector::parse(&**kind, &options.label_selector, &options.field_selector)?;
    let prefix = super::selected_prefix(&**kind, namespace, &selector);
    let root = d.prefix(None);
    let token = options.continue_token.as_deref().map(ContinueToken::decode).transpose()?;
    let first_key = token.as_ref().map(|t| format!("{root}{}", t.start));
    let at = match (&token, options.resource_version_match, options.resource_version) {
        (Some(token), ..) => u64::try_from(token.rv).ok(),
        (None, Some(ResourceVersionMatch::Exact), version) => version,
        (None, None, Some(version)) if version > 0 && options.limit.is_some() => Some(version),
        (None, _, Some(requested)) => {
            let current = state.store.revision().await?;
            if requested > current {
                return Err(ApiError::VersionTooLarge { requested, current });
            }
            None
        }
        (None, _, None) => None,
    };
    // With a selector the number of entries to read for one page is unknown.
    let limit = options.limit.filter(|_| selector.is_everything());
    let range = Range { prefix: &prefix, from: first_key.as_deref(), at, limit };
    let snapshot = match state.store_of(&**kind).list(range).await {
        Err(ListError::TooOld { .. }) if let Some(token) = token => {
            return Err(ApiError::ContinueExpired { new_token: ContinueToken { rv: -1, ..token }.encode() });
        }
        other => other?,
    };
    let mut items: Vec<StoredEntry> = Vec::new();
    let mut metadata = json!({ "resourceVersion": snapshot.revision.to_string() });
    let mut last_key = None;
    let mut has_more = snapshot.remaining > 0;
    for entry in &snapshot.stored {
        if !selector.is_everything() && !selector.matches(&**kind, &entry.entry()) {
            continue;
        }
        if options.limit == Some(items.len()) {
            has_more = true;
            break;
        }
        last_key = entry.key.strip_prefix(root.as_str());
        items.push(entry.clone());
    }
    if has_more {
        let start = format!("{}\0", last_key.unwrap_or_default());
        let rv = i64::try_from(snapshot.revision).unwrap_or(i64::MAX);
        metadata["continue"] = ContinueToken { v: CONTINUE_TOKEN_VERSION.into(), rv, start }.encode().into();
        if selector.is_everything() {
            metadata["remainingItemCount"] = snapshot.remaining.into();
        }
    }
    // Kubernetes returns an empty `continue` for custom resources.
    if d.custom && representation == Representation::Full && metadata.get("continue").is_none() {
        metadata["continue"] = "".into();
    }
    let writer = ListWriter {
        kind: kind.clone(),
        representation,
        include: request.query.include_object()?,
        metadata,
        now: meta::now(),
    };
    Ok(writer.reply(items))
}

fn check_options(options: &ListOptions) -> Result<(), ApiError> {
    let refuse =
        |field: &str, why: &str| Err(ApiError::invalid_option("ListOptions", FieldError::forbidden(field, why)));
    if options.send_initial_events.is_some() {
        return refuse("sendInitialEvents", "sendInitialEvents is forbidden for list");
    }
    if options.continue_token.is_some() {
        if options.resource_version.is_some_and(|v| v > 0) {
            let why = "specifying resource version is not allowed when using continue";
            return Err(ApiError::BadRequest(why.into()));
        }
        if options.resource_version_match.is_some() {
            return refuse("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided");
        }
    }
    match (options.resource_version_match, options.resource_version) {
        (Some(_), None) => {
            refuse("resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided")
        }
        (Some(ResourceVersionMatch::Exact), Some(0)) => {
            refuse("resourceVersionMatch", "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"")
        }
        _ => Ok(()),
    }
}

/// The reply of a deletecollection.
pub(crate) fn render_list(
    request: &ResourceRequest,
    kind: &Arc<dyn Kind>,
    items: Vec<StoredEntry>,
    revision: Revision,
) -> Result<Reply, ApiError> {
    let representation = negotiate(request.accept.as_deref(), ReplyKind::List)?;
    let metadata = json!({ "resourceVersion": revision.to_string() });
    let include = request.query.include_object()?;
    Ok(ListWriter { kind: kind.clone(), representation, include, metadata, now: meta::now() }.reply(items))
}

/// Encodes a list.
struct ListWriter {
    kind: Arc<dyn Kind>,
    representation: Representation,
    include: IncludeObject,
    metadata: Value,
    now: Timestamp,
}

impl ListWriter {
    fn reply(self, items: Vec<StoredEntry>) -> Reply {
        let size: usize = items.iter().map(StoredEntry::value_len).sum();
        let mut out = BytesMut::with_capacity(size.min(CHUNK_BYTES) + 1024);
        self.open(&mut out);
        if size <= CHUNK_BYTES {
            for (i, item) in items.iter().enumerate() {
                self.item(&mut out, item, i == 0);
            }
            self.close(&mut out);
            return Reply::buffer(StatusCode::OK, out);
        }
        let state = (self, items.into_iter(), out, true, false);
        let chunks = futures::stream::unfold(state, |(writer, mut items, mut out, mut first, done)| async move {
            if done {
                return None;
            }
            let mut done = false;
            while out.len() < CHUNK_BYTES {
                let Some(item) = items.next() else {
                    writer.close(&mut out);
                    done = true;
                    break;
                };
                writer.item(&mut out, &item, first);
                first = false;
            }
            let chunk: Bytes = out.split().freeze();
            Some((chunk, (writer, items, out, first, done)))
        });
        Reply::stream(ResponseBody::stream(chunks))
    }

    fn open(&self, out: &mut BytesMut) {
        let d = self.kind.descriptor();
        let (kind, version) = match self.representation {
            Representation::Table => return table::open(out, &*self.kind, &self.metadata, true),
            Representation::Full => (d.list_kind(), d.api_version()),
            Representation::Metadata => ("PartialObjectMetadataList".into(), "meta.k8s.io/v1".into()),
        };
        let metadata = &self.metadata;
        out.put_slice(
            format!(r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},"items":["#).as_bytes(),
        );
    }

    fn item(&self, out: &mut BytesMut, item: &StoredEntry, first: bool) {
        let item = &StoredObject::from(&item.entry());
        if !first {
            out.put_u8(b',');
        }
        match self.representation {
            Representation::Full => render::write_object(out, self.kind.descriptor(), item),
            Representation::Metadata => render::write_partial_metadata(out, item),
            Representation::Table => table::write_row(out, &*self.kind, item, self.include, self.now),
        }
    }

    fn close(&self, out: &mut BytesMut) {
        table::close(out);
    }
}
