//! The server's certificates in `DATA/pki`. The certificate authority and the administrator's client certificate are
//! created once and read at every later start; the server's own certificate is created at every start. Private keys are
//! readable only by the owner.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

const CERTIFICATE_LIFETIME: Duration = Duration::days(3650);
/// The names and addresses that the server's certificate always contains.
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
    #[error("cannot create the certificate {name}")]
    Create {
        name: &'static str,
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

/// A certificate and its private key, both PEM.
pub struct CertificateAndKey {
    pub certificate: String,
    pub key: String,
}

pub struct Pki {
    /// The certificate of the authority that signed the other two, PEM.
    pub ca_certificate: String,
    pub server: CertificateAndKey,
    /// The administrator's client certificate, for the kubeconfig.
    pub admin: CertificateAndKey,
}

/// Reads the certificates in the directory; creates those that do not exist, and the server's. The server's certificate
/// also contains `extra_names`: it is created at every start so that it has the machine's current name.
pub fn open(dir: &Path, extra_names: &[String]) -> Result<Pki, PkiError> {
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.map_err(|source| PkiError::Io { step: "create", path: dir.into(), source })?;
    let ca = match load(dir, "ca")? {
        Some(ca) => ca,
        None => save(dir, "ca", create_ca()?)?,
    };
    let key_path = dir.join("ca.key");
    let unusable = |source| PkiError::Unusable { path: key_path.clone(), source };
    let key = KeyPair::from_pem(&ca.key).map_err(unusable)?;
    let issuer = Issuer::from_ca_cert_pem(&ca.certificate, key).map_err(unusable)?;
    let mut names: Vec<String> = SERVER_NAMES.map(Into::into).into();
    names.extend(extra_names.iter().cloned());
    let server = save(dir, "server", issue("server", &issuer, names, "kube-apiserver", None)?)?;
    let admin = match load(dir, "admin")? {
        Some(admin) => admin,
        None => save(dir, "admin", issue("admin", &issuer, Vec::new(), "admin", Some("system:masters"))?)?,
    };
    Ok(Pki { ca_certificate: ca.certificate, server, admin })
}

fn create_ca() -> Result<CertificateAndKey, PkiError> {
    let failed = |source| PkiError::Create { name: "ca", source };
    let key = KeyPair::generate().map_err(failed)?;
    let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    set_subject_and_validity(&mut params, "cleat-ca", None);
    let certificate = params.self_signed(&key).map_err(failed)?;
    Ok(CertificateAndKey { certificate: certificate.pem(), key: key.serialize_pem() })
}

/// Issues a server certificate for `names`, or a client certificate if `names` is empty. `name` is the name in errors.
fn issue(
    name: &'static str,
    issuer: &Issuer<'_, KeyPair>,
    names: Vec<String>,
    common_name: &str,
    organization: Option<&str>,
) -> Result<CertificateAndKey, PkiError> {
    let failed = |source| PkiError::Create { name, source };
    let key = KeyPair::generate().map_err(failed)?;
    let usage =
        if names.is_empty() { ExtendedKeyUsagePurpose::ClientAuth } else { ExtendedKeyUsagePurpose::ServerAuth };
    let mut params = CertificateParams::new(names).map_err(failed)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    set_subject_and_validity(&mut params, common_name, organization);
    let certificate = params.signed_by(&key, issuer).map_err(failed)?;
    Ok(CertificateAndKey { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn set_subject_and_validity(params: &mut CertificateParams, common_name: &str, organization: Option<&str>) {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, common_name);
    if let Some(organization) = organization {
        subject.push(DnType::OrganizationName, organization);
    }
    params.distinguished_name = subject;
    // Valid from a day ago, for clients whose clocks are behind.
    params.not_before = OffsetDateTime::now_utc() - Duration::days(1);
    params.not_after = OffsetDateTime::now_utc() + CERTIFICATE_LIFETIME;
}

/// Reads `NAME.crt` and `NAME.key`. `None` if one of them does not exist: the caller then creates both.
fn load(dir: &Path, name: &str) -> Result<Option<CertificateAndKey>, PkiError> {
    let certificate = read(&dir.join(format!("{name}.crt")))?;
    let key = read(&dir.join(format!("{name}.key")))?;
    Ok(certificate.zip(key).map(|(certificate, key)| CertificateAndKey { certificate, key }))
}

/// The content of the file. `None` if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(content) => Ok(Some(content)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::Io { step: "read", path: path.into(), source }),
    }
}

fn save(dir: &Path, name: &str, pair: CertificateAndKey) -> Result<CertificateAndKey, PkiError> {
    write_private(&dir.join(format!("{name}.key")), pair.key.as_bytes())?;
    write_private(&dir.join(format!("{name}.crt")), pair.certificate.as_bytes())?;
    Ok(pair)
}

/// Writes a file that only the owner can read. An existing file is replaced atomically: after a crash it has either
/// the old or the new content.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let failed = |step| move |source| PkiError::Io { step, path: path.into(), source };
    let temporary = PathBuf::from(format!("{}.part", path.display()));
    let _ = fs::remove_file(&temporary);
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).map_err(failed("create"))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(failed("write"))?;
    fs::rename(&temporary, path).map_err(failed("replace"))
}
