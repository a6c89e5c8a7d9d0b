//! Other values of the constants that choose kernels, measured in one process.

use std::fmt::Write as _;

use super::place::{Place, list, number};

pub fn run(place: &Place) -> anyhow::Result<String> {
    let words = place.sizes(
        "bench tuning --batch 1,16,64,256 --prompt 448",
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
    writeln!(text, "\nBest values: {}\n", found["best"])?;
    text += "| steps | context | standard, tokens/s | experimental | best values | best / standard |\n\
             | --- | --- | --- | --- | --- | --- |\n";
    for row in list(&found, "together")? {
        let [standard, experimental, best] = ["standard", "experimental", "best"]
            .map(|of| number(row, &format!("{of}_tokens_per_s")));
        let (phase, ratio) = (row["phase"].as_str().unwrap_or_default(), best / standard);
        writeln!(
            text,
            "| {phase} {} | {} | {standard:.0} | {experimental:.0} | {best:.0} | {ratio:.3} |",
            row["rows"], row["context"]
        )?;
    }
    Ok(text)
}
