//! Page of the tenant's files: download and delete.

use askama::Template;
use axum::{
    extract::{Path, Query},
    http::{HeaderMap, HeaderValue, header::CONTENT_DISPOSITION},
};
use serde::Deserialize;
use tritmill_queue::{Timestamp, store::Page};

use super::{Content, PageError, PageResult, Visit, filters, pager::Pager, percent_encoded};
use crate::{
    ApiError, App, Caller,
    openai::{file_content, files},
    store::{
        FileId,
        files::{FilePurpose, StoredFile},
        tenants::StoredFiles,
    },
};

/// Files per page.
const PAGE_SIZE: u32 = 50;

/// The purpose to list, and the position in the list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct FilesQuery {
    purpose: String,
    after: String,
}

#[derive(Template)]
#[template(path = "files.html")]
struct FilesView {
    now: Timestamp,
    purposes: [FilePurpose; 2],
    purpose: Option<FilePurpose>,
    files: Vec<StoredFile>,
    /// All complete files of the tenant.
    total: StoredFiles,
    may_delete: bool,
    pager: Pager,
}

impl FilesView {
    /// The purpose, as in URLs.
    fn word(&self) -> &'static str {
        self.purpose.map_or("", FilePurpose::as_str)
    }
}

/// Shows the files of the visitor's tenant, the latest first.
pub(crate) async fn list(visit: Visit, Query(query): Query<FilesQuery>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, query.clone())).await
}

async fn load(app: App, caller: Caller, query: FilesQuery) -> Result<Content, PageError> {
    let purpose = match query.purpose.as_str() {
        "" => None,
        word => Some(word.parse().map_err(|_| ApiError::not_found("purpose", word))?),
    };
    let after = match query.after.as_str() {
        "" => None,
        id => Some(id.parse().map_err(|_| ApiError::not_found("file", id))?),
    };
    let page = Page { after, limit: PAGE_SIZE, ascending: false };
    let files = app.store.files(&caller.tenant, purpose, page).await?;
    let is_full = files.len() == PAGE_SIZE as usize;
    let list = format!("/dashboard/files?purpose={}", purpose.map_or("", FilePurpose::as_str));
    let next = files.last().filter(|_| is_full).map(|file| format!("{list}&after={}", file.id));
    let view = FilesView {
        now: app.client.now().await?,
        purposes: [FilePurpose::Batch, FilePurpose::BatchOutput],
        purpose,
        total: app.store.stored_files(&caller.tenant).await?,
        may_delete: caller.may_submit(),
        pager: Pager::latest_first("files", after.map(|_: FileId| list.clone()), next),
        files,
    };
    Ok(Content::new("Files", &view))
}

/// Downloads a file.
pub(crate) async fn download(
    visit: Visit,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> PageResult {
    let file = files::find(&visit.app, &visit.caller.tenant, &id).await?;
    let mut response = file_content::respond(&visit.app, &file, &headers);
    response.headers_mut().insert(CONTENT_DISPOSITION, disposition(&file));
    Ok(response)
}

/// Tells the browser to save the file under its name.
fn disposition(file: &StoredFile) -> HeaderValue {
    let name = percent_encoded(&file.filename);
    HeaderValue::try_from(format!("attachment; filename*=UTF-8''{name}"))
        .expect("a percent-encoded name is visible ASCII")
}

/// Deletes a file.
pub(crate) async fn delete(visit: Visit, Path(id): Path<String>) -> PageResult {
    files::delete(&visit.app, &visit.caller.tenant, &id).await?;
    Ok(visit.done("/dashboard/files", "The file is deleted."))
}
