//! Who makes a request: the subject of a client certificate, the bearer of a token this server signed, or, in-process,
//! the name a component was given. Nobody else is somebody; a stranger sees only what `is_public` names.

pub mod account;
pub mod token;

use std::collections::BTreeMap;
use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use account::Verified;
use cleat_apimachinery::error::ApiError;
use cleat_registry::reader::ObjectReader;
use token::{Signer, TokenError};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Of every user that proved to be somebody.
pub const AUTHENTICATED: &str = "system:authenticated";
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Its members may do everything.
pub const MASTERS: &str = "system:masters";
pub const NODES: &str = "system:nodes";
pub const NODE_PREFIX: &str = "system:node:";
pub const ANONYMOUS: &str = "system:anonymous";

impl Caller {
    fn new(name: &str, groups: &[&str]) -> Self {
        Self { name: name.into(), groups: groups.iter().map(|g| (*g).into()).collect(), ..Self::default() }
    }

    /// Somebody inside the process with every right.
    pub fn trusted(name: &str) -> Self {
        Self::new(name, &[MASTERS, AUTHENTICATED])
    }

    /// A component inside the process, with the rights its name was granted.
    pub fn component(name: &str) -> Self {
        match name.strip_prefix(NODE_PREFIX) {
            Some(_) => Self::new(name, &[NODES, AUTHENTICATED]),
            None => Self::new(name, &[AUTHENTICATED]),
        }
    }

    pub fn anonymous() -> Self {
        Self::new(ANONYMOUS, &[UNAUTHENTICATED])
    }

    /// The holder of a certificate whose chain TLS has already verified.
    pub fn of_certificate(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let subject = parsed.subject();
        let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let organizations = subject.iter_organization().filter_map(|o| o.as_str().ok().map(Into::into));
        let groups = organizations.chain([AUTHENTICATED.into()]).collect();
        Some(Self { name, groups, ..Self::default() })
    }

    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }

    /// The node this caller is, if it is one.
    pub fn node(&self) -> Option<&str> {
        self.name.strip_prefix(NODE_PREFIX).filter(|node| !node.is_empty() && self.is_in(NODES))
    }
}

/// What the connection knows about its other end.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A client in this process; headers do not change who it is.
    Internal(Arc<Caller>),
    /// A socket, with the caller its certificate names, if it has one.
    Remote(Option<Arc<Caller>>),
}

/// Finds out who makes a request. Tokens are checked against the objects they are bound to.
pub struct Authenticator {
    pub signer: Signer,
    objects: ObjectReader,
}

impl Authenticator {
    pub fn new(signer: Signer, objects: ObjectReader) -> Self {
        Self { signer, objects }
    }

    /// A client certificate takes precedence over a token. An invalid token is refused, never ignored.
    pub async fn authenticate(&self, peer: &Peer, headers: &HeaderMap) -> Result<Arc<Caller>, ApiError> {
        match peer {
            Peer::Internal(caller) | Peer::Remote(Some(caller)) => Ok(caller.clone()),
            Peer::Remote(None) => match bearer(headers) {
                Some(token) => match self.check_token(token, &[token::ISSUER.into()]).await {
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

    /// Verifies a token for these audiences, and that every object it is bound to still exists.
    pub async fn check_token(&self, token: &str, audiences: &[String]) -> Result<Verified, TokenError> {
        account::check(&self.signer, &self.objects, token, audiences).await
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.trim().split_once(' ')?;
    Some(token.trim()).filter(|t| scheme.eq_ignore_ascii_case("bearer") && !t.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_is_one() {
        for (value, want) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("Basic abc", None),
            ("Bearer", None),
            ("Bearer  ", None),
        ] {
            let headers = [(AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            assert_eq!(bearer(&headers), want, "{value}");
        }
    }

    #[test]
    fn a_node_is_one_by_name_and_group() {
        assert_eq!(Caller::component("system:node:n").node(), Some("n"));
        assert_eq!(Caller::component("system:cleat:binder").node(), None);
        assert_eq!(Caller::new("system:node:n", &[AUTHENTICATED]).node(), None);
    }
}
