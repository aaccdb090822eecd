//! The way to the server: through kube's client to one anywhere, or straight into one in the same process.
//!
//! kube's client puts a queue and a task between each request and whoever answers it. In one process these hops cost more
//! than many a request, so there the server's own future runs on the task that asks.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::client::Body;

/// Asks a server in this process, and brings its whole answer. It is called on the task that waits for the answer, and
/// dropped with it. A request with a [`TypedBody`](cleat_api::TypedBody) may be answered with an [`TypedReply`](cleat_api::TypedReply).
pub type Call = dyn Fn(Request<Bytes>) -> BoxFuture<'static, Response<Bytes>> + Send + Sync;

/// Whoever brings a request to a server and the whole answer back.
pub trait Carrier: Send + Sync {
    fn carry(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>>;

    /// Is the server in this process?
    fn is_near(&self) -> bool {
        false
    }
}

/// What components read and write with.
#[derive(Clone)]
pub struct Client {
    kube: kube::Client,
    direct: Option<Arc<Call>>,
}

impl From<kube::Client> for Client {
    fn from(kube: kube::Client) -> Self {
        Self { kube, direct: None }
    }
}

impl Client {
    /// For a server in this process that `kube` reaches as well, with the same rights.
    pub fn direct(kube: kube::Client, call: Arc<Call>) -> Self {
        Self { kube, direct: Some(call) }
    }

    /// For watches, and for what this crate has no words for.
    pub fn kube(&self) -> &kube::Client {
        &self.kube
    }
}

impl Carrier for Client {
    fn is_near(&self) -> bool {
        self.direct.is_some()
    }

    fn carry(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>> {
        let Some(call) = &self.direct else { return self.kube.carry(request) };
        let answer = call(request);
        Box::pin(async move {
            // Many an answer is there at once: who asks for one after another must not keep others from running.
            tokio::task::consume_budget().await;
            Ok(answer.await)
        })
    }
}

impl Carrier for kube::Client {
    fn carry(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>> {
        Box::pin(async move {
            let (parts, body) = self.send(request.map(Body::from)).await?.into_parts();
            Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::{self, Part};
    use cleat_api::{TypedBody, Key};
    use http::{Method, StatusCode};
    use k8s_openapi::api::core::v1::ConfigMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A server of one map. What is written comes back; another name is not found.
    fn answer(request: &Request<Bytes>) -> (StatusCode, Bytes) {
        let map =
            r#"{"metadata":{"name":"m","namespace":"s","resourceVersion":"7","managedFields":[{"manager":"x"}]}}"#;
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/api/v1/namespaces/s/configmaps/m") => (StatusCode::OK, Bytes::from_static(map.as_bytes())),
            (&Method::PUT, _) => (StatusCode::OK, request.body().clone()),
            (&Method::POST, _) => {
                let status = br#"{"kind":"Status","status":"Failure","reason":"AlreadyExists","code":409}"#;
                (StatusCode::CONFLICT, Bytes::from_static(status))
            }
            _ => (StatusCode::NOT_FOUND, Bytes::from_static(b"no such thing")),
        }
    }

    fn through_kube() -> kube::Client {
        let service = tower::service_fn(|request: Request<Body>| async {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let (code, body) = answer(&Request::from_parts(parts, body));
            let mut response = http::Response::new(http_body_util::Full::new(body));
            *response.status_mut() = code;
            Ok::<_, kube::Error>(response)
        });
        kube::Client::new(service, "default")
    }

    /// Takes objects for texts, and answers alike where it can.
    fn straight() -> Client {
        let call = |request: Request<Bytes>| {
            let (code, body) = answer(&request);
            let handed = request.extensions().get::<TypedBody>().filter(|_| code.is_success());
            let sent = handed.and_then(TypedBody::take::<ConfigMap>);
            let response = Response::builder().status(code);
            match sent.and_then(|map| handed?.reply(Arc::new(*map))) {
                Some(answer) => response.extension(answer).body(Bytes::new()).unwrap(),
                None => response.body(body).unwrap(),
            }
        };
        Client::direct(through_kube(), Arc::new(move |request| Box::pin(std::future::ready(call(request)))))
    }

    #[tokio::test]
    async fn both_ways_bring_the_same_answers() {
        let remote = Client::from(through_kube());
        for (case, client) in [("through kube's client", &remote), ("straight", &straight())] {
            let map: ConfigMap = write::live(client, &Key::namespaced("s", "m")).await.unwrap().expect(case);
            assert_eq!((map.metadata.resource_version.as_deref(), &map.metadata.managed_fields), (Some("7"), &None));
            let absent = write::live::<ConfigMap>(client, &Key::namespaced("s", "other")).await.unwrap();
            assert!(absent.is_none(), "{case}");
            assert_eq!(*write::replace(client, Part::Whole, &map).await.unwrap(), map, "{case}");
            let refused = write::create(client, &map).await.unwrap_err();
            assert!(refused.already_exists() && !refused.is_conflict(), "{case}: {refused}");
        }
    }

    #[tokio::test]
    async fn what_a_server_has_removed_is_not_held() {
        let held = r#""deletionTimestamp":"2026-01-01T00:00:00Z","#;
        for (case, metadata, is_held) in [
            ("shown as it was", String::new(), false),
            ("shown with the mark", format!("{held}\"deletionGracePeriodSeconds\":0,"), false),
            ("held by somebody", format!("{held}\"finalizers\":[\"a/b\"],"), true),
            ("given time", format!("{held}\"deletionGracePeriodSeconds\":30,"), true),
        ] {
            let text = format!(r#"{{"kind":"ConfigMap","metadata":{{{metadata}"name":"m","namespace":"s"}}}}"#);
            let map: ConfigMap = serde_json::from_str(&text).unwrap();
            let call = move |_: Request<Bytes>| Response::new(Bytes::from(text.clone()));
            let client = Client::direct(through_kube(), Arc::new(move |r| Box::pin(std::future::ready(call(r)))));
            let left = write::delete(&client, &map).await.unwrap();
            assert_eq!(left.is_some(), is_held, "{case}");
        }
    }

    #[tokio::test]
    async fn who_asks_again_and_again_lets_others_run() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        const TIMES: usize = 10_000;
        let asking = tokio::spawn(async {
            let client = straight();
            for _ in 0..TIMES {
                write::live::<ConfigMap>(&client, &Key::namespaced("s", "m")).await.unwrap();
                ASKED.fetch_add(1, Ordering::Relaxed);
            }
        });
        tokio::task::yield_now().await;
        let by_then = ASKED.load(Ordering::Relaxed);
        assert!(0 < by_then && by_then < TIMES, "{by_then} of {TIMES} before anybody else's turn");
        asking.await.unwrap();
    }
}
