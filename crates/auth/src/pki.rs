//! The server's certificates: made once in `DATA/pki`, read again at every later start. Private keys are readable by
//! the owner alone.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

const LIFETIME: Duration = Duration::days(3650);
/// The server's certificate is made anew at every start, so that it always covers the machine's current name.
const SERVER_NAMES: [&str; 7] = [
    "localhost",
    "127.0.0.1",
    "::1",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("cannot {step} {path}")]
    Io {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make the certificate {what}")]
    Make {
        what: &'static str,
        #[source]
        source: rcgen::Error,
    },
    #[error("{path} is not a usable key or certificate")]
    Unusable {
        path: PathBuf,
        #[source]
        source: rcgen::Error,
    },
}

/// A certificate and its key, both PEM.
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

pub struct Pki {
    /// The certificate everyone trusts, PEM.
    pub authority: String,
    pub server: Pair,
    /// The administrator's client certificate, the one in the kubeconfig.
    pub admin: Pair,
}

pub fn open(dir: &Path, extra_names: &[String]) -> Result<Pki, PkiError> {
    let private = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    private.map_err(|source| PkiError::Io { step: "create", path: dir.into(), source })?;
    let authority = match load(dir, "ca")? {
        Some(pair) => pair,
        None => save(dir, "ca", authority()?)?,
    };
    let key_path = dir.join("ca.key");
    let unusable = |source| PkiError::Unusable { path: key_path.clone(), source };
    let key = KeyPair::from_pem(&authority.key).map_err(unusable)?;
    let issuer = Issuer::from_ca_cert_pem(&authority.certificate, key).map_err(unusable)?;
    let mut names: Vec<String> = SERVER_NAMES.map(Into::into).into();
    names.extend(extra_names.iter().cloned());
    let server = save(dir, "server", signed("server", &issuer, names, "kube-apiserver", None)?)?;
    let admin = match load(dir, "admin")? {
        Some(pair) => pair,
        None => save(dir, "admin", signed("admin", &issuer, Vec::new(), "admin", Some("system:masters"))?)?,
    };
    Ok(Pki { authority: authority.certificate, server, admin })
}

fn authority() -> Result<Pair, PkiError> {
    let made = |source| PkiError::Make { what: "ca", source };
    let key = KeyPair::generate().map_err(made)?;
    let mut params = CertificateParams::new(Vec::new()).map_err(made)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    describe(&mut params, "cleat-ca", None);
    let certificate = params.self_signed(&key).map_err(made)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn signed(
    what: &'static str,
    issuer: &Issuer<'_, KeyPair>,
    names: Vec<String>,
    common_name: &str,
    organization: Option<&str>,
) -> Result<Pair, PkiError> {
    let made = |source| PkiError::Make { what, source };
    let key = KeyPair::generate().map_err(made)?;
    let usage =
        if names.is_empty() { ExtendedKeyUsagePurpose::ClientAuth } else { ExtendedKeyUsagePurpose::ServerAuth };
    let mut params = CertificateParams::new(names).map_err(made)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    describe(&mut params, common_name, organization);
    let certificate = params.signed_by(&key, issuer).map_err(made)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn describe(params: &mut CertificateParams, common_name: &str, organization: Option<&str>) {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    params.distinguished_name = name;
    // A day of slack for clocks that disagree.
    params.not_before = OffsetDateTime::now_utc() - Duration::days(1);
    params.not_after = OffsetDateTime::now_utc() + LIFETIME;
}

/// The pair if both files are there. One without the other is treated as absent, because both are then made anew.
fn load(dir: &Path, name: &str) -> Result<Option<Pair>, PkiError> {
    let certificate = read(&dir.join(format!("{name}.crt")))?;
    let key = read(&dir.join(format!("{name}.key")))?;
    Ok(certificate.zip(key).map(|(certificate, key)| Pair { certificate, key }))
}

/// The content of a file that need not be there.
pub fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::Io { step: "read", path: path.into(), source }),
    }
}

fn save(dir: &Path, name: &str, pair: Pair) -> Result<Pair, PkiError> {
    write_private(&dir.join(format!("{name}.key")), pair.key.as_bytes())?;
    write_private(&dir.join(format!("{name}.crt")), pair.certificate.as_bytes())?;
    Ok(pair)
}

/// Writes a file that only the owner can read, complete or not at all.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let failed = |step| move |source| PkiError::Io { step, path: path.into(), source };
    let part = PathBuf::from(format!("{}.part", path.display()));
    let _ = fs::remove_file(&part);
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part).map_err(failed("create"))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(failed("write"))?;
    fs::rename(&part, path).map_err(failed("place"))
}
