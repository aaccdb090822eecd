//! Defaults of pods and pod templates.

use cleat_api::Quantity;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, PodSpec, Probe, Volume};

use crate::strategy::persistent_volume_claim;
use crate::strategy::quantity::canonicalize_quantities;

const DEFAULT_FILE_MODE: i32 = 0o644;

/// Defaults of a pod. In addition to those of a template, missing requests are set to the limits.
pub(super) fn default_pod_spec(spec: &mut PodSpec) {
    default_spec(spec);
    spec.enable_service_links.get_or_insert(true);
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        let Some(resources) = &mut container.resources else { continue };
        for (name, limit) in resources.limits.clone().unwrap_or_default() {
            resources.requests.get_or_insert_default().entry(name).or_insert(limit);
        }
    }
}

/// Defaults of the spec of a pod or pod template.
pub(super) fn default_spec(spec: &mut PodSpec) {
    spec.restart_policy.get_or_insert_with(|| "Always".into());
    spec.dns_policy.get_or_insert_with(|| "ClusterFirst".into());
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.security_context.get_or_insert_default();
    spec.scheduler_name.get_or_insert_with(|| "default-scheduler".into());
    // `serviceAccount` is the deprecated name of `serviceAccountName`; both have the same value.
    let non_empty = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    match (non_empty(&spec.service_account_name), non_empty(&spec.service_account)) {
        (Some(name), _) => spec.service_account = Some(name),
        (None, Some(name)) => spec.service_account_name = Some(name),
        (None, None) => {}
    }
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        default_container(container);
    }
    if spec.host_network == Some(true) {
        for port in spec.containers.iter_mut().flat_map(|c| c.ports.iter_mut().flatten()) {
            port.host_port.get_or_insert(port.container_port);
        }
    }
    for volume in spec.volumes.iter_mut().flatten() {
        default_volume(volume);
    }
}

fn default_container(container: &mut Container) {
    let image = container.image.as_deref().unwrap_or_default();
    let tag = image.rsplit('/').next().and_then(|name| name.split_once(':')).map(|(_, tag)| tag);
    let is_latest = !image.contains('@') && tag.is_none_or(|t| t == "latest");
    let policy = if is_latest { "Always" } else { "IfNotPresent" };
    container.image_pull_policy.get_or_insert_with(|| policy.into());
    container.termination_message_path.get_or_insert_with(|| "/dev/termination-log".into());
    container.termination_message_policy.get_or_insert_with(|| "File".into());
    for port in container.ports.iter_mut().flatten() {
        port.protocol.get_or_insert_with(|| "TCP".into());
    }
    let resources = container.resources.get_or_insert_default();
    canonicalize_quantities(&mut resources.limits);
    canonicalize_quantities(&mut resources.requests);
    for probe in [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe] {
        probe.iter_mut().for_each(default_probe);
    }
    for variable in container.env.iter_mut().flatten() {
        if let Some(field) = variable.value_from.as_mut().and_then(|v| v.field_ref.as_mut()) {
            field.api_version.get_or_insert_with(|| "v1".into());
        }
    }
}

fn default_probe(probe: &mut Probe) {
    probe.timeout_seconds.get_or_insert(1);
    probe.period_seconds.get_or_insert(10);
    probe.success_threshold.get_or_insert(1);
    probe.failure_threshold.get_or_insert(3);
}

fn default_volume(volume: &mut Volume) {
    let without_source = Volume { name: volume.name.clone(), ..Default::default() };
    if *volume == without_source {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(source) = &mut volume.secret {
        source.default_mode.get_or_insert(DEFAULT_FILE_MODE);
    }
    if let Some(source) = &mut volume.config_map {
        source.default_mode.get_or_insert(DEFAULT_FILE_MODE);
    }
    if let Some(source) = &mut volume.downward_api {
        source.default_mode.get_or_insert(DEFAULT_FILE_MODE);
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
        source.default_mode.get_or_insert(DEFAULT_FILE_MODE);
        for token in source.sources.iter_mut().flatten().filter_map(|s| s.service_account_token.as_mut()) {
            token.expiration_seconds.get_or_insert(3600);
        }
    }
    if let Some(template) = volume.ephemeral.as_mut().and_then(|e| e.volume_claim_template.as_mut()) {
        persistent_volume_claim::default_spec(&mut template.spec);
    }
}

/// The QoS class that follows from the containers' requests and limits of cpu and memory.
pub(super) fn qos_class(spec: &PodSpec) -> &'static str {
    const QOS_RESOURCES: [&str; 2] = ["cpu", "memory"];
    let all: Vec<&Container> = spec.containers.iter().chain(spec.init_containers.iter().flatten()).collect();
    let is_positive = |raw: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| {
        raw.0.parse::<Quantity>().is_ok_and(|q| q.is_positive())
    };
    let limit = |c: &Container, name: &str| {
        c.resources.as_ref()?.limits.as_ref()?.get(name).filter(|q| is_positive(q)).cloned()
    };
    let request = |c: &Container, name: &str| {
        c.resources.as_ref()?.requests.as_ref()?.get(name).filter(|q| is_positive(q)).cloned()
    };
    let has_any = all.iter().any(|c| QOS_RESOURCES.iter().any(|n| limit(c, n).is_some() || request(c, n).is_some()));
    let has_all_equal =
        all.iter().all(|c| QOS_RESOURCES.iter().all(|n| limit(c, n).is_some() && limit(c, n) == request(c, n)));
    match (has_any, has_all_equal) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}
