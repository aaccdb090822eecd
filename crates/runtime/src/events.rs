//! Events for people: recorded in the background, repeated ones counted on one object, and many that differ only in their
//! message combined in one.
//!
//! Recording never delays and never fails a reconcile. When the server cannot keep up, events are dropped.

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

const WAITING_AT_MOST: usize = 4096;
/// A repeated event is written at most this often; what happens in between is added to the next count.
const REPEAT_EVERY: Duration = Duration::from_secs(5);
/// How long an event waits for others to be written with it.
const GATHERING: Duration = Duration::from_millis(50);
/// Of how many objects events are on their way to the server at the same time.
const AT_ONCE: usize = 64;
/// How many different events are remembered for counting.
const REMEMBERED: usize = 4096;
/// From so many on, events about one object that differ only in their message are combined; after such a pause no more.
const SIMILAR: usize = 10;
const SIMILAR_FOR: Duration = Duration::from_secs(600);

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

struct Note {
    about: ObjectReference,
    kind: EventType,
    reason: String,
    message: String,
    at: Time,
}

/// Records events in the name of one component.
#[derive(Clone)]
pub struct Recorder {
    notes: mpsc::Sender<Note>,
    clock: Arc<dyn Clock>,
}

impl Recorder {
    /// Must be called on a tokio runtime: the writing happens in a task that ends with the last recorder.
    pub fn new(client: impl Into<Client>, component: &str, clock: Arc<dyn Clock>) -> Self {
        let (notes, inbox) = mpsc::channel(WAITING_AT_MOST);
        let (known, similar) = (HashMap::new(), HashMap::new());
        tokio::spawn(Writer { client: client.into(), component: component.to_owned(), known, similar }.run(inbox));
        Self { notes, clock }
    }

    pub fn event<K: Resource<DynamicType = ()>>(
        &self,
        about: &K,
        kind: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        let note = Note {
            about: about.object_ref(&()),
            kind,
            reason: reason.to_owned(),
            message: message.into(),
            // To the nanosecond: events of one second need names of their own.
            at: Time(self.clock.now()),
        };
        if self.notes.try_send(note).is_err() {
            debug!(reason, "event dropped: too many are waiting to be written");
        }
    }

    pub fn normal<K: Resource<DynamicType = ()>>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.event(about, EventType::Normal, reason, message);
    }

    pub fn warning<K: Resource<DynamicType = ()>>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.event(about, EventType::Warning, reason, message);
    }
}

struct Writer {
    client: Client,
    component: String,
    /// By what is told of whom.
    known: HashMap<Digest, Series>,
    /// The same without the message.
    similar: HashMap<Digest, Similar>,
}

/// Stands for texts: thousands of events are remembered for a while, and their texts are long.
type Digest = u128;

fn digest(texts: &[&str]) -> Digest {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, texts).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

/// Events that differ only in their message.
struct Similar {
    /// The digests of the messages, up to as many as count.
    messages: Vec<u64>,
    last: Instant,
}

struct Series {
    /// What the event's name has besides that of the object it is about.
    suffix: u64,
    count: i32,
    written: Instant,
}

/// What is told of one object is told in order.
fn by_subject(writes: Vec<Write>) -> Vec<Vec<Write>> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut groups: Vec<Vec<Write>> = Vec::new();
    for write in writes {
        let about = match &write {
            Write::Create { event, .. } => &event.involved_object,
            Write::Count { note, .. } => &note.about,
        };
        let place = *places.entry(about.uid.clone().unwrap_or_default()).or_insert(groups.len());
        if place == groups.len() {
            groups.push(Vec::new());
        }
        groups[place].push(write);
    }
    groups
}

/// What is written for a note.
enum Write {
    Create { id: Digest, event: Box<Event> },
    Count { id: Digest, key: Key, count: i32, note: Box<Note> },
}

impl Writer {
    async fn run(mut self, mut inbox: mpsc::Receiver<Note>) {
        let mut notes = Vec::new();
        loop {
            if inbox.recv_many(&mut notes, WAITING_AT_MOST).await == 0 {
                return;
            }
            // Nobody waits for an event, and what is told of waits for the same disk: events go together, a little later.
            tokio::time::sleep(GATHERING).await;
            while notes.len() < WAITING_AT_MOST {
                let Ok(note) = inbox.try_recv() else { break };
                notes.push(note);
            }
            let writes: Vec<Write> = notes.drain(..).filter_map(|note| self.planned(note)).collect();
            self.write_all(writes).await;
        }
    }

    /// What to write for a note, if anything. From here on it counts as written.
    fn planned(&mut self, mut note: Note) -> Option<Write> {
        let uid = note.about.uid.as_deref().unwrap_or_default();
        let sort = digest(&[uid, note.kind.as_str(), &note.reason]);
        let mut id = digest(&[uid, note.kind.as_str(), &note.reason, &note.message]);
        if self.is_one_of_many(sort, &note.message) {
            note.message = format!("(combined from similar events): {}", note.message);
            id = sort;
        }
        if let Some(series) = self.known.get_mut(&id) {
            series.count += 1;
            if series.written.elapsed() < REPEAT_EVERY {
                return None;
            }
            series.written = Instant::now();
            let key = key_of(&note, series.suffix);
            return Some(Write::Count { id, key, count: series.count, note: Box::new(note) });
        }
        Some(self.begun(id, &note))
    }

    fn is_one_of_many(&mut self, sort: Digest, message: &str) -> bool {
        if self.similar.len() >= REMEMBERED && !self.similar.contains_key(&sort) {
            self.similar.clear();
        }
        let now = Instant::now();
        let fresh = || Similar { messages: Vec::with_capacity(1), last: now };
        let similar = self.similar.entry(sort).or_insert_with(fresh);
        if now.duration_since(similar.last) > SIMILAR_FOR {
            similar.messages.clear();
        }
        similar.last = now;
        let mut hasher = DefaultHasher::new();
        message.hash(&mut hasher);
        let digest = hasher.finish();
        if !similar.messages.contains(&digest) && similar.messages.len() < SIMILAR {
            similar.messages.push(digest);
        }
        similar.messages.len() >= SIMILAR
    }

    /// A series begins.
    fn begun(&mut self, id: Digest, note: &Note) -> Write {
        let at = note.at.0.to_string();
        // Another component may tell the same in the same moment.
        let suffix = (digest(&[&format!("{id:x}"), &self.component, &at]) >> 64) as u64;
        let event = Box::new(self.build(note, suffix));
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        self.known.insert(id, Series { suffix, count: 1, written: Instant::now() });
        Write::Create { id, event }
    }

    async fn write_all(&mut self, writes: Vec<Write>) {
        let mut left = writes;
        while !left.is_empty() {
            let done: Vec<Vec<Outcome>> = {
                let client = &self.client;
                let told = futures::stream::iter(by_subject(left)).map(|writes| async move {
                    let mut done = Vec::with_capacity(writes.len());
                    for write in writes {
                        done.push(perform(client, write).await);
                    }
                    done
                });
                told.buffer_unordered(AT_ONCE).collect().await
            };
            // What expired on the server begins anew.
            left = done
                .into_iter()
                .flatten()
                .filter_map(|outcome| match outcome {
                    Outcome::Written => None,
                    Outcome::Failed(id) => {
                        self.known.remove(&id);
                        None
                    }
                    Outcome::Expired(id, note) => {
                        self.known.remove(&id);
                        Some(self.begun(id, &note))
                    }
                })
                .collect();
        }
    }

    fn build(&self, note: &Note, suffix: u64) -> Event {
        let key = key_of(note, suffix);
        Event {
            metadata: ObjectMeta { name: Some(key.name), namespace: key.namespace, ..ObjectMeta::default() },
            involved_object: note.about.clone(),
            type_: Some(note.kind.as_str().to_owned()),
            reason: Some(note.reason.clone()),
            message: Some(note.message.clone()),
            count: Some(1),
            first_timestamp: Some(note.at.clone()),
            last_timestamp: Some(note.at.clone()),
            source: Some(EventSource { component: Some(self.component.clone()), host: None }),
            reporting_component: Some(self.component.clone()),
            ..Event::default()
        }
    }
}

/// Where the event about this is. One about a cluster-scoped object is in the default namespace.
fn key_of(note: &Note, suffix: u64) -> Key {
    let name = note.about.name.as_deref().unwrap_or_default();
    Key::namespaced(note.about.namespace.as_deref().unwrap_or("default"), format!("{name}.{suffix:016x}"))
}

enum Outcome {
    Written,
    Failed(Digest),
    Expired(Digest, Box<Note>),
}

async fn perform(client: &Client, write: Write) -> Outcome {
    match write {
        Write::Create { id, event } => match write::create_unseen(client, &*event).await {
            Err(error) if !error.already_exists() => {
                debug!(%error, "event not written");
                Outcome::Failed(id)
            }
            Ok(()) | Err(_) => Outcome::Written,
        },
        Write::Count { id, key, count, note } => {
            // Of events that were combined, the last one tells.
            let patch = serde_json::json!({ "count": count, "lastTimestamp": note.at, "message": note.message });
            match write::merge::<Event>(client, Part::Whole, &key, &patch).await {
                Err(error) if error.is_not_found() => Outcome::Expired(id, note),
                Err(error) => {
                    debug!(%error, "event not counted");
                    Outcome::Written
                }
                Ok(_) => Outcome::Written,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(uid: &str, reason: &str, message: &str) -> Note {
        Note {
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

    fn writer() -> Writer {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
        });
        let client = Client::from(kube::Client::new(service, "default"));
        Writer { client, component: "test".to_owned(), known: HashMap::new(), similar: HashMap::new() }
    }

    #[tokio::test]
    async fn what_is_told_of_one_object_stays_in_order() {
        let mut writer = writer();
        let notes = [("a", "first"), ("b", "first"), ("a", "second"), ("c", "first"), ("b", "second")];
        let writes = notes.into_iter().filter_map(|(uid, reason)| writer.planned(note(uid, reason, "m")));
        let groups = by_subject(writes.collect());
        let told = |write: &Write| match write {
            Write::Create { event, .. } => {
                (event.involved_object.uid.clone().unwrap_or_default(), event.reason.clone().unwrap_or_default())
            }
            Write::Count { .. } => panic!("none is repeated"),
        };
        let groups: Vec<Vec<(String, String)>> = groups.iter().map(|group| group.iter().map(told).collect()).collect();
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
    async fn a_repeated_event_is_counted_on_the_first_and_a_different_one_is_not() {
        let mut writer = writer();
        let Some(Write::Create { event, .. }) = writer.planned(note("a", "r", "m")) else { panic!("it is new") };
        assert!(writer.planned(note("a", "r", "m")).is_none(), "the next one is counted soon enough");
        for (case, other) in [
            ("another object", note("b", "r", "m")),
            ("another reason", note("a", "rm", "")),
            ("another message", note("a", "r", "n")),
        ] {
            let Some(Write::Create { event: told, .. }) = writer.planned(other) else { panic!("{case}") };
            assert_ne!(told.metadata.name, event.metadata.name, "{case}");
        }
        tokio::time::advance(REPEAT_EVERY).await;
        let Some(Write::Count { key, count, .. }) = writer.planned(note("a", "r", "m")) else { panic!("it is known") };
        assert_eq!((key, count), (Key::of(&event.metadata), 3));
    }

    #[tokio::test]
    async fn many_that_differ_only_in_their_message_become_one() {
        let mut writer = writer();
        let made = (0..SIMILAR + 5).filter_map(|n| writer.planned(note("a", "r", &format!("message {n}"))));
        assert_eq!(made.count(), SIMILAR, "the last of which stands for all that follow");
    }
}
