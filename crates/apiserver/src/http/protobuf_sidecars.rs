//! What CSI sidecars and leader elections send as protobuf: leases, events, capacities and the volumes they made. Their
//! patches are JSON.

use super::protobuf::Holds::{
    Flag, Inlined, Message, Messages, MicroTime, Number, Quantities, Quantity, Text, TextMap, TextMeant, Texts, Time,
};
use super::protobuf::{Field, METADATA, REFERENCE};

const SECRET: &[Field] = &[(1, "name", Text), (2, "namespace", Text)];
const SERIES: &[Field] = &[(1, "count", Number), (2, "lastObservedTime", MicroTime)];
const SOURCE: &[Field] = &[(1, "component", Text), (2, "host", Text)];
const REQUIREMENT: &[Field] = &[(1, "key", Text), (2, "operator", Text), (3, "values", Texts)];
const SELECTOR: &[Field] = &[(1, "matchLabels", TextMap), (2, "matchExpressions", Messages(REQUIREMENT))];
const NODE_TERM: &[Field] =
    &[(1, "matchExpressions", Messages(REQUIREMENT)), (2, "matchFields", Messages(REQUIREMENT))];
const NODE_AFFINITY: &[Field] = &[(1, "required", Message(&[(1, "nodeSelectorTerms", Messages(NODE_TERM))]))];
const CSI: &[Field] = &[
    (1, "driver", Text),
    (2, "volumeHandle", Text),
    (3, "readOnly", Flag),
    (4, "fsType", Text),
    (5, "volumeAttributes", TextMap),
    (6, "controllerPublishSecretRef", Message(SECRET)),
    (7, "nodeStageSecretRef", Message(SECRET)),
    (8, "nodePublishSecretRef", Message(SECRET)),
    (9, "controllerExpandSecretRef", Message(SECRET)),
    (10, "nodeExpandSecretRef", Message(SECRET)),
];
const VOLUME: &[Field] = &[
    (1, "capacity", Quantities),
    // Volumes of other sources are not made by sidecars; they come as JSON.
    (2, "persistentVolumeSource", Inlined(&[(22, "csi", Message(CSI))])),
    (3, "accessModes", Texts),
    (4, "claimRef", Message(REFERENCE)),
    (5, "persistentVolumeReclaimPolicy", Text),
    (6, "storageClassName", Text),
    (7, "mountOptions", Texts),
    (8, "volumeMode", TextMeant),
    (9, "nodeAffinity", Message(NODE_AFFINITY)),
    (10, "volumeAttributesClassName", TextMeant),
];

pub(super) const KINDS: &[(&str, &[Field])] = &[
    (
        "coordination.k8s.io/v1.Lease",
        &[
            (1, "metadata", Message(METADATA)),
            (
                2,
                "spec",
                Message(&[
                    (1, "holderIdentity", TextMeant),
                    (2, "leaseDurationSeconds", Number),
                    (3, "acquireTime", MicroTime),
                    (4, "renewTime", MicroTime),
                    (5, "leaseTransitions", Number),
                    (6, "strategy", TextMeant),
                    (7, "preferredHolder", TextMeant),
                ]),
            ),
        ],
    ),
    (
        "v1.Event",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "involvedObject", Message(REFERENCE)),
            (3, "reason", Text),
            (4, "message", Text),
            (5, "source", Message(SOURCE)),
            (6, "firstTimestamp", Time),
            (7, "lastTimestamp", Time),
            (8, "count", Number),
            (9, "type", Text),
            (10, "eventTime", MicroTime),
            (11, "series", Message(SERIES)),
            (12, "action", Text),
            (13, "related", Message(REFERENCE)),
            (14, "reportingComponent", Text),
            (15, "reportingInstance", Text),
        ],
    ),
    (
        "events.k8s.io/v1.Event",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "eventTime", MicroTime),
            (3, "series", Message(SERIES)),
            (4, "reportingController", Text),
            (5, "reportingInstance", Text),
            (6, "action", Text),
            (7, "reason", Text),
            (8, "regarding", Message(REFERENCE)),
            (9, "related", Message(REFERENCE)),
            (10, "note", Text),
            (11, "type", Text),
            (12, "deprecatedSource", Message(SOURCE)),
            (13, "deprecatedFirstTimestamp", Time),
            (14, "deprecatedLastTimestamp", Time),
            (15, "deprecatedCount", Number),
        ],
    ),
    (
        "storage.k8s.io/v1.CSIStorageCapacity",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "nodeTopology", Message(SELECTOR)),
            (3, "storageClassName", Text),
            (4, "capacity", Quantity),
            (5, "maximumVolumeSize", Quantity),
        ],
    ),
    ("v1.PersistentVolume", &[(1, "metadata", Message(METADATA)), (2, "spec", Message(VOLUME))]),
];
