//! `[model]`: the KV geometry.

use crate::ScenarioError;
use crate::decide::DecisionKey;
use crate::doc::{ClosedList, FileName, TomlSection};
use crate::preset::{MODELS, ModelPreset};
use crate::run::{MemoryLayout, ModelGeometry, ModelGroup};
use crate::value::{ByteSize, Distribution};
use kvferry_engine::core::layout::GroupKind;
use kvferry_faults::section;

impl ClosedList for &'static ModelPreset {
    fn named() -> Vec<(&'static str, &'static ModelPreset)> {
        MODELS.iter().map(|model| (model.name, model)).collect()
    }
}

section! {
    #[derive(Debug)]
    pub(super) struct ModelSpec(section) checked by ModelSpec::check {
        pub(super) preset: Option<&'static ModelPreset>;
        pub(super) layers: Distribution<u16> = preset.map_or(4, |it| it.layers), in (1, 1024);
        pub(super) kv_heads: Distribution<u16> = preset.map_or(8, |it| it.kv_heads), in (1, 1024);
        pub(super) block_tokens: Distribution<u32> = 16, in (1, 1 << 20);
        pub(super) layout: Distribution<MemoryLayout> = MemoryLayout::Block;
        head_dim: Distribution<u32> = preset.map_or(16, |it| it.head_dim), in (1, 65_536);
        latent: Distribution<u32> = preset.map_or(0, |it| it.latent), in (0, 65_536);
        element: Distribution<ByteSize> = ByteSize(preset.map_or(2, |it| it.element));
        block_bytes: Option<Distribution<ByteSize>>;
        window_layers: Distribution<u16> = 0;
        window: Distribution<u32> = 64, in (1, 1 << 20);
        state_layers: Distribution<u16> = 0;
        state_bytes: Distribution<ByteSize> = ByteSize(256);
    } with {
        line: u32 = section.line;
    }
}

impl ModelSpec {
    fn check(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        if let Some(zero) = self.element.ends().find(|size| ![1, 2, 4].contains(&size.0)) {
            let what = format!("`{}` is {} bytes", section.path("element"), zero.0);
            return Err(section.error_at(self.element.line, what, "give 1, 2 or 4"));
        }
        if let Some(bytes) = &self.block_bytes {
            if self.head_dim.line > 0 || self.latent.line > 0 {
                let what =
                    "`model.block_bytes` and `model.head_dim` or `model.latent` both size a block";
                return Err(section.error_at(bytes.line, what, "remove one of them"));
            }
            if bytes.ends().any(|size| size.0 == 0) {
                let what = "`model.block_bytes` is 0";
                return Err(section.error_at(bytes.line, what, "give at least 1"));
            }
        }
        Ok(())
    }

    /// Draws the model. `block_bytes` is measured on a rank of the first prefill instance, which
    /// has TP size `tp` and `block_tokens` tokens per block.
    pub(super) fn draw(
        &self,
        file: &FileName,
        seed: u64,
        tp: u16,
        block_tokens: u32,
    ) -> Result<ModelGeometry, ScenarioError> {
        let key = |name: &str| DecisionKey::new(seed, "model").part(name);
        let layers = self.layers.draw(&key("layers"));
        let latent = self.latent.draw(&key("latent"));
        let element = self.element.draw(&key("element")).0;
        let kv_heads = if latent > 0 { 1 } else { self.kv_heads.draw(&key("kv_heads")) };
        let head_bytes = if latent > 0 {
            latent * element
        } else {
            2 * self.head_dim.draw(&key("head_dim")) * element
        };
        let mut model = ModelGeometry {
            name: self.preset.map_or("small", |preset| preset.name).into(),
            layers,
            kv_heads,
            latent: latent > 0,
            head_bytes,
            element,
            state_bytes: self.state_bytes.draw(&key("state_bytes")).0,
            groups: self.groups(file, seed, layers)?,
        };
        if let Some(bytes) = &self.block_bytes {
            let bytes = (bytes.draw(&key("block_bytes")).0, bytes.line);
            model.head_bytes = head_bytes_of_block(file, &model, bytes, tp, block_tokens)?;
        }
        if model.state_bytes == 0 || !model.state_bytes.is_multiple_of(element) {
            let what = format!("`model.state_bytes` is {}", model.state_bytes);
            let remedy = format!("give a multiple of the element size, {element}");
            return Err(file.error(self.state_bytes.line, what, remedy));
        }
        Ok(model)
    }

    fn groups(
        &self,
        file: &FileName,
        seed: u64,
        layers: u16,
    ) -> Result<Vec<ModelGroup>, ScenarioError> {
        let key = |name: &str| DecisionKey::new(seed, "model").part(name);
        let windows = self.window_layers.draw(&key("window_layers"));
        let states = self.state_layers.draw(&key("state_layers"));
        if windows.saturating_add(states) >= layers {
            let what = format!("{windows} window and {states} state layers of {layers}");
            let line = self.window_layers.line.max(self.state_layers.line).max(self.line);
            let remedy = "leave at least one layer with full attention";
            return Err(file.error(line, what, remedy));
        }
        let window = GroupKind::Window { tokens: self.window.draw(&key("window")) };
        let mut groups = [
            ModelGroup { kind: GroupKind::Full, layers: Vec::new() },
            ModelGroup { kind: window, layers: Vec::new() },
            ModelGroup { kind: GroupKind::State, layers: Vec::new() },
        ];
        for layer in 0..layers {
            groups[spread(layer, layers, windows, states)].layers.push(layer);
        }
        Ok(groups.into_iter().filter(|group| !group.layers.is_empty()).collect())
    }
}

/// The group of a layer: window and state layers are spread evenly, the first layer is full.
fn spread(layer: u16, layers: u16, windows: u16, states: u16) -> usize {
    let steps = |count: u32, at: u32| count * at / u32::from(layers);
    let (at, special) = (u32::from(layer), u32::from(windows) + u32::from(states));
    let index = steps(special, at);
    if steps(special, at + 1) == index {
        return 0;
    }
    // Of the special layers, the states are spread the same way.
    let of = |at: u32| u32::from(states) * at / special;
    if of(index + 1) > of(index) { 2 } else { 1 }
}

fn head_bytes_of_block(
    file: &FileName,
    model: &ModelGeometry,
    (bytes, line): (u32, u32),
    tp: u16,
    block_tokens: u32,
) -> Result<u32, ScenarioError> {
    let heads = u32::from(model.heads_per_rank(tp));
    let unit = 2 * model.element;
    match block_tokens.checked_mul(heads) {
        Some(cells) if bytes.is_multiple_of(cells) && (bytes / cells).is_multiple_of(unit) => {
            Ok(bytes / cells)
        }
        _ => {
            let what = format!("`model.block_bytes` is {bytes}");
            let remedy = format!(
                "give a multiple of {} ({block_tokens} tokens x {heads} KV heads per rank x K and V x {} bytes)",
                u64::from(block_tokens) * u64::from(heads) * u64::from(unit),
                model.element
            );
            Err(file.error(line, what, remedy))
        }
    }
}
