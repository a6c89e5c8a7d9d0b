//! What pages load: a stylesheet, a script and an icon, part of the program.

use std::sync::LazyLock;

use axum::{
    extract::Path,
    http::header::{CACHE_CONTROL, CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use sha2::{Digest as _, Sha256};

use crate::error::ApiError;

const STYLE: &str = include_str!("../../assets/dashboard.css");
const SCRIPT: &str = include_str!("../../assets/dashboard.js");
const ICON: &str = include_str!("../../assets/icon.svg");

/// A word that changes with the assets: pages load them under it, so that they may be kept.
pub(super) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let digest = Sha256::digest([STYLE, SCRIPT, ICON].concat());
        digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    });
    &VERSION
}

/// An asset by its name.
pub(crate) async fn asset(Path((_, name)): Path<(String, String)>) -> Response {
    let (kind, text) = match name.as_str() {
        "dashboard.css" => ("text/css; charset=utf-8", STYLE),
        "dashboard.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "icon.svg" => ("image/svg+xml", ICON),
        _ => return ApiError::no_route().into_response(),
    };
    let headers = [(CONTENT_TYPE, kind), (CACHE_CONTROL, "public, max-age=31536000, immutable")];
    (headers, text).into_response()
}
