//! The flags that all sidecars share, in the syntax of the Go sidecars: `--flag=true`, `10s`, `Gate=true,Other=false`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

/// The flags of every sidecar.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// Address of the driver: unix:///path, tcp://host:port, or a path.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/csi/socket")]
    pub csi_address: String,
    /// Kubeconfig file. Default, in a pod: the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// URL of the API server, instead of that in the kubeconfig.
    #[arg(long, value_name = "URL")]
    pub master: Option<String>,
    /// Work only while holding a lease.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_election: bool,
    /// Namespace of the lease. Default: the namespace of the pod, or that of the kubeconfig.
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,
    /// Labels of the lease.
    #[arg(long, value_name = "K=V,…", value_parser = pairs, default_value = "")]
    pub leader_election_labels: Pairs,
    /// How long a leader that does not renew its lease keeps it.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "15s")]
    pub leader_election_lease_duration: Duration,
    /// How long a leader tries to renew its lease before it gives up leadership.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub leader_election_renew_deadline: Duration,
    /// Interval at which the leader renews the lease and other candidates try to acquire it.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5s")]
    pub leader_election_retry_period: Duration,
    /// Address on which metrics and health are served.
    #[arg(long, value_name = "ADDRESS", value_parser = listen_address)]
    pub http_endpoint: Option<SocketAddr>,
    /// Deprecated name of --http-endpoint.
    #[arg(long, value_name = "ADDRESS", value_parser = listen_address, conflicts_with = "http_endpoint")]
    pub metrics_address: Option<SocketAddr>,
    /// HTTP path of the metrics.
    #[arg(long, value_name = "PATH", default_value = "/metrics")]
    pub metrics_path: String,
    /// Timeout of one call to the driver [default: provisioner 10s, attacher 15s].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Maximum number of objects that are processed concurrently [default: provisioner 100, attacher 10].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub worker_threads: Option<u16>,
    /// Delay before the first retry. It doubles with each further failure.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1s")]
    pub retry_interval_start: Duration,
    /// Maximum delay between retries.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub retry_interval_max: Duration,
    /// Accepted for compatibility and ignored: Cleat reacts to changes and does not resync.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub resync: Option<Duration>,
    /// Accepted for compatibility and ignored: Cleat has no client-side rate limit.
    #[arg(long, value_name = "N")]
    pub kube_api_qps: Option<f32>,
    /// Accepted for compatibility and ignored: Cleat has no client-side rate limit.
    #[arg(long, value_name = "N")]
    pub kube_api_burst: Option<u32>,
    /// Accepted for compatibility and ignored: the features of the gates are always on.
    #[arg(long, value_name = "GATE=BOOL,…", value_parser = gates, default_value = "")]
    pub feature_gates: Gates,
    /// Log level: 0 to 3 is info, 4 is debug, 5 and above is trace.
    #[arg(short = 'v', long = "verbosity", value_name = "LEVEL", default_value_t = 0)]
    pub verbosity: u8,
    /// Accepted for compatibility and ignored.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub automaxprocs: bool,
}

/// `KEY=VALUE` pairs. In an `Arc`, because clap would not parse a bare map as one value.
pub type Pairs = std::sync::Arc<BTreeMap<String, String>>;
/// Feature gates by name.
pub type Gates = std::sync::Arc<BTreeMap<String, bool>>;

/// Parses a duration in Go's syntax: numbers with units, such as `1m30s` or `1.5s`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let error = || format!("{text:?} is not a duration such as 10s, 1m30s or 500ms");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut total, mut rest) = (Duration::ZERO, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(error)?;
        let number: f64 = rest[..digits].parse().map_err(|_| error())?;
        let after = &rest[digits..];
        let unit = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let seconds = match &after[..unit] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(error()),
        };
        total += Duration::try_from_secs_f64(number * seconds).map_err(|_| error())?;
        rest = &after[unit..];
    }
    if text.is_empty() { Err(error()) } else { Ok(total) }
}

/// Parses an address to listen on. Without a host it is 0.0.0.0: all IPv4 addresses.
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    full.parse().map_err(|_| format!("{text:?} is not an address such as :8080 or 127.0.0.1:8080"))
}

fn pairs(text: &str) -> Result<Pairs, String> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (key, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not of the form KEY=VALUE"))?;
        Ok::<_, String>((key.to_owned(), value.to_owned()))
    };
    parts.map(pair).collect::<Result<_, _>>().map(std::sync::Arc::new)
}

fn gates(text: &str) -> Result<Gates, String> {
    let gate = |(name, value): (&String, &String)| match value.as_str() {
        "true" => Ok((name.clone(), true)),
        "false" => Ok((name.clone(), false)),
        _ => Err(format!("{name}={value}: a gate is true or false")),
    };
    pairs(text)?.iter().map(gate).collect::<Result<_, _>>().map(std::sync::Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, millis) in [
            ("10s", Some(10_000)),
            ("1m30s", Some(90_000)),
            ("1.5s", Some(1_500)),
            ("250ms", Some(250)),
            ("1h0m0s", Some(3_600_000)),
            ("0", Some(0)),
            ("", None),
            ("10", None),
            ("s", None),
            ("10 s", None),
            ("-1s", None),
        ] {
            assert_eq!(duration(text).ok(), millis.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn lists_of_pairs_are_read() {
        assert!(gates("Topology=true,Other=false").unwrap()["Topology"]);
        assert!(gates("Topology=maybe").is_err());
        assert!(gates("").unwrap().is_empty());
        assert!(pairs("a").is_err());
        assert_eq!(listen_address(":8080").unwrap(), "0.0.0.0:8080".parse().unwrap());
        assert!(listen_address("8080").is_err());
    }
}
