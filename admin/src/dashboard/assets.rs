//! Stylesheet, scripts and icon of the pages, compiled into the program.

use std::sync::LazyLock;

use axum::{
    extract::Path,
    http::header::{CACHE_CONTROL, CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use sha2::{Digest as _, Sha256};

use crate::ApiError;

const STYLE: &str = include_str!("../../assets/dashboard.css");
const SCRIPT: &str = include_str!("../../assets/dashboard.js");
const PLAYGROUND: &str = include_str!("../../assets/playground.js");
const ICON: &str = include_str!("../../assets/icon.svg");

/// Returns a version that changes with the assets. It is part of their URLs, so browsers may cache them.
pub(super) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let digest = Sha256::digest([STYLE, SCRIPT, PLAYGROUND, ICON].concat());
        digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    });
    &VERSION
}

/// Returns an asset.
pub(crate) async fn asset(Path((_, name)): Path<(String, String)>) -> Response {
    let (kind, text) = match name.as_str() {
        "dashboard.css" => ("text/css; charset=utf-8", STYLE),
        "dashboard.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "playground.js" => ("text/javascript; charset=utf-8", PLAYGROUND),
        "icon.svg" => ("image/svg+xml", ICON),
        _ => return ApiError::unknown_url().into_response(),
    };
    let headers = [(CONTENT_TYPE, kind), (CACHE_CONTROL, "public, max-age=31536000, immutable")];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Returns the stylesheet's colours in the light and in the dark scheme.
    fn schemes() -> [HashMap<&'static str, [f64; 3]>; 2] {
        let colours = |text: &'static str| {
            text.lines().filter_map(|line| {
                let (name, value) = line.trim().strip_prefix("--")?.split_once(": #")?;
                let value = u32::from_str_radix(value.get(..6)?, 16).ok()?;
                let channel = |shift: u32| f64::from(value >> shift & 0xff) / 255.0;
                Some((name, [channel(16), channel(8), channel(0)]))
            })
        };
        let (light, dark) = STYLE.split_once("prefers-color-scheme: dark").expect("two schemes");
        let light: HashMap<_, _> = colours(light).collect();
        let dark = light.clone().into_iter().chain(colours(dark)).collect();
        [light, dark]
    }

    /// Returns the contrast ratio according to WCAG.
    fn contrast(one: [f64; 3], two: [f64; 3]) -> f64 {
        let luminance = |colour: [f64; 3]| {
            let [red, green, blue] = colour.map(|channel| {
                if channel <= 0.04045 {
                    channel / 12.92
                } else {
                    ((channel + 0.055) / 1.055).powf(2.4)
                }
            });
            0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05
        };
        let (one, two) = (luminance(one), luminance(two));
        one.max(two) / one.min(two)
    }

    #[test]
    fn text_has_enough_contrast_on_its_backgrounds() {
        const AA: f64 = 4.5;
        for colours in schemes() {
            assert!(colours.len() > 12, "{colours:?}");
            for (text, grounds) in [
                ("text", &["ground", "surface", "raised", "accent-soft"][..]),
                ("muted", &["ground", "surface", "raised"]),
                ("accent", &["ground", "surface", "accent-soft"]),
                ("on-accent", &["accent"]),
                ("ok", &["surface", "ok-soft"]),
                ("warn", &["surface", "warn-soft"]),
                ("bad", &["ground", "surface", "raised", "bad-soft"]),
            ] {
                for ground in grounds {
                    let contrast = contrast(colours[text], colours[ground]);
                    assert!(contrast >= AA, "{text} on {ground}: {contrast:.2}");
                }
            }
        }
    }
}
