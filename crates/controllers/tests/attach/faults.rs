//! Faults between the controller and its API server: lost replies, late watch events, and writes of other clients in
//! between.

use std::sync::Arc;

use cleat_api::names;
use cleat_controllers::attach::DetachPolicy;
use cleat_testing::wait::within_timeout;
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

use super::fixture::{AttachFixture, DRIVER, claim_source};

pub(crate) struct Faults {
    /// Has all rights.
    admin: Client,
    /// Every request of the controller, as method and path.
    log: watch::Sender<Vec<String>>,
    /// The request whose replies are lost.
    lost_request: Mutex<Option<String>>,
    /// A status of Node n1 that another client writes just before the controller's next request of this form.
    node_patch: Mutex<Option<(String, Value)>>,
    /// Whether watch events of VolumeAttachments reach the caches.
    delivers_attachments: watch::Sender<bool>,
}

impl Faults {
    pub(crate) fn new(admin: Client) -> Self {
        Self {
            admin,
            log: watch::Sender::default(),
            lost_request: Mutex::default(),
            node_patch: Mutex::default(),
            delivers_attachments: watch::Sender::new(true),
        }
    }

    /// The client for the controller's own requests.
    pub(crate) fn request_client(self: &Arc<Self>, inner: Client) -> Client {
        let faults = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, faults) = (inner.clone(), faults.clone());
            async move {
                let line = format!("{} {}", request.method(), request.uri().path());
                let due_patch = faults.node_patch.lock().take_if(|(at, _)| *at == line);
                if let Some((_, status)) = due_patch {
                    let nodes: Api<Node> = Api::all(faults.admin.clone());
                    let patch = Patch::Merge(json!({ "status": status }));
                    nodes.patch_status("n1", &PatchParams::default(), &patch).await.unwrap();
                }
                let reply = inner.send(request).await?;
                let is_lost = faults.lost_request.lock().as_ref() == Some(&line);
                faults.log.send_modify(|log| log.push(line));
                let failure = || Response::builder().status(500).body(Body::empty()).unwrap();
                Ok::<_, kube::Error>(if is_lost { failure() } else { reply })
            }
        });
        Client::new(service, "default")
    }

    /// The client of the controller's caches.
    pub(crate) fn cache_client(self: &Arc<Self>, inner: Client) -> Client {
        let faults = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, faults) = (inner.clone(), faults.clone());
            async move {
                let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
                let is_held_back = path.ends_with("/volumeattachments") && query.contains("watch=");
                let frames = inner.send(request).await?.map(move |body| {
                    let frames = body.into_data_stream().then(move |chunk| {
                        let mut delivers = faults.delivers_attachments.subscribe();
                        async move {
                            if is_held_back {
                                // The sender lives as long as this client.
                                let _ = delivers.wait_for(|delivers| *delivers).await;
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

    /// All requests of the controller so far, without those of its caches.
    fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    async fn wait_request(&self, line: &str) {
        self.wait_log(line, |log| log.iter().any(|l| l == line)).await;
    }

    async fn wait_log(&self, what: &str, holds: impl Fn(&[String]) -> bool) {
        let mut log = self.log.subscribe();
        within_timeout(what, log.wait_for(|log| holds(log))).await.unwrap();
    }

    fn lose_replies_to(&self, line: Option<&str>) {
        *self.lost_request.lock() = line.map(ToOwned::to_owned);
    }

    fn patch_node_before(&self, line: &str, status: Value) {
        *self.node_patch.lock() = Some((line.to_owned(), status));
    }
}

const READ_NODE: &str = "GET /api/v1/nodes/n1";
const WRITE_REPORT: &str = "PATCH /api/v1/nodes/n1/status";
const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";

impl AttachFixture {
    /// Creates a volume that is attached to n1 for the pod p. Returns the attachment's name and the unique volume name.
    async fn attached(&self, policy: DetachPolicy) -> (String, String) {
        self.start(policy);
        self.node("n1").await;
        let unique_name = self.volume("v", &["ReadWriteOnce"]).await;
        self.pod("p", "n1", claim_source("v")).await;
        let attachment = self.attachment_name("v", "n1");
        self.wait_attachment(&attachment).await;
        self.confirm(&attachment).await;
        self.wait_reported("n1", &[&unique_name]).await;
        (attachment, unique_name)
    }
}

#[tokio::test]
async fn a_volume_that_comes_into_use_just_before_the_detach_is_kept() {
    let fixture = AttachFixture::new().await;
    let (attachment, unique_name) = fixture.attached(DetachPolicy::default()).await;
    fixture.faults.patch_node_before(READ_NODE, json!({ "volumesInUse": [unique_name] }));
    fixture.delete_pod("p").await;
    fixture.faults.wait_request(READ_NODE).await;
    fixture.wait_reported("n1", &[&unique_name]).await;
    let kept = fixture.server.api::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none());
    let log = fixture.faults.log();
    assert!(!log.iter().any(|line| line.starts_with("DELETE")), "{log:?}");
}

#[tokio::test]
async fn a_volume_is_not_detached_while_the_live_node_lists_it_as_attached() {
    let fixture = AttachFixture::new().await;
    let (attachment, unique_name) = fixture.attached(DetachPolicy::default()).await;
    // A late write or a second controller adds the volume to `volumesAttached` again.
    fixture
        .faults
        .patch_node_before(READ_NODE, json!({ "volumesAttached": [{ "name": unique_name, "devicePath": "" }] }));
    fixture.delete_pod("p").await;
    fixture.wait_deleted(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
    // The attachment is gone shortly before the reply is logged.
    fixture.faults.wait_request(&format!("DELETE {ATTACHMENTS}/{attachment}")).await;
    let log = fixture.faults.log();
    let first = |from: usize, what: &str| from + log[from..].iter().position(|line| line.starts_with(what)).unwrap();
    let read = first(0, READ_NODE);
    assert!(first(read, WRITE_REPORT) < first(read, "DELETE"), "{log:?}");
}

#[tokio::test]
async fn a_volume_whose_detach_got_no_reply_is_not_reported_again() {
    for finalizers in [json!(["test/attacher"]), Value::Null] {
        let has_finalizer = finalizers != Value::Null;
        detach_without_reply(json!({ "metadata": { "finalizers": finalizers } }), has_finalizer).await;
    }
}

/// The attachment is being deleted or is gone, and the controller has no information about either.
async fn detach_without_reply(patch: Value, has_finalizer: bool) {
    let fixture = AttachFixture::new().await;
    let (attachment, _) = fixture.attached(DetachPolicy::default()).await;
    fixture.server.patch::<VolumeAttachment>(&attachment, patch).await;
    fixture.wait_reconciled("w1", "n1").await;
    fixture.faults.delivers_attachments.send_replace(false);
    let delete = format!("DELETE {ATTACHMENTS}/{attachment}");
    fixture.faults.lose_replies_to(Some(&delete));
    fixture.delete_pod("p").await;
    fixture.faults.wait_request(&delete).await;
    fixture.pod("back", "n1", claim_source("v")).await;
    let (read, logged) = (format!("GET {ATTACHMENTS}/{attachment}"), fixture.faults.log().len());
    fixture.faults.wait_request(&read).await;
    fixture.wait_reconciled("w2", "n1").await;
    fixture.wait_reported("n1", &[]).await;
    let is_reported = fixture.faults.log()[logged..].iter().any(|line| line == WRITE_REPORT);
    assert!(!is_reported, "the node reports a volume that is being detached");

    // The attachment is deleted, and created again.
    fixture.faults.delivers_attachments.send_replace(true);
    fixture.faults.lose_replies_to(None);
    if has_finalizer {
        let freed = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        fixture.server.api::<VolumeAttachment>().patch(&attachment, &PatchParams::default(), &freed).await.unwrap();
    }
    let is_not_deleted = |attachment: &VolumeAttachment| attachment.metadata.deletion_timestamp.is_none();
    fixture.server.wait_until(&attachment, "is attached again", is_not_deleted).await;
}

#[tokio::test]
async fn an_attachment_whose_creation_got_no_reply_blocks_other_nodes() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.node("n2").await;
    fixture.volume("v", &["ReadWriteOnce"]).await;
    fixture.wait_reconciled("w", "n1").await;
    fixture.faults.delivers_attachments.send_replace(false);
    let create = format!("POST {ATTACHMENTS}");
    fixture.faults.lose_replies_to(Some(&create));
    fixture.pod("p", "n1", claim_source("v")).await;
    let first = fixture.attachment_name("v", "n1");
    fixture.wait_attachment(&first).await;
    fixture.delete_pod("p").await;
    fixture.pod("q", "n2", claim_source("v")).await;
    let tries = fixture.faults.log().len();
    fixture.faults.wait_log("the controller retries", |log| log.len() > tries + 2).await;
    let second = names::attachment("v", DRIVER, "n2");
    let created = fixture.server.api::<VolumeAttachment>().get_opt(&second).await.unwrap();
    assert!(created.is_none(), "the volume would be attached to two nodes");
    fixture.faults.lose_replies_to(None);
    fixture.faults.delivers_attachments.send_replace(true);
    fixture.wait_attachment(&second).await;
    fixture.wait_deleted(&first).await;
}
