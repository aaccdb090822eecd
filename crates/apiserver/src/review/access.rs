//! SubjectAccessReview, SelfSubjectAccessReview, LocalSubjectAccessReview and SelfSubjectRulesReview.

use k8s_openapi::api::authorization::v1::{
    LocalSubjectAccessReview, NonResourceAttributes, NonResourceRule, ResourceAttributes, ResourceRule,
    SelfSubjectAccessReview, SelfSubjectRulesReview, SubjectAccessReview, SubjectAccessReviewSpec,
    SubjectAccessReviewStatus, SubjectRulesReviewStatus,
};

use super::{decode_body, invalid, reply_created};
use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_auth::authenticate::Caller;
use cleat_auth::authorize::{Attributes, RequestTarget};

/// SelfSubjectAccessReview: may the caller do this?
pub(super) async fn review_own_access(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    caller: &Caller,
) -> Result<Reply, ApiError> {
    let mut review: SelfSubjectAccessReview = decode_body(call, d)?;
    let spec = &review.spec;
    check_one_target(d, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref())?;
    let status = decide(api, caller, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref()).await;
    review.status = Some(status);
    reply_created(&review)
}

/// SubjectAccessReview: may the user of the spec do this?
pub(super) async fn review_access(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
) -> Result<Reply, ApiError> {
    let mut review: SubjectAccessReview = decode_body(call, d)?;
    review.status = Some(decide_for_subject(api, d, &review.spec).await?);
    reply_created(&review)
}

/// LocalSubjectAccessReview: may the user of the spec do this in the namespace?
pub(super) async fn review_local_access(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    namespace: &str,
) -> Result<Reply, ApiError> {
    let mut review: LocalSubjectAccessReview = decode_body(call, d)?;
    let reviewed = review.spec.resource_attributes.as_ref().and_then(|a| a.namespace.as_deref()).unwrap_or_default();
    if reviewed != namespace {
        let why = "must match metadata.namespace";
        return invalid(d, FieldError::invalid("spec.resourceAttributes.namespace", reviewed, why));
    }
    if review.spec.non_resource_attributes.is_some() {
        let path = "spec.nonResourceAttributes";
        return invalid(d, FieldError::forbidden(path, "disallowed on this kind of request"));
    }
    review.metadata.namespace = Some(namespace.into());
    review.status = Some(decide_for_subject(api, d, &review.spec).await?);
    reply_created(&review)
}

async fn decide_for_subject(
    api: &ServerState,
    d: &Descriptor,
    spec: &SubjectAccessReviewSpec,
) -> Result<SubjectAccessReviewStatus, ApiError> {
    check_one_target(d, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref())?;
    let name = spec.user.clone().unwrap_or_default();
    let groups = spec.groups.clone().unwrap_or_default();
    if name.is_empty() && groups.is_empty() {
        let why = "at least one of user or group must be specified";
        return invalid(d, FieldError::invalid("spec.user", &name, why));
    }
    let uid = spec.uid.clone().unwrap_or_default();
    let caller = Caller { name, uid, groups, extra: spec.extra.clone().unwrap_or_default() };
    Ok(decide(api, &caller, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref()).await)
}

/// Either the resource attributes or the non-resource attributes must be set, not both.
fn check_one_target(
    d: &Descriptor,
    resource: Option<&ResourceAttributes>,
    path: Option<&NonResourceAttributes>,
) -> Result<(), ApiError> {
    let why = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
    match (resource, path) {
        (Some(_), None) | (None, Some(_)) => Ok(()),
        (None, None) => invalid(d, FieldError::invalid("spec.resourceAttributes", serde_json::Value::Null, why)),
        (Some(_), Some(path)) => invalid(d, FieldError::invalid("spec.nonResourceAttributes", path, why)),
    }
}

async fn decide(
    api: &ServerState,
    caller: &Caller,
    resource: Option<&ResourceAttributes>,
    path: Option<&NonResourceAttributes>,
) -> SubjectAccessReviewStatus {
    let to_string = |value: &'_ Option<String>| value.clone().unwrap_or_default();
    let decision = match (resource, path) {
        (Some(resource), _) => {
            let (group, plural, subresource) =
                (to_string(&resource.group), to_string(&resource.resource), to_string(&resource.subresource));
            let (verb, name, namespace) =
                (to_string(&resource.verb), to_string(&resource.name), to_string(&resource.namespace));
            let selector = resource.field_selector.as_ref().and_then(|s| s.raw_selector.clone()).unwrap_or_default();
            let target = RequestTarget::Resource {
                group: &group,
                plural: &plural,
                subresource: &subresource,
                namespace: Some(namespace.as_str()).filter(|n| !n.is_empty()),
                name: &name,
            };
            let attributes = Attributes { field_selector: &selector, ..Attributes::new(&verb, target) };
            api.security.authorizer.decide(caller, &attributes).await
        }
        (None, path) => {
            let (path, verb) = path.map(|a| (to_string(&a.path), to_string(&a.verb))).unwrap_or_default();
            api.security.authorizer.decide(caller, &Attributes::new(&verb, RequestTarget::Path(&path))).await
        }
    };
    SubjectAccessReviewStatus {
        allowed: decision.is_allowed(),
        reason: Some(decision.reason()).filter(|r| !r.is_empty()),
        ..SubjectAccessReviewStatus::default()
    }
}

/// SelfSubjectRulesReview: what may the caller do in the namespace?
pub(super) async fn review_own_rules(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    caller: &Caller,
) -> Result<Reply, ApiError> {
    let mut review: SelfSubjectRulesReview = decode_body(call, d)?;
    let namespace = review.spec.namespace.clone().filter(|n| !n.is_empty());
    let Some(namespace) = namespace else { return Err(ApiError::BadRequest("no namespace on request".into())) };
    let mut status = SubjectRulesReviewStatus::default();
    for rule in api.security.authorizer.rules_for(caller, Some(&namespace)).await {
        match rule.non_resource_urls.filter(|urls| !urls.is_empty()) {
            Some(urls) => {
                status.non_resource_rules.push(NonResourceRule { non_resource_urls: Some(urls), verbs: rule.verbs });
            }
            None => status.resource_rules.push(ResourceRule {
                api_groups: rule.api_groups,
                resource_names: rule.resource_names,
                resources: rule.resources,
                verbs: rule.verbs,
            }),
        }
    }
    // The list does not contain what the node authorizer allows: that depends on the pods of the node.
    status.incomplete = caller.node_name().is_some();
    review.status = Some(status);
    reply_created(&review)
}
