//! Builds and sends the calls to a CSI driver's node service. It accesses no files, keeps no state, and makes no decisions.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use cleat_api::access::{self, MultiWriterSupport};
use cleat_csi::v1::node_service_capability::{Rpc, Type, rpc};
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use cleat_csi::{CallError, Client, v1};

use crate::desired::VolumeSpec;

/// The kubelet's timeout for stage and publish. It includes the formatting of a large disk.
const NODE_CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// The capabilities of a driver's node service, read once per registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capabilities {
    pub(crate) stages: bool,
    /// The driver supports the access modes SINGLE_NODE_SINGLE_WRITER and SINGLE_NODE_MULTI_WRITER.
    pub(crate) single_node_modes: bool,
}

/// The pod for which a volume is published; sent to drivers with `podInfoOnMount`.
#[derive(Clone, Debug)]
pub(crate) struct PodInfo {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uid: String,
    pub(crate) service_account: String,
}

/// The parameters of stage and publish that are not part of the volume spec.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallParameters {
    /// The attachment metadata of the VolumeAttachment.
    pub(crate) publish_context: BTreeMap<String, String>,
    pub(crate) secrets: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
pub(crate) struct CsiDriver {
    client: Client,
    capabilities: Capabilities,
}

impl CsiDriver {
    /// Reads the capabilities of the driver.
    pub(crate) async fn connect(client: Client) -> Result<CsiDriver, CallError> {
        let client = client.with_deadline(NODE_CALL_TIMEOUT);
        let response = client.node_get_capabilities().await?;
        let has = |wanted: rpc::Type| {
            response
                .capabilities
                .iter()
                .any(|c| matches!(&c.r#type, Some(Type::Rpc(Rpc { r#type })) if *r#type == wanted as i32))
        };
        let capabilities = Capabilities {
            stages: has(rpc::Type::StageUnstageVolume),
            single_node_modes: has(rpc::Type::SingleNodeMultiWriter),
        };
        Ok(CsiDriver { client, capabilities })
    }

    pub(crate) fn stages(&self) -> bool {
        self.capabilities.stages
    }

    pub(crate) async fn stage(
        &self,
        volume: &VolumeSpec,
        staging: &Path,
        parameters: CallParameters,
    ) -> Result<(), CallError> {
        let request = v1::NodeStageVolumeRequest {
            volume_id: volume.id.handle.clone(),
            publish_context: to_hash_map(parameters.publish_context),
            staging_target_path: to_string(staging),
            volume_capability: Some(capability(volume, self.capabilities)),
            secrets: to_hash_map(parameters.secrets),
            volume_context: to_hash_map(volume.attributes.clone()),
        };
        self.client.node_stage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish(
        &self,
        volume: &VolumeSpec,
        staging: &Path,
        target: &Path,
        pod: &PodInfo,
        parameters: CallParameters,
    ) -> Result<(), CallError> {
        let request = v1::NodePublishVolumeRequest {
            volume_id: volume.id.handle.clone(),
            publish_context: to_hash_map(parameters.publish_context),
            staging_target_path: if self.stages() { to_string(staging) } else { String::new() },
            target_path: to_string(target),
            volume_capability: Some(capability(volume, self.capabilities)),
            readonly: volume.read_only,
            secrets: to_hash_map(parameters.secrets),
            volume_context: volume_context(volume, pod),
        };
        self.client.node_publish_volume(request).await.map(drop)
    }

    pub(crate) async fn unpublish(&self, handle: &str, target: &Path) -> Result<(), CallError> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: handle.to_owned(), target_path: to_string(target) };
        self.client.node_unpublish_volume(request).await.map(drop)
    }

    pub(crate) async fn unstage(&self, handle: &str, staging: &Path) -> Result<(), CallError> {
        let request =
            v1::NodeUnstageVolumeRequest { volume_id: handle.to_owned(), staging_target_path: to_string(staging) };
        self.client.node_unstage_volume(request).await.map(drop)
    }
}

fn capability(volume: &VolumeSpec, capabilities: Capabilities) -> v1::VolumeCapability {
    let modes =
        if capabilities.single_node_modes { MultiWriterSupport::Supported } else { MultiWriterSupport::Unsupported };
    // Only the first mode counts. A volume without modes counts as ReadWriteOnce.
    let mode = volume.access_modes.first().map_or(access::READ_WRITE_ONCE, String::as_str);
    let mode = access::to_csi_mode(mode, modes).map_or(0, |m| m as i32);
    let mount = MountVolume {
        fs_type: volume.fs_type.clone(),
        mount_flags: volume.mount_options.clone(),
        ..MountVolume::default()
    };
    v1::VolumeCapability { access_mode: Some(AccessMode { mode }), access_type: Some(AccessType::Mount(mount)) }
}

/// The attributes of the volume, with the keys of the pod added to a copy: they must not appear in a later stage call.
fn volume_context(volume: &VolumeSpec, pod: &PodInfo) -> HashMap<String, String> {
    let mut context = to_hash_map(volume.attributes.clone());
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

fn to_hash_map(map: BTreeMap<String, String>) -> HashMap<String, String> {
    map.into_iter().collect()
}

fn to_string(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::VolumeId;

    fn volume_spec() -> VolumeSpec {
        VolumeSpec {
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
    fn single_node_modes_are_sent_only_to_drivers_that_support_them() {
        let mode = |modes: &[&str], single_node_modes| {
            let volume = VolumeSpec { access_modes: modes.iter().map(ToString::to_string).collect(), ..volume_spec() };
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
        let volume = volume_spec();
        let context = volume_context(&volume, &pod);
        assert_eq!(context.len(), 6);
        assert_eq!(context["csi.storage.k8s.io/pod.uid"], "u");
        assert_eq!(volume.attributes.len(), 1);
        assert_eq!(volume_context(&VolumeSpec { pod_info: false, ..volume }, &pod).len(), 1);
    }
}
