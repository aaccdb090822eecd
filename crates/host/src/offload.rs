//! Runs a blocking call beside the async workers, with a deadline. Owns the thread; must not know what the call does.

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
/// A thread per call and not the runtime's blocking pool: a call that hangs in the kernel would hold a pool slot, and
/// the runtime's shutdown, for ever. A thread costs about 30 µs, the calls made here cost more.
pub async fn offload<T, E, F>(deadline: Duration, what: impl Into<String>, call: F) -> Result<T, OffloadError<E>>
where
    T: Send + 'static,
    E: Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    let what = what.into();
    let (done, answer) = oneshot::channel();
    let spawned = std::thread::Builder::new().name("offload".into()).spawn(move || {
        let _ = done.send(call());
    });
    if let Err(source) = spawned {
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
}
