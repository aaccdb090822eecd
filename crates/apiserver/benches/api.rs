//! Throughput, latency and memory of the API server: `cargo xtask bench api`.
//!
//! Every write is durable. Writers are kube clients, in the server's process or over TLS on the loopback interface. To
//! measure memory, the server runs in its own process: this program with the argument `fill` or `serve`.
//!
//! `CLEAT_BENCH_OBJECTS` sets the number of objects (default 100,000), TMPDIR the disk.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cleat_apiserver::{ApiServer, Config};
use futures::future::join_all;
use http_body_util::BodyExt as _;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
/// The duration of each throughput measurement.
const MEASURING_TIME: Duration = Duration::from_secs(5);
const WATCHERS: usize = 1000;
const WATCHED_WRITES: usize = 200;
const WRITERS: usize = 64;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["fill", dir] => runtime.block_on(fill(Path::new(dir))),
        ["serve", dir] => runtime.block_on(serve(Path::new(dir))),
        _ => {
            println!("| what | figure | target |\n|---|---|---|");
            runtime.block_on(creates());
            runtime.block_on(deliveries());
            runtime.block_on(many_objects());
        }
    }
}

fn objects() -> usize {
    std::env::var("CLEAT_BENCH_OBJECTS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000)
}

fn row(what: &str, figure: String, target: &str) {
    println!("| {what} | {figure} | {target} |");
}

fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory")
}

async fn open(dir: &Path) -> ApiServer {
    let config = Config::new(dir, "127.0.0.1:0".parse().expect("an address"));
    ApiServer::open(config).await.expect("the server opens")
}

async fn over_tls(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.expect("a configuration");
    Client::try_from(config).expect("a client")
}

fn claim(name: &str) -> PersistentVolumeClaim {
    let claim = json!({
        "metadata": { "name": name, "labels": { "app.kubernetes.io/name": "database", "app.kubernetes.io/instance": name } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "cleat-block",
            "resources": { "requests": { "storage": "10Gi" } },
        },
    });
    serde_json::from_value(claim).expect("a claim")
}

async fn create(client: &Client, name: &str) {
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(client.clone());
    claims.create(&PostParams::default(), &claim(name)).await.expect("the claim is created");
}

/// The CPU time of all threads of this process. Other processes do not affect it.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let own = text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let all = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(all.sum::<u64>().max(own))
}

/// Creates per second with one writer per client, and the CPU time per create. Each writer waits for its last write.
async fn rate(clients: &[Client], name: &str) -> String {
    let (started, before) = (Instant::now(), cpu_time());
    let writers = clients.iter().enumerate().map(|(writer, client)| {
        let (client, name) = (client.clone(), name.to_owned());
        tokio::spawn(async move {
            let mut done = 0usize;
            while started.elapsed() < MEASURING_TIME {
                create(&client, &format!("{name}-{writer}-{done}")).await;
                done += 1;
            }
            done
        })
    });
    let done: usize = join_all(writers).await.into_iter().map(|d| d.expect("a writer")).sum();
    let cpu_micros = cpu_time().saturating_sub(before).as_secs_f64() * 1e6 / done as f64;
    format!("{:.0}/s, {cpu_micros:.0} µs of CPU each", done as f64 / started.elapsed().as_secs_f64())
}

async fn creates() {
    let dir = scratch();
    let server = open(dir.path()).await;
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    let inside = server.client("bench");
    rate(std::slice::from_ref(&inside), "warm").await;
    let mut outside = Vec::new();
    for _ in 0..WRITERS {
        outside.push(over_tls(server.kubeconfig()).await);
    }
    row("durable creates, 1 writer, in-process", rate(std::slice::from_ref(&inside), "in-1").await, "");
    let many = rate(&vec![inside.clone(); WRITERS], "in-64").await;
    row("durable creates, 64 writers, in-process", many, "10,000/s");
    row("durable creates, 1 writer, TLS (client included)", rate(&outside[..1], "tls-1").await, "");
    row("durable creates, 64 writers, TLS (clients included)", rate(&outside, "tls-64").await, "");
    stop.cancel();
    serving.await.expect("the server stops");
    server.close().await;
}

/// The number of lines that all watchers together have read.
#[derive(Default)]
struct DeliveredLines {
    count: AtomicUsize,
    changed: Notify,
}

impl DeliveredLines {
    async fn wait_for(&self, count: usize) {
        loop {
            let changed = self.changed.notified();
            if self.count.load(Ordering::Relaxed) >= count {
                return;
            }
            changed.await;
        }
    }
}

async fn deliveries() {
    let dir = scratch();
    let server = open(dir.path()).await;
    let client = server.client("bench");
    let delivered = Arc::new(DeliveredLines::default());
    let mut watchers = Vec::new();
    for _ in 0..WATCHERS {
        let uri = format!("{CLAIMS}?watch=1&resourceVersion=0");
        let request = http::Request::get(uri).body(Vec::new().into()).expect("a request");
        let mut body = client.send(request).await.expect("a watch").into_body();
        let delivered = delivered.clone();
        watchers.push(tokio::spawn(async move {
            while let Some(Ok(frame)) = body.frame().await {
                let lines = frame.data_ref().map_or(0, |data| data.iter().filter(|b| **b == b'\n').count());
                let before = delivered.count.fetch_add(lines, Ordering::Relaxed);
                if before / WATCHERS != (before + lines) / WATCHERS {
                    delivered.changed.notify_waiters();
                }
            }
        }));
    }
    let mut latencies = Vec::new();
    for round in 1..=WATCHED_WRITES {
        let started = Instant::now();
        create(&client, &format!("one-{round}")).await;
        delivered.wait_for(round * WATCHERS).await;
        latencies.push(started.elapsed());
    }
    latencies.sort();
    let median = latencies[latencies.len() / 2];
    row("one create, until the last of 1,000 watchers has it", format!("{:.1} ms", millis(median)), "");
    let started = Instant::now();
    join_all((0..WATCHED_WRITES).map(|i| {
        let client = client.clone();
        async move { create(&client, &format!("many-{i}")).await }
    }))
    .await;
    delivered.wait_for(2 * WATCHED_WRITES * WATCHERS).await;
    let rate = (WATCHED_WRITES * WATCHERS) as f64 / started.elapsed().as_secs_f64();
    row("deliveries to 1,000 watchers", format!("{rate:.0}/s"), "200,000/s");
    watchers.iter().for_each(|w| w.abort());
    server.close().await;
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

async fn many_objects() {
    let dir = scratch();
    let count = objects();
    let (mut filler, resident) = start("fill", dir.path());
    filler.wait().expect("the filler ends");
    let mebibytes = |kib: usize| format!("{:.0} MiB", kib as f64 / 1024.0);
    row(&format!("memory after creating {count} claims"), mebibytes(parse_digits(&resident)), "400 MiB");
    let started = Instant::now();
    let (mut server, _) = start("serve", dir.path());
    row(&format!("start with {count} claims on disk"), format!("{:.2} s", started.elapsed().as_secs_f64()), "2 s");
    let status = format!("/proc/{}/status", server.id());
    let before = kib(&status, "VmRSS");
    row("memory after that start", mebibytes(before), "400 MiB");
    let client = over_tls(&dir.path().join("kubeconfig")).await;
    for (what, query) in [("list of all, TLS", ""), ("list of all in pages of 500, TLS", "limit=500")] {
        // Resets VmHWM, the peak of resident memory.
        std::fs::write(format!("/proc/{}/clear_refs", server.id()), "5").expect("the high-water mark is reset");
        let before = kib(&status, "VmRSS");
        let started = Instant::now();
        let bytes = list(&client, query).await;
        let took = started.elapsed().as_secs_f64();
        let grown = kib(&status, "VmHWM").saturating_sub(before);
        let size = bytes as f64 / f64::from(1 << 20);
        let figure = format!("{took:.2} s, {size:.0} MiB sent, server grew by {}", mebibytes(grown));
        row(what, figure, if query.is_empty() { "1 s, no second copy" } else { "" });
    }
    server.kill().expect("the server ends");
    server.wait().expect("the server ends");
}

/// Reads a whole list and returns its size in bytes.
async fn list(client: &Client, query: &str) -> usize {
    let mut bytes = 0;
    let mut token = String::new();
    loop {
        let uri = format!("{CLAIMS}?{query}&continue={token}");
        let request = http::Request::get(uri).body(Vec::new().into()).expect("a request");
        let mut body = client.send(request).await.expect("a list").into_body();
        // The list's metadata comes before its items.
        let mut head = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.expect("a list that ends");
            let data = frame.data_ref().expect("data");
            bytes += data.len();
            if head.len() < 1024 {
                head.extend_from_slice(&data[..data.len().min(1024)]);
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let next = head.split_once(r#""continue":""#).and_then(|(_, rest)| rest.split_once('"'));
        match next {
            Some((next, _)) if !next.is_empty() => next.clone_into(&mut token),
            _ => return bytes,
        }
    }
}

/// Starts this program as a server and returns its first line of output.
fn start(mode: &str, dir: &Path) -> (Child, String) {
    let program = std::env::current_exe().expect("this program");
    let mut child =
        Command::new(program).arg(mode).arg(dir).stdout(Stdio::piped()).spawn().expect("the server's process");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("its first line");
    assert!(!line.is_empty(), "the server's process ended");
    (child, line)
}

fn kib(file: &str, field: &str) -> usize {
    let text = std::fs::read_to_string(file).expect("a status file");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    parse_digits(line)
}

fn parse_digits(text: &str) -> usize {
    text.chars().filter(char::is_ascii_digit).collect::<String>().parse().expect("a number")
}

/// Fills a data directory and prints the resident memory in KiB.
async fn fill(dir: &Path) {
    let server = open(dir).await;
    let client = server.client("bench");
    let next = AtomicUsize::new(0);
    join_all((0..WRITERS).map(|_| async {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= objects() {
                return;
            }
            create(&client, &format!("claim-{number:06}")).await;
        }
    }))
    .await;
    println!("{}", kib("/proc/self/status", "VmRSS"));
    server.close().await;
}

/// Serves a data directory until it is killed.
async fn serve(dir: &Path) {
    let server = open(dir).await;
    println!("serving");
    server.serve(CancellationToken::new()).await;
}
