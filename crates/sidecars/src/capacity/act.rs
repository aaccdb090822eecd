//! Writes and deletes CSIStorageCapacity objects.

use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use tracing::info;

use super::CapacityPublisher;
use super::decide::CapacityDecision;

impl CapacityPublisher {
    pub(super) async fn apply(&self, decision: CapacityDecision) -> Result<(), WriteError> {
        let written = match decision {
            CapacityDecision::Nothing => return Ok(()),
            CapacityDecision::Create(object) => match write::create(&self.context.client, object.as_ref()).await {
                Err(error) if error.already_exists() => return Ok(()),
                written => written,
            },
            CapacityDecision::Update(object) => {
                write::replace(&self.context.client, Part::Whole, object.as_ref()).await
            }
        }?;
        cleat_crash::point("capacity:written");
        info!(class = written.storage_class_name, free = ?written.capacity, "capacity published");
        self.observer.capacities.observe_write(written);
        Ok(())
    }

    pub(super) async fn delete(&self, object: &CSIStorageCapacity) -> Result<(), WriteError> {
        write::delete(&self.context.client, object).await?;
        cleat_crash::point("capacity:deleted");
        Ok(())
    }
}
