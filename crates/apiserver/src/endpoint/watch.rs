//! WATCH: the changes after a revision, as lines of JSON, with selectors, bookmarks and a deadline.
//!
//! The stream pulls from the store's watcher when the client reads; a client that does not read holds up nobody.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use cleat_store::{Entry, Event, Range, Revision, StoredEntry, WatchError, Watcher};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::api::Api;
use crate::http::Call;
use crate::http::accept::{Form, Shape, negotiate};
use crate::http::body::ApiBody;
use crate::http::query::{ListOptions, Match};
use crate::http::reply::Reply;
use cleat_apimachinery::cache::watch_frames::{WatchFrameCache, WatchFrameKey};
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::{self, Stored};
use cleat_apimachinery::selector::Selector;
use cleat_apimachinery::table;
use cleat_apimachinery::table::Include;

const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);
/// Watches without a deadline of their own end somewhere in this range, so that they do not all end together.
const DEADLINE_SECONDS: std::ops::Range<u64> = 1800..3600;
/// Events that are ready together travel together, up to this size.
const CHUNK: usize = 32 << 10;

/// How a watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// The current state as ADDED, then changes; the marked bookmark in between if `marked`.
    State {
        marked: bool,
    },
    After(Revision),
    Now,
}

pub(crate) async fn watch(
    api: &Arc<Api>,
    call: &Call,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
    options: ListOptions,
) -> Result<Reply, ApiError> {
    let start = start(&options)?;
    let form = negotiate(call.accept.as_deref(), Shape::Watch)?;
    let selector = Selector::parse(&**kind, &options.label_selector, &options.field_selector)?;
    let prefix = super::narrowed(&**kind, namespace, &selector);
    let mut stream = Stream {
        writer: Writer {
            frames: (kind.conversion().is_none() && form != Form::Table).then(|| api.watch_frames.clone()),
            kind: kind.clone(),
            form,
            include: call.query.include_object()?,
            columns_sent: false,
        },
        selector,
        initial: VecDeque::new(),
        marked: None,
        watcher: None,
        failed: None,
        bookmarks: options.bookmarks,
        others: FuturesUnordered::new(),
    };
    for closing in [Some(&api.closing), Some(&call.closing), kind.retired()].into_iter().flatten() {
        let closed = closing.clone().cancelled_owned();
        stream.others.push(closed.map(|()| Wake::Closing).boxed());
    }
    let deadline = deadline(options.timeout);
    stream.others.push(tokio::time::sleep_until(deadline).map(|()| Wake::Deadline).boxed());
    if options.bookmarks {
        stream.others.push(bookmark_time());
    }
    let begun = stream.begin(api, &prefix, start, options.version).await;
    match begun {
        Ok(()) => {}
        // Too old or too new travels inside the stream: clients start over only if they see it there.
        Err(error @ (ApiError::Expired(_) | ApiError::VersionTooLarge { .. })) => stream.failed = Some(error),
        Err(error) => return Err(error),
    }
    let lines = futures::stream::unfold(stream, |mut stream| async move {
        let chunk = stream.next().await?;
        Some((chunk, stream))
    });
    Ok(Reply::stream(ApiBody::stream(lines)))
}

fn start(options: &ListOptions) -> Result<Start, ApiError> {
    let refuse = |error| Err(ApiError::invalid_option("ListOptions", error));
    match (options.initial_events, options.version_match) {
        (Some(_), None) => {
            let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            refuse(FieldError::forbidden("resourceVersionMatch", why))
        }
        (Some(_), Some(Match::Exact)) => {
            refuse(FieldError::forbidden("resourceVersionMatch", "only NotOlderThan is allowed with sendInitialEvents"))
        }
        (None, Some(_)) => {
            let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            refuse(FieldError::forbidden("resourceVersionMatch", why))
        }
        (Some(true), Some(Match::NotOlderThan)) => Ok(Start::State { marked: true }),
        (Some(false), Some(Match::NotOlderThan)) => Ok(match options.version {
            Some(version) if version > 0 => Start::After(version),
            _ => Start::Now,
        }),
        (None, None) => Ok(match options.version {
            Some(version) if version > 0 => Start::After(version),
            _ => Start::State { marked: false },
        }),
    }
}

fn deadline(asked: Option<Duration>) -> Instant {
    let spread = uuid::Uuid::new_v4().as_u128() as u64 % (DEADLINE_SECONDS.end - DEADLINE_SECONDS.start);
    Instant::now() + asked.unwrap_or(Duration::from_secs(DEADLINE_SECONDS.start + spread))
}

fn bookmark_time() -> BoxFuture<'static, Wake> {
    tokio::time::sleep(BOOKMARK_PERIOD).map(|()| Wake::Bookmark).boxed()
}

struct Stream {
    writer: Writer,
    selector: Selector,
    initial: VecDeque<StoredEntry>,
    /// The revision of the bookmark that ends the initial events, until it is sent.
    marked: Option<Revision>,
    watcher: Option<Box<dyn Watcher>>,
    /// An error to tell, after which the stream ends.
    failed: Option<ApiError>,
    bookmarks: bool,
    /// The ends of the server, the connection, the kind and the time; the next bookmark. Each is looked at only when it
    /// happens: between two events of a busy watch they cost nothing.
    others: FuturesUnordered<BoxFuture<'static, Wake>>,
}

enum Wake {
    Event(Result<Arc<Event>, WatchError>),
    Bookmark,
    Deadline,
    Closing,
}

impl Stream {
    async fn begin(
        &mut self,
        api: &Api,
        prefix: &str,
        start: Start,
        version: Option<Revision>,
    ) -> Result<(), ApiError> {
        let after = match start {
            Start::After(version) => version,
            Start::Now => api.store.revision().await?,
            Start::State { marked } => {
                let current = api.store.revision().await?;
                if let Some(asked) = version.filter(|v| *v > current) {
                    return Err(ApiError::VersionTooLarge { asked, current });
                }
                let kind = &*self.writer.kind;
                let snapshot = api.of(kind).list(Range { prefix, ..Range::default() }).await?;
                let (revision, selector) = (snapshot.revision, &self.selector);
                let matches = |kept: &StoredEntry| selector.is_everything() || selector.matches(kind, &kept.entry());
                self.initial = snapshot.stored.into_iter().filter(matches).collect();
                self.marked = Some(revision).filter(|_| marked && self.bookmarks);
                revision
            }
        };
        self.watcher = Some(api.of(&*self.writer.kind).watch(prefix, after).await.map_err(watch_error)?);
        Ok(())
    }

    async fn next(&mut self) -> Option<Bytes> {
        let mut out = BytesMut::new();
        while out.len() < CHUNK {
            let Some(kept) = self.initial.pop_front() else { break };
            self.writer.event(&mut out, "ADDED", &Stored::from(&kept.entry()));
        }
        if self.initial.is_empty()
            && let Some(revision) = self.marked.take()
        {
            self.writer.bookmark(&mut out, revision, true);
        }
        if !out.is_empty() {
            return Some(out.freeze());
        }
        if let Some(error) = self.failed.take() {
            self.watcher = None;
            return Some(self.writer.error(&error));
        }
        loop {
            let wake = self.wake().await?;
            match wake {
                Wake::Closing => {
                    self.watcher = None;
                    return None;
                }
                Wake::Event(event) => {
                    let mut chunk = Chunk::default();
                    self.take(&mut chunk, event);
                    // Whatever else is ready goes along.
                    while chunk.len() < CHUNK && self.failed.is_none() {
                        let Some(ready) = self.watcher.as_mut().and_then(|w| w.next().now_or_never()) else { break };
                        self.take(&mut chunk, ready);
                    }
                    if let Some(bytes) = chunk.finish() {
                        return Some(bytes);
                    }
                }
                Wake::Bookmark | Wake::Deadline => {
                    if let Some(watcher) = self.watcher.as_mut().filter(|_| self.bookmarks) {
                        let revision = watcher.progress();
                        self.writer.bookmark(&mut out, revision, false);
                    }
                    if matches!(wake, Wake::Deadline) {
                        self.watcher = None;
                        return Some(out.freeze()).filter(|o| !o.is_empty());
                    }
                    self.others.push(bookmark_time());
                }
            }
            if !out.is_empty() {
                return Some(out.freeze());
            }
            if let Some(error) = self.failed.take() {
                self.watcher = None;
                return Some(self.writer.error(&error));
            }
        }
    }

    /// What happens next; nothing once the watch is over.
    async fn wake(&mut self) -> Option<Wake> {
        let Self { watcher, others, .. } = self;
        let watcher = watcher.as_mut()?;
        let next = std::future::poll_fn(|cx| match others.poll_next_unpin(cx) {
            Poll::Ready(Some(other)) => Poll::Ready(other),
            _ => watcher.poll_next(cx).map(Wake::Event),
        });
        Some(next.await)
    }

    fn take(&mut self, chunk: &mut Chunk, event: Result<Arc<Event>, WatchError>) {
        match event {
            Ok(event) => {
                if let Some((name, stored)) = seen(&*self.writer.kind, &self.selector, &event) {
                    chunk.push(self.writer.line(name, &stored));
                }
            }
            // The store goes away with the server: an end, not an error.
            Err(WatchError::Closed) => self.watcher = None,
            Err(error) => self.failed = Some(watch_error(error)),
        }
    }
}

/// What travels together. One line alone, the usual case, is not copied.
#[derive(Default)]
struct Chunk {
    first: Option<Bytes>,
    joined: BytesMut,
}

impl Chunk {
    fn len(&self) -> usize {
        self.first.as_ref().map_or(self.joined.len(), Bytes::len)
    }

    fn push(&mut self, line: Bytes) {
        if self.len() == 0 {
            self.first = Some(line);
            return;
        }
        if let Some(first) = self.first.take() {
            self.joined.extend_from_slice(&first);
        }
        self.joined.extend_from_slice(&line);
    }

    fn finish(self) -> Option<Bytes> {
        let Self { first, joined } = self;
        first.or_else(|| Some(joined.freeze()).filter(|j| !j.is_empty()))
    }
}

fn watch_error(error: WatchError) -> ApiError {
    match error {
        WatchError::TooOld { asked, oldest } => {
            ApiError::Expired(format!("too old resource version: {asked} ({oldest})"))
        }
        WatchError::Future { asked, current } => ApiError::VersionTooLarge { asked, current },
        WatchError::Closed => ApiError::Unavailable,
        WatchError::Read(error) => error.into(),
    }
}

/// The change as a watch with this selector sees it.
fn seen(kind: &dyn Kind, selector: &Selector, event: &Event) -> Option<(&'static str, Stored)> {
    let matches =
        |entry: &Option<Entry>| entry.as_ref().is_some_and(|e| selector.is_everything() || selector.matches(kind, e));
    let shown =
        |entry: &Option<Entry>| entry.as_ref().map(|e| Stored { value: e.value.clone(), revision: event.revision });
    match (matches(&event.old), matches(&event.new)) {
        (false, true) => shown(&event.new).map(|s| ("ADDED", s)),
        (true, true) => shown(&event.new).map(|s| ("MODIFIED", s)),
        (true, false) => shown(&event.old).map(|s| ("DELETED", s)),
        (false, false) => None,
    }
}

/// Writes events in the negotiated form, each on one line.
struct Writer {
    /// The cache of encoded events, if all watches of the kind show the same bytes.
    frames: Option<Arc<WatchFrameCache>>,
    kind: Arc<dyn Kind>,
    form: Form,
    include: Include,
    columns_sent: bool,
}

impl Writer {
    /// A change that other watchers see, too.
    fn line(&mut self, name: &'static str, stored: &Stored) -> Bytes {
        let frames = self.frames.clone();
        let line = WatchFrameKey { revision: stored.revision, event: name, form: self.form as usize };
        let mut make = || {
            let mut out = BytesMut::with_capacity(stored.value.len() + 128);
            self.event(&mut out, name, stored);
            out.freeze()
        };
        match frames {
            Some(frames) => frames.get_or_encode(line, make),
            None => make(),
        }
    }

    fn event(&mut self, out: &mut BytesMut, name: &str, stored: &Stored) {
        out.put_slice(br#"{"type":""#);
        out.put_slice(name.as_bytes());
        out.put_slice(br#"","object":"#);
        match self.form {
            Form::Plain => render::object(out, self.kind.descriptor(), stored),
            Form::Partial => render::partial(out, stored),
            Form::Table => {
                let metadata = json!({ "resourceVersion": stored.revision.to_string() });
                table::open(out, &*self.kind, &metadata, !self.columns_sent);
                self.columns_sent = true;
                table::row(out, &*self.kind, stored, self.include, meta::now());
                table::close(out);
            }
        }
        out.put_slice(b"}\n");
    }

    fn bookmark(&mut self, out: &mut BytesMut, revision: Revision, ends_initial: bool) {
        let d = self.kind.descriptor();
        let mut metadata = json!({ "resourceVersion": revision.to_string() });
        if ends_initial {
            metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        let plain = |kind: &str, version: &str| json!({ "kind": kind, "apiVersion": version, "metadata": metadata });
        let object: Value = match self.form {
            Form::Plain => plain(&d.kind, &d.api_version()),
            Form::Partial => plain("PartialObjectMetadata", "meta.k8s.io/v1"),
            Form::Table => {
                let mut head = BytesMut::new();
                let version = json!({ "resourceVersion": revision.to_string() });
                table::open(&mut head, &*self.kind, &version, !self.columns_sent);
                table::close(&mut head);
                let mut table: Value = serde_json::from_slice(&head).unwrap_or_default();
                let cells: Vec<Value> = self.kind.columns().iter().map(|_| Value::Null).collect();
                table["rows"] = json!([{ "cells": cells, "object": plain("PartialObjectMetadata", "meta.k8s.io/v1") }]);
                self.columns_sent = true;
                table
            }
        };
        out.put_slice(json!({ "type": "BOOKMARK", "object": object }).to_string().as_bytes());
        out.put_u8(b'\n');
    }

    fn error(&self, error: &ApiError) -> Bytes {
        let (_, status) = error.status();
        format!("{}\n", json!({ "type": "ERROR", "object": status })).into()
    }
}
