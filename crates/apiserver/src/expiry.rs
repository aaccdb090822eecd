//! Events do not stay: one that nobody has repeated for an hour is deleted.

use std::sync::Arc;
use std::time::Duration;

use cleat_store::{Range, WriteError};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use serde::Deserialize;

use crate::state::ServerState;

const EVENTS: &str = "/registry/events/";
const LIFETIME: Duration = Duration::from_secs(3600);
const PERIOD: Duration = Duration::from_secs(60);

/// Sweeps until the server goes away.
pub(crate) async fn run(api: Arc<ServerState>) {
    let closing = api.closing.clone();
    let mut pause = Duration::ZERO;
    while closing.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        pause = sweep(&api, Timestamp::now()).await;
    }
}

/// Says how long there will be nothing to do.
async fn sweep(api: &ServerState, now: Timestamp) -> Duration {
    let Ok(snapshot) = api.store.list(Range { prefix: EVENTS, ..Range::default() }).await else { return PERIOD };
    // An event that comes after this is heard of after it.
    let mut oldest = now;
    for entry in snapshot.entries() {
        let Some(last) = serde_json::from_slice::<Heard>(&entry.value).ok().and_then(|heard| heard.last()) else {
            continue;
        };
        if !is_expired(last, now) {
            oldest = oldest.min(last);
            continue;
        }
        match api.store.delete(&entry.key, entry.modified).await {
            // Somebody repeated or deleted it meanwhile.
            Ok(_) | Err(WriteError::Conflict { .. } | WriteError::Missing { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "expired events stay for now");
                return PERIOD;
            }
        }
    }
    pause(oldest, now)
}

/// How long to wait for the oldest. Clocks are set and events are edited: not as long as it may take.
fn pause(oldest: Timestamp, now: Timestamp) -> Duration {
    let left = LIFETIME.saturating_sub(now.duration_since(oldest).unsigned_abs());
    left.clamp(PERIOD, 10 * PERIOD)
}

/// When something was heard of an event, and nothing else of it: most events are looked at in vain.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Heard {
    series: Option<Series>,
    last_timestamp: Option<Time>,
    event_time: Option<MicroTime>,
    metadata: Metadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Series {
    last_observed_time: Option<MicroTime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    creation_timestamp: Option<Time>,
}

impl Heard {
    fn last(self) -> Option<Timestamp> {
        let heard = [
            self.series.and_then(|s| s.last_observed_time).map(|t| t.0),
            self.last_timestamp.map(|t| t.0),
            self.event_time.map(|t| t.0),
            self.metadata.creation_timestamp.map(|t| t.0),
        ];
        heard.into_iter().flatten().max()
    }
}

/// Whether nothing was heard of the event for its lifetime.
fn is_expired(last: Timestamp, now: Timestamp) -> bool {
    now.duration_since(last).unsigned_abs() > LIFETIME && now > last
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Event, EventSeries};

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
            let heard: Heard = serde_json::from_value(serde_json::to_value(&event).unwrap()).unwrap();
            assert_eq!(is_expired(heard.last().unwrap(), now), want, "{case}");
        }
    }

    #[test]
    fn what_was_heard_last_counts_wherever_it_is_written() {
        let time = |second: i64| Timestamp::from_second(second).unwrap();
        let mut event = Event::default();
        let last = |event: &Event| {
            let heard: Heard = serde_json::from_value(serde_json::to_value(event).unwrap()).unwrap();
            heard.last()
        };
        assert_eq!(last(&event), None);
        event.metadata.creation_timestamp = Some(Time(time(1)));
        assert_eq!(last(&event), Some(time(1)));
        event.event_time = Some(MicroTime(time(2)));
        assert_eq!(last(&event), Some(time(2)));
        event.series = Some(EventSeries { last_observed_time: Some(MicroTime(time(4))), count: Some(2) });
        assert_eq!(last(&event), Some(time(4)));
        event.last_timestamp = Some(Time(time(3)));
        assert_eq!(last(&event), Some(time(4)));
    }

    #[test]
    fn nobody_looks_before_there_can_be_something_to_see() {
        let now = Timestamp::from_second(100_000).unwrap();
        for (case, oldest, want) in [
            ("nothing is old", 100_000, 600),
            ("soon", 100_000 - 3400, 200),
            ("now", 100_000 - 3600, 60),
            ("from a clock ahead of ours", 200_000, 60),
        ] {
            let oldest = Timestamp::from_second(oldest).unwrap();
            assert_eq!(pause(oldest, now), Duration::from_secs(want), "{case}");
        }
    }
}
