//! Faults between the controller and its API server: lost replies, late watch events, and writes of other clients in
//! between.

use std::sync::Arc;

use cleat_api::names;
use cleat_controllers::attach::DetachPolicy;
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

use super::rig::{DRIVER, Rig, claim_source, wait_until};

pub(crate) struct Faults {
    /// Has all rights.
    admin: Client,
    /// Every request of the controller, as method and path.
    log: Mutex<Vec<String>>,
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
            log: Mutex::default(),
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
                faults.log.lock().push(line);
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
        self.log.lock().clone()
    }

    async fn wait_request(&self, line: &str) {
        wait_until(line, || async { self.log().iter().any(|l| l == line).then_some(()) }).await;
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

impl Rig {
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
    let rig = Rig::new().await;
    let (attachment, unique_name) = rig.attached(DetachPolicy::default()).await;
    rig.faults.patch_node_before(READ_NODE, json!({ "volumesInUse": [unique_name] }));
    rig.delete_pod("p").await;
    rig.faults.wait_request(READ_NODE).await;
    rig.wait_reported("n1", &[&unique_name]).await;
    let kept = rig.cluster::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none());
    let log = rig.faults.log();
    assert!(!log.iter().any(|line| line.starts_with("DELETE")), "{log:?}");
}

#[tokio::test]
async fn a_volume_is_not_detached_while_the_live_node_lists_it_as_attached() {
    let rig = Rig::new().await;
    let (attachment, unique_name) = rig.attached(DetachPolicy::default()).await;
    // A late write or a second controller adds the volume to `volumesAttached` again.
    rig.faults.patch_node_before(READ_NODE, json!({ "volumesAttached": [{ "name": unique_name, "devicePath": "" }] }));
    rig.delete_pod("p").await;
    rig.wait_deleted(&attachment).await;
    rig.wait_reported("n1", &[]).await;
    // The attachment is gone shortly before the reply is logged.
    rig.faults.wait_request(&format!("DELETE {ATTACHMENTS}/{attachment}")).await;
    let log = rig.faults.log();
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
    let rig = Rig::new().await;
    let (attachment, _) = rig.attached(DetachPolicy::default()).await;
    rig.cluster::<VolumeAttachment>().patch(&attachment, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    rig.wait_reconciled("w1", "n1").await;
    rig.faults.delivers_attachments.send_replace(false);
    let delete = format!("DELETE {ATTACHMENTS}/{attachment}");
    rig.faults.lose_replies_to(Some(&delete));
    rig.delete_pod("p").await;
    rig.faults.wait_request(&delete).await;
    rig.pod("back", "n1", claim_source("v")).await;
    let (read, logged) = (format!("GET {ATTACHMENTS}/{attachment}"), rig.faults.log().len());
    rig.faults.wait_request(&read).await;
    rig.wait_reconciled("w2", "n1").await;
    rig.wait_reported("n1", &[]).await;
    let is_reported = rig.faults.log()[logged..].iter().any(|line| line == WRITE_REPORT);
    assert!(!is_reported, "the node reports a volume that is being detached");

    // The attachment is deleted, and created again.
    rig.faults.delivers_attachments.send_replace(true);
    rig.faults.lose_replies_to(None);
    if has_finalizer {
        let freed = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        rig.cluster::<VolumeAttachment>().patch(&attachment, &PatchParams::default(), &freed).await.unwrap();
    }
    wait_until("the volume is attached again", || async {
        let again = rig.cluster::<VolumeAttachment>().get_opt(&attachment).await.unwrap();
        again.filter(|a| a.metadata.deletion_timestamp.is_none())
    })
    .await;
}

#[tokio::test]
async fn an_attachment_whose_creation_got_no_reply_blocks_other_nodes() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.wait_reconciled("w", "n1").await;
    rig.faults.delivers_attachments.send_replace(false);
    let create = format!("POST {ATTACHMENTS}");
    rig.faults.lose_replies_to(Some(&create));
    rig.pod("p", "n1", claim_source("v")).await;
    let first = rig.attachment_name("v", "n1");
    rig.wait_attachment(&first).await;
    rig.delete_pod("p").await;
    rig.pod("q", "n2", claim_source("v")).await;
    let tries = rig.faults.log().len();
    wait_until("the controller retries", || async { (rig.faults.log().len() > tries + 2).then_some(()) }).await;
    let second = names::attachment("v", DRIVER, "n2");
    let created = rig.cluster::<VolumeAttachment>().get_opt(&second).await.unwrap();
    assert!(created.is_none(), "the volume would be attached to two nodes");
    rig.faults.lose_replies_to(None);
    rig.faults.delivers_attachments.send_replace(true);
    rig.wait_attachment(&second).await;
    rig.wait_deleted(&first).await;
}
