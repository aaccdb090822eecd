//! Content negotiation: the representation that the `Accept` header asks for.

use cleat_apimachinery::error::ApiError;

/// The representation of objects in a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Representation {
    /// The whole object.
    Full,
    Table,
    /// PartialObjectMetadata.
    Metadata,
}

/// The kind of a reply: some representations exist only for some of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    Item,
    List,
    Watch,
}

pub(crate) const AGGREGATED_DISCOVERY: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// One clause of the header: `MEDIA;g=GROUP;v=VERSION;as=TRANSFORM`.
struct Clause<'a> {
    media: &'a str,
    group: &'a str,
    version: &'a str,
    transform: &'a str,
}

fn clauses(header: &str) -> impl Iterator<Item = Clause<'_>> {
    header.split(',').map(|clause| {
        let mut parts = clause.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let mut found = Clause { media, group: "", version: "", transform: "" };
        for part in parts {
            match part.split_once('=') {
                Some(("g", value)) => found.group = value,
                Some(("v", value)) => found.version = value,
                Some(("as", value)) => found.transform = value,
                _ => {}
            }
        }
        found
    })
}

fn is_json(media: &str) -> bool {
    matches!(media, "application/json" | "application/*" | "*/*" | "")
}

/// The representation of the first clause that the server can satisfy.
pub(crate) fn negotiate(header: Option<&str>, reply: ReplyKind) -> Result<Representation, ApiError> {
    let Some(header) = header else { return Ok(Representation::Full) };
    clauses(header)
        .filter(|c| is_json(c.media))
        .find_map(|c| match (c.transform, c.group, c.version, reply) {
            ("", ..) => Some(Representation::Full),
            ("Table", "meta.k8s.io", "v1" | "v1beta1", _) => Some(Representation::Table),
            ("PartialObjectMetadata", "meta.k8s.io", "v1", ReplyKind::Item | ReplyKind::Watch) => {
                Some(Representation::Metadata)
            }
            ("PartialObjectMetadataList", "meta.k8s.io", "v1", ReplyKind::List) => Some(Representation::Metadata),
            _ => None,
        })
        .ok_or(ApiError::NotAcceptable)
}

/// Returns true if the client prefers aggregated discovery documents.
pub(crate) fn wants_aggregated(header: Option<&str>) -> bool {
    let first = header.and_then(|h| {
        clauses(h).find(|c| {
            is_json(c.media) && (c.transform.is_empty() || (c.group == "apidiscovery.k8s.io" && c.version == "v2"))
        })
    });
    first.is_some_and(|c| c.transform == "APIGroupDiscoveryList")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clause_that_can_be_satisfied_wins() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,\
                       application/json";
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,\
                        application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        for (header, reply, want) in [
            (Some(kubectl), ReplyKind::List, Some(Representation::Table)),
            (Some(metadata), ReplyKind::List, Some(Representation::Metadata)),
            (Some(metadata), ReplyKind::Item, Some(Representation::Full)),
            (Some("application/vnd.kubernetes.protobuf, */*"), ReplyKind::List, Some(Representation::Full)),
            (Some("application/vnd.kubernetes.protobuf"), ReplyKind::List, None),
            (None, ReplyKind::Item, Some(Representation::Full)),
        ] {
            assert_eq!(negotiate(header, reply).ok(), want, "{header:?}");
        }
    }

    #[test]
    fn discovery_is_aggregated_only_on_request() {
        assert!(wants_aggregated(Some(&format!("{AGGREGATED_DISCOVERY},application/json"))));
        assert!(!wants_aggregated(Some("application/json")));
        assert!(!wants_aggregated(None));
    }
}
