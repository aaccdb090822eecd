//! The protobuf messages of roles, bindings, tokens and reviews, which `kubectl create role`, `kubectl auth` and
//! `kubectl create token` send.

use super::FieldType::{Int, Message, MessageList, Text, TextList, TextMap};
use super::{Field, METADATA};

const RULE: &[Field] = &[
    (1, "verbs", TextList),
    (2, "apiGroups", TextList),
    (3, "resources", TextList),
    (4, "resourceNames", TextList),
    (5, "nonResourceURLs", TextList),
];
const SUBJECT: &[Field] = &[(1, "kind", Text), (2, "apiGroup", Text), (3, "name", Text), (4, "namespace", Text)];
const ROLE_REF: &[Field] = &[(1, "apiGroup", Text), (2, "kind", Text), (3, "name", Text)];
const REQUIREMENT: &[Field] = &[(1, "key", Text), (2, "operator", Text), (3, "values", TextList)];
const LABELS: &[Field] = &[(1, "matchLabels", TextMap), (2, "matchExpressions", MessageList(REQUIREMENT))];
const AGGREGATION: &[Field] = &[(1, "clusterRoleSelectors", MessageList(LABELS))];
const ROLE: &[Field] = &[(1, "metadata", Message(METADATA)), (2, "rules", MessageList(RULE))];
const CLUSTER_ROLE: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (2, "rules", MessageList(RULE)),
    (3, "aggregationRule", Message(AGGREGATION)),
];
const BINDING: &[Field] =
    &[(1, "metadata", Message(METADATA)), (2, "subjects", MessageList(SUBJECT)), (3, "roleRef", Message(ROLE_REF))];
const SELECTOR: &[Field] = &[(1, "rawSelector", Text), (2, "requirements", MessageList(REQUIREMENT))];
const RESOURCE: &[Field] = &[
    (1, "namespace", Text),
    (2, "verb", Text),
    (3, "group", Text),
    (4, "version", Text),
    (5, "resource", Text),
    (6, "subresource", Text),
    (7, "name", Text),
    (8, "fieldSelector", Message(SELECTOR)),
    (9, "labelSelector", Message(SELECTOR)),
];
const PATH: &[Field] = &[(1, "path", Text), (2, "verb", Text)];
const SELF_ACCESS: &[Field] =
    &[(1, "resourceAttributes", Message(RESOURCE)), (2, "nonResourceAttributes", Message(PATH))];
const ACCESS: &[Field] = &[
    (1, "resourceAttributes", Message(RESOURCE)),
    (2, "nonResourceAttributes", Message(PATH)),
    (3, "user", Text),
    (4, "groups", TextList),
    (6, "uid", Text),
];
const SUBJECT_ACCESS: &[Field] = &[(1, "metadata", Message(METADATA)), (2, "spec", Message(ACCESS))];
const BOUND: &[Field] = &[(1, "kind", Text), (2, "apiVersion", Text), (3, "name", Text), (4, "uid", Text)];
const TOKEN_REQUEST: &[Field] =
    &[(1, "audiences", TextList), (3, "boundObjectRef", Message(BOUND)), (4, "expirationSeconds", Int)];

pub(super) const KINDS: &[(&str, &[Field])] = &[
    ("Role", ROLE),
    ("ClusterRole", CLUSTER_ROLE),
    ("RoleBinding", BINDING),
    ("ClusterRoleBinding", BINDING),
    ("SelfSubjectReview", &[(1, "metadata", Message(METADATA))]),
    (
        "TokenReview",
        &[(1, "metadata", Message(METADATA)), (2, "spec", Message(&[(1, "token", Text), (2, "audiences", TextList)]))],
    ),
    ("TokenRequest", &[(1, "metadata", Message(METADATA)), (2, "spec", Message(TOKEN_REQUEST))]),
    ("SubjectAccessReview", SUBJECT_ACCESS),
    ("LocalSubjectAccessReview", SUBJECT_ACCESS),
    ("SelfSubjectAccessReview", &[(1, "metadata", Message(METADATA)), (2, "spec", Message(SELF_ACCESS))]),
    ("SelfSubjectRulesReview", &[(1, "metadata", Message(METADATA)), (2, "spec", Message(&[(1, "namespace", Text)]))]),
];
