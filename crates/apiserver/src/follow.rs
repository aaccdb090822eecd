//! The server's own watchers of its store: each follows something until the server goes away, and starts over when its
//! watch has fallen behind.

use std::sync::Arc;

use cleat_store::WatchError;
use futures::future::BoxFuture;

use crate::state::ServerState;

/// Runs `follow` again and again. It ends by itself only with an error: the store's end, or a watch that is too late.
pub(crate) async fn follow<F>(api: Arc<ServerState>, what: &'static str, follow: F)
where
    F: for<'a> Fn(&'a ServerState) -> BoxFuture<'a, Result<(), WatchError>>,
{
    let following = async {
        loop {
            match follow(&api).await {
                Err(WatchError::Closed) => return,
                Ok(()) => {}
                Err(error) => tracing::warn!(%error, what, "a watch of the server's own starts over"),
            }
        }
    };
    api.closing.run_until_cancelled(following).await;
}
