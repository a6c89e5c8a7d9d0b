//! Decoding by sampling parameters, against greedy decoding.

use std::fmt::Write as _;

use super::place::{Place, Target, list, number, targets_table};

pub fn run(place: &Place) -> anyhow::Result<String> {
    let words = place.sizes(
        "bench sampling --batch 1,64 --generate 64",
        "bench sampling --batch 2 --prompt 4 --generate 4 --repetitions 1",
    );
    let mut text = "| parameters | batch | tokens/s | of greedy | draws from all logits |\n\
                    | --- | --- | --- | --- | --- |\n"
        .to_owned();
    let mut of_default = None;
    for row in list(&place.measure(words)?, "rows")? {
        let name = row["parameters"].as_str().unwrap_or_default();
        let batch = row["batch"].as_u64().unwrap_or_default();
        let [rate, share, all] =
            ["tokens_per_s", "of_greedy", "all_logits"].map(|field| number(row, field));
        writeln!(
            text,
            "| {name} | {batch} | {rate:.0} | {:.0} % | {:.1} % |",
            100.0 * share,
            100.0 * all
        )?;
        if name == "temperature 1" {
            of_default = Some(100.0 * share);
        }
    }
    let target: Target =
        ("temperature 1 at the largest batch, % of greedy", "90".to_owned(), of_default);
    Ok(text + &targets_table(&[target]))
}
