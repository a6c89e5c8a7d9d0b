//! `cargo xtask gpu measure`: prefill and decode over batch sizes, against what was to be reached.

use super::{Place, Target, list, number, print_targets};

/// Sequences of a step, and tokens of prompt and answer.
const SWEEPS: [(&str, &str, &str); 3] = [
    ("1,2,4,8,16,32,64,128,256", "128", "64"),
    ("1,16,64,128,256", "512", "32"),
    ("1", "2048", "16"),
];

/// One measurement.
struct Row {
    phase: String,
    batch: u64,
    prompt: &'static str,
    median: f64,
    lowest: f64,
    highest: f64,
}

pub fn run(place: &Place) -> anyhow::Result<()> {
    let model = place.model()?;
    println!(
        "| phase | prompt | batch | tokens/s | slowest … fastest |\n| --- | --- | --- | --- | --- |"
    );
    let mut rows = Vec::new();
    for (batches, prompt, generate) in SWEEPS {
        let words =
            ["bench", "engine", "--batch", batches, "--prompt", prompt, "--generate", generate];
        for row in list(&place.measure(&words, &model)?, "rows")? {
            let row = Row {
                phase: row["phase"].as_str().unwrap_or_default().to_owned(),
                batch: row["batch"].as_u64().unwrap_or_default(),
                prompt,
                median: number(row, "tokens_per_s"),
                lowest: number(row, "tokens_per_s_lowest"),
                highest: number(row, "tokens_per_s_highest"),
            };
            let Row { phase, batch, median, lowest, highest, .. } = &row;
            println!("| {phase} | {prompt} | {batch} | {median:.0} | {lowest:.0} … {highest:.0} |");
            rows.push(row);
        }
    }
    print_targets(&targets(&rows));
    Ok(())
}

fn targets(rows: &[Row]) -> [Target; 5] {
    let decode = |batch| {
        let is = |row: &&Row| row.phase == "decode" && row.batch == batch && row.prompt == "128";
        rows.iter().find(is).map(|row| row.median)
    };
    let best = |phase: &str, prompt: Option<&str>| {
        let of = rows.iter().filter(|row| row.phase == phase);
        let of = of.filter(|row| prompt.is_none_or(|prompt| row.prompt == prompt));
        of.map(|row| row.median).max_by(f64::total_cmp)
    };
    let times = decode(16).zip(decode(1)).map(|(many, one)| many / one);
    let asked = str::to_owned;
    [
        ("decode, batch 1, tokens/s", asked("1500"), decode(1)),
        ("decode, batch 64", asked("20000"), decode(64)),
        ("decode, best batch at 512 tokens", asked("40000"), best("decode", Some("512"))),
        ("decode, batch 16 against batch 1, times", asked("8"), times),
        ("prefill", asked("150000"), best("prefill", None)),
    ]
}
