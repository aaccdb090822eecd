//! Runs the API server alone: `cargo run -p cleat-apiserver --example serve -- DATA-DIR [ADDRESS]`, until Ctrl-C.

use cleat_apiserver::{ApiServer, Config};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let data = arguments.next().ok_or("usage: serve DATA-DIR [ADDRESS]")?;
    let listen = arguments.next().unwrap_or("127.0.0.1:0".into()).parse()?;
    let server = ApiServer::open(Config::new(data, listen)).await?;
    println!("export KUBECONFIG={}", server.kubeconfig().display());
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    tokio::signal::ctrl_c().await?;
    stop.cancel();
    Ok(serving.await?)
}
