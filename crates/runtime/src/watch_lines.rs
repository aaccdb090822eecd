//! The body of a watch, line by line. Each line is the JSON of one event.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use cleat_api::transport::{Transport, WatchChunks};
use futures::{StreamExt as _, TryStreamExt as _};

use kube::Error;

use crate::calls::{failure, is_failure};

/// An open watch.
pub(crate) struct WatchLines {
    chunks: WatchChunks,
    /// The last chunk of the body, without the bytes that were returned already.
    chunk: Bytes,
    /// The start of a line that continues in `chunk`.
    partial_line: BytesMut,
}

impl WatchLines {
    pub(crate) async fn open(client: &dyn Transport, mut request: http::Request<()>) -> kube::Result<Self> {
        // Some servers compress each event separately, and common decoders stop after the first one.
        let identity = http::HeaderValue::from_static("identity");
        request.headers_mut().insert(http::header::ACCEPT_ENCODING, identity);
        let response = client.watch(request).await.map_err(|error| Error::Service(error.0))?;
        let code = response.status();
        let chunks = response.into_body();
        if is_failure(code) {
            let body: Vec<Bytes> = chunks.try_collect().await.map_err(|error| Error::Service(error.0))?;
            return Err(failure(code, &body.concat()));
        }
        Ok(Self { chunks, chunk: Bytes::new(), partial_line: BytesMut::new() })
    }

    /// The next line without its end, or `None` at the end of the watch. An incomplete last line is dropped.
    pub(crate) async fn next(&mut self) -> kube::Result<Option<Bytes>> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.chunk) {
                let line = self.chunk.split_to(end);
                self.chunk.advance(1);
                if self.partial_line.is_empty() {
                    return Ok(Some(line));
                }
                self.partial_line.extend_from_slice(&line);
                return Ok(Some(self.partial_line.split().freeze()));
            }
            self.partial_line.extend_from_slice(&self.chunk);
            self.chunk = match self.chunks.next().await {
                None => return Ok(None),
                Some(Err(error)) if is_disconnect(&*error.0) => return Ok(None),
                Some(Err(error)) => return Err(Error::Service(error.0)),
                Some(Ok(chunk)) => chunk,
            };
        }
    }
}

/// Returns true if the connection was closed without a proper end. Proxies close idle connections like that; it counts as the
/// regular end of the watch.
fn is_disconnect(error: &(dyn std::error::Error + 'static)) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_complete_however_the_body_is_split_or_ends() {
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
            let client = crate::Client::from(kube::Client::new(service, "default"));
            let mut lines = WatchLines::open(&client, http::Request::new(())).await.unwrap();
            let mut read = Vec::new();
            loop {
                match lines.next().await {
                    Ok(Some(line)) => read.push(String::from_utf8(line.to_vec()).unwrap()),
                    Ok(None) => return (read, true),
                    Err(_) => return (read, false),
                }
            }
        };
        for (case, pieces, read, ended_well) in [
            ("one piece", vec![Ok("a\nb\n")], vec!["a", "b"], true),
            ("split within lines", vec![Ok("a"), Ok("b\nc"), Ok("d"), Ok("\n")], vec!["ab", "cd"], true),
            ("an incomplete last line", vec![Ok("a\nb")], vec!["a"], true),
            ("closed without a proper end", vec![Ok("a\n"), Err(io::ErrorKind::UnexpectedEof)], vec!["a"], true),
            ("a failure", vec![Ok("a\n"), Err(io::ErrorKind::PermissionDenied)], vec!["a"], false),
        ] {
            let read: Vec<String> = read.into_iter().map(ToOwned::to_owned).collect();
            assert_eq!(lines(pieces).await, (read, ended_well), "{case}");
        }
    }
}
