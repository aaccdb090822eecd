//! Measures the latency of durable in-process writes: `cargo run --release -p cleat-apiserver --example write_speed
//! [COUNT]`.

use std::time::{Duration, Instant};

use cleat_apiserver::{ApiServer, Config};
use cleat_testing::build;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, Patch, PatchParams, PostParams};

const WRITERS: usize = 64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // On a worker task, where components run too. On the main thread every write would switch threads.
    tokio::spawn(measure()).await?
}

async fn measure() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let count: usize = std::env::args().nth(1).map_or(Ok(2000), |text| text.parse())?;
    let data = std::env::temp_dir().join(format!("cleat-write-speed-{}", std::process::id()));
    let server = ApiServer::open(Config::new(&data, "127.0.0.1:0".parse()?)).await?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(server.client("bench"), "default");
    let mut times = Vec::new();
    for i in 0..count {
        let started = Instant::now();
        claims.create(&PostParams::default(), &claim(&format!("one-{i}"))).await?;
        times.push(started.elapsed());
    }
    report("create, 1 writer", &mut times);
    for i in 0..count {
        let patch = serde_json::json!({ "status": { "phase": "Bound" } });
        let started = Instant::now();
        claims.patch_status(&format!("one-{i}"), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        times.push(started.elapsed());
    }
    report("patch status, 1 writer", &mut times);
    let started = Instant::now();
    let mut writers = tokio::task::JoinSet::new();
    for w in 0..WRITERS {
        let claims = claims.clone();
        writers.spawn(async move {
            let mut times = Vec::new();
            for i in 0..count / 4 {
                let started = Instant::now();
                claims.create(&PostParams::default(), &claim(&format!("many-{w}-{i}"))).await?;
                times.push(started.elapsed());
            }
            Ok::<_, kube::Error>(times)
        });
    }
    while let Some(done) = writers.join_next().await {
        times.extend(done??);
    }
    println!("{:.0} creates/s with {WRITERS} writers", times.len() as f64 / started.elapsed().as_secs_f64());
    report("create, 64 writers", &mut times);
    drop((claims, server));
    std::fs::remove_dir_all(data)?;
    Ok(())
}

fn claim(name: &str) -> PersistentVolumeClaim {
    let mut claim = build::claim("default", name, Some("fast"), "1Gi");
    claim.metadata.resource_version = None;
    claim
}

fn report(what: &str, times: &mut Vec<Duration>) {
    times.sort();
    println!("{what}: p50 {:?}, p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100]);
    times.clear();
}
