//! SubjectAccessReview and its siblings: may this one do that?

use k8s_openapi::api::authorization::v1::{
    LocalSubjectAccessReview, NonResourceAttributes, NonResourceRule, ResourceAttributes, ResourceRule,
    SelfSubjectAccessReview, SelfSubjectRulesReview, SubjectAccessReview, SubjectAccessReviewSpec,
    SubjectAccessReviewStatus, SubjectRulesReviewStatus,
};

use super::{body, created, invalid};
use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_auth::authenticate::Caller;
use cleat_auth::authorize::{Attributes, What};

pub(super) async fn own(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    caller: &Caller,
) -> Result<Reply, ApiError> {
    let mut review: SelfSubjectAccessReview = body(call, d)?;
    let spec = &review.spec;
    check_question(d, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref())?;
    let status = judge(api, caller, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref()).await;
    review.status = Some(status);
    created(&review)
}

pub(super) async fn subject(api: &ServerState, call: &ResourceRequest, d: &Descriptor) -> Result<Reply, ApiError> {
    let mut review: SubjectAccessReview = body(call, d)?;
    review.status = Some(about(api, d, &review.spec).await?);
    created(&review)
}

pub(super) async fn local(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    namespace: &str,
) -> Result<Reply, ApiError> {
    let mut review: LocalSubjectAccessReview = body(call, d)?;
    let asked = review.spec.resource_attributes.as_ref().and_then(|a| a.namespace.as_deref()).unwrap_or_default();
    if asked != namespace {
        let why = "must match metadata.namespace";
        return invalid(d, FieldError::invalid("spec.resourceAttributes.namespace", asked, why));
    }
    if review.spec.non_resource_attributes.is_some() {
        let path = "spec.nonResourceAttributes";
        return invalid(d, FieldError::forbidden(path, "disallowed on this kind of request"));
    }
    review.metadata.namespace = Some(namespace.into());
    review.status = Some(about(api, d, &review.spec).await?);
    created(&review)
}

async fn about(
    api: &ServerState,
    d: &Descriptor,
    spec: &SubjectAccessReviewSpec,
) -> Result<SubjectAccessReviewStatus, ApiError> {
    check_question(d, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref())?;
    let name = spec.user.clone().unwrap_or_default();
    let groups = spec.groups.clone().unwrap_or_default();
    if name.is_empty() && groups.is_empty() {
        let why = "at least one of user or group must be specified";
        return invalid(d, FieldError::invalid("spec.user", &name, why));
    }
    let uid = spec.uid.clone().unwrap_or_default();
    let caller = Caller { name, uid, groups, extra: spec.extra.clone().unwrap_or_default() };
    Ok(judge(api, &caller, spec.resource_attributes.as_ref(), spec.non_resource_attributes.as_ref()).await)
}

fn check_question(
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

async fn judge(
    api: &ServerState,
    caller: &Caller,
    resource: Option<&ResourceAttributes>,
    path: Option<&NonResourceAttributes>,
) -> SubjectAccessReviewStatus {
    let text = |value: &'_ Option<String>| value.clone().unwrap_or_default();
    let verdict = match (resource, path) {
        (Some(asked), _) => {
            let (group, plural, subresource) = (text(&asked.group), text(&asked.resource), text(&asked.subresource));
            let (verb, name, namespace) = (text(&asked.verb), text(&asked.name), text(&asked.namespace));
            let fields = asked.field_selector.as_ref().and_then(|f| f.raw_selector.clone()).unwrap_or_default();
            let what = What::Resource {
                group: &group,
                plural: &plural,
                subresource: &subresource,
                namespace: Some(namespace.as_str()).filter(|n| !n.is_empty()),
                name: &name,
            };
            let asked = Attributes { fields: &fields, ..Attributes::new(&verb, what) };
            api.security.authorizer.decide(caller, &asked).await
        }
        (None, asked) => {
            let (path, verb) = asked.map(|a| (text(&a.path), text(&a.verb))).unwrap_or_default();
            api.security.authorizer.decide(caller, &Attributes::new(&verb, What::Path(&path))).await
        }
    };
    SubjectAccessReviewStatus {
        allowed: verdict.is_allowed(),
        reason: Some(verdict.reason()).filter(|r| !r.is_empty()),
        ..SubjectAccessReviewStatus::default()
    }
}

pub(super) async fn rules(
    api: &ServerState,
    call: &ResourceRequest,
    d: &Descriptor,
    caller: &Caller,
) -> Result<Reply, ApiError> {
    let mut review: SelfSubjectRulesReview = body(call, d)?;
    let namespace = review.spec.namespace.clone().filter(|n| !n.is_empty());
    let Some(namespace) = namespace else { return Err(ApiError::BadRequest("no namespace on request".into())) };
    let mut status = SubjectRulesReviewStatus::default();
    for rule in api.security.authorizer.rules(caller, Some(&namespace)).await {
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
    // What a node needs beyond its roles depends on its pods and cannot be listed.
    status.incomplete = caller.node().is_some();
    review.status = Some(status);
    created(&review)
}
