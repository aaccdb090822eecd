//! Client and server over real sockets: restarts, deadlines, the set-up of sockets, metrics, and redaction of secrets.
#![allow(clippy::unwrap_used)]

use std::{
    collections::HashMap,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
    time::Duration,
};

use cleat_csi::{
    Client, Code, Endpoint, ErrorClass, RegistrationClient,
    registration::{self, registration_server},
    server::{self, ServeError},
    v1::{self, controller_server, identity_server, snapshot_metadata_server},
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, codegen::BoxStream, service::Routes};

/// Reports `name` in GetPluginInfo; CreateVolume hangs; the other methods of the controller service are unimplemented.
#[derive(Clone)]
struct FakeDriver {
    name: &'static str,
}

#[tonic::async_trait]
impl identity_server::Identity for FakeDriver {
    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        let (name, vendor_version) = (self.name.to_owned(), "1".to_owned());
        Ok(Response::new(v1::GetPluginInfoResponse { name, vendor_version, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        Err(Status::failed_precondition("not yet"))
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }
}

#[tonic::async_trait]
impl controller_server::Controller for FakeDriver {
    async fn create_volume(
        &self,
        _: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        std::future::pending().await
    }
}

#[tonic::async_trait]
impl registration_server::Registration for FakeDriver {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(registration::PluginInfo {
            r#type: registration::CSI_PLUGIN.to_owned(),
            name: self.name.to_owned(),
            endpoint: "/run/csi.sock".to_owned(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        assert_eq!((status.plugin_registered, status.error.as_str()), (false, "no such driver"));
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}

/// Sends two messages for `whole`, one message and an error for `broken`, NOT_FOUND for `none`, and for any other
/// snapshot one message after which the stream hangs.
#[tonic::async_trait]
impl snapshot_metadata_server::SnapshotMetadata for FakeDriver {
    async fn get_metadata_allocated(
        &self,
        request: Request<v1::GetMetadataAllocatedRequest>,
    ) -> Result<Response<BoxStream<v1::GetMetadataAllocatedResponse>>, Status> {
        let message = || Ok(v1::GetMetadataAllocatedResponse { volume_capacity_bytes: 7, ..Default::default() });
        let stream: BoxStream<v1::GetMetadataAllocatedResponse> = match request.get_ref().snapshot_id.as_str() {
            "whole" => Box::pin(tokio_stream::iter([message(), message()])),
            "broken" => Box::pin(tokio_stream::iter([message(), Err(Status::out_of_range("offset"))])),
            "none" => return Err(Status::not_found("no such snapshot")),
            _ => {
                let silence = tokio_stream::pending();
                Box::pin(tokio_stream::StreamExt::chain(tokio_stream::iter([message()]), silence))
            }
        };
        Ok(Response::new(stream))
    }

    async fn get_metadata_delta(
        &self,
        _: Request<v1::GetMetadataDeltaRequest>,
    ) -> Result<Response<BoxStream<v1::GetMetadataDeltaResponse>>, Status> {
        let message = v1::GetMetadataDeltaResponse { volume_capacity_bytes: 9, ..Default::default() };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(message)]))))
    }
}

/// A driver that is being served.
struct RunningDriver {
    stop: CancellationToken,
    served: JoinHandle<Result<(), ServeError>>,
}

async fn start(endpoint: &Endpoint, name: &'static str) -> RunningDriver {
    let fake = FakeDriver { name };
    let mut routes = Routes::builder();
    routes
        .add_service(identity_server::IdentityServer::new(fake.clone()))
        .add_service(controller_server::ControllerServer::new(fake.clone()))
        .add_service(snapshot_metadata_server::SnapshotMetadataServer::new(fake.clone()))
        .add_service(registration_server::RegistrationServer::new(fake));
    let stop = CancellationToken::new();
    let listener = server::bind(endpoint).await.unwrap();
    let served = tokio::spawn(listener.serve(routes.routes(), stop.clone()));
    RunningDriver { stop, served }
}

impl RunningDriver {
    async fn stop(self) {
        self.stop.cancel();
        self.served.await.unwrap().unwrap();
    }
}

fn socket_in(directory: &Path) -> Endpoint {
    Endpoint::unix(directory.join("csi.sock"))
}

#[tokio::test]
async fn a_client_reconnects_after_the_driver_has_restarted() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = socket_in(directory.path());
    let client = Client::new(endpoint.clone());

    let error = client.get_plugin_info().await.unwrap_err();
    assert_eq!((error.code(), error.class()), (Code::Unavailable, ErrorClass::Transient), "{error}");

    let first = start(&endpoint, "first").await;
    assert_eq!(client.get_plugin_info().await.unwrap().name, "first");
    let error = client.get_plugin_capabilities().await.unwrap_err();
    assert_eq!(error.to_string(), "rpc error: code = FailedPrecondition desc = not yet");
    first.stop().await;

    assert!(!directory.path().join("csi.sock").exists(), "a clean stop removes the socket");
    assert_eq!(client.get_plugin_info().await.unwrap_err().code(), Code::Unavailable);

    let second = start(&endpoint, "second").await;
    assert_eq!(client.get_plugin_info().await.unwrap().name, "second");
    second.stop().await;
}

#[tokio::test]
async fn wait_ready_waits_for_a_driver_that_starts_late() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = socket_in(directory.path());
    let waiting = tokio::spawn({
        let client = Client::new(endpoint.clone());
        async move { client.wait_ready(Duration::from_secs(30)).await }
    });
    tokio::task::yield_now().await;
    let running = start(&endpoint, "slow").await;
    waiting.await.unwrap().unwrap();
    running.stop().await;
    let late = Client::new(endpoint).wait_ready(Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(late.code(), Code::Unavailable);
}

#[tokio::test]
async fn a_call_past_its_deadline_is_uncertain() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = socket_in(directory.path());
    let running = start(&endpoint, "hangs").await;
    let client = Client::new(endpoint).with_deadline(Duration::from_millis(50));
    let error = client.create_volume(v1::CreateVolumeRequest::default()).await.unwrap_err();
    assert_eq!((error.code(), error.class()), (Code::DeadlineExceeded, ErrorClass::Uncertain), "{error}");
    assert_eq!(client.delete_volume(v1::DeleteVolumeRequest::default()).await.unwrap_err().code(), Code::Unimplemented);
    running.stop().await;
}

#[tokio::test]
async fn a_driver_that_dies_during_a_call_is_unavailable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csi.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let client = Client::new(Endpoint::unix(&path));
    let call = tokio::spawn(async move { client.create_volume(v1::CreateVolumeRequest::default()).await });
    drop(listener.accept().await.unwrap());
    let error = call.await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.class()), (Code::Unavailable, ErrorClass::Uncertain), "{error}");
}

#[tokio::test]
async fn a_client_connects_to_a_tcp_endpoint() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = Endpoint::parse(&format!("tcp://127.0.0.1:{port}")).unwrap();
    let running = start(&endpoint, "tcp").await;
    assert_eq!(Client::new(endpoint).get_plugin_info().await.unwrap().name, "tcp");
    running.stop().await;
}

#[tokio::test]
async fn registration_calls_reach_the_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let running = start(&socket_in(directory.path()), "block.cleat.dev").await;
    let client = RegistrationClient::new(directory.path().join("csi.sock"));
    let info = client.get_info().await.unwrap();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "block.cleat.dev"));
    client.notify(Err("no such driver".to_owned())).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn only_a_socket_without_listener_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csi.sock");
    let endpoint = Endpoint::unix(&path);

    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let running = start(&endpoint, "replaces").await;
    let metadata = std::fs::symlink_metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);

    assert!(matches!(server::bind(&endpoint).await, Err(ServeError::InUse { .. })));
    assert_eq!(Client::new(endpoint.clone()).get_plugin_info().await.unwrap().name, "replaces");
    running.stop().await;

    std::fs::write(&path, "data").unwrap();
    assert!(matches!(server::bind(&endpoint).await, Err(ServeError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"data");

    let missing = Endpoint::unix(directory.path().join("absent/csi.sock"));
    assert!(matches!(server::bind(&missing).await, Err(ServeError::Parent { .. })));
    let under_file = Endpoint::unix(path.join("csi.sock"));
    assert!(matches!(server::bind(&under_file).await, Err(ServeError::Parent { .. })));
    let long = Endpoint::unix(directory.path().join("x".repeat(108)));
    let error = server::bind(&long).await.err().unwrap();
    assert!(error.to_string().contains("107"), "{error}");
}

#[tokio::test]
async fn the_deadline_applies_to_each_message_of_a_stream() {
    let directory = tempfile::tempdir().unwrap();
    let running = start(&socket_in(directory.path()), "streams").await;
    let client = Client::new(socket_in(directory.path())).with_deadline(Duration::from_secs(1));
    let ask = |id: &str| v1::GetMetadataAllocatedRequest { snapshot_id: id.to_owned(), ..Default::default() };
    let all = client.get_metadata_allocated(ask("whole")).await.unwrap().collect().await.unwrap();
    assert_eq!(all.iter().map(|message| message.volume_capacity_bytes).collect::<Vec<_>>(), [7, 7]);
    let mut broken = client.get_metadata_allocated(ask("broken")).await.unwrap();
    assert!(broken.next().await.unwrap().is_some());
    assert_eq!(broken.next().await.unwrap_err().code(), Code::OutOfRange);
    assert_eq!(client.get_metadata_allocated(ask("none")).await.unwrap_err().code(), Code::NotFound);
    let mut silent =
        client.with_deadline(Duration::from_millis(50)).get_metadata_allocated(ask("silent")).await.unwrap();
    assert!(silent.next().await.unwrap().is_some());
    let error = silent.next().await.unwrap_err();
    assert_eq!((error.code(), error.class()), (Code::DeadlineExceeded, ErrorClass::Transient), "{error}");
    let client = Client::new(socket_in(directory.path()));
    let delta = client.get_metadata_delta(Default::default()).await.unwrap().collect().await.unwrap();
    assert_eq!(delta[0].volume_capacity_bytes, 9);
    drop(silent);
    running.stop().await;
}

#[tokio::test]
async fn every_call_is_counted_by_method_and_code() {
    let directory = tempfile::tempdir().unwrap();
    let running = start(&socket_in(directory.path()), "counted").await;
    let client = Client::new(socket_in(directory.path()));
    client.get_plugin_info().await.unwrap();
    client.get_capacity(Default::default()).await.unwrap_err();
    let mut registry = prometheus_client::registry::Registry::default();
    cleat_csi::metrics::register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for labels in [
        r#"method_name="GetPluginInfo",grpc_status_code="OK""#,
        r#"method_name="GetCapacity",grpc_status_code="Unimplemented""#,
    ] {
        let line = format!("csi_operations_seconds_count{{{labels}}}");
        assert!(text.lines().any(|shown| shown.starts_with(&line)), "{line} is not in\n{text}");
    }
    running.stop().await;
}

/// Sends the bytes that old gRPC libraries send: a request with the socket's path as authority, and a second request that
/// refers to the first one's header table.
#[tokio::test]
async fn a_socket_path_as_authority_is_accepted() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        out.extend([kind, flags, 0, 0, 0, stream]);
        out.extend(payload);
        out
    }
    fn literal(name: u8, value: &str) -> Vec<u8> {
        [vec![name, value.len() as u8], value.as_bytes().to_vec()].concat()
    }
    for authority in ["/csi/csi.sock", "%2Fcsi%2Fcsi.sock"] {
        let directory = tempfile::tempdir().unwrap();
        let running = start(&socket_in(directory.path()), "old").await;
        let mut socket = tokio::net::UnixStream::connect(directory.path().join("csi.sock")).await.unwrap();
        let te = [vec![0x40, 2], b"te".to_vec(), vec![8], b"trailers".to_vec()].concat();
        let first = [
            vec![0x83, 0x86],
            literal(0x44, "/csi.v1.Identity/GetPluginInfo"),
            literal(0x41, authority),
            literal(0x5f, "application/grpc"),
            te,
        ]
        .concat();
        // All headers are references to the dynamic table that the first request filled.
        let second = vec![0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe];
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(4, 0, 0, &[]));
        for (stream, block) in [(1, first), (3, second)] {
            bytes.extend(frame(1, 4, stream, &block));
            bytes.extend(frame(0, 1, stream, &[0; 5]));
        }
        socket.write_all(&bytes).await.unwrap();
        let mut answered_streams = Vec::new();
        let mut header = [0; 9];
        while answered_streams.len() < 2 {
            socket.read_exact(&mut header).await.unwrap();
            let mut payload = vec![0; usize::from(header[1]) << 8 | usize::from(header[2])];
            socket.read_exact(&mut payload).await.unwrap();
            assert!(!matches!(header[3], 3 | 7), "{authority}: the stream or connection was reset");
            // A DATA frame that contains the driver's name.
            if header[3] == 0 && payload.windows(3).any(|part| part == b"old") {
                answered_streams.push(header[8]);
            }
        }
        answered_streams.sort();
        assert_eq!(answered_streams, [1, 3], "{authority}");
        drop(socket);
        running.stop().await;
    }
}

#[test]
fn debug_output_contains_no_secret() {
    let secrets = || HashMap::from([("password".to_owned(), "hunter2".to_owned())]);
    let tokens = || {
        HashMap::from([
            ("csi.storage.k8s.io/serviceAccount.tokens".to_owned(), "hunter2".to_owned()),
            ("fsType".to_owned(), "xfs".to_owned()),
        ])
    };
    let publish = v1::NodePublishVolumeRequest { secrets: secrets(), volume_context: tokens(), ..Default::default() };
    let shown = format!("{publish:?} {publish:#?}");
    assert!(shown.contains("fsType") && shown.contains("xfs") && shown.contains("password"), "{shown}");
    for shown in [
        shown,
        format!("{:?}", v1::CreateVolumeRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::DeleteVolumeRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::ControllerPublishVolumeRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::NodeStageVolumeRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::NodeExpandVolumeRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::CreateSnapshotRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", v1::GetMetadataDeltaRequest { secrets: secrets(), ..Default::default() }),
        format!("{:?}", Request::new(v1::CreateVolumeRequest { secrets: secrets(), ..Default::default() })),
    ] {
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("redacted"), "{shown}");
    }
}
