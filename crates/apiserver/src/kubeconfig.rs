//! The file that lets kubectl in.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use cleat_auth::pki::Pki;

/// A kubeconfig with everything embedded. It is JSON, which is YAML too.
pub(crate) fn content(pki: &Pki, address: SocketAddr) -> String {
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let server = format!("https://{}", SocketAddr::new(host, address.port()));
    let encoded = |pem: &str| BASE64_STANDARD.encode(pem);
    let name = "cleat";
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": name,
        "clusters": [{ "name": name, "cluster": {
            "server": server, "certificate-authority-data": encoded(&pki.authority),
        } }],
        "users": [{ "name": name, "user": {
            "client-certificate-data": encoded(&pki.admin.certificate), "client-key-data": encoded(&pki.admin.key),
        } }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": name, "namespace": "default" } }],
    });
    format!("{config:#}\n")
}
