//! Who makes a request: the subject of a client certificate, the service account of a token that this server signed,
//! or, in the same process, the user that the component was given. A request with none of these is anonymous; roles
//! decide what an anonymous user may do.

pub mod service_account;
pub mod token;

use std::collections::BTreeMap;
use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use cleat_apimachinery::error::ApiError;
use cleat_registry::reader::ObjectReader;
use service_account::VerifiedToken;
use token::{TokenError, TokenSigner};

/// The user that makes a request, with the groups that the user is a member of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The group of every user that is not anonymous.
pub const AUTHENTICATED_GROUP: &str = "system:authenticated";
/// The group of the anonymous user.
pub const UNAUTHENTICATED_GROUP: &str = "system:unauthenticated";
/// Members of this group may do everything.
pub const MASTERS_GROUP: &str = "system:masters";
const NODES_GROUP: &str = "system:nodes";
/// A node's user name is this prefix and the node's name.
const NODE_USER_PREFIX: &str = "system:node:";
pub const ANONYMOUS_USER: &str = "system:anonymous";

impl Caller {
    fn new(name: &str, groups: &[&str]) -> Self {
        Self { name: name.into(), groups: groups.iter().map(|g| (*g).into()).collect(), ..Self::default() }
    }

    /// A caller inside the process that may do everything.
    pub fn trusted(name: &str) -> Self {
        Self::new(name, &[MASTERS_GROUP, AUTHENTICATED_GROUP])
    }

    /// A component inside the process, with the rights that roles grant its user name. `system:node:NAME` is that node.
    pub fn component(name: &str) -> Self {
        match name.strip_prefix(NODE_USER_PREFIX) {
            Some(_) => Self::new(name, &[NODES_GROUP, AUTHENTICATED_GROUP]),
            None => Self::new(name, &[AUTHENTICATED_GROUP]),
        }
    }

    pub fn anonymous() -> Self {
        Self::new(ANONYMOUS_USER, &[UNAUTHENTICATED_GROUP])
    }

    /// The user that a client certificate names: its common name, with its organizations as groups. TLS has verified
    /// the chain already. `None` if the certificate cannot be parsed or has no common name.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let subject = parsed.subject();
        let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let organizations = subject.iter_organization().filter_map(|o| o.as_str().ok().map(Into::into));
        let groups = organizations.chain([AUTHENTICATED_GROUP.into()]).collect();
        Some(Self { name, groups, ..Self::default() })
    }

    pub fn is_member_of(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }

    /// The name of the node that the caller is. `None` if the caller is not a node: a node has the user name and the
    /// group.
    pub fn node_name(&self) -> Option<&str> {
        self.name.strip_prefix(NODE_USER_PREFIX).filter(|node| !node.is_empty() && self.is_member_of(NODES_GROUP))
    }
}

/// The other end of the connection that a request came on.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A client in this process. Credentials in headers are ignored.
    Internal(Arc<Caller>),
    /// A client on a socket, with the caller that its certificate names, if it has sent one.
    Remote(Option<Arc<Caller>>),
}

/// Finds the caller of a request. Tokens are verified against the objects that they are bound to.
pub struct Authenticator {
    pub signer: TokenSigner,
    objects: ObjectReader,
}

impl Authenticator {
    pub fn new(signer: TokenSigner, objects: ObjectReader) -> Self {
        Self { signer, objects }
    }

    /// A client certificate takes precedence over a token. A request with an invalid token, or with another
    /// authorization scheme, is refused with a 401; it is never treated as anonymous.
    pub async fn authenticate(&self, peer: &Peer, headers: &HeaderMap) -> Result<Arc<Caller>, ApiError> {
        match peer {
            Peer::Internal(caller) | Peer::Remote(Some(caller)) => Ok(caller.clone()),
            Peer::Remote(None) => match bearer_token(headers) {
                Some(token) => match self.verify_token(token, &[token::ISSUER.into()]).await {
                    Ok(verified) => Ok(Arc::new(verified.caller)),
                    Err(error) => {
                        tracing::debug!(%error, "token refused");
                        Err(ApiError::Unauthorized)
                    }
                },
                None if headers.contains_key(AUTHORIZATION) => Err(ApiError::Unauthorized),
                None => Ok(Arc::new(Caller::anonymous())),
            },
        }
    }

    /// Verifies a token for one of these audiences, and that every object it is bound to still exists.
    pub async fn verify_token(&self, token: &str, audiences: &[String]) -> Result<VerifiedToken, TokenError> {
        service_account::verify_token(&self.signer, &self.objects, token, audiences).await
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.trim().split_once(' ')?;
    Some(token.trim()).filter(|t| scheme.eq_ignore_ascii_case("bearer") && !t.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_bearer_scheme_carries_a_token() {
        for (value, want) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("Basic abc", None),
            ("Bearer", None),
            ("Bearer  ", None),
        ] {
            let headers = [(AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            assert_eq!(bearer_token(&headers), want, "{value}");
        }
    }

    #[test]
    fn a_node_has_the_user_name_and_the_group() {
        assert_eq!(Caller::component("system:node:n").node_name(), Some("n"));
        assert_eq!(Caller::component("system:cleat:binder").node_name(), None);
        assert_eq!(Caller::new("system:node:n", &[AUTHENTICATED_GROUP]).node_name(), None);
    }
}
