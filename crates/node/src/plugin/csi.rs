//! The calls to a CSI driver's node service: what each request says. Touches no files, keeps no state, decides nothing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use cleat_api::access::{self, MultiWriterSupport};
use cleat_csi::v1::node_service_capability::{Rpc, Type, rpc};
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use cleat_csi::{CallError, Client, v1};

use crate::desired::Wanted;

/// What the kubelet grants stage and publish, mkfs of a large disk included.
const DEADLINE: Duration = Duration::from_secs(120);

/// What a driver's node service can do; asked once per registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capabilities {
    pub(crate) stages: bool,
    /// Tells one writer on a node from several.
    pub(crate) single_node_modes: bool,
}

/// The pod a volume is published for, for drivers that ask.
#[derive(Clone, Debug)]
pub(crate) struct PodInfo {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uid: String,
    pub(crate) service_account: String,
}

/// Everything beside the volume itself that stage and publish carry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Context {
    /// From the attachment.
    pub(crate) publish: BTreeMap<String, String>,
    pub(crate) secrets: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Driver {
    client: Client,
    capabilities: Capabilities,
}

impl Driver {
    /// Asks the driver what it can do.
    pub(crate) async fn connect(client: Client) -> Result<Driver, CallError> {
        let client = client.with_deadline(DEADLINE);
        let answer = client.node_get_capabilities().await?;
        let has = |wanted: rpc::Type| {
            answer
                .capabilities
                .iter()
                .any(|c| matches!(&c.r#type, Some(Type::Rpc(Rpc { r#type })) if *r#type == wanted as i32))
        };
        let capabilities = Capabilities {
            stages: has(rpc::Type::StageUnstageVolume),
            single_node_modes: has(rpc::Type::SingleNodeMultiWriter),
        };
        Ok(Driver { client, capabilities })
    }

    pub(crate) fn stages(&self) -> bool {
        self.capabilities.stages
    }

    pub(crate) async fn stage(&self, volume: &Wanted, staging: &Path, context: Context) -> Result<(), CallError> {
        let request = v1::NodeStageVolumeRequest {
            volume_id: volume.id.handle.clone(),
            publish_context: hash(context.publish),
            staging_target_path: text(staging),
            volume_capability: Some(capability(volume, self.capabilities)),
            secrets: hash(context.secrets),
            volume_context: hash(volume.attributes.clone()),
        };
        self.client.node_stage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish(
        &self,
        volume: &Wanted,
        staging: &Path,
        target: &Path,
        pod: &PodInfo,
        context: Context,
    ) -> Result<(), CallError> {
        let request = v1::NodePublishVolumeRequest {
            volume_id: volume.id.handle.clone(),
            publish_context: hash(context.publish),
            staging_target_path: if self.stages() { text(staging) } else { String::new() },
            target_path: text(target),
            volume_capability: Some(capability(volume, self.capabilities)),
            readonly: volume.read_only,
            secrets: hash(context.secrets),
            volume_context: volume_context(volume, pod),
        };
        self.client.node_publish_volume(request).await.map(drop)
    }

    pub(crate) async fn unpublish(&self, handle: &str, target: &Path) -> Result<(), CallError> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: handle.to_owned(), target_path: text(target) };
        self.client.node_unpublish_volume(request).await.map(drop)
    }

    pub(crate) async fn unstage(&self, handle: &str, staging: &Path) -> Result<(), CallError> {
        let request = v1::NodeUnstageVolumeRequest { volume_id: handle.to_owned(), staging_target_path: text(staging) };
        self.client.node_unstage_volume(request).await.map(drop)
    }
}

fn capability(volume: &Wanted, capabilities: Capabilities) -> v1::VolumeCapability {
    let modes = if capabilities.single_node_modes { MultiWriterSupport::Supported } else { MultiWriterSupport::Unsupported };
    // The first mode counts, and a volume without modes is taken as ReadWriteOnce.
    let mode = volume.access_modes.first().map_or(access::READ_WRITE_ONCE, String::as_str);
    let mode = access::to_csi_mode(mode, modes).map_or(0, |m| m as i32);
    let mount = MountVolume {
        fs_type: volume.fs_type.clone(),
        mount_flags: volume.mount_options.clone(),
        ..MountVolume::default()
    };
    v1::VolumeCapability { access_mode: Some(AccessMode { mode }), access_type: Some(AccessType::Mount(mount)) }
}

/// A copy: the pod's keys must not leak into a later stage call.
fn volume_context(volume: &Wanted, pod: &PodInfo) -> HashMap<String, String> {
    let mut context = hash(volume.attributes.clone());
    if volume.pod_info {
        for (key, value) in [
            ("pod.name", pod.name.as_str()),
            ("pod.namespace", &pod.namespace),
            ("pod.uid", &pod.uid),
            ("serviceAccount.name", &pod.service_account),
            ("ephemeral", "false"),
        ] {
            context.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
        }
    }
    context
}

fn hash(map: BTreeMap<String, String>) -> HashMap<String, String> {
    map.into_iter().collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::VolumeId;

    fn wanted() -> Wanted {
        Wanted {
            id: VolumeId::new("d", "h"),
            spec_name: "pv".into(),
            read_only: false,
            fs_type: "xfs".into(),
            mount_options: vec!["noatime".into()],
            access_modes: vec!["ReadWriteOnce".into()],
            attributes: [("k".to_owned(), "v".to_owned())].into(),
            stage_secret: None,
            publish_secret: None,
            pod_info: true,
        }
    }

    #[test]
    fn access_modes_follow_what_the_driver_tells_apart() {
        let mode = |modes: &[&str], single_node_modes| {
            let volume = Wanted { access_modes: modes.iter().map(ToString::to_string).collect(), ..wanted() };
            capability(&volume, Capabilities { stages: true, single_node_modes }).access_mode.unwrap().mode
        };
        assert_eq!(mode(&["ReadWriteOnce"], false), 1);
        assert_eq!(mode(&["ReadWriteOnce"], true), 7);
        assert_eq!(mode(&["ReadWriteOncePod"], true), 6);
        assert_eq!(mode(&["ReadWriteMany", "ReadWriteOnce"], true), 5, "the first mode counts");
        assert_eq!(mode(&[], false), 1, "no mode is ReadWriteOnce");
    }

    #[test]
    fn pod_keys_are_added_to_a_copy() {
        let pod = PodInfo { name: "p".into(), namespace: "n".into(), uid: "u".into(), service_account: "s".into() };
        let volume = wanted();
        let context = volume_context(&volume, &pod);
        assert_eq!(context.len(), 6);
        assert_eq!(context["csi.storage.k8s.io/pod.uid"], "u");
        assert_eq!(volume.attributes.len(), 1);
        assert_eq!(volume_context(&Wanted { pod_info: false, ..volume }, &pod).len(), 1);
    }
}
