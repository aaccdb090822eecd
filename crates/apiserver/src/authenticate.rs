//! Who makes a request. Over TLS it is the subject of the client's certificate; in-process it is the name the
//! component was given.

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) name: String,
    pub(crate) groups: Vec<String>,
}

/// Of every user that proved to be somebody.
const AUTHENTICATED: &str = "system:authenticated";

impl Caller {
    /// A component inside the process.
    pub(crate) fn internal(name: &str) -> Self {
        Self { name: name.into(), groups: vec!["system:masters".into(), AUTHENTICATED.into()] }
    }

    /// The holder of a certificate whose chain TLS has already verified.
    pub(crate) fn of_certificate(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let subject = parsed.subject();
        let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let organizations = subject.iter_organization().filter_map(|o| o.as_str().ok().map(Into::into));
        let groups = organizations.chain([AUTHENTICATED.into()]).collect();
        Some(Self { name, groups })
    }
}
