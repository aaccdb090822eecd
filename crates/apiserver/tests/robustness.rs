//! Slow, greedy and malformed clients: none stops the server, and other clients are served meanwhile.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config, Limits};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

const TIMEOUT: Duration = Duration::from_secs(60);
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

struct TestServer {
    dir: tempfile::TempDir,
    server: ApiServer,
    tls: TlsConnector,
}

async fn serve(limits: Limits) -> TestServer {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path(), "127.0.0.1:0".parse().unwrap());
    config.limits = limits;
    let server = ApiServer::open(config).await.unwrap();
    tokio::spawn(server.serve(CancellationToken::new()));
    let tls = connector(dir.path());
    TestServer { dir, server, tls }
}

fn connector(data: &std::path::Path) -> TlsConnector {
    let pki = data.join("pki");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pki.join("ca.crt")).unwrap()).unwrap();
    let certificate = CertificateDer::from_pem_file(pki.join("admin.crt")).unwrap();
    let key = PrivateKeyDer::from_pem_file(pki.join("admin.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)
        .unwrap();
    TlsConnector::from(Arc::new(config))
}

impl TestServer {
    async fn connect(&self) -> TlsStream<TcpStream> {
        let socket = TcpStream::connect(self.server.address()).await.unwrap();
        self.tls.connect(ServerName::try_from("localhost").unwrap(), socket).await.unwrap()
    }

    /// Sends the bytes and returns everything the server sends until it closes the connection.
    async fn exchange(&self, request: &[u8]) -> String {
        let mut stream = self.connect().await;
        // The server may reply and close the connection before it has read the whole request.
        let _ = stream.write_all(request).await;
        let mut reply = Vec::new();
        let reading = async {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                reply.extend_from_slice(&buffer[..count]);
            }
        };
        tokio::time::timeout(TIMEOUT, reading).await.expect("the server answers and closes");
        String::from_utf8_lossy(&reply).into_owned()
    }

    async fn post(&self, path: &str, body: &[u8]) -> String {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: \
             {}\r\n\r\n",
            body.len()
        );
        self.exchange(&[head.as_bytes(), body].concat()).await
    }

    async fn assert_alive(&self, after: &str) {
        let reply =
            self.exchange(format!("GET {MAPS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await;
        assert!(reply.starts_with("HTTP/1.1 200"), "after {after}: {reply}");
    }
}

fn code(reply: &str) -> &str {
    reply.split(' ').nth(1).unwrap_or("none")
}

#[tokio::test]
async fn malformed_requests_are_refused_and_the_server_goes_on() {
    let served = serve(Limits::default()).await;
    let nested = |open: &str, close: &str| {
        let depth = 100_000;
        format!(r#"{{"metadata":{{"name":"a"}},"data":{}{}}}"#, open.repeat(depth), close.repeat(depth)).into_bytes()
    };
    let big = format!(r#"{{"metadata":{{"name":"a"}},"data":{{"k":"{}"}}}}"#, "x".repeat(4 << 20)).into_bytes();
    for (case, body, want) in [
        ("nested arrays", nested("[", "]"), "400"),
        ("nested objects", nested(r#"{"a":"#, "}"), "400"),
        ("unclosed", b"[".repeat(1 << 20), "400"),
        ("over 3 MiB", big, "413"),
        ("invalid UTF-8", b"{\"metadata\":{\"name\":\"\xff\xfe\"}}".to_vec(), "400"),
        ("a number out of range", br#"{"metadata":{"name":"a","generation":1e999999}}"#.to_vec(), "400"),
    ] {
        assert_eq!(code(&served.post(MAPS, &body).await), want, "{case}");
        served.assert_alive(case).await;
    }
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").into_bytes();
    let long = |n: usize| "x".repeat(n);
    let headers = "a: b\r\n".repeat(500);
    for (case, request, want) in [
        ("a very long selector", get(&format!("{MAPS}?labelSelector={}a", "a,".repeat(20_000))), "200"),
        ("a very long query", get(&format!("{MAPS}?x={}", long(100_000))), "414"),
        ("a path of broken escapes", get("/api/v1/namespaces/%ff%fe/configmaps/%zz"), "404"),
        ("a query of broken escapes", get(&format!("{MAPS}?labelSelector=%ff%fe%zz")), "400"),
        ("many headers", format!("GET {MAPS} HTTP/1.1\r\nhost: x\r\n{headers}\r\n").into_bytes(), "431"),
        (
            "a long header",
            format!("GET {MAPS} HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n", long(1 << 20)).into_bytes(),
            "431",
        ),
        ("no HTTP at all", b"\x00\x01\x02 hello\r\n\r\n".to_vec(), "400"),
        (
            "two lengths",
            format!("POST {MAPS} HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab").into_bytes(),
            "400",
        ),
        (
            "an unknown method",
            format!("BREW {MAPS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").into_bytes(),
            "405",
        ),
    ] {
        let reply = served.exchange(&request).await;
        assert_eq!(code(&reply), want, "{case}: {}", reply.chars().take(200).collect::<String>());
        served.assert_alive(case).await;
    }
    assert!(served.dir.path().join("store.redb").exists());
}

#[tokio::test]
async fn a_patch_cannot_grow_without_limit() {
    let served = serve(Limits::default()).await;
    assert_eq!(code(&served.post(MAPS, br#"{"metadata":{"name":"a"},"data":{"k":"v"}}"#).await), "201");
    let patch = |body: &[u8]| {
        let head = format!(
            "PATCH {MAPS}/a HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: \
             application/json-patch+json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        [head.as_bytes(), body].concat()
    };
    // Each copy doubles the object: forty of them would need a terabyte.
    let copies: Vec<String> =
        (0..40).map(|i| format!(r#"{{"op":"copy","from":"/data","path":"/data/x{i}"}}"#)).collect();
    let reply = served.exchange(&patch(format!("[{}]", copies.join(",")).as_bytes())).await;
    assert_eq!(code(&reply), "413", "{reply}");
    let many = format!("[{}]", vec![r#"{"op":"test","path":"/data/k","value":"v"}"#; 10_001].join(","));
    assert_eq!(code(&served.exchange(&patch(many.as_bytes())).await), "413");
    served.assert_alive("patches").await;
}

#[tokio::test]
async fn slow_clients_lose_their_connection_and_others_are_served() {
    let quick = Duration::from_millis(300);
    let limits = Limits { handshake_timeout: quick, header_timeout: quick, body_timeout: quick, ..Limits::default() };
    let served = serve(limits).await;
    let ended = |mut stream: TlsStream<TcpStream>| async move {
        let mut rest = Vec::new();
        let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut rest)).await;
        assert!(read.is_ok(), "the server closes the connection");
        String::from_utf8_lossy(&rest).into_owned()
    };
    let mut silent = TcpStream::connect(served.server.address()).await.unwrap();
    let mut byte = [0];
    let closed = tokio::time::timeout(TIMEOUT, silent.read(&mut byte)).await.expect("no handshake, no connection");
    assert!(matches!(closed, Ok(0) | Err(_)));
    assert_eq!(ended(served.connect().await).await, "", "no request");
    let mut half = served.connect().await;
    half.write_all(b"GET /api HTTP/1.1\r\nhost: ").await.unwrap();
    let reply = ended(half).await;
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 408"), "half a head: {reply}");
    let mut body = served.connect().await;
    let head =
        format!("POST {MAPS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{");
    body.write_all(head.as_bytes()).await.unwrap();
    let reply = ended(body).await;
    assert_eq!(code(&reply), "504", "half a body: {reply}");
    served.assert_alive("slow clients").await;
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let headers = Duration::from_millis(500);
    let served = serve(Limits { max_connections: 4, header_timeout: headers, ..Limits::default() }).await;
    let mut idle = Vec::new();
    for _ in 0..4 {
        idle.push(served.connect().await);
    }
    // Idle clients hold all connections. They time out, and then this client is accepted.
    let reply = tokio::time::timeout(
        TIMEOUT,
        served.exchange(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    );
    assert!(reply.await.unwrap().starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn the_body_of_an_unauthenticated_request_is_not_read() {
    let served = serve(Limits::default()).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(served.dir.path().join("pki/ca.crt")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let served = TestServer { tls: TlsConnector::from(Arc::new(config)), ..served };
    // The reply comes although no byte of the body is sent.
    let head = format!("POST {MAPS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000000\r\n\r\n");
    assert_eq!(code(&served.exchange(head.as_bytes()).await), "401");
}

#[tokio::test]
async fn many_watches_share_a_connection_and_a_stalled_reader_delays_no_other() {
    let served = serve(Limits::default()).await;
    let socket = TcpStream::connect(served.server.address()).await.unwrap();
    let mut config = (*served.tls.config()).as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsConnector::from(Arc::new(config));
    let stream = tls.connect(ServerName::try_from("localhost").unwrap(), socket).await.unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, http_body_util::Full<bytes::Bytes>>(executor, io).await.unwrap();
    tokio::spawn(connection);
    let open = |sender: &hyper::client::conn::http2::SendRequest<http_body_util::Full<bytes::Bytes>>| {
        let mut sender = sender.clone();
        async move {
            let uri = format!("https://localhost{MAPS}?watch=1&resourceVersion=0");
            let request = http::Request::get(uri).body(http_body_util::Full::default()).unwrap();
            // The response head is sent before the first event.
            let response = tokio::time::timeout(TIMEOUT, sender.send_request(request)).await.expect("a head").unwrap();
            assert_eq!(response.status(), 200);
            response.into_body()
        }
    };
    let mut watches = Vec::new();
    for _ in 0..300 {
        watches.push(open(&sender).await);
    }
    // Two watches that never read: one on the same connection, and one whose socket buffer fills up.
    let _stalled = open(&sender).await;
    let secrets = "/api/v1/namespaces/default/secrets";
    let mut full = served.connect().await;
    full.write_all(format!("GET {secrets}?watch=1 HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
    let client = served.server.client("test");
    let post = async |path: &str, name: String, value: &str| {
        let body = format!(r#"{{"metadata":{{"name":"{name}"}},"stringData":{{"k":"{value}"}},"data":{{}}}}"#);
        let request = http::Request::post(path).body(body.into_bytes()).unwrap();
        client.request::<serde_json::Value>(request).await.unwrap();
    };
    let large = "x".repeat(512 << 10);
    for i in 0..40 {
        post(secrets, format!("s{i}"), &large).await;
    }
    for i in 0..10 {
        post(MAPS, format!("m{i}"), "v").await;
        let deliveries = watches.iter_mut().map(|watch| async {
            let mut line = Vec::new();
            while !line.ends_with(b"\n") {
                let frame = tokio::time::timeout(TIMEOUT, http_body_util::BodyExt::frame(watch)).await;
                let frame = frame.expect("other watches get the event").unwrap().unwrap();
                line.extend_from_slice(frame.data_ref().unwrap());
            }
            assert!(line.starts_with(br#"{"type":"ADDED""#));
        });
        futures::future::join_all(deliveries).await;
    }
}

#[tokio::test]
async fn a_closed_server_replies_503_with_retry_after() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let client = server.client("test");
    server.close().await;
    let refused = client.send(http::Request::get(MAPS).body(Vec::new().into()).unwrap()).await.unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers().get("retry-after").is_some()), (503, true));
}
