//! The fields `input_url`, `input_options`, `output_url` and `output_format` of a batch.

use serde_json::Value;
use tritmill_client::Fields;
use tritmill_data::AllowedAddresses;
use tritmill_queue::Tenant;

use crate::{
    ApiError,
    data_urls::{InputUrl, OutputUrl},
};

/// Takes the source of a batch with an endpoint, if it has one, and checks that its tenant may read it.
///
/// # Errors
/// Names the first invalid field.
pub(super) fn take_input(
    fields: &mut Fields,
    endpoint: &str,
    (allowed, tenant): (&AllowedAddresses, &Tenant),
) -> Result<Option<InputUrl>, ApiError> {
    let options: Option<Value> = fields.take("input_options");
    let Some(url) = fields.text("input_url")? else {
        return match options {
            None => Ok(None),
            Some(_) => Err(ApiError::missing_field("input_url")),
        };
    };
    let input = InputUrl::parse(url, options, endpoint)?;
    input.check_allowed(allowed, tenant)?;
    Ok(Some(input))
}

/// Takes the sink of a batch, if it has one, and checks that its tenant may write it.
///
/// # Errors
/// Names the first invalid field.
pub(super) fn take_output(
    fields: &mut Fields,
    (allowed, tenant): (&AllowedAddresses, &Tenant),
) -> Result<Option<OutputUrl>, ApiError> {
    let format = fields.text("output_format")?;
    let Some(url) = fields.text("output_url")? else {
        return match format {
            None => Ok(None),
            Some(_) => Err(ApiError::missing_field("output_url")),
        };
    };
    let output = OutputUrl::parse(url, format)?;
    output.check_allowed(allowed, tenant)?;
    Ok(Some(output))
}
