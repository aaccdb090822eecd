//! The server side of a driver: binds the socket, serves it, and removes it at the end.
//!
//! At the start it removes an existing socket only if no process listens on it; at the end it removes only the socket
//! that it created itself.
use std::{
    future::Future,
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::{
    StreamExt,
    wrappers::{TcpListenerStream, UnixListenerStream},
};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};

use crate::{Endpoint, authority::AuthorityFixStream};

/// The length of the kernel's `sun_path`, without the terminating NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Calls that are in progress at the stop are cut off after this time.
const SHUTDOWN_GRACE_PERIOD: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("socket path {path} is {length} bytes long; the kernel allows {MAX_SOCKET_PATH_BYTES}")]
    PathTooLong { path: PathBuf, length: usize },
    #[error("socket directory {path}")]
    Parent {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} exists and is not a socket")]
    NotASocket { path: PathBuf },
    #[error("something is already listening on {path}")]
    InUse { path: PathBuf },
    #[error("{step} {path}")]
    Socket {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("listen on {address}")]
    Tcp {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("serve {endpoint}")]
    Serve {
        endpoint: Endpoint,
        #[source]
        source: tonic::transport::Error,
    },
}

/// A bound socket. Clients can connect to it, but their calls wait until [`Listener::serve`].
pub struct Listener {
    endpoint: Endpoint,
    socket: Socket,
}

enum Socket {
    Unix { listener: UnixListener, identity: (u64, u64) },
    Tcp(TcpListener),
}

/// Binds and serves until `stop`.
pub async fn serve(endpoint: &Endpoint, routes: Routes, stop: CancellationToken) -> Result<(), ServeError> {
    bind(endpoint).await?.serve(routes, stop).await
}

pub async fn bind(endpoint: &Endpoint) -> Result<Listener, ServeError> {
    let socket = match endpoint {
        Endpoint::Unix(path) => bind_unix(path)?,
        Endpoint::Tcp(address) => Socket::Tcp(
            TcpListener::bind(address).await.map_err(|source| ServeError::Tcp { address: address.clone(), source })?,
        ),
    };
    Ok(Listener { endpoint: endpoint.clone(), socket })
}

impl Listener {
    /// At `stop` no new connections are accepted; calls in progress have [`SHUTDOWN_GRACE_PERIOD`] to finish.
    pub async fn serve(self, routes: Routes, stop: CancellationToken) -> Result<(), ServeError> {
        let Listener { endpoint, socket } = self;
        let router = Server::builder().add_routes(routes);
        match socket {
            Socket::Unix { listener, identity } => {
                let incoming = UnixListenerStream::new(listener).map(|accepted| accepted.map(AuthorityFixStream::new));
                let serving = router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
                let result = with_grace(serving, &stop).await;
                if let Endpoint::Unix(path) = &endpoint {
                    remove_own(path, identity);
                }
                result
            }
            Socket::Tcp(listener) => {
                let incoming = TcpListenerStream::new(listener).map(|accepted| accepted.map(AuthorityFixStream::new));
                let serving = router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
                with_grace(serving, &stop).await
            }
        }
        .map_err(|source| ServeError::Serve { endpoint, source })
    }
}

async fn with_grace(
    serving: impl Future<Output = Result<(), tonic::transport::Error>>,
    stop: &CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let expired = async {
        stop.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE_PERIOD).await;
    };
    tokio::select! {
        result = serving => result,
        () = expired => {
            tracing::warn!("calls in progress were cut off at shutdown");
            Ok(())
        }
    }
}

fn bind_unix(path: &Path) -> Result<Socket, ServeError> {
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH_BYTES {
        return Err(ServeError::PathTooLong { path: path.to_owned(), length });
    }
    check_parent(path)?;
    remove_stale(path)?;
    let failed = |step| move |source: io::Error| ServeError::Socket { step, path: path.to_owned(), source };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| failed("open a socket for")(errno.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|errno| failed("address")(errno.into()))?;
    rustix::net::bind(&socket, &address).map_err(|errno| failed("bind")(errno.into()))?;
    // Before listen, so that other users can connect at no time.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed("set the mode of"))?;
    rustix::net::listen(&socket, 128).map_err(|errno| failed("listen on")(errno.into()))?;
    let metadata = std::fs::symlink_metadata(path).map_err(failed("inspect"))?;
    let listener =
        UnixListener::from_std(std::os::unix::net::UnixListener::from(socket)).map_err(failed("listen on"))?;
    Ok(Socket::Unix { listener, identity: (metadata.dev(), metadata.ino()) })
}

fn check_parent(path: &Path) -> Result<(), ServeError> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let failed = |source| ServeError::Parent { path: parent.to_owned(), source };
    let metadata = std::fs::metadata(parent).map_err(failed)?;
    if metadata.is_dir() { Ok(()) } else { Err(failed(io::ErrorKind::NotADirectory.into())) }
}

fn remove_stale(path: &Path) -> Result<(), ServeError> {
    let failed = |step, source| ServeError::Socket { step, path: path.to_owned(), source };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("inspect", error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ServeError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(ServeError::InUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|source| failed("remove the stale socket", source))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("ask who listens on", error)),
    }
}

/// Leaves the path alone if another process has bound a new socket there in the meantime.
fn remove_own(path: &Path, identity: (u64, u64)) {
    let own = std::fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == identity);
    if own && let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "socket not removed");
    }
}
