//! Other values of the constants that choose kernels, measured in one process.

use std::fmt::Write as _;

use super::place::{Place, list, number};

pub fn run(place: &Place) -> anyhow::Result<String> {
    let words = place.sizes(
        "bench tuning --batch 1,8,32,64,128,256 --prompt 448",
        "bench tuning --quick --batch 1,3 --prompt 20",
    );
    let found = place.measure(words)?;
    let mut text =
        "| constant | value | steps | context | tokens/s |\n| --- | --- | --- | --- | --- |\n"
            .to_owned();
    for row in list(&found, "rows")? {
        let word = |name: &str| row[name].as_str().unwrap_or_default();
        let mark = if row["is_default"] == true { " (default)" } else { "" };
        writeln!(
            text,
            "| {} | {}{mark} | {} {} | {} | {:.0} |",
            word("constant"),
            row["value"],
            word("phase"),
            row["rows"],
            row["context"],
            number(row, "tokens_per_s")
        )?;
    }
    Ok(text)
}
