//! Keeps a reader current: a list, then a watch from its revision, then again from wherever the watch ended.
//!
//! kube's own watcher is not used because it does not tell at which revision its list was taken, and without that nobody
//! can know whether an object the list does not show is gone or was written after it.

use std::time::Duration;

use kube::Client;
use kube::api::{ListParams, Request, WatchParams};
use kube::core::Status;
use tracing::warn;

use crate::wire::{self, Lines};

const PAGE: u32 = 500;
/// The server ends a watch after this many seconds; one that is silent for longer has lost its connection.
const WATCH_SECONDS: u32 = 290;
const SILENCE: Duration = Duration::from_secs(300);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Who makes something of the texts.
pub(crate) trait Reader: Send {
    /// A list begins: what it does not show is gone.
    fn begun(&mut self);

    fn page(&mut self, text: &[u8]) -> serde_json::Result<Page>;

    /// Everything there was at this revision was listed.
    fn complete(&mut self, revision: &str);

    /// One line of the watch, which is not empty.
    fn line(&mut self, line: &[u8]) -> serde_json::Result<Taken>;
}

/// Of a list, what is beside its items.
pub(crate) struct Page {
    pub(crate) more: Option<String>,
    pub(crate) revision: String,
}

/// What a line of a watch came to.
pub(crate) enum Taken {
    /// Everything up to this revision is known now.
    Upto(String),
    Nothing,
    /// The server ends the watch.
    End(Box<Status>),
}

/// Why a watch came to an end.
enum End {
    /// Go on from this revision.
    Resume(String),
    /// The history from there on is gone. Did the watch work before that?
    TooOld { worked: bool },
    /// Go on from this revision, after a pause; a short one if the watch had worked.
    Failed { error: String, at: String, worked: bool },
}

/// Keeps the reader current with what is at this path, until dropped.
pub(crate) async fn keep(client: &Client, path: &str, reader: &mut dyn Reader) {
    let requests = Request::new(path);
    let mut from: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let failure = match from.take() {
            None => match list(client, &requests, reader).await {
                Ok(revision) => {
                    from = Some(revision);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Some(revision) => match watch(client, &requests, revision, reader).await {
                End::Resume(revision) => {
                    from = Some(revision);
                    None
                }
                End::TooOld { worked: true } => None,
                // The next list may be too old as soon as it is taken: it is not taken at once.
                End::TooOld { worked: false } => Some("the history it needs is gone".to_owned()),
                End::Failed { error, at, worked } => {
                    if worked {
                        pause = FIRST_PAUSE;
                    }
                    from = Some(at);
                    Some(error)
                }
            },
        };
        match failure {
            None => pause = FIRST_PAUSE,
            Some(error) => {
                warn!(path, error, "watch interrupted; it will be resumed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Takes a complete list, page by page, and returns its revision.
async fn list(client: &Client, requests: &Request, reader: &mut dyn Reader) -> kube::Result<String> {
    let mut parameters = ListParams::default().limit(PAGE);
    reader.begun();
    loop {
        let request = requests.list(&parameters).map_err(kube::Error::BuildRequest)?;
        let text = wire::text(client, request).await?;
        let Page { more, revision } = reader.page(&text).map_err(kube::Error::SerdeError)?;
        match more.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => {
                reader.complete(&revision);
                return Ok(revision);
            }
        }
    }
}

async fn watch(client: &Client, requests: &Request, mut revision: String, reader: &mut dyn Reader) -> End {
    let parameters = WatchParams::default().timeout(WATCH_SECONDS);
    let opened = async {
        let request = requests.watch(&parameters, &revision).map_err(kube::Error::BuildRequest)?;
        Lines::open(client, request).await
    };
    let mut lines = match opened.await {
        Ok(lines) => lines,
        Err(kube::Error::Api(status)) if status.code == 410 => return End::TooOld { worked: false },
        Err(error) => return End::Failed { error: error.to_string(), at: revision, worked: false },
    };
    let mut worked = false;
    loop {
        let line = match tokio::time::timeout(SILENCE, lines.next()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return End::Resume(revision),
            Ok(Err(error)) => return End::Failed { error: error.to_string(), at: revision, worked },
            Err(_) => return End::Failed { error: "the server is silent".to_owned(), at: revision, worked },
        };
        if line.trim_ascii().is_empty() {
            continue;
        }
        match reader.line(&line) {
            Ok(Taken::Upto(newest)) => {
                revision = newest;
                worked = true;
            }
            Ok(Taken::Nothing) => {}
            Ok(Taken::End(status)) if status.code == 410 => return End::TooOld { worked },
            Ok(Taken::End(status)) => return End::Failed { error: status.to_string(), at: revision, worked },
            Err(error) => return End::Failed { error: error.to_string(), at: revision, worked: false },
        }
    }
}
