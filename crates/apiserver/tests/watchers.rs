//! kube-rs watchers over TLS, with lists, pages and streaming lists, get every change exactly once and in order: during
//! concurrent writes, cut connections, compaction and restarts of the server.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use cleat_store::embedded::HistoryLimits;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const TIMEOUT: Duration = Duration::from_secs(120);
const WRITERS: usize = 6;
const CHANGES: usize = 40;

/// A server on a socket. Clients connect through a relay, whose connections can be cut.
struct RunningServer {
    server: Option<ApiServer>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

async fn serve(dir: &Path, history: HistoryLimits) -> RunningServer {
    let mut config = Config::new(dir, "127.0.0.1:0".parse().unwrap());
    config.history = history;
    let server = ApiServer::open(config).await.unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    RunningServer { server: Some(server), stop, serving }
}

impl RunningServer {
    fn server(&self) -> &ApiServer {
        self.server.as_ref().unwrap()
    }

    async fn stop(mut self) {
        self.stop.cancel();
        (&mut self.serving).await.unwrap();
        self.server.take().unwrap().close().await;
    }
}

/// Forwards connections to the current address of the server.
struct Relay {
    address: SocketAddr,
    target: watch::Sender<SocketAddr>,
    /// Incremented by `cut`; connections of an earlier epoch are closed.
    epoch: watch::Sender<u64>,
}

impl Relay {
    async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (target, targets) = watch::channel(server);
        let (epoch, epochs) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *targets.borrow();
                let mut cut = epochs.clone();
                cut.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { address, target, epoch }
    }

    fn cut(&self) {
        self.epoch.send_modify(|epoch| *epoch += 1);
    }

    async fn client(&self, kubeconfig: &Path) -> Client {
        let mut kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        for cluster in kubeconfig.clusters.iter_mut().filter_map(|c| c.cluster.as_mut()) {
            cluster.server = Some(format!("https://{}", self.address));
        }
        let options = KubeConfigOptions::default();
        let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        config.tls_server_name = Some("localhost".into());
        Client::try_from(config).unwrap()
    }
}

/// The state that a watcher has reported. Applying an event checks that the versions of each object increase and that
/// no version is reported twice.
#[derive(Default)]
struct ObservedState {
    objects: BTreeMap<String, (u64, String)>,
    /// The objects of the list in progress.
    listing: Option<BTreeMap<String, (u64, String)>>,
    versions: BTreeSet<u64>,
    /// The number of completed lists.
    lists: usize,
}

fn content(map: &ConfigMap) -> (u64, String) {
    let data = map.data.clone().unwrap_or_default().remove("k").unwrap_or_default();
    (map.resource_version().unwrap().parse().unwrap(), data)
}

impl ObservedState {
    fn apply(&mut self, event: Event<ConfigMap>) {
        match event {
            Event::Init => self.listing = Some(BTreeMap::new()),
            Event::InitApply(map) => {
                let named = self.listing.as_mut().expect("a list has begun").insert(map.name_any(), content(&map));
                assert_eq!(named, None, "a list names an object once");
            }
            Event::InitDone => {
                let listed = self.listing.take().expect("a list has begun");
                for (name, (version, _)) in &listed {
                    let known = self.objects.get(name).map_or(0, |(version, _)| *version);
                    assert!(*version >= known, "a list is not older than earlier events: {name}");
                }
                self.objects = listed;
                self.lists += 1;
            }
            Event::Apply(map) => {
                let (version, data) = content(&map);
                assert!(self.versions.insert(version), "version {version} is reported once");
                let known = self.objects.insert(map.name_any(), (version, data)).map_or(0, |(version, _)| version);
                assert!(version > known, "{}: {version} after {known}", map.name_any());
            }
            Event::Delete(map) => {
                let (version, _) = content(&map);
                assert!(self.versions.insert(version), "version {version} is reported once");
                assert!(self.objects.remove(&map.name_any()).is_some(), "only what was there goes");
            }
        }
    }
}

/// A watcher that runs on its own task, and the state it has reported.
struct RunningWatcher {
    events: mpsc::UnboundedReceiver<Event<ConfigMap>>,
    state: ObservedState,
    task: JoinHandle<()>,
}

impl RunningWatcher {
    fn start(maps: Api<ConfigMap>, config: watcher::Config) -> Self {
        let (send, events) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            let mut stream = watcher(maps, config).boxed();
            loop {
                // Connection errors: the watcher recovers when it is polled again.
                match stream.try_next().await {
                    Ok(Some(event)) => drop(send.send(event)),
                    Ok(None) => return,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        });
        Self { events, state: ObservedState::default(), task }
    }

    async fn wait_until(&mut self, what: &str, condition: impl Fn(&ObservedState) -> bool) {
        let waiting = async {
            while self.state.listing.is_some() || !condition(&self.state) {
                let event = self.events.recv().await.expect("the watcher goes on");
                self.state.apply(event);
            }
        };
        let reached = tokio::time::timeout(TIMEOUT, waiting).await.is_ok();
        assert!(reached, "{what}: {:?}", self.state.objects);
    }

    async fn wait_for_objects(&mut self, what: &str, want: &BTreeMap<String, (u64, String)>) {
        self.wait_until(what, |state| state.objects == *want).await;
    }
}

impl Drop for RunningWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Creates, changes and deletes the objects of one writer. Retries when the connection or the server fails.
async fn write(maps: Api<ConfigMap>, writer: usize, changes: usize) {
    for i in 0..changes {
        let name = format!("w{writer}-{}", i % 7);
        let map = json!({ "metadata": { "name": name }, "data": { "k": i.to_string() } });
        loop {
            let map: ConfigMap = serde_json::from_value(map.clone()).unwrap();
            let done = match i % 5 {
                4 => maps.delete(&name, &DeleteParams::default()).await.map(drop),
                _ => match maps.create(&PostParams::default(), &map).await {
                    Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
                        let patch = json!({ "data": { "k": i.to_string() } });
                        maps.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
                    }
                    other => other.map(drop),
                },
            };
            match done {
                Ok(()) => break,
                Err(kube::Error::Api(status)) if status.code == 404 => break,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

async fn stored_objects(server: &ApiServer) -> BTreeMap<String, (u64, String)> {
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client("test"));
    let list = maps.list(&kube::api::ListParams::default()).await.unwrap();
    list.items.iter().map(|map| (map.name_any(), content(map))).collect()
}

fn modes() -> [(&'static str, watcher::Config); 3] {
    let list = watcher::Config::default();
    [("lists", list.clone()), ("pages", list.page_size(5)), ("streams", watcher::Config::default().streaming_lists())]
}

/// Runs writers and watchers during `disturb`. Afterwards every watcher's state equals the server's.
async fn with_disturbance<F, Fut>(history: HistoryLimits, disturb: F)
where
    F: FnOnce(tempfile::TempDir, RunningServer, Relay) -> Fut,
    Fut: Future<Output = (tempfile::TempDir, RunningServer, Relay)>,
{
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), history).await;
    let relay = Relay::start(served.server().address()).await;
    let client = relay.client(served.server().kubeconfig()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let mut watching: Vec<_> =
        modes().into_iter().map(|(mode, config)| (mode, RunningWatcher::start(maps.clone(), config))).collect();
    for (mode, watching) in &mut watching {
        watching.wait_until(mode, |state| state.lists > 0).await;
    }
    let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(write(maps.clone(), writer, CHANGES))).collect();
    let (_dir, served, _relay) = disturb(dir, served, relay).await;
    for writer in writers {
        tokio::time::timeout(TIMEOUT, writer).await.expect("writers end").unwrap();
    }
    let expected = stored_objects(served.server()).await;
    assert!(!expected.is_empty());
    for (mode, watching) in &mut watching {
        watching.wait_for_objects(mode, &expected).await;
    }
    drop(watching);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undisturbed_watchers_get_every_change_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), HistoryLimits::default()).await;
    let relay = Relay::start(served.server().address()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(relay.client(served.server().kubeconfig()).await);
    let mut watching: Vec<_> =
        modes().into_iter().map(|(mode, config)| (mode, RunningWatcher::start(maps.clone(), config))).collect();
    for (mode, watching) in &mut watching {
        watching.wait_until(mode, |state| state.lists > 0).await;
    }
    futures::future::join_all((0..WRITERS).map(|writer| write(maps.clone(), writer, CHANGES))).await;
    let expected = stored_objects(served.server()).await;
    let mut reported = Vec::new();
    for (mode, watching) in &mut watching {
        watching.wait_for_objects(mode, &expected).await;
        assert_eq!(watching.state.lists, 1, "{mode}: it did not list again");
        reported.push(watching.state.versions.clone());
    }
    assert!(reported[0].len() > WRITERS * CHANGES / 2, "{}", reported[0].len());
    assert!(reported.iter().all(|versions| *versions == reported[0]), "all got the same changes");
    drop(watching);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_connections_lose_and_repeat_no_change() {
    with_disturbance(HistoryLimits::default(), |dir, served, relay| async move {
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            relay.cut();
        }
        (dir, served, relay)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_whose_version_expired_lists_once_more() {
    let dir = tempfile::tempdir().unwrap();
    // With so little history, a watcher's version expires during a short interruption.
    let served = serve(dir.path(), HistoryLimits { events: 3, ..HistoryLimits::default() }).await;
    let relay = Relay::start(served.server().address()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(relay.client(served.server().kubeconfig()).await);
    for (mode, config) in modes() {
        let mut watching = RunningWatcher::start(maps.clone(), config);
        watching.wait_until(mode, |state| state.lists == 1).await;
        // The server is unreachable while an in-process client writes.
        let address = *relay.target.borrow();
        relay.target.send_replace("127.0.0.1:1".parse().unwrap());
        relay.cut();
        let inside: Api<ConfigMap> = Api::default_namespaced(served.server().client("test"));
        write(inside, 0, 30).await;
        relay.target.send_replace(address);
        let expected = stored_objects(served.server()).await;
        watching.wait_for_objects(mode, &expected).await;
        assert_eq!(watching.state.lists, 2, "{mode}: it lists once more, and only once");
    }
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_continue_after_a_restart_of_the_server() {
    with_disturbance(HistoryLimits::default(), |dir, mut served, relay| async move {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            served.stop().await;
            relay.cut();
            served = serve(dir.path(), HistoryLimits::default()).await;
            relay.target.send_replace(served.server().address());
            relay.cut();
        }
        (dir, served, relay)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_causes_lists_but_loses_no_change() {
    with_disturbance(HistoryLimits { events: 2, ..HistoryLimits::default() }, |dir, served, relay| async move {
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            relay.cut();
        }
        (dir, served, relay)
    })
    .await;
}
