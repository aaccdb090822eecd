//! Reconciles one volume: calls `decide`, carries out the step, stores its outcome in the state, and repeats this until
//! there is nothing to do. The queue guarantees that only one reconcile of a volume runs at a time.

use std::sync::Arc;

use cleat_api::key::Meta as _;
use cleat_csi::ErrorClass;
use cleat_runtime::Outcome;
use tracing::{debug, info};

use crate::act;
use crate::actual::MountState;
use crate::context::AgentContext;
use crate::decide;
use crate::error::ReconcileError;
use crate::layout::VolumeId;
use crate::plugin::csi::{CsiDriver, PodInfo};
use crate::state::{FailedSteps, Operation};

pub(crate) async fn reconcile(agent: Arc<AgentContext>, id: VolumeId) -> Result<Outcome, ReconcileError> {
    let mut failed = FailedSteps::default();
    let mut messages = Vec::new();
    // A stop takes effect between steps; a started step is completed.
    while !agent.stop.is_cancelled() {
        let attach = attach_state(&agent, &id);
        let driver = agent.drivers.get(&id.driver);
        let driver_state = match &driver {
            None => decide::DriverState::NotRegistered,
            Some(driver) => decide::DriverState::Registered { stages: driver.stages() },
        };
        let (operation, changed) = agent.state.lock().plan(&id, attach, driver_state, &failed);
        for uid in changed {
            agent.wake_pod(uid);
        }
        let Some(operation) = operation else { break };
        if let Operation::Forget = operation {
            debug!(volume = %id, "volume no longer in use");
            agent.wake_node();
            break;
        }
        // `decide` returns these steps only if the driver is registered.
        let Some(driver) = driver else { break };
        if let Err(message) = Box::pin(carry_out(&agent, &driver, &id, operation, &mut failed)).await {
            messages.push(message);
        }
    }
    if messages.is_empty() { Ok(Outcome::Done) } else { Err(ReconcileError::Steps(messages.join("; "))) }
}

async fn carry_out(
    agent: &AgentContext,
    driver: &CsiDriver,
    id: &VolumeId,
    operation: Operation,
    failed: &mut FailedSteps,
) -> Result<(), String> {
    match operation {
        Operation::Stage { volume, before, uid } => {
            let result = act::stage(agent, driver, &volume, before).await;
            let state_after = state_after_call(before, result.as_ref().map_err(act::MountError::class));
            agent.state.lock().set_staged(id, state_after);
            match result {
                Ok(()) => info!(volume = %id, "volume staged"),
                Err(error) => {
                    failed.stage = true;
                    return Err(report_mount_failure(agent, id, &uid, "MountDevice", &volume.spec_name, &error));
                }
            }
        }
        Operation::Publish { volume, before, uid, key, service_account } => {
            let pod = PodInfo {
                name: key.name.clone(),
                namespace: key.namespace.clone().unwrap_or_default(),
                uid: uid.clone(),
                service_account,
            };
            let result = act::publish(agent, driver, &volume, before, &pod).await;
            let state_after = state_after_call(before, result.as_ref().map_err(act::MountError::class));
            {
                let mut state = agent.state.lock();
                state.set_published(id, &uid, &volume.spec_name, state_after);
                if result.is_ok() {
                    state.set_error(id, &uid, None);
                }
            }
            match result {
                Ok(()) => info!(volume = %id, pod = %key, uid, "volume published"),
                Err(error) => {
                    failed.pods.insert(uid.clone());
                    return Err(report_mount_failure(agent, id, &uid, "SetUp", &volume.spec_name, &error));
                }
            }
            agent.wake_pod(uid);
        }
        Operation::Unpublish { uid, spec_name } => {
            match act::unpublish(&agent.layout, driver, id, &uid, &spec_name).await {
                Ok(()) => {
                    agent.state.lock().set_published(id, &uid, &spec_name, MountState::default());
                    info!(volume = %id, uid, "volume unpublished");
                    agent.wake_pod(uid);
                }
                Err(error) => {
                    agent.state.lock().undo_failed(id, Some(&uid));
                    failed.pods.insert(uid.clone());
                    return Err(format!("unpublish for pod {uid}: {error}"));
                }
            }
        }
        Operation::Unstage => match act::unstage(&agent.layout, driver, id).await {
            Ok(()) => {
                agent.state.lock().set_staged(id, MountState::default());
                info!(volume = %id, "volume unstaged");
            }
            Err(error) => {
                agent.state.lock().undo_failed(id, None);
                failed.stage = true;
                return Err(format!("unstage: {error}"));
            }
        },
        Operation::Forget => {}
    }
    Ok(())
}

fn state_after_call(before: MountState, result: Result<&(), ErrorClass>) -> MountState {
    match result {
        Ok(()) => MountState::mounted(),
        Err(class) => before.call_failed(class),
    }
}

/// Stores the error for the pod's condition and records an event. Returns the message.
fn report_mount_failure(
    agent: &AgentContext,
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

/// Whether the volume is attached, as far as this node may rely on it.
fn attach_state(agent: &AgentContext, id: &VolumeId) -> decide::AttachState {
    if !agent.attach_required(&id.driver) {
        return decide::AttachState::NotRequired;
    }
    // The acknowledgement is read before the Node, so that the Node is at least as new as the acknowledgement.
    let in_use_reported = agent.state.lock().is_reported(id);
    let name = id.unique_name();
    let node = agent.nodes.named(&agent.name);
    let listed_as_attached = node
        .as_ref()
        .and_then(|n| n.status.as_ref()?.volumes_attached.as_ref())
        .is_some_and(|all| all.iter().any(|a| a.name == name));
    let attachment = match agent.attachments.named(&id.attachment_name(&agent.name)) {
        None => decide::AttachmentState::Missing,
        Some(a) if a.metadata.is_deleting() => decide::AttachmentState::Deleting,
        Some(a) => match &a.status {
            Some(status) if status.attached => decide::AttachmentState::Attached,
            Some(status) => match status.attach_error.as_ref().and_then(|e| e.message.clone()) {
                Some(error) => decide::AttachmentState::Failed(error),
                None => decide::AttachmentState::Pending,
            },
            None => decide::AttachmentState::Pending,
        },
    };
    decide::AttachState::Required { in_use_reported, listed_as_attached, attachment }
}
