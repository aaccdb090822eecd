//! A pool, its drivers and everything a test mounts, taken down again however the test ends.
use std::{
    collections::HashMap,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use cleat_csi::{
    CallError, Client, Endpoint,
    v1::{
        self, VolumeCapability,
        volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode},
    },
};
use cleat_drivers::block::{self, Config};
use cleat_host::{loopdev, mount};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

pub(crate) const GIB: i64 = 1 << 30;

pub(crate) struct Rig {
    pub(crate) directory: TempDir,
    stop: CancellationToken,
}

impl Rig {
    pub(crate) fn new() -> Rig {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests mount file systems and attach loop devices: run them as root"
        );
        Rig { directory: TempDir::with_prefix("cleat-block-").unwrap(), stop: CancellationToken::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A directory as the node agent makes it before it calls the driver.
    pub(crate) fn make(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        text(&path)
    }

    pub(crate) fn target(&self, name: &str) -> String {
        text(&self.path(name))
    }

    pub(crate) fn image(&self, id: &str) -> PathBuf {
        self.path("pool").join("volumes").join(format!("{id}.img"))
    }

    pub(crate) fn bytes(&self, id: &str, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        std::fs::File::open(self.image(id)).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    pub(crate) fn record(&self, id: &str) -> PathBuf {
        self.image(id).with_extension("json")
    }

    pub(crate) fn config(&self, node: &str) -> Config {
        Config::new(Endpoint::unix(self.path(&format!("{node}.sock"))), self.path("pool"), node)
    }

    /// Controller and node in one, as the node `node`, beside the other nodes of the same pool.
    pub(crate) async fn driver(&self, node: &str) -> Client {
        let config = self.config(node);
        let client = Client::new(config.endpoint.clone());
        tokio::spawn(block::run(config, self.stop.clone()));
        client.wait_ready(Duration::from_secs(30)).await.unwrap();
        client
    }

    pub(crate) fn loop_devices(&self, id: &str) -> usize {
        loopdev::find(&self.image(id)).unwrap().len()
    }

    /// Mounts below the rig's directory.
    pub(crate) fn mounts(&self) -> Vec<PathBuf> {
        let root = self.directory.path().canonicalize().unwrap();
        let table = mount::table().unwrap();
        table.into_iter().map(|mount| mount.target).filter(|target| target.starts_with(&root)).collect()
    }

    #[track_caller]
    pub(crate) fn assert_nothing_left(&self, id: &str) {
        assert_eq!(self.mounts(), Vec::<PathBuf>::new());
        assert_eq!(self.loop_devices(id), 0);
        let left: Vec<_> = std::fs::read_dir(self.path("pool").join("volumes")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
        for target in self.mounts().iter().rev() {
            let _ = mount::unmount(target);
        }
        for entry in std::fs::read_dir(self.path("pool").join("volumes")).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "img") {
                let _ = loopdev::detach_file(&entry.path());
            }
        }
    }
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

pub(crate) fn mounted(fs_type: &str, mode: Mode) -> VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub(crate) fn raw(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub(crate) fn writer(fs_type: &str) -> VolumeCapability {
    mounted(fs_type, Mode::SingleNodeWriter)
}

pub(crate) fn create_request(name: &str, capability: VolumeCapability) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(v1::CapacityRange { required_bytes: GIB, limit_bytes: 0 }),
        volume_capabilities: vec![capability],
        ..Default::default()
    }
}

/// One volume as a caller sees it, so that a test reads as the sequence of its calls.
#[derive(Clone)]
pub(crate) struct Volume {
    pub(crate) id: String,
    pub(crate) capability: VolumeCapability,
}

impl Volume {
    pub(crate) async fn create(client: &Client, name: &str, capability: VolumeCapability) -> Result<Volume, CallError> {
        let response = client.create_volume(create_request(name, capability.clone())).await?;
        Ok(Volume { id: response.volume.unwrap().volume_id, capability })
    }

    pub(crate) async fn delete(&self, client: &Client) -> Result<(), CallError> {
        let request = v1::DeleteVolumeRequest { volume_id: self.id.clone(), ..Default::default() };
        client.delete_volume(request).await.map(drop)
    }

    pub(crate) async fn attach(&self, client: &Client, node: &str) -> Result<(), CallError> {
        let request = v1::ControllerPublishVolumeRequest {
            volume_id: self.id.clone(),
            node_id: node.to_owned(),
            volume_capability: Some(self.capability.clone()),
            ..Default::default()
        };
        client.controller_publish_volume(request).await.map(drop)
    }

    pub(crate) async fn detach(&self, client: &Client, node: &str) -> Result<(), CallError> {
        let request = v1::ControllerUnpublishVolumeRequest {
            volume_id: self.id.clone(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        client.controller_unpublish_volume(request).await.map(drop)
    }

    pub(crate) async fn stage(&self, client: &Client, at: &str) -> Result<(), CallError> {
        let request = v1::NodeStageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: at.to_owned(),
            volume_capability: Some(self.capability.clone()),
            secrets: HashMap::from([("unused".to_owned(), "secret".to_owned())]),
            ..Default::default()
        };
        client.clone().with_deadline(Duration::from_secs(120)).node_stage_volume(request).await.map(drop)
    }

    pub(crate) async fn unstage(&self, client: &Client, at: &str) -> Result<(), CallError> {
        let request = v1::NodeUnstageVolumeRequest { volume_id: self.id.clone(), staging_target_path: at.to_owned() };
        client.node_unstage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish(&self, client: &Client, staged: &str, target: &str) -> Result<(), CallError> {
        self.publish_as(client, staged, target, false).await
    }

    pub(crate) async fn publish_as(
        &self,
        client: &Client,
        staged: &str,
        target: &str,
        readonly: bool,
    ) -> Result<(), CallError> {
        let request = v1::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: staged.to_owned(),
            target_path: target.to_owned(),
            volume_capability: Some(self.capability.clone()),
            readonly,
            ..Default::default()
        };
        client.node_publish_volume(request).await.map(drop)
    }

    pub(crate) async fn unpublish(&self, client: &Client, target: &str) -> Result<(), CallError> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: self.id.clone(), target_path: target.to_owned() };
        client.node_unpublish_volume(request).await.map(drop)
    }
}
