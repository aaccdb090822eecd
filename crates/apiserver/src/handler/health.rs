//! `/healthz`, `/livez` and `/readyz`.

use http::StatusCode;

use crate::http::query::Query;
use crate::http::reply::Reply;
use crate::state::ServerState;

/// The checks of `/livez`. The store is not among them: a server that cannot write still serves reads.
const LIVENESS_CHECKS: &[&str] = &["ping"];
/// The checks of `/readyz` and `/healthz`.
const READINESS_CHECKS: &[&str] = &["ping", "store-reads", "store-writes"];

pub(super) async fn check(state: &ServerState, path: &str, query: Option<&str>) -> Reply {
    let mut segments = path.split('/').filter(|s| !s.is_empty());
    let endpoint = segments.next().unwrap_or_default();
    let checks = if endpoint == "livez" { LIVENESS_CHECKS } else { READINESS_CHECKS };
    if let Some(check) = segments.next() {
        return match checks.contains(&check) && segments.next().is_none() {
            true if passes(state, check).await => Reply::text(StatusCode::OK, "ok"),
            true => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, "internal server error: reason withheld\n"),
            false => Reply::text(StatusCode::NOT_FOUND, "404 page not found\n"),
        };
    }
    let query = Query::parse(query);
    let excluded = |check: &str| query.all("exclude").any(|name| name == check);
    let mut text = String::new();
    let mut failed = false;
    for check in checks {
        if excluded(check) {
            text += &format!("[+]{check} excluded: ok\n");
        } else if passes(state, check).await {
            text += &format!("[+]{check} ok\n");
        } else {
            text += &format!("[-]{check} failed: reason withheld\n");
            failed = true;
        }
    }
    match (failed, query.get("verbose")) {
        (true, _) => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{text}{endpoint} check failed\n")),
        (false, Some(_)) => Reply::text(StatusCode::OK, format!("{text}{endpoint} check passed\n")),
        (false, None) => Reply::text(StatusCode::OK, "ok"),
    }
}

async fn passes(state: &ServerState, check: &str) -> bool {
    match check {
        "store-reads" => state.store.revision().await.is_ok(),
        "store-writes" => state.security.metrics.store_is_writable(),
        _ => true,
    }
}
