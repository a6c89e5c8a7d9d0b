//! Limits that operators set for a tenant: what a request may still add.

use tritmill_queue::Tenant;

use crate::{ApiError, App, refusals::Limit};

/// Returns the number of bytes that the next file of a tenant may have. Uploads at the same moment are not counted.
///
/// # Errors
/// If the tenant may not store anything more.
pub(crate) async fn file_room(app: &App, tenant: &Tenant) -> Result<FileRoom, ApiError> {
    let account = match app.store.tenant_limits(tenant).await?.file_bytes {
        Some(most) => Some((most, app.store.tenant_account(tenant).await?.used.file_bytes)),
        None => None,
    };
    let room = FileRoom { most_bytes: app.limits.file_bytes_max, account };
    room.check(1).map(|()| room)
}

/// How many bytes the next file of a tenant may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileRoom {
    /// Largest file of the service.
    most_bytes: u64,
    /// Bytes that the tenant may have, and those that it has; `None` without a limit.
    account: Option<(u64, u64)>,
}

impl FileRoom {
    /// Checks the size of a file, so far.
    ///
    /// # Errors
    /// Names the limit that it exceeds.
    pub fn check(&self, size_bytes: u64) -> Result<(), ApiError> {
        if size_bytes > self.most_bytes {
            return Err(ApiError::too_large("file", self.most_bytes));
        }
        match self.account {
            Some((most, used)) if used.saturating_add(size_bytes) > most => {
                Err(ApiError::over_limit(Limit::FileBytes, "bytes of files", most, used).at("file"))
            }
            _ => Ok(()),
        }
    }
}

/// Returns how many unfinished batches a tenant may have: its own limit, or that of the service.
pub(crate) async fn open_batches(app: &App, tenant: &Tenant) -> Result<u32, ApiError> {
    let limits = app.store.tenant_limits(tenant).await?;
    Ok(limits.open_batches.unwrap_or(app.limits.open_batches_max))
}

/// Checks that a tenant may have one more API key.
///
/// # Errors
/// If it has as many as it may.
pub(crate) async fn check_keys(app: &App, tenant: &Tenant) -> Result<(), ApiError> {
    let Some(most) = app.store.tenant_limits(tenant).await?.keys else { return Ok(()) };
    let (most, used) = (u64::from(most), app.store.tenant_account(tenant).await?.used.keys);
    match used < most {
        true => Ok(()),
        false => Err(ApiError::over_limit(Limit::Keys, "API keys", most, used).at("tenant")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_fits_into_both_limits() {
        let check = |account, size_bytes: u64, code: Option<u16>| {
            let room = FileRoom { most_bytes: 100, account };
            let refused = room.check(size_bytes).err();
            assert_eq!(refused.map(|error| error.status().as_u16()), code, "{account:?}");
        };
        check(None, 100, None);
        check(None, 101, Some(413));
        check(Some((1000, 0)), 101, Some(413));
        check(Some((1000, 950)), 50, None);
        check(Some((1000, 950)), 51, Some(403));
        check(Some((1000, 2000)), 1, Some(403));
    }
}
