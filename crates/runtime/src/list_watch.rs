//! Lists a collection and watches it from the list's revision, and resumes the watch at the revision it has reached.
//!
//! kube's own watcher is not used because it does not return the revision of its list. Without that, an object that is
//! missing in the list may have been deleted or may have been created after the list.
//!
//! The JSON is passed to a handler; this module decodes none of it.

use std::time::Duration;

use cleat_api::transport::Transport;
use kube::api::{ListParams, Request, WatchParams};
use kube::core::Status;
use tracing::warn;

use crate::calls;
use crate::watch_lines::WatchLines;

const LIST_PAGE_SIZE: u32 = 500;
/// The server ends a watch after this many seconds.
const WATCH_TIMEOUT_SECONDS: u32 = 290;
/// A watch without any data for this long, which is longer than the server lets it run, has lost its connection.
const MAX_WATCH_SILENCE: Duration = Duration::from_secs(300);
const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// Decodes and applies the JSON of lists and watch events.
pub(crate) trait ListWatchHandler: Send {
    /// A list starts. It may start again before it is completed.
    fn list_started(&mut self);

    fn list_page(&mut self, json: &[u8]) -> serde_json::Result<ListPage>;

    /// All pages of a list at this revision were handled: an object that was in none of them does not exist at it.
    fn list_completed(&mut self, revision: &str);

    /// Handles one watch event, which is never empty.
    fn watch_event(&mut self, json: &[u8]) -> serde_json::Result<WatchProgress>;
}

/// The metadata of one page of a list.
pub(crate) struct ListPage {
    /// Absent or empty on the last page.
    pub(crate) continue_token: Option<String>,
    pub(crate) revision: String,
}

/// How far a watch event has brought the handler.
pub(crate) enum WatchProgress {
    /// Everything up to this revision was handled: a new watch resumes here.
    Reached(String),
    None,
    /// The server ends the watch with this status.
    ServerError(Box<Status>),
}

/// Why a watch ended. `had_events` is true if it delivered an event before.
enum WatchEnd {
    /// The server ended it. Resume at this revision without delay.
    Completed(String),
    /// The server no longer has the history from the revision on (410 Gone). List again.
    Expired { had_events: bool },
    /// Resume at `revision` after a delay, the initial one if the watch had events.
    Failed { error: String, revision: String, had_events: bool },
}

/// Keeps the handler current with the collection at this path, until dropped.
pub(crate) async fn run(client: &dyn Transport, path: &str, handler: &mut dyn ListWatchHandler) {
    let requests = Request::new(path);
    let mut resume_at: Option<String> = None;
    let mut delay = INITIAL_RETRY_DELAY;
    loop {
        let failure = match resume_at.take() {
            None => match list(client, &requests, handler).await {
                Ok(revision) => {
                    resume_at = Some(revision);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Some(revision) => match watch(client, &requests, revision, handler).await {
                WatchEnd::Completed(revision) => {
                    resume_at = Some(revision);
                    None
                }
                WatchEnd::Expired { had_events: true } => None,
                // The next list may expire as fast as this one did: it is delayed.
                WatchEnd::Expired { had_events: false } => Some("its revision has expired".to_owned()),
                WatchEnd::Failed { error, revision, had_events } => {
                    if had_events {
                        delay = INITIAL_RETRY_DELAY;
                    }
                    resume_at = Some(revision);
                    Some(error)
                }
            },
        };
        match failure {
            None => delay = INITIAL_RETRY_DELAY,
            Some(error) => {
                warn!(path, error, retry_in = ?delay, "list or watch interrupted");
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(MAX_RETRY_DELAY);
            }
        }
    }
}

/// Lists all pages and returns the revision of the list.
async fn list(client: &dyn Transport, requests: &Request, handler: &mut dyn ListWatchHandler) -> kube::Result<String> {
    let mut parameters = ListParams::default().limit(LIST_PAGE_SIZE);
    handler.list_started();
    loop {
        let request = requests.list(&parameters).map_err(kube::Error::BuildRequest)?;
        let json = calls::fetch_bytes(client, request).await?;
        let ListPage { continue_token, revision } = handler.list_page(&json).map_err(kube::Error::SerdeError)?;
        match continue_token.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => {
                handler.list_completed(&revision);
                return Ok(revision);
            }
        }
    }
}

async fn watch(
    client: &dyn Transport,
    requests: &Request,
    mut revision: String,
    handler: &mut dyn ListWatchHandler,
) -> WatchEnd {
    let parameters = WatchParams::default().timeout(WATCH_TIMEOUT_SECONDS);
    let opened = async {
        let request = requests.watch(&parameters, &revision).map_err(kube::Error::BuildRequest)?;
        WatchLines::open(client, request.map(drop)).await
    };
    let mut lines = match opened.await {
        Ok(lines) => lines,
        Err(kube::Error::Api(status)) if status.code == 410 => return WatchEnd::Expired { had_events: false },
        Err(error) => return WatchEnd::Failed { error: error.to_string(), revision, had_events: false },
    };
    let mut had_events = false;
    loop {
        let line = match tokio::time::timeout(MAX_WATCH_SILENCE, lines.next()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return WatchEnd::Completed(revision),
            Ok(Err(error)) => return WatchEnd::Failed { error: error.to_string(), revision, had_events },
            Err(_) => return WatchEnd::Failed { error: "no data from the server".to_owned(), revision, had_events },
        };
        if line.trim_ascii().is_empty() {
            continue;
        }
        match handler.watch_event(&line) {
            Ok(WatchProgress::Reached(reached)) => {
                revision = reached;
                had_events = true;
            }
            Ok(WatchProgress::None) => {}
            Ok(WatchProgress::ServerError(status)) if status.code == 410 => return WatchEnd::Expired { had_events },
            Ok(WatchProgress::ServerError(status)) => {
                return WatchEnd::Failed { error: status.to_string(), revision, had_events };
            }
            // An event that cannot be decoded would come again at once: the delay must grow.
            Err(error) => return WatchEnd::Failed { error: error.to_string(), revision, had_events: false },
        }
    }
}
