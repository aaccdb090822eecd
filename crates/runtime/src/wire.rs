//! From the server's bytes to objects without what nobody here reads.
//!
//! kube's own calls decode `managedFields` into trees that outweigh the rest of the object several times, and copy each
//! body on the way. Everything this crate reads goes through here instead.

use std::any::Any;
use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use cleat_api::{TypedBody, TypedReply};
use http_body_util::BodyExt as _;
use kube::client::Body;
use kube::core::Status;
use kube::{Client, Error};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::client::Carrier;

/// Sends a request and decodes the object in the answer.
pub(crate) async fn fetch<T: DeserializeOwned>(
    client: &dyn Carrier,
    request: http::Request<Vec<u8>>,
) -> kube::Result<T> {
    let body = text(client, request).await?;
    serde_json::from_slice(&slim(&body)).map_err(Error::SerdeError)
}

/// Sends a request whose answer is of no interest beyond its being one.
pub(crate) async fn send(client: &dyn Carrier, request: http::Request<Vec<u8>>) -> kube::Result<()> {
    text(client, request).await.map(drop)
}

/// Like [`exchange`], where the server may answer with a Status instead of an object.
pub(crate) async fn exchange_unless_status<T: Sent>(
    client: &dyn Carrier,
    request: http::Request<Vec<u8>>,
) -> kube::Result<Option<Arc<T>>> {
    #[derive(Deserialize)]
    struct Kind<'a> {
        #[serde(borrow)]
        kind: Option<Cow<'a, str>>,
    }
    let response = answer(client, with_object::<T>(client, request, None)).await?;
    if let Some(object) = handed(&response) {
        return Ok(Some(object));
    }
    let kind: Kind<'_> = serde_json::from_slice(response.body()).map_err(Error::SerdeError)?;
    match kind.kind.as_deref() {
        Some("Status") => Ok(None),
        _ => serde_json::from_slice(&slim(response.body()))
            .map(|object| Some(Arc::new(object)))
            .map_err(Error::SerdeError),
    }
}

/// The whole answer.
pub(crate) async fn text(client: &dyn Carrier, request: http::Request<Vec<u8>>) -> kube::Result<Bytes> {
    answer(client, request.map(Bytes::from)).await.map(http::Response::into_body)
}

async fn answer(client: &dyn Carrier, request: http::Request<Bytes>) -> kube::Result<http::Response<Bytes>> {
    let response = client.carry(request).await?;
    let code = response.status();
    if is_failure(code) { Err(failure(code, response.body())) } else { Ok(response) }
}

/// Like [`fetch`], for a write. A server in this process gets what is sent as it is, and answers alike.
pub(crate) async fn exchange<T: Sent>(
    client: &dyn Carrier,
    request: http::Request<Vec<u8>>,
    sent: Option<&T>,
) -> kube::Result<Arc<T>> {
    let response = answer(client, with_object(client, request, sent)).await?;
    match handed(&response) {
        Some(object) => Ok(object),
        None => serde_json::from_slice(&slim(response.body())).map(Arc::new).map_err(Error::SerdeError),
    }
}

/// What can be sent and comes back.
pub(crate) trait Sent: DeserializeOwned + Serialize + Clone + Any + Send + Sync {}

impl<T: DeserializeOwned + Serialize + Clone + Any + Send + Sync> Sent for T {}

fn handed<T: Sent>(response: &http::Response<Bytes>) -> Option<Arc<T>> {
    response.extensions().get::<TypedReply>().and_then(TypedReply::object)
}

/// Like [`send`], for a write. A server in this process need not even put its answer into words.
pub(crate) async fn submit<T: Sent>(
    client: &dyn Carrier,
    request: http::Request<Vec<u8>>,
    sent: &T,
) -> kube::Result<()> {
    answer(client, with_object(client, request, Some(sent))).await.map(drop)
}

fn with_object<T: Sent>(
    client: &dyn Carrier,
    request: http::Request<Vec<u8>>,
    sent: Option<&T>,
) -> http::Request<Bytes> {
    let mut request = request.map(Bytes::from);
    if client.is_near() {
        let handed = sent.map_or_else(TypedBody::reply_only::<T>, |sent| TypedBody::with_object(Box::new(sent.clone())));
        request.extensions_mut().insert(handed);
    }
    request
}

fn is_failure(code: http::StatusCode) -> bool {
    code.is_client_error() || code.is_server_error()
}

/// The failure that a response tells of.
fn failure(code: http::StatusCode, body: &[u8]) -> Error {
    let status = serde_json::from_slice::<Status>(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(body);
        Status::failure(text.trim(), "Failed to parse error data").with_code(code.as_u16())
    });
    Error::Api(status.boxed())
}

/// The lines of a watch, as they come.
pub(crate) struct Lines {
    body: Body,
    /// What came last, from the first byte not handed out yet.
    chunk: Bytes,
    /// The beginning of a line that goes on in the chunk.
    begun: BytesMut,
}

impl Lines {
    pub(crate) async fn open(client: &Client, mut request: http::Request<Vec<u8>>) -> kube::Result<Self> {
        // Some servers compress each event on its own, and the usual decoders stop after the first.
        let identity = http::HeaderValue::from_static("identity");
        request.headers_mut().insert(http::header::ACCEPT_ENCODING, identity);
        let response = client.send(request.map(Body::from)).await?;
        let code = response.status();
        let body = response.into_body();
        if is_failure(code) {
            return Err(failure(code, &body.collect().await?.to_bytes()));
        }
        Ok(Self { body, chunk: Bytes::new(), begun: BytesMut::new() })
    }

    /// The next line, or none at the end. A last line that was cut off is no line.
    pub(crate) async fn next(&mut self) -> kube::Result<Option<Bytes>> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.chunk) {
                let line = self.chunk.split_to(end);
                self.chunk.advance(1);
                if self.begun.is_empty() {
                    return Ok(Some(line));
                }
                self.begun.extend_from_slice(&line);
                return Ok(Some(self.begun.split().freeze()));
            }
            self.begun.extend_from_slice(&self.chunk);
            self.chunk = loop {
                match self.body.frame().await {
                    None => return Ok(None),
                    Some(Err(error)) if is_cut_off(&error) => return Ok(None),
                    Some(frame) => match frame?.into_data() {
                        Ok(data) => break data,
                        Err(_trailers) => {}
                    },
                }
            };
        }
    }
}

/// Has the connection ended without a farewell? Proxies end quiet ones like that; it is as good an end as any.
fn is_cut_off(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(found) = cause {
        let kind = found.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::TimedOut)) {
            return true;
        }
        cause = found.source();
    }
    error.to_string().contains("unexpected EOF during chunk")
}

/// As much of an event of a watch as tells whether the rest is news.
#[derive(Deserialize)]
pub(crate) struct Headline<'a> {
    #[serde(borrow, rename = "type")]
    pub(crate) verb: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) object: Subject<'a>,
}

#[derive(Deserialize)]
pub(crate) struct Subject<'a> {
    #[serde(borrow, default)]
    pub(crate) metadata: Metadata<'a>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata<'a> {
    #[serde(borrow)]
    pub(crate) namespace: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) resource_version: Option<Cow<'a, str>>,
}

/// What a watch brings besides its verb.
#[derive(Deserialize)]
struct Content<T> {
    object: T,
}

/// The object of a line of a watch.
pub(crate) fn object<T: DeserializeOwned>(line: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Content<T>>(&slim(line)).map(|content| content.object)
}

/// The text without `managedFields`: whoever decodes them here would only throw them away.
///
/// In a string every quote is escaped, so what is searched for can only be a key. If it is not followed by a list, or
/// the list has no end, the text is left as it is, for the decoder to judge.
pub(crate) fn slim(text: &[u8]) -> Cow<'_, [u8]> {
    const KEY: &[u8] = b"\"managedFields\":[";
    let mut kept: Option<Vec<u8>> = None;
    let mut rest = text;
    while let Some(at) = memchr::memmem::find(rest, KEY) {
        let Some(length) = list_length(&rest[at + KEY.len() - 1..]) else { break };
        let end = at + KEY.len() - 1 + length;
        let kept = kept.get_or_insert_with(|| Vec::with_capacity(text.len()));
        // With the comma that parts it from what follows, or else from what is before it.
        let (before, after) = match (rest[..at].last(), rest.get(end)) {
            (_, Some(b',')) => (&rest[..at], &rest[end + 1..]),
            (Some(b','), _) => (&rest[..at - 1], &rest[end..]),
            _ => (&rest[..at], &rest[end..]),
        };
        kept.extend_from_slice(before);
        rest = after;
    }
    match kept {
        None => Cow::Borrowed(text),
        Some(mut kept) => {
            kept.extend_from_slice(rest);
            Cow::Owned(kept)
        }
    }
}

/// The length of the list that the text begins with.
fn list_length(text: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::{Value, json};

    #[test]
    fn managed_fields_are_left_out_wherever_they_stand() {
        let fields = json!([{ "manager": "a]\"", "fieldsV1": { "f:data": { "k:{\"a\":[1]}": {} } } }]);
        let fields = fields.to_string();
        for (case, text) in [
            ("between", format!(r#"{{"metadata":{{"labels":{{}},"managedFields":{fields},"name":"n"}}}}"#)),
            ("first", format!(r#"{{"metadata":{{"managedFields":{fields},"name":"n"}}}}"#)),
            ("last", format!(r#"{{"metadata":{{"name":"n","managedFields":{fields}}}}}"#)),
            ("alone", format!(r#"{{"metadata":{{"managedFields":{fields}}}}}"#)),
            (
                "in a list of objects",
                format!(
                    r#"{{"items":[{{"metadata":{{"managedFields":{fields},"name":"n"}}}},{{"metadata":{{"managedFields":{fields}}}}}]}}"#
                ),
            ),
        ] {
            let mut want: Value = serde_json::from_str(&text).unwrap();
            drop_managed(&mut want);
            let got: Value = serde_json::from_slice(&slim(text.as_bytes())).unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(got, want, "{case}");
        }
    }

    fn drop_managed(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("managedFields");
                fields.values_mut().for_each(drop_managed);
            }
            Value::Array(items) => items.iter_mut().for_each(drop_managed),
            _ => {}
        }
    }

    #[test]
    fn a_string_that_looks_like_them_stays() {
        for text in [
            json!({ "data": { "a": "{\"managedFields\":[1]}" } }).to_string(),
            r#"{"metadata":{"managedFields":[{"a""#.to_owned(),
            r#"{"metadata":{"managedFields":null}}"#.to_owned(),
        ] {
            assert_eq!(slim(text.as_bytes()), text.as_bytes());
        }
    }

    #[tokio::test]
    async fn lines_come_whole_whatever_the_pieces_and_the_end() {
        type Piece = Result<&'static str, io::ErrorKind>;
        let lines = async |pieces: Vec<Piece>| {
            let service = tower::service_fn(move |_| {
                let frames = pieces.clone().into_iter().map(|piece| match piece {
                    Ok(text) => Ok(http_body::Frame::data(Bytes::from_static(text.as_bytes()))),
                    Err(kind) => Err(io::Error::from(kind)),
                });
                let body = http_body_util::StreamBody::new(futures::stream::iter(frames));
                std::future::ready(Ok::<_, std::convert::Infallible>(http::Response::new(body)))
            });
            let client = Client::new(service, "default");
            let mut lines = Lines::open(&client, http::Request::new(Vec::new())).await.unwrap();
            let mut read = Vec::new();
            loop {
                match lines.next().await {
                    Ok(Some(line)) => read.push(String::from_utf8(line.to_vec()).unwrap()),
                    Ok(None) => return (read, true),
                    Err(_) => return (read, false),
                }
            }
        };
        for (case, pieces, read, well) in [
            ("one piece", vec![Ok("a\nb\n")], vec!["a", "b"], true),
            ("in the middle of lines", vec![Ok("a"), Ok("b\nc"), Ok("d"), Ok("\n")], vec!["ab", "cd"], true),
            ("the last is cut off", vec![Ok("a\nb")], vec!["a"], true),
            ("no farewell", vec![Ok("a\n"), Err(io::ErrorKind::UnexpectedEof)], vec!["a"], true),
            ("a failure", vec![Ok("a\n"), Err(io::ErrorKind::PermissionDenied)], vec!["a"], false),
        ] {
            let read: Vec<String> = read.into_iter().map(ToOwned::to_owned).collect();
            assert_eq!(lines(pieces).await, (read, well), "{case}");
        }
    }

    #[test]
    fn a_line_is_told_by_its_head() {
        let line = br#"{"type":"MODIFIED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"7","managedFields":[{}],"name":"n","namespace":"s"},"data":{"a":"b"}}}"#;
        let head: Headline<'_> = serde_json::from_slice(line).unwrap();
        let metadata = head.object.metadata;
        assert_eq!(
            (&*head.verb, metadata.name.as_deref(), metadata.namespace.as_deref()),
            ("MODIFIED", Some("n"), Some("s"))
        );
        assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        let map: ConfigMap = object(line).unwrap();
        assert_eq!(map.metadata.managed_fields, None);
        assert_eq!(map.data.unwrap()["a"], "b");
    }
}
