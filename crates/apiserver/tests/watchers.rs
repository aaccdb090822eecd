//! kube-rs watchers over real sockets, in both list modes, see exactly the sequence of changes: under concurrent writers,
//! cut connections, compaction and restarts of the server.

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

const WAIT: Duration = Duration::from_secs(120);
const WRITERS: usize = 6;
const CHANGES: usize = 40;

/// A served server, stopped and started again at will. Clients reach it through a relay whose connections can be cut.
struct Served {
    server: Option<ApiServer>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

async fn serve(dir: &Path, history: HistoryLimits) -> Served {
    let mut config = Config::new(dir, "127.0.0.1:0".parse().unwrap());
    config.history = history;
    let server = ApiServer::open(config).await.unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    Served { server: Some(server), stop, serving }
}

impl Served {
    fn server(&self) -> &ApiServer {
        self.server.as_ref().unwrap()
    }

    async fn end(mut self) {
        self.stop.cancel();
        (&mut self.serving).await.unwrap();
        self.server.take().unwrap().close().await;
    }
}

/// Forwards connections to wherever the server is now.
struct Relay {
    address: SocketAddr,
    to: watch::Sender<SocketAddr>,
    /// Replaced at every cut; whoever waits on the old one ends.
    epoch: watch::Sender<u64>,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to, target) = watch::channel(to);
        let (epoch, epochs) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *target.borrow();
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
        Self { address, to, epoch }
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

/// What a watcher must never contradict: per object the versions only grow, and no version is told twice.
#[derive(Default)]
struct Picture {
    objects: BTreeMap<String, (u64, String)>,
    /// During a list: what it has named so far.
    listing: Option<BTreeMap<String, (u64, String)>>,
    told: BTreeSet<u64>,
    lists: usize,
}

fn content(map: &ConfigMap) -> (u64, String) {
    let data = map.data.clone().unwrap_or_default().remove("k").unwrap_or_default();
    (map.resource_version().unwrap().parse().unwrap(), data)
}

impl Picture {
    fn take(&mut self, event: Event<ConfigMap>) {
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
                    assert!(*version >= known, "a list is not older than what was seen: {name}");
                }
                self.objects = listed;
                self.lists += 1;
            }
            Event::Apply(map) => {
                let (version, data) = content(&map);
                assert!(self.told.insert(version), "version {version} is told once");
                let known = self.objects.insert(map.name_any(), (version, data)).map_or(0, |(version, _)| version);
                assert!(version > known, "{}: {version} after {known}", map.name_any());
            }
            Event::Delete(map) => {
                let (version, _) = content(&map);
                assert!(self.told.insert(version), "version {version} is told once");
                assert!(self.objects.remove(&map.name_any()).is_some(), "only what was there goes");
            }
        }
    }
}

/// A watcher's picture, and a way to wait until it is as wanted.
struct Watching {
    events: mpsc::UnboundedReceiver<Event<ConfigMap>>,
    picture: Picture,
    task: JoinHandle<()>,
}

impl Watching {
    fn start(maps: Api<ConfigMap>, config: watcher::Config) -> Self {
        let (send, events) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            let mut stream = watcher(maps, config).boxed();
            loop {
                // Errors are the connection's; the watcher goes on by itself when it is polled again.
                match stream.try_next().await {
                    Ok(Some(event)) => drop(send.send(event)),
                    Ok(None) => return,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        });
        Self { events, picture: Picture::default(), task }
    }

    async fn until(&mut self, what: &str, holds: impl Fn(&Picture) -> bool) {
        let waiting = async {
            while self.picture.listing.is_some() || !holds(&self.picture) {
                let event = self.events.recv().await.expect("the watcher goes on");
                self.picture.take(event);
            }
        };
        let reached = tokio::time::timeout(WAIT, waiting).await.is_ok();
        assert!(reached, "{what}: {:?}", self.picture.objects);
    }

    async fn sees(&mut self, what: &str, want: &BTreeMap<String, (u64, String)>) {
        self.until(what, |picture| picture.objects == *want).await;
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Creates, changes and deletes objects of its own, and keeps at it when the connection or the server goes away.
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

async fn state(server: &ApiServer) -> BTreeMap<String, (u64, String)> {
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client("test"));
    let list = maps.list(&kube::api::ListParams::default()).await.unwrap();
    list.items.iter().map(|map| (map.name_any(), content(map))).collect()
}

fn modes() -> [(&'static str, watcher::Config); 3] {
    let list = watcher::Config::default();
    [("lists", list.clone()), ("pages", list.page_size(5)), ("streams", watcher::Config::default().streaming_lists())]
}

/// Writers and watchers at work while `disturb` happens; in the end every watcher's picture is the truth.
async fn with_disturbance<F, Fut>(history: HistoryLimits, disturb: F)
where
    F: FnOnce(tempfile::TempDir, Served, Relay) -> Fut,
    Fut: Future<Output = (tempfile::TempDir, Served, Relay)>,
{
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), history).await;
    let relay = Relay::start(served.server().address()).await;
    let client = relay.client(served.server().kubeconfig()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let mut watching: Vec<_> =
        modes().into_iter().map(|(mode, config)| (mode, Watching::start(maps.clone(), config))).collect();
    for (mode, watching) in &mut watching {
        watching.until(mode, |picture| picture.lists > 0).await;
    }
    let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(write(maps.clone(), writer, CHANGES))).collect();
    let (_dir, served, _relay) = disturb(dir, served, relay).await;
    for writer in writers {
        tokio::time::timeout(WAIT, writer).await.expect("writers end").unwrap();
    }
    let truth = state(served.server()).await;
    assert!(!truth.is_empty());
    for (mode, watching) in &mut watching {
        watching.sees(mode, &truth).await;
    }
    drop(watching);
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undisturbed_watchers_are_told_every_change_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), HistoryLimits::default()).await;
    let relay = Relay::start(served.server().address()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(relay.client(served.server().kubeconfig()).await);
    let mut watching: Vec<_> =
        modes().into_iter().map(|(mode, config)| (mode, Watching::start(maps.clone(), config))).collect();
    for (mode, watching) in &mut watching {
        watching.until(mode, |picture| picture.lists > 0).await;
    }
    futures::future::join_all((0..WRITERS).map(|writer| write(maps.clone(), writer, CHANGES))).await;
    let truth = state(served.server()).await;
    let mut told = Vec::new();
    for (mode, watching) in &mut watching {
        watching.sees(mode, &truth).await;
        assert_eq!(watching.picture.lists, 1, "{mode}: nothing made it begin again");
        told.push(watching.picture.told.clone());
    }
    assert!(told[0].len() > WRITERS * CHANGES / 2, "{}", told[0].len());
    assert!(told.iter().all(|versions| *versions == told[0]), "all were told the same changes");
    drop(watching);
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_connections_lose_and_repeat_nothing() {
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
async fn a_watcher_that_is_too_late_lists_again() {
    let dir = tempfile::tempdir().unwrap();
    // Hardly any history: whoever was away for a moment is too late.
    let served = serve(dir.path(), HistoryLimits { events: 3, ..HistoryLimits::default() }).await;
    let relay = Relay::start(served.server().address()).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(relay.client(served.server().kubeconfig()).await);
    for (mode, config) in modes() {
        let mut watching = Watching::start(maps.clone(), config);
        watching.until(mode, |picture| picture.lists == 1).await;
        // Away: nothing can be reached, and meanwhile much is written from inside.
        let address = *relay.to.borrow();
        relay.to.send_replace("127.0.0.1:1".parse().unwrap());
        relay.cut();
        let inside: Api<ConfigMap> = Api::default_namespaced(served.server().client("test"));
        write(inside, 0, 30).await;
        relay.to.send_replace(address);
        let truth = state(served.server()).await;
        watching.sees(mode, &truth).await;
        assert_eq!(watching.picture.lists, 2, "{mode}: it lists once more, and only once");
    }
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_is_the_same_to_watchers() {
    with_disturbance(HistoryLimits::default(), |dir, mut served, relay| async move {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            served.end().await;
            relay.cut();
            served = serve(dir.path(), HistoryLimits::default()).await;
            relay.to.send_replace(served.server().address());
            relay.cut();
        }
        (dir, served, relay)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_under_writers_costs_lists_but_no_changes() {
    with_disturbance(HistoryLimits { events: 2, ..HistoryLimits::default() }, |dir, served, relay| async move {
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            relay.cut();
        }
        (dir, served, relay)
    })
    .await;
}
