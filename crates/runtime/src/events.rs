//! Records Kubernetes events in the background. A repeated event increases the count of one Event object; many events that differ
//! only in their message are combined in one.
//!
//! Recording never delays a reconcile and never fails it. Events are dropped if the server is too slow.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::Key;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::debug;

use crate::client::Client;
use crate::clock::Clock;
use crate::write::{self, Part};

const MAX_PENDING_EVENTS: usize = 4096;
/// The count of a repeated event is written at most this often; repetitions in between are added to the next write.
const MIN_COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// How long an event waits for others to be written with it.
const BATCH_DELAY: Duration = Duration::from_millis(50);
/// The events of this many objects are written concurrently.
const MAX_CONCURRENT_OBJECTS: usize = 64;
/// The maximum number of series, and of groups of similar events. All are forgotten when it is reached: later repetitions start a
/// new Event object.
const MAX_TRACKED: usize = 4096;
/// Events of one object that differ only in their message are combined from this number of messages on.
const COMBINE_THRESHOLD: usize = 10;
/// After this long without a similar event, events are no longer combined.
const COMBINE_WINDOW: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// An event that was recorded and not written yet.
struct PendingEvent {
    about: ObjectReference,
    kind: EventType,
    reason: String,
    message: String,
    at: Time,
}

/// Records events of one component.
#[derive(Clone)]
pub struct Recorder {
    sender: mpsc::Sender<PendingEvent>,
    clock: Arc<dyn Clock>,
}

impl Recorder {
    /// Must be called in a tokio runtime: it spawns the task that writes the events. The task ends when the last clone of the
    /// recorder is dropped.
    pub fn new(client: impl Into<Client>, component: &str, clock: Arc<dyn Clock>) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
        tokio::spawn(EventWriter::new(client.into(), component).run(receiver));
        Self { sender, clock }
    }

    pub fn event<K: Resource<DynamicType = ()>>(
        &self,
        about: &K,
        kind: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        let event = PendingEvent {
            about: about.object_ref(&()),
            kind,
            reason: reason.to_owned(),
            message: message.into(),
            // With nanoseconds: the event's name is derived from it and must differ within a second.
            at: Time(self.clock.now()),
        };
        if self.sender.try_send(event).is_err() {
            debug!(reason, "event dropped: too many pending events");
        }
    }

    pub fn normal<K: Resource<DynamicType = ()>>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.event(about, EventType::Normal, reason, message);
    }

    pub fn warning<K: Resource<DynamicType = ()>>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.event(about, EventType::Warning, reason, message);
    }
}

struct EventWriter {
    client: Client,
    component: String,
    /// By object, type, reason and message; of combined events, without the message.
    series: HashMap<Digest, EventSeries>,
    /// By object, type and reason.
    similar: HashMap<Digest, SimilarEvents>,
}

/// A hash of strings, which takes less memory than thousands of messages.
type Digest = u128;

fn digest(parts: &[&str]) -> Digest {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, parts).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

/// Events that differ only in their message.
struct SimilarEvents {
    /// Hashes of the different messages, [`COMBINE_THRESHOLD`] at most.
    messages: Vec<u64>,
    last: Instant,
}

/// An Event object that repetitions are counted on.
struct EventSeries {
    /// The Event's name is the name of the object it is about, with this suffix.
    suffix: u64,
    count: i32,
    last_write: Instant,
}

/// Groups the writes by the object that they are about. Within a group the order is kept.
fn group_by_object(writes: Vec<EventWrite>) -> Vec<Vec<EventWrite>> {
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut groups: Vec<Vec<EventWrite>> = Vec::new();
    for write in writes {
        let about = match &write {
            EventWrite::Create { event, .. } => &event.involved_object,
            EventWrite::Count { event, .. } => &event.about,
        };
        let position = *positions.entry(about.uid.clone().unwrap_or_default()).or_insert(groups.len());
        if position == groups.len() {
            groups.push(Vec::new());
        }
        groups[position].push(write);
    }
    groups
}

enum EventWrite {
    Create { id: Digest, event: Box<Event> },
    Count { id: Digest, key: Key, count: i32, event: Box<PendingEvent> },
}

impl EventWriter {
    fn new(client: Client, component: &str) -> Self {
        Self { client, component: component.to_owned(), series: HashMap::new(), similar: HashMap::new() }
    }

    async fn run(mut self, mut receiver: mpsc::Receiver<PendingEvent>) {
        let mut events = Vec::new();
        loop {
            if receiver.recv_many(&mut events, MAX_PENDING_EVENTS).await == 0 {
                return;
            }
            // Events are not urgent, and they compete with the writes that they report for the same disk: they are written in
            // batches.
            tokio::time::sleep(BATCH_DELAY).await;
            while events.len() < MAX_PENDING_EVENTS {
                let Ok(event) = receiver.try_recv() else { break };
                events.push(event);
            }
            let writes: Vec<EventWrite> = events.drain(..).filter_map(|event| self.plan(event)).collect();
            self.write_all(writes).await;
        }
    }

    /// The write for an event, if it needs one now. The event is counted in its series in any case.
    fn plan(&mut self, mut event: PendingEvent) -> Option<EventWrite> {
        let uid = event.about.uid.as_deref().unwrap_or_default();
        let group = digest(&[uid, event.kind.as_str(), &event.reason]);
        let mut id = digest(&[uid, event.kind.as_str(), &event.reason, &event.message]);
        if self.must_combine(group, &event.message) {
            event.message = format!("(combined from similar events): {}", event.message);
            id = group;
        }
        if let Some(series) = self.series.get_mut(&id) {
            series.count += 1;
            if series.last_write.elapsed() < MIN_COUNT_INTERVAL {
                return None;
            }
            series.last_write = Instant::now();
            let key = event_key(&event, series.suffix);
            return Some(EventWrite::Count { id, key, count: series.count, event: Box::new(event) });
        }
        Some(self.start_series(id, &event))
    }

    /// Records the message and returns true if the group has so many different ones that its events are combined.
    fn must_combine(&mut self, group: Digest, message: &str) -> bool {
        if self.similar.len() >= MAX_TRACKED && !self.similar.contains_key(&group) {
            self.similar.clear();
        }
        let now = Instant::now();
        let new = || SimilarEvents { messages: Vec::with_capacity(1), last: now };
        let similar = self.similar.entry(group).or_insert_with(new);
        if now.duration_since(similar.last) > COMBINE_WINDOW {
            similar.messages.clear();
        }
        similar.last = now;
        let mut hasher = DefaultHasher::new();
        message.hash(&mut hasher);
        let hash = hasher.finish();
        if !similar.messages.contains(&hash) && similar.messages.len() < COMBINE_THRESHOLD {
            similar.messages.push(hash);
        }
        similar.messages.len() >= COMBINE_THRESHOLD
    }

    /// Starts a series with a new Event object.
    fn start_series(&mut self, id: Digest, event: &PendingEvent) -> EventWrite {
        let at = event.at.0.to_string();
        // With the component: another one may record the same event at the same time.
        let suffix = (digest(&[&format!("{id:x}"), &self.component, &at]) >> 64) as u64;
        let event = Box::new(self.build(event, suffix));
        if self.series.len() >= MAX_TRACKED {
            self.series.clear();
        }
        self.series.insert(id, EventSeries { suffix, count: 1, last_write: Instant::now() });
        EventWrite::Create { id, event }
    }

    async fn write_all(&mut self, writes: Vec<EventWrite>) {
        let mut remaining = writes;
        while !remaining.is_empty() {
            let results: Vec<Vec<WriteResult>> = {
                let client = &self.client;
                let groups = futures::stream::iter(group_by_object(remaining)).map(|writes| async move {
                    let mut results = Vec::with_capacity(writes.len());
                    for write in writes {
                        results.push(perform(client, write).await);
                    }
                    results
                });
                groups.buffer_unordered(MAX_CONCURRENT_OBJECTS).collect().await
            };
            // An event whose Event object has expired on the server starts a new series.
            remaining = results
                .into_iter()
                .flatten()
                .filter_map(|result| match result {
                    WriteResult::Written => None,
                    WriteResult::Failed(id) => {
                        self.series.remove(&id);
                        None
                    }
                    WriteResult::Expired(id, event) => {
                        self.series.remove(&id);
                        Some(self.start_series(id, &event))
                    }
                })
                .collect();
        }
    }

    fn build(&self, event: &PendingEvent, suffix: u64) -> Event {
        let key = event_key(event, suffix);
        Event {
            metadata: ObjectMeta { name: Some(key.name), namespace: key.namespace, ..ObjectMeta::default() },
            involved_object: event.about.clone(),
            type_: Some(event.kind.as_str().to_owned()),
            reason: Some(event.reason.clone()),
            message: Some(event.message.clone()),
            count: Some(1),
            first_timestamp: Some(event.at.clone()),
            last_timestamp: Some(event.at.clone()),
            source: Some(EventSource { component: Some(self.component.clone()), host: None }),
            reporting_component: Some(self.component.clone()),
            ..Event::default()
        }
    }
}

/// The key of the Event object. Events about cluster-scoped objects are in the namespace `default`.
fn event_key(event: &PendingEvent, suffix: u64) -> Key {
    let name = event.about.name.as_deref().unwrap_or_default();
    Key::namespaced(event.about.namespace.as_deref().unwrap_or("default"), format!("{name}.{suffix:016x}"))
}

enum WriteResult {
    /// Written, or not worth another attempt.
    Written,
    /// The Event object was not created.
    Failed(Digest),
    /// The Event object does not exist any more.
    Expired(Digest, Box<PendingEvent>),
}

async fn perform(client: &Client, write: EventWrite) -> WriteResult {
    match write {
        EventWrite::Create { id, event } => match write::create_without_reply(client, &*event).await {
            Err(error) if !error.already_exists() => {
                debug!(%error, "event not written");
                WriteResult::Failed(id)
            }
            Ok(()) | Err(_) => WriteResult::Written,
        },
        EventWrite::Count { id, key, count, event } => {
            // Combined events show the message of the last one.
            let patch = serde_json::json!({ "count": count, "lastTimestamp": event.at, "message": event.message });
            match write::merge::<Event>(client, Part::Whole, &key, &patch).await {
                Err(error) if error.is_not_found() => WriteResult::Expired(id, event),
                Err(error) => {
                    debug!(%error, "count of event not written");
                    WriteResult::Written
                }
                Ok(_) => WriteResult::Written,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(uid: &str, reason: &str, message: &str) -> PendingEvent {
        PendingEvent {
            about: ObjectReference {
                uid: Some(uid.to_owned()),
                name: Some(format!("name-of-{uid}")),
                ..ObjectReference::default()
            },
            kind: EventType::Normal,
            reason: reason.to_owned(),
            message: message.to_owned(),
            at: cleat_testing::build::time(1),
        }
    }

    fn writer() -> EventWriter {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
        });
        let client = Client::from(kube::Client::new(service, "default"));
        EventWriter::new(client, "test")
    }

    #[tokio::test]
    async fn events_of_one_object_stay_in_order() {
        let mut writer = writer();
        let events = [("a", "first"), ("b", "first"), ("a", "second"), ("c", "first"), ("b", "second")];
        let writes = events.into_iter().filter_map(|(uid, reason)| writer.plan(event(uid, reason, "m")));
        let groups = group_by_object(writes.collect());
        let uid_and_reason = |write: &EventWrite| match write {
            EventWrite::Create { event, .. } => {
                (event.involved_object.uid.clone().unwrap_or_default(), event.reason.clone().unwrap_or_default())
            }
            EventWrite::Count { .. } => panic!("none is repeated"),
        };
        let groups: Vec<Vec<(String, String)>> =
            groups.iter().map(|group| group.iter().map(uid_and_reason).collect()).collect();
        let pair = |(uid, reason): (&str, &str)| (uid.to_owned(), reason.to_owned());
        assert_eq!(
            groups,
            [
                vec![pair(("a", "first")), pair(("a", "second"))],
                vec![pair(("b", "first")), pair(("b", "second"))],
                vec![pair(("c", "first"))]
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_event_is_counted_and_a_different_one_is_created() {
        let mut writer = writer();
        let Some(EventWrite::Create { event: first, .. }) = writer.plan(event("a", "r", "m")) else {
            panic!("it is new")
        };
        assert!(writer.plan(event("a", "r", "m")).is_none(), "its count is written later");
        for (case, other) in [
            ("another object", event("b", "r", "m")),
            ("another reason", event("a", "rm", "")),
            ("another message", event("a", "r", "n")),
        ] {
            let Some(EventWrite::Create { event: created, .. }) = writer.plan(other) else { panic!("{case}") };
            assert_ne!(created.metadata.name, first.metadata.name, "{case}");
        }
        tokio::time::advance(MIN_COUNT_INTERVAL).await;
        let Some(EventWrite::Count { key, count, .. }) = writer.plan(event("a", "r", "m")) else {
            panic!("it is a repetition")
        };
        assert_eq!((key, count), (Key::of(&first.metadata), 3));
    }

    #[tokio::test]
    async fn many_events_that_differ_only_in_their_message_are_combined() {
        let mut writer = writer();
        let writes = (0..COMBINE_THRESHOLD + 5).filter_map(|n| writer.plan(event("a", "r", &format!("message {n}"))));
        assert_eq!(writes.count(), COMBINE_THRESHOLD, "the last one is combined with all that follow");
    }
}
