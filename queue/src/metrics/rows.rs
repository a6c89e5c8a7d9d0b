//! Tables of metrics with values that are read at each scrape.

use std::fmt;

use prometheus_client::{
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric as _, MetricEncoder,
    },
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// Values of a metric. Each may have a value of a further label.
pub type Values<V> = Vec<(Option<&'static str>, V)>;

/// A metric's name, its help, whether it is a counter or a gauge, and its values for a source.
pub type Row<T, V> = (&'static str, &'static str, MetricType, fn(&T) -> Values<V>);

/// Name and value of a label.
type Label<'a> = (&'a str, &'a str);

/// Encodes the metrics of sources, each with the label of its source. `further` is the name of the further
/// label.
///
/// # Errors
/// As the encoder.
pub fn encode_rows<T, V: EncodeCounterValue + EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    rows: &[Row<T, V>],
    sources: &[(Option<Label<'_>>, &T)],
    further: &str,
) -> fmt::Result {
    for (name, help, kind, values) in rows {
        let mut metric = encoder.encode_descriptor(name, help, None, *kind)?;
        'values: for (label, source) in sources {
            for (value_label, value) in values(source) {
                let value_label = value_label.map(|value| (further, value));
                let labels: Vec<Label<'_>> = label.iter().copied().chain(value_label).collect();
                if labels.is_empty() {
                    // Without a label there is one value only.
                    encode(value, *kind, metric)?;
                    break 'values;
                }
                encode(value, *kind, metric.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

fn encode<V: EncodeCounterValue + EncodeGaugeValue>(
    value: V,
    kind: MetricType,
    metric: MetricEncoder<'_>,
) -> fmt::Result {
    match kind {
        MetricType::Counter => ConstCounter::new(value).encode(metric),
        _ => ConstGauge::new(value).encode(metric),
    }
}
