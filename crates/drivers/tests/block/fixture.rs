//! A pool, its drivers and everything that a test mounts. Dropping it removes all of that.
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
use cleat_host::{
    Access,
    filesystem::{self, Format, Overwrite},
    freeze, loopdev,
    mount::{self, MountOptions},
};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

pub(crate) const GIB: i64 = 1 << 30;

pub(crate) struct BlockFixture {
    pub(crate) directory: TempDir,
    /// The image and the mount point of the file system that the pool is on, if the fixture created one.
    disk: Option<(PathBuf, PathBuf)>,
    stop: CancellationToken,
}

impl BlockFixture {
    pub(crate) fn new() -> BlockFixture {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests mount file systems and attach loop devices: run them as root"
        );
        let directory = TempDir::with_prefix("cleat-block-").unwrap();
        BlockFixture { directory, disk: None, stop: CancellationToken::new() }
    }

    /// The pool is on a separate xfs, where files can share blocks.
    pub(crate) fn on_xfs(bytes: u64) -> BlockFixture {
        BlockFixture::on(Format::Xfs, &[], bytes)
    }

    /// The pool is on a separate file system.
    pub(crate) fn on(format: Format, options: &[&str], bytes: u64) -> BlockFixture {
        let mut fixture = BlockFixture::new();
        let (image, at) = (fixture.path("disk.img"), fixture.path("disk"));
        std::fs::create_dir(&at).unwrap();
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
        fixture.disk = Some((image, at.clone()));
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        filesystem::mkfs(&device.path, format, &options, Overwrite::IfBlank).unwrap();
        mount::mount_fs(&device.path, &at, format.name(), &MountOptions::default()).unwrap();
        fixture
    }

    /// The files in `volumes/` that would exist after a power failure at this time. Only for a pool on ext4.
    pub(crate) fn volumes_after_power_failure(&self) -> Vec<String> {
        let (disk, _) = self.disk.as_ref().unwrap();
        let (copy, at) = (self.path("after.img"), self.path("after"));
        // Dirty data that has not been written to the disk is not in the copy.
        std::fs::copy(disk, &copy).unwrap();
        std::fs::create_dir_all(&at).unwrap();
        let device = loopdev::attach(&copy, Access::ReadWrite).unwrap();
        let found = mount::mount_fs(&device.path, &at, "ext4", &MountOptions::default()).map(|()| {
            let names = std::fs::read_dir(at.join("pool/volumes"));
            let names = names.map(|all| all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect());
            mount::unmount(&at).unwrap();
            names
        });
        loopdev::detach(&device).unwrap();
        let mut names: Vec<String> = found.unwrap().unwrap();
        names.sort();
        names
    }

    pub(crate) fn pool(&self) -> PathBuf {
        match &self.disk {
            Some((_, at)) => at.join("pool"),
            None => self.path("pool"),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Creates a directory, as the node agent does before it calls the driver.
    pub(crate) fn create_dir(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        to_string(&path)
    }

    pub(crate) fn path_string(&self, name: &str) -> String {
        to_string(&self.path(name))
    }

    pub(crate) fn image(&self, id: &str) -> PathBuf {
        self.pool().join("volumes").join(format!("{id}.img"))
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
        Config::new(Endpoint::unix(self.path(&format!("{node}.sock"))), self.pool(), node)
    }

    /// Starts a driver with all services as the node `node`. Several may serve the same pool.
    pub(crate) async fn driver(&self, node: &str) -> Client {
        self.driver_with(self.config(node)).await
    }

    pub(crate) async fn driver_with(&self, config: Config) -> Client {
        let client = Client::new(config.endpoint.clone());
        tokio::spawn(block::run(config, self.stop.clone()));
        client.wait_ready(Duration::from_secs(30)).await.unwrap();
        client
    }

    pub(crate) fn loop_devices(&self, id: &str) -> usize {
        loopdev::find(&self.image(id)).unwrap().len()
    }

    /// The mounts below the directory of the fixture, without the file system of the pool.
    pub(crate) fn mounts(&self) -> Vec<PathBuf> {
        let root = self.directory.path().canonicalize().unwrap();
        let table = mount::table().unwrap();
        let own = self.disk.as_ref().map(|(_, at)| at.canonicalize().unwrap());
        let targets = table.into_iter().map(|mount| mount.target);
        targets.filter(|target| target.starts_with(&root) && Some(target) != own.as_ref()).collect()
    }

    #[track_caller]
    pub(crate) fn assert_nothing_left(&self, id: &str) {
        assert_eq!(self.mounts(), Vec::<PathBuf>::new());
        assert_eq!(self.loop_devices(id), 0);
        for directory in ["volumes", "snapshots", "groups", "held"] {
            let left: Vec<_> = std::fs::read_dir(self.pool().join(directory)).unwrap().collect();
            assert!(left.is_empty(), "{left:?}");
        }
        assert_eq!(block::audit(&self.pool(), false).unwrap(), [], "the audit finds nothing");
    }
}

impl Drop for BlockFixture {
    fn drop(&mut self) {
        self.stop.cancel();
        for target in self.mounts().iter().rev() {
            let _ = freeze::thaw(target);
            let _ = mount::unmount(target);
        }
        let root = self.directory.path().canonicalize().unwrap();
        let below = self.disk.as_ref().map_or(root, |(_, at)| at.canonicalize().unwrap());
        for (device, _) in loopdev::attached_below(&below).unwrap_or_default() {
            let _ = loopdev::detach(&device);
        }
        if let Some((image, at)) = &self.disk {
            let _ = mount::unmount(at);
            let _ = loopdev::detach_file(image);
        }
    }
}

pub(crate) fn to_string(path: &Path) -> String {
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

/// A volume with the calls of a CSI client.
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

    /// Publishes the volume to `node` and stages it at `at`.
    pub(crate) async fn publish_and_stage(&self, client: &Client, node: &str, at: &str) {
        self.attach(client, node).await.unwrap();
        self.stage(client, at).await.unwrap();
    }

    pub(crate) async fn unstage_and_unpublish(&self, client: &Client, node: &str, at: &str) {
        self.unstage(client, at).await.unwrap();
        self.detach(client, node).await.unwrap();
    }

    pub(crate) async fn expand(&self, client: &Client, bytes: i64) -> Result<bool, CallError> {
        let request = v1::ControllerExpandVolumeRequest {
            volume_id: self.id.clone(),
            capacity_range: Some(v1::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        client.controller_expand_volume(request).await.map(|response| response.node_expansion_required)
    }

    pub(crate) async fn node_expand(&self, client: &Client, path: &str, bytes: i64) -> Result<i64, CallError> {
        let request = v1::NodeExpandVolumeRequest {
            volume_id: self.id.clone(),
            volume_path: path.to_owned(),
            capacity_range: Some(v1::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        client.node_expand_volume(request).await.map(|response| response.capacity_bytes)
    }

    pub(crate) async fn snapshot(&self, client: &Client, name: &str) -> Result<v1::Snapshot, CallError> {
        let request = v1::CreateSnapshotRequest {
            source_volume_id: self.id.clone(),
            name: name.to_owned(),
            ..Default::default()
        };
        client.create_snapshot(request).await.map(|response| response.snapshot.unwrap())
    }
}

pub(crate) fn from_snapshot(id: &str) -> v1::VolumeContentSource {
    use v1::volume_content_source::{SnapshotSource, Type};
    v1::VolumeContentSource { r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id: id.to_owned() })) }
}

pub(crate) fn from_volume(id: &str) -> v1::VolumeContentSource {
    use v1::volume_content_source::{Type, VolumeSource};
    v1::VolumeContentSource { r#type: Some(Type::Volume(VolumeSource { volume_id: id.to_owned() })) }
}

/// Waits until a snapshot is ready.
pub(crate) async fn ready(client: &Client, id: &str) -> v1::Snapshot {
    try_ready(client, id).await.unwrap()
}

pub(crate) async fn try_ready(client: &Client, id: &str) -> Result<v1::Snapshot, CallError> {
    let until = tokio::time::Instant::now() + Duration::from_secs(120);
    loop {
        let request = v1::GetSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        let snapshot = client.get_snapshot(request).await?.snapshot.unwrap();
        if snapshot.ready_to_use {
            return Ok(snapshot);
        }
        assert!(tokio::time::Instant::now() < until, "{id} is never ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn delete_snapshot(client: &Client, id: &str) -> Result<(), CallError> {
    let request = v1::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    client.delete_snapshot(request).await.map(drop)
}
