//! Runs a blocking call beside the async workers, with a deadline. Owns the threads; must not know what the call does.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;

/// How an offloaded call ended badly.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError<E> {
    /// The call is still running on a thread nobody waits for: its effect may yet happen.
    #[error("{what}: no answer within {deadline:?}")]
    Deadline { what: String, deadline: Duration },
    #[error("{what}: no thread to run it")]
    Spawn { what: String, source: std::io::Error },
    #[error("{what}: the call panicked")]
    Panicked { what: String },
    #[error(transparent)]
    Failed(E),
}

impl<E> OffloadError<E> {
    /// Whether the call may have taken effect, or may still do so, although it reported nothing.
    pub fn uncertain(&self) -> bool {
        matches!(self, OffloadError::Deadline { .. } | OffloadError::Panicked { .. })
    }
}

/// Runs `call` on a thread of its own and waits for it, but not longer than `deadline`.
///
/// Not on the runtime's blocking pool: a call that hangs in the kernel would hold a pool slot, and the runtime's shutdown,
/// for ever. Here a call gets a thread that has nothing else to do, or a new one, so none ever waits for another.
pub async fn offload<T, E, F>(deadline: Duration, what: impl Into<String>, call: F) -> Result<T, OffloadError<E>>
where
    T: Send + 'static,
    E: Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    let what = what.into();
    let (done, answer) = oneshot::channel();
    let handed_out = hand_out(Box::new(move |free| {
        let result = call();
        // Whoever waits for the answer may call again at once, and then finds this thread.
        free();
        if let Err(unwanted) = done.send(result) {
            // What nobody waits for any more may hang when it is dropped, and this thread may have its next call.
            let _ = thread::Builder::new().name(NAME.into()).spawn(move || drop(unwanted));
        }
    }));
    if let Err(source) = handed_out {
        return Err(OffloadError::Spawn { what, source });
    }
    match tokio::time::timeout(deadline, answer).await {
        Err(_) => {
            tracing::warn!(what, ?deadline, "a host call hangs, its thread is left behind");
            Err(OffloadError::Deadline { what, deadline })
        }
        Ok(Err(_)) => Err(OffloadError::Panicked { what }),
        Ok(Ok(result)) => result.map_err(OffloadError::Failed),
    }
}

const NAME: &str = "offload";
/// How many threads without work are kept, and for how long.
const KEPT: usize = 128;
const REST: Duration = Duration::from_secs(5);

/// Calls its argument when the thread is free for the next job.
type Job = Box<dyn FnOnce(&mut dyn FnMut()) + Send>;

/// The threads that have nothing to do, the last to become so at the end.
static FREE: Mutex<Vec<Free>> = Mutex::new(Vec::new());

struct Free {
    thread: thread::ThreadId,
    inbox: Sender<Job>,
}

fn free_threads() -> MutexGuard<'static, Vec<Free>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hand_out(job: Job) -> std::io::Result<()> {
    // Whoever is taken from the list waits for a job, and gets no other.
    let free = free_threads().pop();
    let job = match free {
        Some(free) => match free.inbox.send(job) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(job)) => job,
        },
        None => job,
    };
    thread::Builder::new().name(NAME.into()).spawn(move || work(job)).map(drop)
}

/// A job that panics ends its thread.
fn work(first: Job) {
    let thread = thread::current().id();
    let (inbox, jobs) = mpsc::channel();
    let mut job = first;
    loop {
        let mut listed = false;
        job(&mut || {
            let mut free = free_threads();
            if free.len() < KEPT {
                free.push(Free { thread, inbox: inbox.clone() });
                listed = true;
            }
        });
        if !listed {
            return;
        }
        job = match jobs.recv_timeout(REST) {
            Ok(next) => next,
            Err(RecvTimeoutError::Timeout) => {
                let mut free = free_threads();
                let place = free.iter().position(|other| other.thread == thread);
                if let Some(place) = place {
                    free.remove(place);
                    return;
                }
                drop(free);
                // Taken from the list just now: the job is on its way.
                let Ok(next) = jobs.recv() else { return };
                next
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_or_gives_up_at_the_deadline() {
        let long = Duration::from_secs(30);
        let ok: Result<u8, OffloadError<()>> = offload(long, "add", || Ok(1 + 1)).await;
        assert_eq!(ok.unwrap(), 2);

        let failed: Result<u8, OffloadError<&str>> = offload(long, "fail", || Err("no")).await;
        assert!(matches!(failed, Err(OffloadError::Failed("no"))));

        let (release, hold) = std::sync::mpsc::channel::<()>();
        let hung: Result<(), OffloadError<()>> = offload(Duration::from_millis(5), "hang", move || {
            let _ = hold.recv();
            Ok(())
        })
        .await;
        assert!(hung.unwrap_err().uncertain());
        drop(release);

        let panicked: Result<(), OffloadError<()>> = offload(long, "panic", || panic!("on purpose")).await;
        assert!(matches!(panicked, Err(OffloadError::Panicked { .. })));
    }

    #[tokio::test]
    async fn calls_share_threads_and_none_waits_for_one_that_hangs() {
        let long = Duration::from_secs(60);
        let here = || Ok::<_, ()>(thread::current().id());
        let mut threads = std::collections::HashSet::new();
        for _ in 0..200 {
            threads.insert(offload(long, "look", here).await.unwrap());
        }
        assert!(threads.len() < 100, "{} threads for 200 calls after each other", threads.len());

        let (release, hold) = std::sync::mpsc::channel::<()>();
        let hold = std::sync::Arc::new(Mutex::new(hold));
        let hanging: Vec<_> = (0..2 * KEPT)
            .map(|_| {
                let hold = hold.clone();
                tokio::spawn(offload(long, "hang", move || {
                    let _ = hold.lock().map(|hold| hold.recv());
                    Ok::<_, ()>(())
                }))
            })
            .collect();
        for _ in 0..10 {
            offload(long, "look", here).await.unwrap();
        }
        drop(release);
        for call in hanging {
            call.await.unwrap().unwrap();
        }
        assert!(free_threads().len() <= KEPT);
    }
}
