//! The address of a driver. Parsing only: it must not access the file system or the network.
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Unix(PathBuf),
    /// `host:port`
    Tcp(String),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    #[error("endpoint is empty")]
    Empty,
    #[error("endpoint {0:?}: a socket path must be absolute, as in unix:///run/csi.sock")]
    Relative(String),
    #[error("endpoint {0:?}: expected tcp://host:port")]
    NoPort(String),
    #[error("endpoint {0:?}: unknown scheme; use unix:///path or tcp://host:port")]
    Scheme(String),
}

impl Endpoint {
    pub fn unix(path: impl Into<PathBuf>) -> Endpoint {
        Endpoint::Unix(path.into())
    }

    pub fn parse(text: &str) -> Result<Endpoint, EndpointError> {
        if text.is_empty() {
            return Err(EndpointError::Empty);
        }
        if let Some(rest) = text.strip_prefix("tcp://") {
            return match rest.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                    Ok(Endpoint::Tcp(rest.to_owned()))
                }
                _ => Err(EndpointError::NoPort(text.to_owned())),
            };
        }
        let path = match text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")) {
            Some(path) => path,
            None if text.contains("://") => return Err(EndpointError::Scheme(text.to_owned())),
            None => text,
        };
        if Path::new(path).is_absolute() {
            Ok(Endpoint::Unix(PathBuf::from(path)))
        } else {
            Err(EndpointError::Relative(text.to_owned()))
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        Endpoint::parse(text)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => write!(f, "unix://{}", path.display()),
            Endpoint::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_forms_that_drivers_and_administrators_use() {
        let unix = |path: &str| Ok(Endpoint::unix(path));
        let tcp = |address: &str| Ok(Endpoint::Tcp(address.to_owned()));
        for (text, want) in [
            ("unix:///run/csi.sock", unix("/run/csi.sock")),
            ("unix:/run/csi.sock", unix("/run/csi.sock")),
            ("/run/csi.sock", unix("/run/csi.sock")),
            ("tcp://127.0.0.1:9000", tcp("127.0.0.1:9000")),
            ("tcp://[::1]:9000", tcp("[::1]:9000")),
            ("", Err(EndpointError::Empty)),
            ("csi.sock", Err(EndpointError::Relative("csi.sock".into()))),
            ("unix://csi.sock", Err(EndpointError::Relative("unix://csi.sock".into()))),
            ("tcp://host", Err(EndpointError::NoPort("tcp://host".into()))),
            ("http://host:1", Err(EndpointError::Scheme("http://host:1".into()))),
        ] {
            assert_eq!(Endpoint::parse(text), want, "{text:?}");
            if let Ok(endpoint) = want {
                assert_eq!(Endpoint::parse(&endpoint.to_string()), Ok(endpoint), "{text:?} survives Display");
            }
        }
    }
}
