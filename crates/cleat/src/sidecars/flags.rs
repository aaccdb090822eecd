//! Flags in the form that the Go sidecars take them: `--flag=true`, `10s`, `Gate=true,Other=false`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

/// What every sidecar takes.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// The driver's socket: unix:///path, tcp://host:port, or a bare path.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/csi/socket")]
    pub csi_address: String,
    /// How to reach the API server; in a pod, its service account is used if this is absent.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The API server, where it is not the kubeconfig's.
    #[arg(long, value_name = "URL")]
    pub master: Option<String>,
    /// Run for a lease, and work only while holding it.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_election: bool,
    /// The namespace of the lease; the pod's own if absent.
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,
    /// Labels for the lease.
    #[arg(long, value_name = "K=V,…", value_parser = pairs, default_value = "")]
    pub leader_election_labels: Pairs,
    /// How long others wait for a silent leader.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "15s")]
    pub leader_election_lease_duration: Duration,
    /// A leader that could not renew for this long steps down.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub leader_election_renew_deadline: Duration,
    /// How often a leader renews, and others look.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5s")]
    pub leader_election_retry_period: Duration,
    /// Where to serve metrics and health.
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    pub http_endpoint: Option<SocketAddr>,
    /// The older name of --http-endpoint.
    #[arg(long, value_name = "ADDRESS", value_parser = listen, conflicts_with = "http_endpoint")]
    pub metrics_address: Option<SocketAddr>,
    #[arg(long, value_name = "PATH", default_value = "/metrics")]
    pub metrics_path: String,
    /// How long one call to the driver may take [default: each sidecar's own].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// How many objects are worked on at the same time [default: each sidecar's own].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub worker_threads: Option<u16>,
    /// The pause after a first failure; it doubles with each.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1s")]
    pub retry_interval_start: Duration,
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub retry_interval_max: Duration,
    /// Accepted for compatibility. Cleat looks again when something changes, never on a timer.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub resync: Option<Duration>,
    /// Accepted for compatibility. Cleat follows the server's own limits.
    #[arg(long, value_name = "N")]
    pub kube_api_qps: Option<f32>,
    /// Accepted for compatibility. Cleat follows the server's own limits.
    #[arg(long, value_name = "N")]
    pub kube_api_burst: Option<u32>,
    /// Accepted for compatibility: what the gates turn on, Cleat does in any case.
    #[arg(long, value_name = "GATE=BOOL,…", value_parser = gates, default_value = "")]
    pub feature_gates: Gates,
    /// How much to log: 0 to 3 is info, 4 debug, 5 and more everything.
    #[arg(short = 'v', long = "verbosity", value_name = "LEVEL", default_value_t = 0)]
    pub verbosity: u8,
    /// Accepted for compatibility.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub automaxprocs: bool,
}

/// clap takes a plain map for a list of values.
pub type Pairs = std::sync::Arc<BTreeMap<String, String>>;
pub type Gates = std::sync::Arc<BTreeMap<String, bool>>;

/// A duration as Go writes it: numbers with units, such as `1m30s` or `1.5s`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration such as 10s, 1m30s or 500ms");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut total, mut rest) = (Duration::ZERO, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        let after = &rest[digits..];
        let unit = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let seconds = match &after[..unit] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(wrong()),
        };
        total += Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())?;
        rest = &after[unit..];
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total) }
}

/// An address to listen on; without a host, on all of them.
fn listen(text: &str) -> Result<SocketAddr, String> {
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
        assert_eq!(listen(":8080").unwrap(), "0.0.0.0:8080".parse().unwrap());
        assert!(listen("8080").is_err());
    }
}
