//! The escalation of a batch: lines that have not begun at some time go to another model.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tritmill_client::Fields;
use utoipa::ToSchema;

use crate::{
    ApiError, App,
    store::{batches::parse_window, escalation::Escalation},
};

/// Where the lines of a batch go that have not begun at some time.
#[derive(Serialize, ToSchema)]
#[schema(as = Escalation)]
pub(crate) struct EscalationView {
    /// The model. Each answer says which one it is from.
    #[schema(examples("small"))]
    model: String,
    /// Time after the creation of the batch, less than its window: a number and one of s, m, h, d. The time in which the
    /// batch is paused does not count.
    #[schema(examples("20h"))]
    after: String,
}

impl From<Escalation> for EscalationView {
    fn from(Escalation { model, after, .. }: Escalation) -> Self {
        Self { model, after }
    }
}

/// An escalation that a request asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NewEscalation {
    model: String,
    after: String,
}

impl NewEscalation {
    /// Parses the field `escalation` of a batch with this endpoint and window.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn parse(value: Value, endpoint: &str, within: Duration) -> Result<Self, ApiError> {
        const NAME: &str = "escalation";
        let Value::Object(map) = value else {
            return Err(ApiError::invalid_value(NAME, "escalation must be an object"));
        };
        if !matches!(endpoint, "/v1/chat/completions" | "/v1/completions" | "/v1/responses") {
            let message = "escalation needs a batch of one model, which generates text";
            return Err(ApiError::invalid_value(NAME, message));
        }
        let mut fields = Fields::new(map, "escalation.");
        let mut required = |name: &str| {
            fields.text(name)?.ok_or_else(|| ApiError::missing_field(&format!("{NAME}.{name}")))
        };
        let (model, after) = (required("model")?, required("after")?);
        fields.finish()?;
        if parse_window(&after).is_none_or(|after| after >= within) {
            let message = "escalation.after must be a number and one of s, m, h, d, and less than the completion window";
            return Err(ApiError::invalid_value("escalation.after", message));
        }
        Ok(Self { model, after })
    }

    /// Returns the model, and the time after the creation of the batch.
    pub fn parts(&self) -> (String, String) {
        (self.model.clone(), self.after.clone())
    }

    /// Finds the queue of the model.
    ///
    /// # Errors
    /// The model is not served, or the store is unavailable.
    pub async fn find(self, app: &App) -> Result<Escalation, ApiError> {
        let Self { model, after } = self;
        match app.models.find(&model).await? {
            Some(queue) => Ok(Escalation { model, queue, after }),
            None => Err(ApiError::model_not_found(&model).at("escalation.model")),
        }
    }
}
