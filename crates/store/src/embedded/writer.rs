//! The single writer: takes the queued requests, checks each against the state in memory, makes the batch durable with
//! one append to the log, publishes it, and only then answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::task::Waker;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::commit::Committer;
use super::state::SharedState;
use super::statistics::StoreStatistics;
use crate::entry::{Entry, Event, Revision};
use crate::error::WriteError;

/// A batch is limited, so that its first request does not wait for an endless queue.
const MAX_BATCH_REQUESTS: usize = 1024;
const MAX_BATCH_BYTES: usize = 8 << 20;

pub(super) enum Operation {
    Create(Bytes),
    Update(Revision, Bytes),
    Delete(Revision),
}

/// A write and the channel for its result.
pub(super) struct WriteRequest {
    pub(super) key: Arc<str>,
    pub(super) operation: Operation,
    pub(super) reply: oneshot::Sender<Result<Revision, WriteError>>,
}

/// The result of a write, to be sent once the batch is durable.
struct PendingReply {
    reply: oneshot::Sender<Result<Revision, WriteError>>,
    key: Arc<str>,
    result: Result<Revision, WriteError>,
}

/// Writes until the queue is closed and empty.
pub(super) fn run(
    mut committer: Committer,
    shared: &SharedState,
    statistics: &StoreStatistics,
    requests: &Receiver<WriteRequest>,
) {
    while let Ok(first) = requests.recv() {
        let mut batch = vec![first];
        let mut bytes = 0;
        while batch.len() < MAX_BATCH_REQUESTS && bytes < MAX_BATCH_BYTES {
            let Ok(next) = requests.try_recv() else { break };
            if let Operation::Create(value) | Operation::Update(_, value) = &next.operation {
                bytes += value.len();
            }
            batch.push(next);
        }
        write(&mut committer, shared, statistics, batch);
    }
    committer.close();
}

fn write(committer: &mut Committer, shared: &SharedState, statistics: &StoreStatistics, batch: Vec<WriteRequest>) {
    let (events, replies) = plan(shared, batch);
    let outcome = match events.is_empty() {
        true => Ok(Vec::new()),
        false => committer.commit(events),
    };
    match outcome {
        Ok(changes) => {
            cleat_crash::point("store:committed");
            let wakers = match changes.is_empty() {
                true => Vec::new(),
                false => {
                    statistics.count_commit(changes.len());
                    shared.publish(changes)
                }
            };
            for PendingReply { reply, result, .. } in replies {
                // Fails if the caller has stopped waiting; the write stands.
                let _ = reply.send(result);
            }
            // After the replies: a component that writes and watches then mostly learns of its write from the reply,
            // and need not decode the watch event.
            wakers.into_iter().for_each(Waker::wake);
        }
        Err(error) => {
            statistics.count_failure();
            tracing::error!(%error, writes = replies.len(), "store commit failed");
            let source: Arc<dyn std::error::Error + Send + Sync> = Arc::new(error);
            for PendingReply { reply, key, .. } in replies {
                // Also for requests that were refused: the refusal may follow from a write of the same batch.
                let _ = reply.send(Err(WriteError::Uncertain { key: key.to_string(), source: source.clone() }));
            }
        }
    }
}

/// Decides the requests in order; each observes the effects of those before it. Writes nothing.
fn plan(shared: &SharedState, batch: Vec<WriteRequest>) -> (Vec<Event>, Vec<PendingReply>) {
    let mut revision = shared.revision();
    let mut planned: HashMap<Arc<str>, Option<Entry>> = HashMap::new();
    let mut events = Vec::with_capacity(batch.len());
    let mut replies = Vec::with_capacity(batch.len());
    for WriteRequest { key, operation, reply } in batch {
        let current = planned.get(&key).cloned().unwrap_or_else(|| shared.get(&key));
        let result = decide(&key, operation, current, revision + 1).map(|event| {
            revision = event.revision;
            planned.insert(key.clone(), event.new.clone());
            events.push(event);
            revision
        });
        replies.push(PendingReply { reply, key, result });
    }
    (events, replies)
}

fn decide(
    key: &Arc<str>,
    operation: Operation,
    current: Option<Entry>,
    revision: Revision,
) -> Result<Event, WriteError> {
    let key_name = || key.to_string();
    let expect = |expected: Revision, current: Option<Entry>| match current {
        None => Err(WriteError::Missing { key: key_name() }),
        Some(found) if found.modified != expected => {
            Err(WriteError::Conflict { key: key_name(), expected, current: found })
        }
        Some(found) => Ok(found),
    };
    match operation {
        Operation::Create(value) => match current {
            Some(current) => Err(WriteError::Exists { key: key_name(), current }),
            None => {
                let new = Entry { key: key.clone(), value, created: revision, modified: revision };
                Ok(Event { revision, new: Some(new), old: None })
            }
        },
        Operation::Update(expected, value) => {
            let old = expect(expected, current)?;
            let new = Entry { key: old.key.clone(), value, created: old.created, modified: revision };
            Ok(Event { revision, new: Some(new), old: Some(old) })
        }
        Operation::Delete(expected) => {
            let old = expect(expected, current)?;
            Ok(Event { revision, new: None, old: Some(old) })
        }
    }
}
