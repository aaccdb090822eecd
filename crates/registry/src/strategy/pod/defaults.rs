//! What a pod gets that its author left out.

use cleat_api::Quantity;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, PodSpec, Probe, ResourceRequirements, Volume};

use super::super::{canonical, claim};

const FILE_MODE: i32 = 0o644;

/// A pod, as opposed to the template of one, also has its requests filled from its limits.
pub(super) fn pod(spec: &mut PodSpec) {
    self::spec(spec);
    spec.enable_service_links.get_or_insert(true);
    for one in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        let Some(resources) = &mut one.resources else { continue };
        for (name, limit) in resources.limits.clone().unwrap_or_default() {
            resources.requests.get_or_insert_default().entry(name).or_insert(limit);
        }
    }
}

pub(super) fn spec(spec: &mut PodSpec) {
    spec.restart_policy.get_or_insert_with(|| "Always".into());
    spec.dns_policy.get_or_insert_with(|| "ClusterFirst".into());
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.security_context.get_or_insert_default();
    spec.scheduler_name.get_or_insert_with(|| "default-scheduler".into());
    // The older of the two names is kept equal to the newer.
    let said = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    match (said(&spec.service_account_name), said(&spec.service_account)) {
        (Some(name), _) => spec.service_account = Some(name),
        (None, Some(name)) => spec.service_account_name = Some(name),
        (None, None) => {}
    }
    for one in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        container(one);
    }
    if spec.host_network == Some(true) {
        for port in spec.containers.iter_mut().flat_map(|c| c.ports.iter_mut().flatten()) {
            port.host_port.get_or_insert(port.container_port);
        }
    }
    for volume in spec.volumes.iter_mut().flatten() {
        self::volume(volume);
    }
}

fn container(container: &mut Container) {
    let image = container.image.as_deref().unwrap_or_default();
    let tag = image.rsplit('/').next().and_then(|name| name.split_once(':')).map(|(_, tag)| tag);
    let latest = !image.contains('@') && tag.is_none_or(|t| t == "latest");
    let policy = if latest { "Always" } else { "IfNotPresent" };
    container.image_pull_policy.get_or_insert_with(|| policy.into());
    container.termination_message_path.get_or_insert_with(|| "/dev/termination-log".into());
    container.termination_message_policy.get_or_insert_with(|| "File".into());
    for port in container.ports.iter_mut().flatten() {
        port.protocol.get_or_insert_with(|| "TCP".into());
    }
    let resources = container.resources.get_or_insert_default();
    canonical(&mut resources.limits);
    canonical(&mut resources.requests);
    for probe in [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe] {
        probe.iter_mut().for_each(self::probe);
    }
    for variable in container.env.iter_mut().flatten() {
        if let Some(field) = variable.value_from.as_mut().and_then(|v| v.field_ref.as_mut()) {
            field.api_version.get_or_insert_with(|| "v1".into());
        }
    }
}

fn probe(probe: &mut Probe) {
    probe.timeout_seconds.get_or_insert(1);
    probe.period_seconds.get_or_insert(10);
    probe.success_threshold.get_or_insert(1);
    probe.failure_threshold.get_or_insert(3);
}

fn volume(volume: &mut Volume) {
    let bare = Volume { name: volume.name.clone(), ..Default::default() };
    if *volume == bare {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(source) = &mut volume.secret {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = &mut volume.config_map {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = &mut volume.downward_api {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = &mut volume.host_path {
        source.type_.get_or_insert_default();
    }
    if let Some(source) = &mut volume.iscsi {
        source.iscsi_interface.get_or_insert_with(|| "default".into());
    }
    if let Some(source) = &mut volume.rbd {
        source.pool.get_or_insert_with(|| "rbd".into());
        source.user.get_or_insert_with(|| "admin".into());
        source.keyring.get_or_insert_with(|| "/etc/ceph/keyring".into());
    }
    if let Some(source) = &mut volume.projected {
        source.default_mode.get_or_insert(FILE_MODE);
        for token in source.sources.iter_mut().flatten().filter_map(|s| s.service_account_token.as_mut()) {
            token.expiration_seconds.get_or_insert(3600);
        }
    }
    if let Some(template) = volume.ephemeral.as_mut().and_then(|e| e.volume_claim_template.as_mut()) {
        claim::default_spec(&mut template.spec);
    }
}

/// The quality of service that the pod's requests and limits amount to.
pub(super) fn quality(spec: &PodSpec) -> &'static str {
    const COUNTED: [&str; 2] = ["cpu", "memory"];
    let all: Vec<&Container> = spec.containers.iter().chain(spec.init_containers.iter().flatten()).collect();
    let positive = |written: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| {
        written.0.parse::<Quantity>().is_ok_and(|q| q.is_positive())
    };
    let get = |c: &Container, limits: bool, name: &str| {
        let resources: &ResourceRequirements = c.resources.as_ref()?;
        let list = if limits { &resources.limits } else { &resources.requests };
        list.as_ref()?.get(name).filter(|q| positive(q)).cloned()
    };
    let any = all.iter().any(|c| COUNTED.iter().any(|n| get(c, true, n).is_some() || get(c, false, n).is_some()));
    let full =
        all.iter().all(|c| COUNTED.iter().all(|n| get(c, true, n).is_some() && get(c, true, n) == get(c, false, n)));
    match (any, full) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}
