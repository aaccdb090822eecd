//! How controllers do: what waits in their queues, for how long, and how their reconciles end.
//! Counts only; whoever serves `/metrics` registers it. All controllers of a process share it.

use std::sync::OnceLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Of {
    name: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Ended {
    name: &'static str,
    result: &'static str,
}

type Histograms = Family<Of, Histogram, fn() -> Histogram>;

/// From a look that found nothing to do, to a call that ran into its deadline.
const BOUNDS: [f64; 12] = [0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];

struct Metrics {
    depth: Family<Of, Gauge>,
    waited: Histograms,
    worked: Histograms,
    ended: Family<Ended, Counter>,
    retries: Family<Of, Counter>,
}

fn metrics() -> &'static Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| Metrics {
        depth: Family::default(),
        waited: Histograms::new_with_constructor(|| Histogram::new(BOUNDS)),
        worked: Histograms::new_with_constructor(|| Histogram::new(BOUNDS)),
        ended: Family::default(),
        retries: Family::default(),
    })
}

pub fn register(registry: &mut Registry) {
    let m = metrics();
    registry.register("workqueue_depth", "Keys that wait to be worked on", m.depth.clone());
    registry.register_with_unit("workqueue_queue_duration", "How long keys waited", Unit::Seconds, m.waited.clone());
    registry.register_with_unit("workqueue_work_duration", "How long reconciles took", Unit::Seconds, m.worked.clone());
    registry.register("workqueue_reconciles", "Reconciles by how they ended", m.ended.clone());
    registry.register("workqueue_retries", "Keys put back after a failure", m.retries.clone());
}

/// One controller's own counters, looked up once.
#[derive(Clone)]
pub(crate) struct Meter {
    depth: Gauge,
    waited: Histogram,
    worked: Histogram,
    retries: Counter,
    done: Counter,
    failed: Counter,
    conflicted: Counter,
    overloaded: Counter,
}

#[derive(Clone, Copy)]
pub(crate) enum Result {
    Done,
    Conflicted,
    Overloaded,
    Failed,
}

impl Meter {
    pub(crate) fn of(name: &'static str) -> Self {
        let m = metrics();
        let of = Of { name };
        let ended = |result| m.ended.get_or_create(&Ended { name, result }).clone();
        Self {
            depth: m.depth.get_or_create(&of).clone(),
            waited: m.waited.get_or_create(&of).clone(),
            worked: m.worked.get_or_create(&of).clone(),
            retries: m.retries.get_or_create(&of).clone(),
            done: ended("done"),
            failed: ended("failed"),
            conflicted: ended("conflict"),
            overloaded: ended("overload"),
        }
    }

    pub(crate) fn taken(&self, waited: Duration, left: usize) {
        self.depth.set(i64::try_from(left).unwrap_or(i64::MAX));
        self.waited.observe(waited.as_secs_f64());
    }

    pub(crate) fn ended(&self, result: Result, worked: Duration) {
        self.worked.observe(worked.as_secs_f64());
        match result {
            Result::Done => &self.done,
            Result::Conflicted => &self.conflicted,
            Result::Overloaded => &self.overloaded,
            Result::Failed => &self.failed,
        }
        .inc();
        if !matches!(result, Result::Done) {
            self.retries.inc();
        }
    }
}
