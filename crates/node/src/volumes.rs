//! One visit to one volume: ask `decide`, carry the step out, record what came of it, until there is nothing to do. The queue
//! lets one visit at a time into a volume.

use std::sync::Arc;

use cleat_api::key::Meta as _;
use cleat_csi::Class;
use cleat_runtime::Outcome;
use tracing::{debug, info};

use crate::act;
use crate::actual::Effect;
use crate::agent::{Shared, TurnError};
use crate::decide;
use crate::layout::VolumeId;
use crate::plugin::csi::{Driver, PodInfo};
use crate::state::{Failed, Order};

pub(crate) async fn turn(agent: Arc<Shared>, id: VolumeId) -> Result<Outcome, TurnError> {
    let mut failed = Failed::default();
    let mut messages = Vec::new();
    // A stop is honoured between steps; a step once begun is seen through.
    while !agent.stop.is_cancelled() {
        let attach = attachment(&agent, &id);
        let driver = agent.drivers.get(&id.driver);
        let seen = match &driver {
            None => decide::Driver::NotRegistered,
            Some(driver) => decide::Driver::Registered { stages: driver.stages() },
        };
        let (order, changed) = agent.state.lock().plan(&id, attach, seen, &failed);
        for uid in changed {
            agent.wake_pod(uid);
        }
        let Some(order) = order else { break };
        if let Order::Forget = order {
            debug!(volume = %id, "no longer in use here");
            agent.wake_node();
            break;
        }
        // A step is ordered only with a driver at hand.
        let Some(driver) = driver else { break };
        if let Err(message) = Box::pin(carry_out(&agent, &driver, &id, order, &mut failed)).await {
            messages.push(message);
        }
    }
    if messages.is_empty() { Ok(Outcome::Done) } else { Err(TurnError::Steps(messages.join("; "))) }
}

async fn carry_out(
    agent: &Shared,
    driver: &Driver,
    id: &VolumeId,
    order: Order,
    failed: &mut Failed,
) -> Result<(), String> {
    match order {
        Order::Stage { volume, before, uid } => {
            let result = act::stage(agent, driver, &volume, before).await;
            let effect = outcome(before, result.as_ref().map_err(act::MountError::class));
            agent.state.lock().set_staged(id, effect);
            match result {
                Ok(()) => info!(volume = %id, "staged"),
                Err(error) => {
                    failed.stage = true;
                    return Err(mount_failed(agent, id, &uid, "MountDevice", &volume.spec_name, &error));
                }
            }
        }
        Order::Publish { volume, before, uid, key, service_account } => {
            let pod = PodInfo {
                name: key.name.clone(),
                namespace: key.namespace.clone().unwrap_or_default(),
                uid: uid.clone(),
                service_account,
            };
            let result = act::publish(agent, driver, &volume, before, &pod).await;
            let effect = outcome(before, result.as_ref().map_err(act::MountError::class));
            {
                let mut state = agent.state.lock();
                state.set_published(id, &uid, &volume.spec_name, effect);
                if result.is_ok() {
                    state.set_error(id, &uid, None);
                }
            }
            match result {
                Ok(()) => info!(volume = %id, pod = %key, uid, "published"),
                Err(error) => {
                    failed.pods.insert(uid.clone());
                    return Err(mount_failed(agent, id, &uid, "SetUp", &volume.spec_name, &error));
                }
            }
            agent.wake_pod(uid);
        }
        Order::Unpublish { uid, spec_name } => {
            match act::unpublish(&agent.layout, driver, id, &uid, &spec_name).await {
                Ok(()) => {
                    agent.state.lock().set_published(id, &uid, &spec_name, Effect::default());
                    info!(volume = %id, uid, "unpublished");
                    agent.wake_pod(uid);
                }
                Err(error) => {
                    agent.state.lock().undo_failed(id, Some(&uid));
                    failed.pods.insert(uid.clone());
                    return Err(format!("unpublish for pod {uid}: {error}"));
                }
            }
        }
        Order::Unstage => match act::unstage(&agent.layout, driver, id).await {
            Ok(()) => {
                agent.state.lock().set_staged(id, Effect::default());
                info!(volume = %id, "unstaged");
            }
            Err(error) => {
                agent.state.lock().undo_failed(id, None);
                failed.stage = true;
                return Err(format!("unstage: {error}"));
            }
        },
        Order::Forget => {}
    }
    Ok(())
}

fn outcome(before: Effect, result: Result<&(), Class>) -> Effect {
    match result {
        Ok(()) => Effect::done(),
        Err(class) => before.failed(class),
    }
}

/// Tells the pod, and people, that a mount failed. Returns the message.
fn mount_failed(
    agent: &Shared,
    id: &VolumeId,
    uid: &str,
    step: &str,
    spec_name: &str,
    error: &act::MountError,
) -> String {
    let step = match error {
        act::MountError::NotAttached { .. } | act::MountError::ReadAttachment(_) => "WaitForAttach",
        _ => step,
    };
    let message = format!("MountVolume.{step} failed for volume \"{spec_name}\" : {error}");
    agent.state.lock().set_error(id, uid, Some(message.clone()));
    agent.warn_pod(uid, "FailedMount", &message);
    agent.wake_pod(uid.to_owned());
    message
}

/// How the volume stands with the attach/detach controller.
fn attachment(agent: &Shared, id: &VolumeId) -> decide::Attach {
    if !agent.attach_required(&id.driver) {
        return decide::Attach::NotRequired;
    }
    // The acknowledgement is read before the Node: the Node read then is no older than what was acknowledged.
    let reported = agent.state.lock().is_reported(id);
    let name = id.unique_name();
    let node = agent.nodes.named(&agent.name);
    let listed = node
        .as_ref()
        .and_then(|n| n.status.as_ref()?.volumes_attached.as_ref())
        .is_some_and(|all| all.iter().any(|a| a.name == name));
    let attachment = match agent.attachments.named(&id.attachment_name(&agent.name)) {
        None => decide::Attachment::Missing,
        Some(a) if a.metadata.is_deleting() => decide::Attachment::Deleting,
        Some(a) => match &a.status {
            Some(status) if status.attached => decide::Attachment::Attached,
            Some(status) => match status.attach_error.as_ref().and_then(|e| e.message.clone()) {
                Some(error) => decide::Attachment::Failed(error),
                None => decide::Attachment::Pending,
            },
            None => decide::Attachment::Pending,
        },
    };
    decide::Attach::Required { reported, listed, attachment }
}
