//! The protobuf messages that CSI sidecars and leader elections send: leases, events, capacities and volumes. Their
//! patches are JSON.

use super::FieldType::{
    Bool, InlinedMessage, Int, Message, MessageList, MicroTime, OptionalText, Quantity, QuantityMap, Text, TextList,
    TextMap, Time,
};
use super::{Field, METADATA, OBJECT_REFERENCE};

const SECRET: &[Field] = &[(1, "name", Text), (2, "namespace", Text)];
const SERIES: &[Field] = &[(1, "count", Int), (2, "lastObservedTime", MicroTime)];
const SOURCE: &[Field] = &[(1, "component", Text), (2, "host", Text)];
const REQUIREMENT: &[Field] = &[(1, "key", Text), (2, "operator", Text), (3, "values", TextList)];
const SELECTOR: &[Field] = &[(1, "matchLabels", TextMap), (2, "matchExpressions", MessageList(REQUIREMENT))];
const NODE_TERM: &[Field] =
    &[(1, "matchExpressions", MessageList(REQUIREMENT)), (2, "matchFields", MessageList(REQUIREMENT))];
const NODE_AFFINITY: &[Field] = &[(1, "required", Message(&[(1, "nodeSelectorTerms", MessageList(NODE_TERM))]))];
const CSI: &[Field] = &[
    (1, "driver", Text),
    (2, "volumeHandle", Text),
    (3, "readOnly", Bool),
    (4, "fsType", Text),
    (5, "volumeAttributes", TextMap),
    (6, "controllerPublishSecretRef", Message(SECRET)),
    (7, "nodeStageSecretRef", Message(SECRET)),
    (8, "nodePublishSecretRef", Message(SECRET)),
    (9, "controllerExpandSecretRef", Message(SECRET)),
    (10, "nodeExpandSecretRef", Message(SECRET)),
];
const VOLUME: &[Field] = &[
    (1, "capacity", QuantityMap),
    // Sidecars create only CSI volumes. Volumes with other sources must be sent as JSON.
    (2, "persistentVolumeSource", InlinedMessage(&[(22, "csi", Message(CSI))])),
    (3, "accessModes", TextList),
    (4, "claimRef", Message(OBJECT_REFERENCE)),
    (5, "persistentVolumeReclaimPolicy", Text),
    (6, "storageClassName", Text),
    (7, "mountOptions", TextList),
    (8, "volumeMode", OptionalText),
    (9, "nodeAffinity", Message(NODE_AFFINITY)),
    (10, "volumeAttributesClassName", OptionalText),
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
                    (1, "holderIdentity", OptionalText),
                    (2, "leaseDurationSeconds", Int),
                    (3, "acquireTime", MicroTime),
                    (4, "renewTime", MicroTime),
                    (5, "leaseTransitions", Int),
                    (6, "strategy", OptionalText),
                    (7, "preferredHolder", OptionalText),
                ]),
            ),
        ],
    ),
    (
        "v1.Event",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "involvedObject", Message(OBJECT_REFERENCE)),
            (3, "reason", Text),
            (4, "message", Text),
            (5, "source", Message(SOURCE)),
            (6, "firstTimestamp", Time),
            (7, "lastTimestamp", Time),
            (8, "count", Int),
            (9, "type", Text),
            (10, "eventTime", MicroTime),
            (11, "series", Message(SERIES)),
            (12, "action", Text),
            (13, "related", Message(OBJECT_REFERENCE)),
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
            (8, "regarding", Message(OBJECT_REFERENCE)),
            (9, "related", Message(OBJECT_REFERENCE)),
            (10, "note", Text),
            (11, "type", Text),
            (12, "deprecatedSource", Message(SOURCE)),
            (13, "deprecatedFirstTimestamp", Time),
            (14, "deprecatedLastTimestamp", Time),
            (15, "deprecatedCount", Int),
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
