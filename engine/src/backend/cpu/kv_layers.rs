//! Which blocks of a sequence have the keys and values of a layer, and where in a block they lie.

use crate::{config::ModelConfig, kernels::float::POSITIONS_PART, kv::LayerGroups};

/// The place of a layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlace {
    /// The group of the layer: its block table.
    pub group: usize,
    /// Its number among the layers of a block.
    pub layer: usize,
}

/// The groups of a model's layers with attention.
#[derive(Debug, Clone)]
pub struct KvLayers {
    /// The groups.
    pub groups: LayerGroups,
    /// Layers of a block.
    pub per_block: usize,
    /// The place of each layer; layers without attention have that of the next one with it. // (layer)
    places: Vec<KvPlace>,
}

impl KvLayers {
    /// Returns the groups of a model. Layers with a window have groups of their own if there are at least as many as without one,
    /// and the window is shorter than the context: then a block holds as many layers as there are without a window.
    pub fn of(config: &ModelConfig) -> Self {
        let layers = 0..config.layer_count;
        let with_window = layers.clone().filter(|layer| config.window(*layer).is_some()).count();
        let without = config.attention_layers() - with_window;
        match &config.windows {
            Some(windows)
                if (1..=with_window).contains(&without) && windows.size < config.context_length =>
            {
                let mut met = [0; 2]; // with a window or not
                let place = |layer: usize| {
                    let has_window = config.window(layer).is_some();
                    let number = &mut met[usize::from(has_window)];
                    *number += 1;
                    let (group, layer) = ((*number - 1) / without, (*number - 1) % without);
                    KvPlace { group: group + usize::from(has_window), layer }
                };
                let groups = LayerGroups {
                    windows: with_window.div_ceil(without),
                    window: windows.size,
                    part: POSITIONS_PART,
                };
                Self { groups, per_block: without, places: layers.map(place).collect() }
            }
            _ => {
                let place =
                    |layer| KvPlace { group: 0, layer: config.attention_layers_before(layer) };
                let (groups, per_block) = (LayerGroups::ONE, config.attention_layers());
                Self { groups, per_block, places: layers.map(place).collect() }
            }
        }
    }

    /// Returns the place of a layer's keys and values.
    pub fn place(&self, layer: usize) -> KvPlace {
        self.places[layer]
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::files::Model;

    fn config(golden: &str) -> ModelConfig {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden);
        Model::open(&golden).expect("a golden model").config().clone()
    }

    fn with_windows(layers: &[bool]) -> ModelConfig {
        let mut config = config("maple-tiny/maple-tiny-tq2_0.gguf");
        let windows = config.windows.as_mut().expect("it has windows");
        windows.layers = layers.to_vec();
        config.layer_count = layers.len();
        config
    }

    #[test]
    fn layers_with_a_window_are_groups_of_as_many_layers_as_are_without() {
        let layers = KvLayers::of(&with_windows(&[true, true, false, true, true, true, false]));
        assert_eq!((layers.groups.windows, layers.groups.window, layers.per_block), (3, 24, 2));
        let places: Vec<_> = layers.places.iter().map(|place| (place.group, place.layer)).collect();
        assert_eq!(places, [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (3, 0), (0, 1)]);
    }

    #[test]
    fn blocks_have_all_layers_where_groups_would_free_little() {
        let few = with_windows(&[true, false, false]);
        let none = with_windows(&[true, true]);
        let mut short = config("maple-tiny/maple-tiny-tq2_0.gguf");
        short.context_length = 24;
        for config in [few, none, short, config("bitnet-tiny"), config("qwen35-tiny")] {
            let layers = KvLayers::of(&config);
            assert_eq!(layers.groups, LayerGroups::ONE);
            assert_eq!(layers.per_block, config.attention_layers());
        }
    }
}
