//! Events do not stay: one that nobody has repeated for an hour is deleted.

use std::sync::Arc;
use std::time::Duration;

use cleat_store::{Range, WriteError};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use tokio::time::MissedTickBehavior;

use crate::api::Api;

const EVENTS: &str = "/registry/events/";
const LIFETIME: Duration = Duration::from_secs(3600);
const PERIOD: Duration = Duration::from_secs(60);

/// Sweeps until the server goes away.
pub(crate) async fn run(api: Arc<Api>) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let closing = api.closing.clone();
    while closing.run_until_cancelled(ticks.tick()).await.is_some() {
        sweep(&api, Timestamp::now()).await;
    }
}

async fn sweep(api: &Api, now: Timestamp) {
    let Ok(snapshot) = api.store.list(Range { prefix: EVENTS, ..Range::default() }).await else { return };
    for entry in snapshot.entries() {
        let expired = serde_json::from_slice::<Event>(&entry.value).is_ok_and(|event| is_expired(&event, now));
        if !expired {
            continue;
        }
        match api.store.delete(&entry.key, entry.modified).await {
            // Somebody repeated or deleted it meanwhile.
            Ok(_) | Err(WriteError::Conflict { .. } | WriteError::Missing { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "expired events stay for now");
                return;
            }
        }
    }
}

/// Whether nothing was heard of the event for its lifetime.
fn is_expired(event: &Event, now: Timestamp) -> bool {
    let heard = [
        event.series.as_ref().and_then(|s| s.last_observed_time.as_ref()).map(|t| t.0),
        event.last_timestamp.as_ref().map(|t| t.0),
        event.event_time.as_ref().map(|t| t.0),
        event.metadata.creation_timestamp.as_ref().map(|t| t.0),
    ];
    let last = heard.into_iter().flatten().max();
    last.is_some_and(|last| now.duration_since(last).unsigned_abs() > LIFETIME && now > last)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    #[test]
    fn an_event_lives_an_hour_after_it_was_last_heard_of() {
        let at = |seconds| Some(Time(Timestamp::from_second(seconds).unwrap()));
        let now = Timestamp::from_second(100_000).unwrap();
        for (case, created, last, want) in [
            ("just made", 99_999, None, false),
            ("made long ago", 90_000, None, true),
            ("made long ago, repeated lately", 90_000, at(99_000), false),
            ("from a clock ahead of ours", 200_000, None, false),
        ] {
            let mut event = Event { last_timestamp: last, ..Default::default() };
            event.metadata.creation_timestamp = at(created);
            assert_eq!(is_expired(&event, now), want, "{case}");
        }
    }
}
