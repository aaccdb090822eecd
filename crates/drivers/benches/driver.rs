//! The overhead of the driver: each step through its socket, compared with the same system calls and programs without
//! the driver. Needs root. `cargo xtask bench driver`.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use cleat_csi::{
    Client, Endpoint,
    v1::{
        self, VolumeCapability,
        volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode},
    },
};
use cleat_drivers::block::{self, Config};
use cleat_host::{
    Access,
    filesystem::{self, Format, Overwrite},
    loopdev,
    mount::{self, MountOptions},
};
use tokio_util::sync::CancellationToken;

const GIB: i64 = 1 << 30;
/// Fewer than created ones, because each is formatted.
const STAGED_VOLUMES: usize = 64;
const CREATED_VOLUMES: usize = 1024;
const IN_FLIGHT: [usize; 3] = [1, 16, 64];
const DEADLINE: Duration = Duration::from_secs(300);

#[tokio::main(flavor = "multi_thread")]
async fn main() {
    // `cargo test --benches` runs this too; it must do nothing then.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    assert!(rustix::process::geteuid().is_root(), "this mounts file systems: run it as root");
    let directory = Arc::new(tempfile::TempDir::with_prefix("cleat-bench-").unwrap());
    let config = Config::new(Endpoint::unix(directory.path().join("csi.sock")), directory.path().join("pool"), "n");
    let client = Client::new(config.endpoint.clone()).with_deadline(DEADLINE);
    let stop = CancellationToken::new();
    let config = Config { max_volumes: 100_000, ..config };
    let served = tokio::spawn(block::run(config, stop.clone()));
    client.wait_ready(Duration::from_secs(30)).await.unwrap();

    println!("| step | in flight | p50 | p99 | rate |\n|---|---|---|---|---|");
    // Measured first: ext4 does not reuse the inodes of deleted files for a while, and skipping them takes longer than
    // the rest.
    for (round, in_flight) in IN_FLIGHT.into_iter().enumerate() {
        let fresh = (round + 1) * CREATED_VOLUMES..(round + 2) * CREATED_VOLUMES;
        run("CreateVolume, nothing deleted before", in_flight, fresh, &client, &directory, Step::Create).await;
    }
    let all = CREATED_VOLUMES..(IN_FLIGHT.len() + 1) * CREATED_VOLUMES;
    run("(delete)", 1, all, &client, &directory, Step::Delete).await;
    let bare = measure_bare(directory.path());
    for in_flight in IN_FLIGHT {
        let create = run("CreateVolume", in_flight, 0..CREATED_VOLUMES, &client, &directory, Step::Create).await;
        let delete = run("DeleteVolume", in_flight, 0..CREATED_VOLUMES, &client, &directory, Step::Delete).await;
        run("(create)", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Create).await;
        let publish = run("ControllerPublish", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Attach).await;
        let up =
            run("NodeStage + NodePublish, ext4", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Up).await;
        let down =
            run("NodeUnpublish + NodeUnstage", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Down).await;
        run("ControllerUnpublish", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Detach).await;
        run("(delete)", in_flight, 0..STAGED_VOLUMES, &client, &directory, Step::Delete).await;
        if in_flight == 1 {
            println!("\nover the bare work, p50 per RPC, one in flight:");
            for (step, with, without, calls) in [
                ("CreateVolume", create, bare.create, 1),
                ("DeleteVolume", delete, bare.delete, 1),
                ("ControllerPublish", publish, bare.record, 1),
                ("NodeStage + NodePublish", up, bare.up, 2),
                ("NodeUnpublish + NodeUnstage", down, bare.down, 2),
            ] {
                println!("  {step}: {:.2} ms", (with - without) * 1e3 / f64::from(calls));
            }
            println!("\n| step | in flight | p50 | p99 | rate |\n|---|---|---|---|---|");
        }
    }
    stop.cancel();
    let _ = served.await;
}

#[derive(Clone, Copy)]
enum Step {
    Create,
    Attach,
    Up,
    Down,
    Detach,
    Delete,
}

/// Runs a step for all numbers, and returns its median duration in seconds.
async fn run(
    name: &str,
    in_flight: usize,
    numbers: std::ops::Range<usize>,
    client: &Client,
    directory: &Arc<tempfile::TempDir>,
    step: Step,
) -> f64 {
    let started = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for worker in 0..in_flight {
        let (client, directory, numbers) = (client.clone(), Arc::clone(directory), numbers.clone());
        running.spawn(async move {
            let mut times = Vec::new();
            for number in numbers.skip(worker).step_by(in_flight) {
                let started_at = Instant::now();
                run_step(step, &client, directory.path(), number).await;
                times.push(started_at.elapsed().as_secs_f64());
            }
            times
        });
    }
    let times = running.join_all().await.concat();
    report(name, &in_flight.to_string(), times, started.elapsed())
}

fn report(name: &str, in_flight: &str, mut times: Vec<f64>, total: Duration) -> f64 {
    times.sort_by(f64::total_cmp);
    let at = |fraction: f64| times[((times.len() - 1) as f64 * fraction) as usize];
    if !name.starts_with('(') {
        let rate = times.len() as f64 / total.as_secs_f64();
        println!("| {name} | {in_flight} | {:.2} ms | {:.2} ms | {rate:.0}/s |", at(0.5) * 1e3, at(0.99) * 1e3);
    }
    at(0.5)
}

async fn run_step(step: Step, client: &Client, directory: &Path, number: usize) {
    let volume_id = format!("v-{number}");
    let at = |name: &str| directory.join(format!("{name}-{number}")).to_str().unwrap().to_owned();
    let capability = || {
        Some(VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..Default::default() })),
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        })
    };
    match step {
        Step::Create => {
            let request = v1::CreateVolumeRequest {
                name: volume_id,
                capacity_range: Some(v1::CapacityRange { required_bytes: GIB, limit_bytes: 0 }),
                volume_capabilities: capability().into_iter().collect(),
                ..Default::default()
            };
            client.create_volume(request).await.unwrap();
        }
        Step::Attach => {
            let request = v1::ControllerPublishVolumeRequest {
                volume_id,
                node_id: "n".to_owned(),
                volume_capability: capability(),
                ..Default::default()
            };
            client.controller_publish_volume(request).await.unwrap();
        }
        Step::Up => {
            let (staging_target_path, target_path) = (at("stage"), at("target"));
            let stage = v1::NodeStageVolumeRequest {
                volume_id: volume_id.clone(),
                staging_target_path: staging_target_path.clone(),
                volume_capability: capability(),
                ..Default::default()
            };
            client.node_stage_volume(stage).await.unwrap();
            let publish = v1::NodePublishVolumeRequest {
                volume_id,
                staging_target_path,
                target_path,
                volume_capability: capability(),
                ..Default::default()
            };
            client.node_publish_volume(publish).await.unwrap();
        }
        Step::Down => {
            let unpublish = v1::NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path: at("target") };
            client.node_unpublish_volume(unpublish).await.unwrap();
            let unstage = v1::NodeUnstageVolumeRequest { volume_id, staging_target_path: at("stage") };
            client.node_unstage_volume(unstage).await.unwrap();
        }
        Step::Detach => {
            let request = v1::ControllerUnpublishVolumeRequest { volume_id, ..Default::default() };
            client.controller_unpublish_volume(request).await.unwrap();
        }
        Step::Delete => {
            client.delete_volume(v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await.unwrap();
        }
    }
}

/// Median durations in seconds, without the driver.
struct BareMedians {
    create: f64,
    record: f64,
    up: f64,
    down: f64,
    delete: f64,
}

/// Measures the same effects without the driver: as many synced files, the same programs, the same system calls.
fn measure_bare(parent: &Path) -> BareMedians {
    let directory = parent.join("bare");
    fs::create_dir(&directory).unwrap();
    let image = |number: usize| directory.join(format!("{number}.img"));
    let record = |number: usize| directory.join(format!("{number}.json"));
    let create = timed("bare: record with fsync, sparse file", CREATED_VOLUMES, |number| {
        write_synced(&record(number));
        File::create(image(number)).unwrap().set_len(GIB as u64).unwrap();
    });
    let rewritten = timed("bare: record replaced, directory synced", STAGED_VOLUMES, |number| {
        let temporary = directory.join("temporary");
        write_synced(&temporary);
        fs::rename(&temporary, record(number)).unwrap();
        File::open(&directory).unwrap().sync_all().unwrap();
    });
    let (stage, target) = (directory.join("stage"), directory.join("target"));
    fs::create_dir(&stage).unwrap();
    fs::create_dir(&target).unwrap();
    let (mut ups, mut downs) = (Vec::new(), Vec::new());
    for number in 0..STAGED_VOLUMES {
        let started_at = Instant::now();
        up(&image(number), &stage, &target);
        ups.push(started_at.elapsed().as_secs_f64());
        let started_at = Instant::now();
        mount::unmount(&target).unwrap();
        mount::unmount(&stage).unwrap();
        loopdev::detach_file(&image(number)).unwrap();
        downs.push(started_at.elapsed().as_secs_f64());
    }
    let total = |times: &[f64]| Duration::from_secs_f64(times.iter().sum());
    let (all_ups, all_downs) = (total(&ups), total(&downs));
    let up = report("bare: loop, mkfs.ext4, mount, bind", "1", ups, all_ups);
    let down = report("bare: unmount, unmount, detach", "1", downs, all_downs);
    let delete = timed("bare: two files removed, directory synced", CREATED_VOLUMES, |number| {
        fs::remove_file(record(number)).unwrap();
        fs::remove_file(image(number)).unwrap();
        File::open(&directory).unwrap().sync_all().unwrap();
    });
    BareMedians { create, record: rewritten, up, down, delete }
}

fn up(image: &Path, stage: &Path, target: &Path) {
    let device = loopdev::attach(image, Access::ReadWrite).unwrap();
    filesystem::mkfs(&device.path, Format::Ext4, &[], Overwrite::IfBlank).unwrap();
    mount::mount_fs(&device.path, stage, "ext4", &MountOptions::default()).unwrap();
    mount::bind(stage, target, Access::ReadWrite).unwrap();
}

fn write_synced(path: &Path) {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(path).unwrap();
    file.write_all(&[b'x'; 200]).unwrap();
    file.sync_all().unwrap();
}

fn timed(name: &str, count: usize, mut work: impl FnMut(usize)) -> f64 {
    let started = Instant::now();
    let times = (0..count)
        .map(|number| {
            let started_at = Instant::now();
            work(number);
            started_at.elapsed().as_secs_f64()
        })
        .collect();
    report(name, "1", times, started.elapsed())
}
