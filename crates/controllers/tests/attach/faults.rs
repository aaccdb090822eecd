//! What goes wrong between the controller and its server: answers that get lost, news that come late, and others who write at
//! the worst moment.

use std::sync::Arc;

use cleat_api::names;
use cleat_controllers::attach::Policy;
use futures::{StreamExt as _, TryStreamExt as _};
use http::{Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{Patch, PatchParams};
use kube::client::Body;
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::rig::{DRIVER, Rig, claimed, until};

pub(crate) struct Faults {
    /// May do everything.
    admin: Client,
    /// Every request of the controller: method and path.
    log: Mutex<Vec<String>>,
    /// A request whose answers get lost.
    lost: Mutex<Option<String>>,
    /// What somebody writes on the Node n1 just before the controller's next such request.
    meanwhile: Mutex<Option<(String, Value)>>,
    /// Whether news of attachments arrive.
    news: watch::Sender<bool>,
}

impl Faults {
    pub(crate) fn new(admin: Client) -> Self {
        let (lost, meanwhile) = (Mutex::default(), Mutex::default());
        Self { admin, log: Mutex::default(), lost, meanwhile, news: watch::Sender::new(true) }
    }

    /// What the controller writes and looks up with.
    pub(crate) fn acting(self: &Arc<Self>, inner: Client) -> Client {
        let faults = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, faults) = (inner.clone(), faults.clone());
            async move {
                let line = format!("{} {}", request.method(), request.uri().path());
                let due = faults.meanwhile.lock().take_if(|(at, _)| *at == line);
                if let Some((_, status)) = due {
                    let nodes: Api<Node> = Api::all(faults.admin.clone());
                    let patch = Patch::Merge(json!({ "status": status }));
                    nodes.patch_status("n1", &PatchParams::default(), &patch).await.unwrap();
                }
                let answer = inner.send(request).await?;
                let is_lost = faults.lost.lock().as_ref() == Some(&line);
                faults.log.lock().push(line);
                let failure = || Response::builder().status(500).body(Body::empty()).unwrap();
                Ok::<_, kube::Error>(if is_lost { failure() } else { answer })
            }
        });
        Client::new(service, "default")
    }

    /// What its caches are fed with.
    pub(crate) fn watching(self: &Arc<Self>, inner: Client) -> Client {
        let faults = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, faults) = (inner.clone(), faults.clone());
            async move {
                let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
                let held = path.ends_with("/volumeattachments") && query.contains("watch=");
                let frames = inner.send(request).await?.map(move |body| {
                    let frames = body.into_data_stream().then(move |chunk| {
                        let mut news = faults.news.subscribe();
                        async move {
                            if held {
                                // The sender lives as long as this client.
                                let _ = news.wait_for(|arrive| *arrive).await;
                            }
                            chunk
                        }
                    });
                    StreamBody::new(frames.map_ok(http_body::Frame::data))
                });
                Ok::<_, kube::Error>(frames)
            }
        });
        Client::new(service, "default")
    }

    /// The controller's requests about Node n1 and about attachments, as far as they are writes or looks.
    fn log(&self) -> Vec<String> {
        self.log.lock().clone()
    }

    async fn asked(&self, line: &str) {
        until(line, || async { self.log().iter().any(|l| l == line).then_some(()) }).await;
    }

    fn lose(&self, line: Option<&str>) {
        *self.lost.lock() = line.map(ToOwned::to_owned);
    }

    fn meanwhile(&self, line: &str, status: Value) {
        *self.meanwhile.lock() = Some((line.to_owned(), status));
    }
}

const LOOK: &str = "GET /api/v1/nodes/n1";
const REPORT: &str = "PATCH /api/v1/nodes/n1/status";
const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";

impl Rig {
    /// A volume that is attached to n1, and its pod p.
    async fn attached(&self, policy: Policy) -> (String, String) {
        self.start(policy);
        self.node("n1").await;
        let unique = self.volume("v", &["ReadWriteOnce"]).await;
        self.pod("p", "n1", claimed("v")).await;
        let attachment = self.attachment("v", "n1");
        self.made(&attachment).await;
        self.confirm(&attachment).await;
        self.told("n1", &[&unique]).await;
        (attachment, unique)
    }
}

#[tokio::test]
async fn a_volume_taken_into_use_at_the_last_moment_stays() {
    let rig = Rig::new().await;
    let (attachment, unique) = rig.attached(Policy::default()).await;
    rig.faults.meanwhile(LOOK, json!({ "volumesInUse": [unique] }));
    rig.forget_pod("p").await;
    rig.faults.asked(LOOK).await;
    rig.told("n1", &[&unique]).await;
    let kept = rig.all::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none());
    let log = rig.faults.log();
    assert!(!log.iter().any(|line| line.starts_with("DELETE")), "{log:?}");
}

#[tokio::test]
async fn nothing_is_detached_that_its_node_is_told_of() {
    let rig = Rig::new().await;
    let (attachment, unique) = rig.attached(Policy::default()).await;
    // An answer from long ago, or a second controller: the node is told once more.
    rig.faults.meanwhile(LOOK, json!({ "volumesAttached": [{ "name": unique, "devicePath": "" }] }));
    rig.forget_pod("p").await;
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
    // It is gone a moment before the answer is noted.
    rig.faults.asked(&format!("DELETE {ATTACHMENTS}/{attachment}")).await;
    let log = rig.faults.log();
    let first = |from: usize, what: &str| from + log[from..].iter().position(|line| line.starts_with(what)).unwrap();
    let look = first(0, LOOK);
    assert!(first(look, REPORT) < first(look, "DELETE"), "{log:?}");
}

#[tokio::test]
async fn a_volume_whose_detach_got_no_answer_is_not_reported_again() {
    for finalizers in [json!(["test/attacher"]), Value::Null] {
        let held = finalizers != Value::Null;
        unanswered_detach(json!({ "metadata": { "finalizers": finalizers } }), held).await;
    }
}

/// The attachment is leaving, or gone, and the controller has heard neither.
async fn unanswered_detach(held: Value, stays: bool) {
    let rig = Rig::new().await;
    let (attachment, _) = rig.attached(Policy::default()).await;
    rig.all::<VolumeAttachment>().patch(&attachment, &PatchParams::default(), &Patch::Merge(held)).await.unwrap();
    rig.looked_around("w1", "n1").await;
    rig.faults.news.send_replace(false);
    let delete = format!("DELETE {ATTACHMENTS}/{attachment}");
    rig.faults.lose(Some(&delete));
    rig.forget_pod("p").await;
    rig.faults.asked(&delete).await;
    rig.pod("back", "n1", claimed("v")).await;
    let (looks, reports) = (format!("GET {ATTACHMENTS}/{attachment}"), rig.faults.log().len());
    rig.faults.asked(&looks).await;
    rig.looked_around("w2", "n1").await;
    rig.told("n1", &[]).await;
    let told = rig.faults.log()[reports..].iter().any(|line| line == REPORT);
    assert!(!told, "the node was told of a volume that is leaving");

    // It goes, and comes back.
    rig.faults.news.send_replace(true);
    rig.faults.lose(None);
    if stays {
        let freed = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        rig.all::<VolumeAttachment>().patch(&attachment, &PatchParams::default(), &freed).await.unwrap();
    }
    until("it is attached anew", || async {
        let again = rig.all::<VolumeAttachment>().get_opt(&attachment).await.unwrap();
        again.filter(|a| a.metadata.deletion_timestamp.is_none())
    })
    .await;
}

#[tokio::test]
async fn an_attachment_that_may_exist_counts_before_another_node_gets_the_volume() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.looked_around("w", "n1").await;
    rig.faults.news.send_replace(false);
    let create = format!("POST {ATTACHMENTS}");
    rig.faults.lose(Some(&create));
    rig.pod("p", "n1", claimed("v")).await;
    let first = rig.attachment("v", "n1");
    rig.made(&first).await;
    rig.forget_pod("p").await;
    rig.pod("q", "n2", claimed("v")).await;
    let tries = rig.faults.log().len();
    until("the controller tries on", || async { (rig.faults.log().len() > tries + 2).then_some(()) }).await;
    let second = names::attachment("v", DRIVER, "n2");
    let made = rig.all::<VolumeAttachment>().get_opt(&second).await.unwrap();
    assert!(made.is_none(), "the volume would be in two places");
    rig.faults.lose(None);
    rig.faults.news.send_replace(true);
    rig.made(&second).await;
    rig.gone(&first).await;
}
