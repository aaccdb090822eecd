//! The single writer: takes everything that is queued, checks each request against memory, makes the batch durable in
//! one transaction, publishes it and only then answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::task::Waker;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::disk::Disk;
use super::state::Shared;
use super::statistics::Statistics;
use crate::{Entry, Event, Revision, WriteError};

/// Bounds a batch, so that the first request in it does not wait for an endless queue.
const BATCH: usize = 1024;
const BATCH_BYTES: usize = 8 << 20;

pub(super) enum Operation {
    Create(Bytes),
    Update(Revision, Bytes),
    Delete(Revision),
}

pub(super) struct Request {
    pub(super) key: Arc<str>,
    pub(super) operation: Operation,
    pub(super) reply: oneshot::Sender<Result<Revision, WriteError>>,
}

type Answer = (oneshot::Sender<Result<Revision, WriteError>>, Arc<str>, Result<Revision, WriteError>);

pub(super) fn run(mut disk: Disk, shared: &Shared, statistics: &Statistics, requests: &Receiver<Request>) {
    while let Ok(first) = requests.recv() {
        let mut batch = vec![first];
        let mut bytes = 0;
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Ok(next) = requests.try_recv() else { break };
            if let Operation::Create(value) | Operation::Update(_, value) = &next.operation {
                bytes += value.len();
            }
            batch.push(next);
        }
        write(&mut disk, shared, statistics, batch);
    }
    disk.close();
}

fn write(disk: &mut Disk, shared: &Shared, statistics: &Statistics, batch: Vec<Request>) {
    let (events, answers) = plan(shared, batch);
    let outcome = match events.is_empty() {
        true => Ok(Vec::new()),
        false => disk.commit(events),
    };
    match outcome {
        Ok(changes) => {
            cleat_crash::point("store:committed");
            let watchers = match changes.is_empty() {
                true => Vec::new(),
                false => {
                    statistics.committed(changes.len());
                    shared.publish(changes)
                }
            };
            for (reply, _, result) in answers {
                // The requester may have stopped waiting; the write stands.
                let _ = reply.send(result);
            }
            // Last: whoever writes and watches need not read from the watch what the answer brings, in most cases.
            watchers.into_iter().for_each(Waker::wake);
        }
        Err(error) => {
            statistics.failed();
            tracing::error!(%error, writes = answers.len(), "store commit failed");
            let source: Arc<dyn std::error::Error + Send + Sync> = Arc::new(error);
            for (reply, key, _) in answers {
                // Refusals too: one may rest on a write of the same batch, so it is no surer than that write.
                let _ = reply.send(Err(WriteError::Uncertain { key: key.to_string(), source: source.clone() }));
            }
        }
    }
}

/// Decides every request in order, each seeing the effects of those before it. Writes nothing.
fn plan(shared: &Shared, batch: Vec<Request>) -> (Vec<Event>, Vec<Answer>) {
    let mut revision = shared.revision();
    let mut ahead: HashMap<Arc<str>, Option<Entry>> = HashMap::new();
    let mut events = Vec::with_capacity(batch.len());
    let mut answers = Vec::with_capacity(batch.len());
    for Request { key, operation, reply } in batch {
        let current = ahead.get(&key).cloned().unwrap_or_else(|| shared.get(&key));
        let result = decide(&key, operation, current, revision + 1).map(|event| {
            revision = event.revision;
            ahead.insert(key.clone(), event.new.clone());
            events.push(event);
            revision
        });
        answers.push((reply, key, result));
    }
    (events, answers)
}

fn decide(
    key: &Arc<str>,
    operation: Operation,
    current: Option<Entry>,
    revision: Revision,
) -> Result<Event, WriteError> {
    let named = || key.to_string();
    let expect = |expected: Revision, current: Option<Entry>| match current {
        None => Err(WriteError::Missing { key: named() }),
        Some(found) if found.modified != expected => {
            Err(WriteError::Conflict { key: named(), expected, current: found })
        }
        Some(found) => Ok(found),
    };
    match operation {
        Operation::Create(value) => match current {
            Some(current) => Err(WriteError::Exists { key: named(), current }),
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
