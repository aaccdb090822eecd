//! Runs blocking calls on threads of its own, with a deadline. Owns these threads, and keeps idle ones for later calls;
//! must not know what a call does.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;

/// Why an offloaded call returned no value.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError<E> {
    /// The call did not return in time. It is still running, and may take effect later.
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
    /// Whether the call may have taken effect, or may still take effect, although it returned nothing.
    pub fn is_uncertain(&self) -> bool {
        matches!(self, OffloadError::Deadline { .. } | OffloadError::Panicked { .. })
    }
}

/// Runs `call` on another thread and waits for its result for at most `deadline`. `what` names the call in errors and
/// logs.
///
/// The runtime's blocking pool is not used: a call that hangs in the kernel would occupy one of its threads, and block
/// the shutdown of the runtime, for ever. Each call gets an idle thread or a new one, so no call waits for another.
pub async fn offload<T, E, F>(deadline: Duration, what: impl Into<String>, call: F) -> Result<T, OffloadError<E>>
where
    T: Send + 'static,
    E: Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    let what = what.into();
    let (sender, receiver) = oneshot::channel();
    let dispatched = dispatch(Box::new(move |mark_idle| {
        let result = call();
        // Before the result is sent: a caller that makes its next call at once then finds this thread idle.
        mark_idle();
        if let Err(unwanted) = sender.send(result) {
            // The caller has given up. Dropping the result may hang, and this thread may have its next job already.
            let _ = thread::Builder::new().name(THREAD_NAME.into()).spawn(move || drop(unwanted));
        }
    }));
    if let Err(source) = dispatched {
        return Err(OffloadError::Spawn { what, source });
    }
    match tokio::time::timeout(deadline, receiver).await {
        Err(_) => {
            tracing::warn!(what, ?deadline, "host call exceeded its deadline; its thread keeps running");
            Err(OffloadError::Deadline { what, deadline })
        }
        Ok(Err(_)) => Err(OffloadError::Panicked { what }),
        Ok(Ok(result)) => result.map_err(OffloadError::Failed),
    }
}

const THREAD_NAME: &str = "offload";
const MAX_IDLE_THREADS: usize = 128;
/// How long an idle thread waits for a job before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The job calls its argument when the thread can be given the next job.
type Job = Box<dyn FnOnce(&mut dyn FnMut()) + Send>;

/// Threads that wait for a job; the one that became idle last is at the end.
static IDLE_THREADS: Mutex<Vec<IdleThread>> = Mutex::new(Vec::new());

struct IdleThread {
    thread: thread::ThreadId,
    jobs: Sender<Job>,
}

fn idle_threads() -> MutexGuard<'static, Vec<IdleThread>> {
    IDLE_THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the job to an idle thread, or to a new one if there is none.
fn dispatch(job: Job) -> std::io::Result<()> {
    // A thread removed from the list gets exactly one job: no other caller can find it.
    let idle = idle_threads().pop();
    let job = match idle {
        Some(idle) => match idle.jobs.send(job) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(job)) => job,
        },
        None => job,
    };
    thread::Builder::new().name(THREAD_NAME.into()).spawn(move || run_jobs(job)).map(drop)
}

/// The main function of a thread. A job that panics ends the thread.
fn run_jobs(first: Job) {
    let thread = thread::current().id();
    let (sender, jobs) = mpsc::channel();
    let mut job = first;
    loop {
        let mut is_idle = false;
        job(&mut || {
            let mut idle = idle_threads();
            if idle.len() < MAX_IDLE_THREADS {
                idle.push(IdleThread { thread, jobs: sender.clone() });
                is_idle = true;
            }
        });
        if !is_idle {
            return;
        }
        job = match jobs.recv_timeout(IDLE_TIMEOUT) {
            Ok(next) => next,
            Err(RecvTimeoutError::Timeout) => {
                let mut idle = idle_threads();
                let index = idle.iter().position(|other| other.thread == thread);
                if let Some(index) = index {
                    idle.remove(index);
                    return;
                }
                drop(idle);
                // `dispatch` has just removed this thread from the list, and is about to send its job.
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
    async fn a_call_returns_its_result_or_fails_at_the_deadline() {
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
        assert!(hung.unwrap_err().is_uncertain());
        drop(release);

        let panicked: Result<(), OffloadError<()>> = offload(long, "panic", || panic!("on purpose")).await;
        assert!(matches!(panicked, Err(OffloadError::Panicked { .. })));
    }

    #[tokio::test]
    async fn calls_reuse_threads_and_none_waits_for_one_that_hangs() {
        let long = Duration::from_secs(60);
        let thread_id = || Ok::<_, ()>(thread::current().id());
        let mut threads = std::collections::HashSet::new();
        for _ in 0..200 {
            threads.insert(offload(long, "inspect", thread_id).await.unwrap());
        }
        assert!(threads.len() < 100, "{} threads for 200 sequential calls", threads.len());

        let (release, hold) = std::sync::mpsc::channel::<()>();
        let hold = std::sync::Arc::new(Mutex::new(hold));
        let hanging: Vec<_> = (0..2 * MAX_IDLE_THREADS)
            .map(|_| {
                let hold = hold.clone();
                tokio::spawn(offload(long, "hang", move || {
                    let _ = hold.lock().map(|hold| hold.recv());
                    Ok::<_, ()>(())
                }))
            })
            .collect();
        for _ in 0..10 {
            offload(long, "inspect", thread_id).await.unwrap();
        }
        drop(release);
        for call in hanging {
            call.await.unwrap().unwrap();
        }
        assert!(idle_threads().len() <= MAX_IDLE_THREADS);
    }
}
