//! Renders the administrator's kubeconfig.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use cleat_auth::pki::Pki;

/// A kubeconfig with certificates and key embedded, as JSON, which is valid YAML. An unspecified address becomes the
/// loopback address.
pub(crate) fn render(pki: &Pki, address: SocketAddr) -> String {
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let server = format!("https://{}", SocketAddr::new(host, address.port()));
    let base64 = |pem: &str| BASE64_STANDARD.encode(pem);
    let name = "cleat";
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": name,
        "clusters": [{ "name": name, "cluster": {
            "server": server, "certificate-authority-data": base64(&pki.ca_certificate),
        } }],
        "users": [{ "name": name, "user": {
            "client-certificate-data": base64(&pki.admin.certificate), "client-key-data": base64(&pki.admin.key),
        } }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": name, "namespace": "default" } }],
    });
    format!("{config:#}\n")
}
