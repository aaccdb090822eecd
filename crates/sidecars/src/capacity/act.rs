//! Asks the driver, and writes what it says.

use cleat_api::Quantity;
use cleat_csi::v1::{GetCapacityRequest, Topology};
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource;
use tracing::info;

use super::Publisher;
use super::decide::{Decision, Free, Item};
use crate::Failure;

impl Publisher {
    pub(super) async fn ask(&self, item: &Item) -> Result<Free, Failure> {
        let class = self.observed.classes.named(&item.class);
        let parameters = class.and_then(|c| c.parameters.clone()).into_iter().flatten().collect();
        let segment = Some(item.segment.clone()).filter(|s| !s.is_empty());
        let request = GetCapacityRequest {
            volume_capabilities: Vec::new(),
            parameters,
            accessible_topology: segment.map(|s| Topology { segments: s.into_iter().collect() }),
        };
        let answer = self.driver.client.get_capacity(request).await?;
        let quantity = |bytes: i64| resource::Quantity(Quantity::from_bytes(bytes).to_string());
        Ok(Free {
            capacity: Some(quantity(answer.available_capacity)),
            largest: answer.maximum_volume_size.map(quantity),
        })
    }

    pub(super) async fn settle(&self, decision: Decision) -> Result<(), WriteError> {
        let written = match decision {
            Decision::Nothing => return Ok(()),
            Decision::Create(object) => match write::create(&self.context.client, object.as_ref()).await {
                Err(error) if error.already_exists() => return Ok(()),
                written => written,
            },
            Decision::Update(object) => write::replace(&self.context.client, Part::Whole, object.as_ref()).await,
        }?;
        cleat_crash::point("capacity:written");
        info!(class = written.storage_class_name, free = ?written.capacity, "capacity published");
        self.observed.capacities.observe_write(written);
        Ok(())
    }

    pub(super) async fn delete(&self, object: &CSIStorageCapacity) -> Result<(), WriteError> {
        write::delete(&self.context.client, object).await?;
        cleat_crash::point("capacity:deleted");
        Ok(())
    }
}
