//! The loop of the server's own controllers: each lists and watches something in the store until the server closes, and
//! starts over when its watch has failed.

use std::sync::Arc;

use cleat_store::WatchError;
use futures::future::BoxFuture;

use crate::state::ServerState;

/// Calls `watch` again and again until the server or the store closes. `watch` ends with an error: the store is
/// closed, or the watch has failed, for example because it fell too far behind. `controller` is the name in the log.
pub(crate) async fn run_until_closed<F>(api: Arc<ServerState>, controller: &'static str, watch: F)
where
    F: for<'a> Fn(&'a ServerState) -> BoxFuture<'a, Result<(), WatchError>>,
{
    let watching = async {
        loop {
            match watch(&api).await {
                Err(WatchError::Closed) => return,
                Ok(()) => {}
                Err(error) => tracing::warn!(%error, controller, "watch failed, listing again"),
            }
        }
    };
    api.closing.run_until_cancelled(watching).await;
}
