//! The server's own metrics, in the OpenMetrics text format.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cleat_store::Range;
use cleat_store::embedded::StoreStatistics;
use http::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use cleat_auth::request_info::RequestInfo;
use cleat_registry::catalog::ServedKinds;

pub(crate) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const DURATION_BUCKETS_SECONDS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    group: String,
    resource: String,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DurationLabels {
    verb: &'static str,
    group: String,
    resource: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabels {
    group: String,
    resource: String,
}

type Histograms = Family<DurationLabels, Histogram, fn() -> Histogram>;

pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: Histograms,
    watchers: Family<ResourceLabels, Gauge>,
    objects: Family<ResourceLabels, Gauge>,
    store_statistics: Arc<StoreStatistics>,
}

/// Counts a running watch until it is dropped.
pub(crate) struct WatchGuard(Gauge);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    /// `extra` registers the metrics of other components of the process.
    pub(crate) fn new(store_statistics: Arc<StoreStatistics>, extra: &[fn(&mut Registry)]) -> Self {
        let mut registry = Registry::default();
        extra.iter().for_each(|register| register(&mut registry));
        let requests = Family::default();
        let durations: Histograms = Family::new_with_constructor(|| Histogram::new(DURATION_BUCKETS_SECONDS));
        let (watchers, objects) = (Family::default(), Family::default());
        registry.register("apiserver_request", "Responses sent", requests.clone());
        registry.register(
            "apiserver_request_duration_seconds",
            "Time from the start of a request to its response, except watches",
            durations.clone(),
        );
        registry.register("apiserver_watchers", "Watches running", watchers.clone());
        registry.register("apiserver_storage_objects", "Objects stored", objects.clone());
        registry.register_collector(Box::new(StoreCollector(store_statistics.clone())));
        Self { registry, requests, durations, watchers, objects, store_statistics }
    }

    /// Counts a response. Watches are counted without their duration.
    pub(crate) fn record_response(&self, request: &RequestInfo, code: StatusCode, duration: Duration) {
        let (group, resource) = request.metric_labels();
        let (verb, code) = (request.verb, code.as_u16());
        let (group, resource) = if verb == "watch" {
            (group, resource)
        } else {
            let labels = DurationLabels { verb, group, resource };
            self.durations.get_or_create(&labels).observe(duration.as_secs_f64());
            (labels.group, labels.resource)
        };
        self.requests.get_or_create(&RequestLabels { verb, group, resource, code }).inc();
    }

    /// Counts the watch as running until the guard is dropped.
    pub(crate) fn track_watch(&self, request: &RequestInfo) -> WatchGuard {
        let (group, resource) = request.metric_labels();
        let gauge = self.watchers.get_or_create(&ResourceLabels { group, resource }).clone();
        gauge.inc();
        WatchGuard(gauge)
    }

    /// Did the store's last commit succeed?
    pub(crate) fn store_is_writable(&self) -> bool {
        !self.store_statistics.failing.load(Ordering::Relaxed)
    }

    /// Counts the stored objects and encodes all metrics.
    pub(crate) async fn encode(
        &self,
        store: &dyn cleat_store::Store,
        kinds: &ServedKinds,
    ) -> Result<String, fmt::Error> {
        for kind in kinds.iter() {
            let d = kind.descriptor();
            let prefix = d.prefix(None);
            if let Ok(found) = store.list(Range { prefix: &prefix, ..Range::default() }).await {
                let labels = ResourceLabels { group: d.group.clone(), resource: d.plural.clone() };
                self.objects.get_or_create(&labels).set(i64::try_from(found.stored.len()).unwrap_or(i64::MAX));
            }
        }
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

/// Encodes the statistics that the store itself keeps.
#[derive(Debug)]
struct StoreCollector(Arc<StoreStatistics>);

impl Collector for StoreCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        for (name, help, value) in [
            ("cleat_store_commits", "Batches made durable", load(&self.0.commits)),
            ("cleat_store_writes", "Writes made durable", load(&self.0.writes)),
            ("cleat_store_failures", "Batches that could not be made durable", load(&self.0.failures)),
            ("cleat_store_checkpoints", "Checkpoints of the log into the database file", load(&self.0.checkpoints)),
            ("cleat_store_checkpoint_failures", "Checkpoints that failed", load(&self.0.checkpoint_failures)),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let buckets: Vec<(f64, u64)> = self
            .0
            .batch_sizes()
            .map(|(limit, count)| {
                (limit.map_or(f64::INFINITY, |l| f64::from(u32::try_from(l).unwrap_or(u32::MAX))), count)
            })
            .collect();
        let (writes, commits) = (load(&self.0.writes), load(&self.0.commits));
        let name = "cleat_store_batch_size";
        let mut metric = encoder.encode_descriptor(name, "Writes that shared one sync", None, MetricType::Histogram)?;
        #[allow(clippy::cast_precision_loss)]
        metric.encode_histogram::<NoLabelSet>(writes as f64, commits, &buckets, None)
    }
}
