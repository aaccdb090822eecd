//! Which lists a strategic merge joins element by element, and by what. Every list not named here is replaced whole.

/// How a strategic merge treats a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListRule {
    Replace,
    /// Elements are objects, identified by this field.
    By(&'static str),
    /// Elements are primitives, each at most once.
    Set,
}

/// Lists of every kind.
const COMMON: &[(&str, ListRule)] =
    &[("metadata.ownerReferences", ListRule::By("uid")), ("metadata.finalizers", ListRule::Set)];

/// Lists of one kind. Paths name fields only: an element of a list is transparent.
const KINDS: &[(&str, &[(&str, ListRule)])] = &[
    (
        "Pod",
        &[
            ("spec.containers", ListRule::By("name")),
            ("spec.initContainers", ListRule::By("name")),
            ("spec.ephemeralContainers", ListRule::By("name")),
            ("spec.volumes", ListRule::By("name")),
            ("spec.imagePullSecrets", ListRule::By("name")),
            ("spec.hostAliases", ListRule::By("ip")),
            ("spec.topologySpreadConstraints", ListRule::By("topologyKey")),
            ("spec.schedulingGates", ListRule::By("name")),
            ("spec.resourceClaims", ListRule::By("name")),
            ("status.conditions", ListRule::By("type")),
            ("status.podIPs", ListRule::By("ip")),
            ("status.hostIPs", ListRule::By("ip")),
        ],
    ),
    (
        "Node",
        &[
            ("spec.podCIDRs", ListRule::Set),
            ("status.addresses", ListRule::By("type")),
            ("status.conditions", ListRule::By("type")),
        ],
    ),
    ("Namespace", &[("status.conditions", ListRule::By("type"))]),
    ("PersistentVolumeClaim", &[("status.conditions", ListRule::By("type"))]),
    ("ServiceAccount", &[("secrets", ListRule::By("name"))]),
    ("CSINode", &[("spec.drivers", ListRule::By("name"))]),
];

const CONTAINER: &[(&str, ListRule)] = &[
    ("env", ListRule::By("name")),
    ("ports", ListRule::By("containerPort")),
    ("volumeMounts", ListRule::By("mountPath")),
    ("volumeDevices", ListRule::By("devicePath")),
];

/// Kinds that hold the template of a pod.
const TEMPLATED: [&str; 5] = ["DaemonSet", "Deployment", "Job", "ReplicaSet", "StatefulSet"];

pub(super) fn rule(kind: &str, path: &str) -> ListRule {
    if TEMPLATED.contains(&kind)
        && let Some(inside) = path.strip_prefix("spec.template.")
    {
        return rule("Pod", inside);
    }
    if TEMPLATED.contains(&kind) && path == "status.conditions" {
        return ListRule::By("type");
    }
    let container = |path: &str| {
        let (parent, field) = path.rsplit_once('.')?;
        let in_pod = ["spec.containers", "spec.initContainers", "spec.ephemeralContainers"].contains(&parent);
        CONTAINER.iter().find(|(name, _)| in_pod && kind == "Pod" && *name == field)
    };
    let of_kind = || KINDS.iter().find(|(name, _)| *name == kind).map_or(&[][..], |(_, rules)| rules);
    COMMON
        .iter()
        .chain(of_kind())
        .find(|(name, _)| *name == path)
        .or_else(|| container(path))
        .map_or(ListRule::Replace, |(_, rule)| *rule)
}
