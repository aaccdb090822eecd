//! Deletes events that were last observed more than an hour ago.
//!
//! It deletes from the store directly, as the server itself: finalizers and write authorization do not apply.

use std::sync::Arc;
use std::time::Duration;

use cleat_store::{Range, WriteError};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use serde::Deserialize;

use crate::state::ServerState;

const EVENTS: &str = "/registry/events/";
const EVENT_LIFETIME: Duration = Duration::from_secs(3600);
const MIN_SWEEP_INTERVAL: Duration = Duration::from_secs(60);
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(600);

/// Runs until the server closes.
pub(crate) async fn run(api: Arc<ServerState>) {
    let closing = api.closing.clone();
    let mut interval = Duration::ZERO;
    while closing.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
        interval = sweep(&api, Timestamp::now()).await;
    }
}

/// Deletes the expired events. Returns the time until the next sweep.
async fn sweep(api: &ServerState, now: Timestamp) -> Duration {
    let Ok(snapshot) = api.store.list(Range { prefix: EVENTS, ..Range::default() }).await else {
        return MIN_SWEEP_INTERVAL;
    };
    // Events that are created after the list are observed later than `now`.
    let mut oldest = now;
    for entry in snapshot.entries() {
        let times = serde_json::from_slice::<EventTimes>(&entry.value).ok();
        let Some(last) = times.and_then(EventTimes::last_observed) else { continue };
        if !is_expired(last, now) {
            oldest = oldest.min(last);
            continue;
        }
        match api.store.delete(&entry.key, entry.modified).await {
            // A client has updated or deleted it in the meantime.
            Ok(_) | Err(WriteError::Conflict { .. } | WriteError::Missing { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot delete an expired event, trying again later");
                return MIN_SWEEP_INTERVAL;
            }
        }
    }
    next_interval(oldest, now)
}

/// The time until the oldest event expires, within the bounds. There is an upper bound because the clock may be set and
/// events may be edited in the meantime.
fn next_interval(oldest: Timestamp, now: Timestamp) -> Duration {
    let left = EVENT_LIFETIME.saturating_sub(now.duration_since(oldest).unsigned_abs());
    left.clamp(MIN_SWEEP_INTERVAL, MAX_SWEEP_INTERVAL)
}

/// The times of an event. The other fields are not decoded: a sweep reads every event and deletes few.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EventTimes {
    series: Option<SeriesTimes>,
    last_timestamp: Option<Time>,
    event_time: Option<MicroTime>,
    metadata: MetadataTimes,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SeriesTimes {
    last_observed_time: Option<MicroTime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetadataTimes {
    creation_timestamp: Option<Time>,
}

impl EventTimes {
    /// The latest of the times. `None` if the event has none.
    fn last_observed(self) -> Option<Timestamp> {
        let times = [
            self.series.and_then(|s| s.last_observed_time).map(|t| t.0),
            self.last_timestamp.map(|t| t.0),
            self.event_time.map(|t| t.0),
            self.metadata.creation_timestamp.map(|t| t.0),
        ];
        times.into_iter().flatten().max()
    }
}

/// False also if `last` is in the future: another server's clock may be ahead.
fn is_expired(last: Timestamp, now: Timestamp) -> bool {
    now.duration_since(last).unsigned_abs() > EVENT_LIFETIME && now > last
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Event, EventSeries};

    use super::*;

    #[test]
    fn an_event_expires_an_hour_after_it_was_last_observed() {
        let at = |seconds| Some(Time(Timestamp::from_second(seconds).unwrap()));
        let now = Timestamp::from_second(100_000).unwrap();
        for (case, created, last, want) in [
            ("just created", 99_999, None, false),
            ("created long ago", 90_000, None, true),
            ("created long ago, observed recently", 90_000, at(99_000), false),
            ("from a clock ahead of ours", 200_000, None, false),
        ] {
            let mut event = Event { last_timestamp: last, ..Default::default() };
            event.metadata.creation_timestamp = at(created);
            let times: EventTimes = serde_json::from_value(serde_json::to_value(&event).unwrap()).unwrap();
            assert_eq!(is_expired(times.last_observed().unwrap(), now), want, "{case}");
        }
    }

    #[test]
    fn the_latest_time_counts_in_whichever_field_it_is() {
        let time = |second: i64| Timestamp::from_second(second).unwrap();
        let mut event = Event::default();
        let last = |event: &Event| {
            let times: EventTimes = serde_json::from_value(serde_json::to_value(event).unwrap()).unwrap();
            times.last_observed()
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
    fn the_next_sweep_is_when_the_oldest_event_expires() {
        let now = Timestamp::from_second(100_000).unwrap();
        for (case, oldest, want) in [
            ("nothing is old", 100_000, 600),
            ("soon", 100_000 - 3400, 200),
            ("now", 100_000 - 3600, 60),
            ("from a clock ahead of ours", 200_000, 60),
        ] {
            let oldest = Timestamp::from_second(oldest).unwrap();
            assert_eq!(next_interval(oldest, now), Duration::from_secs(want), "{case}");
        }
    }
}
