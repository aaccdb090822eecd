//! `/healthz`, `/livez` and `/readyz`: is the server alive, and can it do its work?

use http::StatusCode;

use crate::api::Api;
use crate::http::query::Query;
use crate::http::reply::Reply;

/// What there is to check. A server that cannot write still lives: it answers reads.
const LIVE: &[&str] = &["ping"];
const READY: &[&str] = &["ping", "store-reads", "store-writes"];

pub(super) async fn check(api: &Api, path: &str, query: Option<&str>) -> Reply {
    let mut segments = path.split('/').filter(|s| !s.is_empty());
    let endpoint = segments.next().unwrap_or_default();
    let checks = if endpoint == "livez" { LIVE } else { READY };
    if let Some(one) = segments.next() {
        return match checks.contains(&one) && segments.next().is_none() {
            true if passes(api, one).await => Reply::text(StatusCode::OK, "ok"),
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
        } else if passes(api, check).await {
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

async fn passes(api: &Api, check: &str) -> bool {
    match check {
        "store-reads" => api.store.revision().await.is_ok(),
        "store-writes" => api.security.metrics.store_is_writable(),
        _ => true,
    }
}
