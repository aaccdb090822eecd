//! LIST: a snapshot, filtered, in pages if asked, in the negotiated form. Large lists are rendered as they are read,
//! so that the answer never exists twice in memory.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bytes::{BufMut, Bytes, BytesMut};
use cleat_store::{ListError, Range, Revision, StoredEntry};
use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::Api;
use crate::http::Call;
use crate::http::accept::{Form, Shape, negotiate};
use crate::http::body::ApiBody;
use crate::http::query::{ListOptions, Match};
use crate::http::reply::Reply;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::{self, Stored};
use cleat_apimachinery::selector::Selector;
use cleat_apimachinery::table;
use cleat_apimachinery::table::Include;

const CHUNK: usize = 64 << 10;
const TOKEN_VERSION: &str = "meta.k8s.io/v1";

#[derive(Debug, Serialize, Deserialize)]
struct Token {
    v: String,
    /// The revision of the first page; -1 continues at the latest.
    rv: i64,
    /// Where the next page starts, relative to the kind's prefix.
    start: String,
}

impl Token {
    fn encode(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(json!(self).to_string())
    }

    fn decode(text: &str) -> Result<Self, ApiError> {
        let bad = |why: String| ApiError::BadRequest(format!("continue key is not valid: {why}"));
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|e| bad(e.to_string()))?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if token.v != TOKEN_VERSION || token.start.split('/').any(|s| s == "..") {
            return Err(bad("unknown version or start".into()));
        }
        Ok(token)
    }
}

pub(crate) async fn list(
    api: &Api,
    call: &Call,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
    options: ListOptions,
) -> Result<Reply, ApiError> {
    check(&options)?;
    let form = negotiate(call.accept.as_deref(), Shape::List)?;
    let d = kind.descriptor();
    let selector = Selector::parse(&**kind, &options.label_selector, &options.field_selector)?;
    let prefix = super::narrowed(&**kind, namespace, &selector);
    let root = d.prefix(None);
    let token = options.token.as_deref().map(Token::decode).transpose()?;
    let from = token.as_ref().map(|t| format!("{root}{}", t.start));
    let at = match (&token, options.version_match, options.version) {
        (Some(token), ..) => u64::try_from(token.rv).ok(),
        (None, Some(Match::Exact), version) => version,
        (None, None, Some(version)) if version > 0 && options.limit.is_some() => Some(version),
        (None, _, Some(asked)) => {
            let current = api.store.revision().await?;
            if asked > current {
                return Err(ApiError::VersionTooLarge { asked, current });
            }
            None
        }
        (None, _, None) => None,
    };
    // With a selector nobody knows how many have to be looked at.
    let limit = options.limit.filter(|_| selector.is_everything());
    let range = Range { prefix: &prefix, from: from.as_deref(), at, limit };
    let snapshot = match api.of(&**kind).list(range).await {
        Err(ListError::TooOld { .. }) if let Some(token) = token => {
            return Err(ApiError::ContinueExpired { fresh: Token { rv: -1, ..token }.encode() });
        }
        other => other?,
    };
    let mut found: Vec<StoredEntry> = Vec::new();
    let mut metadata = json!({ "resourceVersion": snapshot.revision.to_string() });
    let mut last = None;
    let mut more = snapshot.remaining > 0;
    for kept in &snapshot.stored {
        if !selector.is_everything() && !selector.matches(&**kind, &kept.entry()) {
            continue;
        }
        if options.limit == Some(found.len()) {
            more = true;
            break;
        }
        last = kept.key.strip_prefix(root.as_str());
        found.push(kept.clone());
    }
    if more {
        let start = format!("{}\0", last.unwrap_or_default());
        let rv = i64::try_from(snapshot.revision).unwrap_or(i64::MAX);
        metadata["continue"] = Token { v: TOKEN_VERSION.into(), rv, start }.encode().into();
        if selector.is_everything() {
            metadata["remainingItemCount"] = snapshot.remaining.into();
        }
    }
    // Lists of custom objects have always shown where they end.
    if d.custom && form == Form::Plain && metadata.get("continue").is_none() {
        metadata["continue"] = "".into();
    }
    let body = Body { kind: kind.clone(), form, include: call.query.include_object()?, metadata, now: meta::now() };
    Ok(body.reply(found))
}

fn check(options: &ListOptions) -> Result<(), ApiError> {
    let refuse =
        |field: &str, why: &str| Err(ApiError::invalid_option("ListOptions", FieldError::forbidden(field, why)));
    if options.initial_events.is_some() {
        return refuse("sendInitialEvents", "sendInitialEvents is forbidden for list");
    }
    if options.token.is_some() {
        if options.version.is_some_and(|v| v > 0) {
            let why = "specifying resource version is not allowed when using continue";
            return Err(ApiError::BadRequest(why.into()));
        }
        if options.version_match.is_some() {
            return refuse("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided");
        }
    }
    match (options.version_match, options.version) {
        (Some(_), None) => {
            refuse("resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided")
        }
        (Some(Match::Exact), Some(0)) => {
            refuse("resourceVersionMatch", "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"")
        }
        _ => Ok(()),
    }
}

/// The list that a deletecollection answers with.
pub(crate) fn collected(
    call: &Call,
    kind: &Arc<dyn Kind>,
    items: Vec<StoredEntry>,
    revision: Revision,
) -> Result<Reply, ApiError> {
    let form = negotiate(call.accept.as_deref(), Shape::List)?;
    let metadata = json!({ "resourceVersion": revision.to_string() });
    let include = call.query.include_object()?;
    Ok(Body { kind: kind.clone(), form, include, metadata, now: meta::now() }.reply(items))
}

struct Body {
    kind: Arc<dyn Kind>,
    form: Form,
    include: Include,
    metadata: Value,
    now: Timestamp,
}

impl Body {
    fn reply(self, items: Vec<StoredEntry>) -> Reply {
        let size: usize = items.iter().map(StoredEntry::value_len).sum();
        let mut out = BytesMut::with_capacity(size.min(CHUNK) + 1024);
        self.open(&mut out);
        if size <= CHUNK {
            for (i, item) in items.iter().enumerate() {
                self.item(&mut out, item, i == 0);
            }
            self.close(&mut out);
            return Reply::buffer(StatusCode::OK, out);
        }
        let state = (self, items.into_iter(), out, true, false);
        let chunks = futures::stream::unfold(state, |(body, mut items, mut out, mut first, done)| async move {
            if done {
                return None;
            }
            let mut done = false;
            while out.len() < CHUNK {
                let Some(item) = items.next() else {
                    body.close(&mut out);
                    done = true;
                    break;
                };
                body.item(&mut out, &item, first);
                first = false;
            }
            let chunk: Bytes = out.split().freeze();
            Some((chunk, (body, items, out, first, done)))
        });
        Reply::stream(ApiBody::stream(chunks))
    }

    fn open(&self, out: &mut BytesMut) {
        let d = self.kind.descriptor();
        let (kind, version) = match self.form {
            Form::Table => return table::open(out, &*self.kind, &self.metadata, true),
            Form::Plain => (d.list_kind(), d.api_version()),
            Form::Partial => ("PartialObjectMetadataList".into(), "meta.k8s.io/v1".into()),
        };
        let metadata = &self.metadata;
        out.put_slice(
            format!(r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},"items":["#).as_bytes(),
        );
    }

    fn item(&self, out: &mut BytesMut, item: &StoredEntry, first: bool) {
        let item = &Stored::from(&item.entry());
        if !first {
            out.put_u8(b',');
        }
        match self.form {
            Form::Plain => render::object(out, self.kind.descriptor(), item),
            Form::Partial => render::partial(out, item),
            Form::Table => table::row(out, &*self.kind, item, self.include, self.now),
        }
    }

    fn close(&self, out: &mut BytesMut) {
        table::close(out);
    }
}
