//! WATCH: the changes after a revision, one JSON object per line, with selectors, bookmarks and a deadline.
//!
//! The stream reads from the store's watcher when the client reads. A client that does not read delays no other client.

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

const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);
/// A watch without `timeoutSeconds` ends after a random time in this range, so that not all watches restart at once.
const DEFAULT_TIMEOUT_SECONDS: std::ops::Range<u64> = 1800..3600;
/// Events that are ready at the same time are sent in one chunk, which is closed when it has this size.
const CHUNK_BYTES: usize = 32 << 10;

/// The first events of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchStart {
    /// The current objects as ADDED events, then the changes. If `end_bookmark` is set, a bookmark marks the end of the
    /// current objects.
    CurrentState { end_bookmark: bool },
    /// The changes after this revision.
    After(Revision),
    /// The changes from now on.
    Now,
}

pub(crate) async fn watch(
    state: &Arc<ServerState>,
    request: &ResourceRequest,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
    options: ListOptions,
) -> Result<Reply, ApiError> {
    let start = watch_start(&options)?;
    let representation = negotiate(request.accept.as_deref(), ReplyKind::Watch)?;
    let selector = Selector::parse(&**kind, &options.label_selector, &options.field_selector)?;
    let prefix = super::selected_prefix(&**kind, namespace, &selector);
    let mut stream = WatchStream {
        writer: EventWriter {
            kind: kind.clone(),
            representation,
            include: request.query.include_object()?,
            columns_sent: false,
        },
        selector,
        initial: VecDeque::new(),
        end_bookmark: None,
        watcher: None,
        failed: None,
        allow_bookmarks: options.allow_bookmarks,
        interrupts: FuturesUnordered::new(),
    };
    for closing in [Some(&state.closing), Some(&request.closing), kind.retired()].into_iter().flatten() {
        let closed = closing.clone().cancelled_owned();
        stream.interrupts.push(closed.map(|()| WakeReason::Closing).boxed());
    }
    let deadline = deadline(options.timeout);
    stream.interrupts.push(tokio::time::sleep_until(deadline).map(|()| WakeReason::Deadline).boxed());
    if options.allow_bookmarks {
        stream.interrupts.push(next_bookmark());
    }
    let started = stream.start(state, &prefix, start, options.resource_version).await;
    match started {
        Ok(()) => {}
        // A resourceVersion that is too old or too new is reported as an event: clients list again only if they find
        // the error in the stream.
        Err(error @ (ApiError::Expired(_) | ApiError::VersionTooLarge { .. })) => stream.failed = Some(error),
        Err(error) => return Err(error),
    }
    let lines = futures::stream::unfold(stream, |mut stream| async move {
        let chunk = stream.next().await?;
        Some((chunk, stream))
    });
    Ok(Reply::stream(ResponseBody::stream(lines)))
}

fn watch_start(options: &ListOptions) -> Result<WatchStart, ApiError> {
    let refuse = |error| Err(ApiError::invalid_option("ListOptions", error));
    match (options.send_initial_events, options.resource_version_match) {
        (Some(_), None) => {
            let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            refuse(FieldError::forbidden("resourceVersionMatch", why))
        }
        (Some(_), Some(ResourceVersionMatch::Exact)) => {
            refuse(FieldError::forbidden("resourceVersionMatch", "only NotOlderThan is allowed with sendInitialEvents"))
        }
        (None, Some(_)) => {
            let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            refuse(FieldError::forbidden("resourceVersionMatch", why))
        }
        (Some(true), Some(ResourceVersionMatch::NotOlderThan)) => Ok(WatchStart::CurrentState { end_bookmark: true }),
        (Some(false), Some(ResourceVersionMatch::NotOlderThan)) => Ok(match options.resource_version {
            Some(version) if version > 0 => WatchStart::After(version),
            _ => WatchStart::Now,
        }),
        (None, None) => Ok(match options.resource_version {
            Some(version) if version > 0 => WatchStart::After(version),
            _ => WatchStart::CurrentState { end_bookmark: false },
        }),
    }
}

fn deadline(timeout: Option<Duration>) -> Instant {
    let spread = uuid::Uuid::new_v4().as_u128() as u64 % (DEFAULT_TIMEOUT_SECONDS.end - DEFAULT_TIMEOUT_SECONDS.start);
    Instant::now() + timeout.unwrap_or(Duration::from_secs(DEFAULT_TIMEOUT_SECONDS.start + spread))
}

fn next_bookmark() -> BoxFuture<'static, WakeReason> {
    tokio::time::sleep(BOOKMARK_PERIOD).map(|()| WakeReason::Bookmark).boxed()
}

struct WatchStream {
    writer: EventWriter,
    selector: Selector,
    /// The current objects that have not been sent yet.
    initial: VecDeque<StoredEntry>,
    /// The revision of the bookmark that ends the initial events, until it is sent.
    end_bookmark: Option<Revision>,
    /// None once the watch has ended.
    watcher: Option<Box<dyn Watcher>>,
    /// An error to send; the stream ends after it.
    failed: Option<ApiError>,
    allow_bookmarks: bool,
    /// The end of the server, of the connection and of the kind, the deadline, and the next bookmark. A future in this
    /// set is polled only after it was woken, so that they cost nothing between two events of a busy watch.
    interrupts: FuturesUnordered<BoxFuture<'static, WakeReason>>,
}

enum WakeReason {
    Event(Result<Arc<Event>, WatchError>),
    Bookmark,
    Deadline,
    Closing,
}

impl WatchStream {
    async fn start(
        &mut self,
        state: &ServerState,
        prefix: &str,
        start: WatchStart,
        version: Option<Revision>,
    ) -> Result<(), ApiError> {
        let after = match start {
            WatchStart::After(version) => version,
            WatchStart::Now => state.store.revision().await?,
            WatchStart::CurrentState { end_bookmark } => {
                let current = state.store.revision().await?;
                if let Some(requested) = version.filter(|v| *v > current) {
                    return Err(ApiError::VersionTooLarge { requested, current });
                }
                let kind = &*self.writer.kind;
                let snapshot = state.store_of(kind).list(Range { prefix, ..Range::default() }).await?;
                let (revision, selector) = (snapshot.revision, &self.selector);
                let matches = |entry: &StoredEntry| selector.is_everything() || selector.matches(kind, &entry.entry());
                self.initial = snapshot.stored.into_iter().filter(matches).collect();
                self.end_bookmark = Some(revision).filter(|_| end_bookmark && self.allow_bookmarks);
                revision
            }
        };
        self.watcher = Some(state.store_of(&*self.writer.kind).watch(prefix, after).await.map_err(watch_error)?);
        Ok(())
    }

    /// The next chunk; none once the watch has ended.
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = BytesMut::new();
        while out.len() < CHUNK_BYTES {
            let Some(entry) = self.initial.pop_front() else { break };
            self.writer.event(&mut out, "ADDED", &StoredObject::from(&entry.entry()));
        }
        if self.initial.is_empty()
            && let Some(revision) = self.end_bookmark.take()
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
            let reason = self.wake().await?;
            match reason {
                WakeReason::Closing => {
                    self.watcher = None;
                    return None;
                }
                WakeReason::Event(event) => {
                    let mut chunk = Chunk::default();
                    self.push_event(&mut chunk, event);
                    // Add the events that are ready now.
                    while chunk.len() < CHUNK_BYTES && self.failed.is_none() {
                        let Some(ready) = self.watcher.as_mut().and_then(|w| w.next().now_or_never()) else { break };
                        self.push_event(&mut chunk, ready);
                    }
                    if let Some(bytes) = chunk.finish() {
                        return Some(bytes);
                    }
                }
                WakeReason::Bookmark | WakeReason::Deadline => {
                    if let Some(watcher) = self.watcher.as_mut().filter(|_| self.allow_bookmarks) {
                        let revision = watcher.progress();
                        self.writer.bookmark(&mut out, revision, false);
                    }
                    if matches!(reason, WakeReason::Deadline) {
                        self.watcher = None;
                        return Some(out.freeze()).filter(|o| !o.is_empty());
                    }
                    self.interrupts.push(next_bookmark());
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

    /// Waits for the next event or interrupt; none once the watch has ended.
    async fn wake(&mut self) -> Option<WakeReason> {
        let Self { watcher, interrupts, .. } = self;
        let watcher = watcher.as_mut()?;
        let next = std::future::poll_fn(|cx| match interrupts.poll_next_unpin(cx) {
            Poll::Ready(Some(interrupt)) => Poll::Ready(interrupt),
            _ => watcher.poll_next(cx).map(WakeReason::Event),
        });
        Some(next.await)
    }

    fn push_event(&mut self, chunk: &mut Chunk, event: Result<Arc<Event>, WatchError>) {
        match event {
            Ok(event) => {
                if let Some((name, stored)) = selected_event(&*self.writer.kind, &self.selector, &event) {
                    chunk.push(self.writer.line(name, &stored));
                }
            }
            // The store is closed with the server: the stream ends without an error.
            Err(WatchError::Closed) => self.watcher = None,
            Err(error) => self.failed = Some(watch_error(error)),
        }
    }
}

/// Lines that are sent together. A single line, the common case, is not copied.
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
        WatchError::Future { asked, current } => ApiError::VersionTooLarge { requested: asked, current },
        WatchError::Closed => ApiError::Unavailable,
        WatchError::Read(error) => error.into(),
    }
}

/// The event that a watch with this selector gets for a change: an object that starts or stops matching is added or
/// deleted. None if the object matches neither before nor after the change.
fn selected_event(kind: &dyn Kind, selector: &Selector, event: &Event) -> Option<(&'static str, StoredObject)> {
    let matches =
        |entry: &Option<Entry>| entry.as_ref().is_some_and(|e| selector.is_everything() || selector.matches(kind, e));
    let at_revision = |entry: &Option<Entry>| {
        entry.as_ref().map(|e| StoredObject { value: e.value.clone(), revision: event.revision })
    };
    match (matches(&event.old), matches(&event.new)) {
        (false, true) => at_revision(&event.new).map(|s| ("ADDED", s)),
        (true, true) => at_revision(&event.new).map(|s| ("MODIFIED", s)),
        (true, false) => at_revision(&event.old).map(|s| ("DELETED", s)),
        (false, false) => None,
    }
}

/// Encodes events in the negotiated representation, each on one line.
struct EventWriter {
    kind: Arc<dyn Kind>,
    representation: Representation,
    include: IncludeObject,
    columns_sent: bool,
}

impl EventWriter {
    /// The line of a change.
    fn line(&mut self, name: &'static str, stored: &StoredObject) -> Bytes {
        let mut out = BytesMut::with_capacity(stored.value.len() + 128);
        self.event(&mut out, name, stored);
        out.freeze()
    }

    fn event(&mut self, out: &mut BytesMut, name: &str, stored: &StoredObject) {
        out.put_slice(br#"{"type":""#);
        out.put_slice(name.as_bytes());
        out.put_slice(br#"","object":"#);
        match self.representation {
            Representation::Full => render::write_object(out, self.kind.descriptor(), stored),
            Representation::Metadata => render::write_partial_metadata(out, stored),
            Representation::Table => {
                let metadata = json!({ "resourceVersion": stored.revision.to_string() });
                table::open(out, &*self.kind, &metadata, !self.columns_sent);
                self.columns_sent = true;
                table::write_row(out, &*self.kind, stored, self.include, meta::now());
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
        let object: Value = match self.representation {
            Representation::Full => plain(&d.kind, &d.api_version()),
            Representation::Metadata => plain("PartialObjectMetadata", "meta.k8s.io/v1"),
            Representation::Table => {
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
