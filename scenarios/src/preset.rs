//! Public models and machines. Every number names its source.

use crate::cost::StepCost;
use crate::run::ModelGeometry;
use kvferry_engine::core::Nanos;

/// A model as published.
#[derive(Debug)]
pub struct ModelPreset {
    /// Name in scenario files.
    pub name: &'static str,
    pub layers: u16,
    /// KV heads; 1 with a latent.
    pub kv_heads: u16,
    /// Elements of K (and of V) per head and token; 0 with a latent.
    pub head_dim: u32,
    /// Elements of the latent per token; 0 without.
    pub latent: u32,
    /// Bytes per KV element.
    pub element: u32,
    /// Parameters that a token passes through.
    pub active_parameters: u64,
    /// Bytes of all weights.
    pub weight_bytes: u64,
    pub query_heads: u64,
    /// Elements of a query-key product plus elements of a value, per query head.
    pub attention_dim: u64,
}

/// The models that `[model] preset` knows.
pub const MODELS: &[ModelPreset] = &[
    // config.json of meta-llama/Llama-3.1-70B: num_hidden_layers 80, num_key_value_heads 8,
    // num_attention_heads 64, hidden_size 8192 (so head_dim 128), torch_dtype bfloat16.
    // Parameters: 70.6 B in the model card, two bytes each.
    ModelPreset {
        name: "llama-3.1-70b",
        layers: 80,
        kv_heads: 8,
        head_dim: 128,
        latent: 0,
        element: 2,
        active_parameters: 70_600_000_000,
        weight_bytes: 141_200_000_000,
        query_heads: 64,
        attention_dim: 256,
    },
    // config.json of Qwen/Qwen3-235B-A22B: num_hidden_layers 94, num_key_value_heads 4,
    // num_attention_heads 64, head_dim 128, torch_dtype bfloat16. Model card: 235 B parameters,
    // 22 B activated, two bytes each.
    ModelPreset {
        name: "qwen3-235b-a22b",
        layers: 94,
        kv_heads: 4,
        head_dim: 128,
        latent: 0,
        element: 2,
        active_parameters: 22_000_000_000,
        weight_bytes: 470_000_000_000,
        query_heads: 64,
        attention_dim: 256,
    },
    // config.json of deepseek-ai/DeepSeek-R1: num_hidden_layers 61, kv_lora_rank 512 and
    // qk_rope_head_dim 64 (latent 576), num_attention_heads 128, qk_nope_head_dim 128 (a
    // query-key product has 192), v_head_dim 128; weights in FP8, KV cache in bfloat16.
    // Model card: 671 B parameters, 37 B activated.
    ModelPreset {
        name: "deepseek-r1",
        layers: 61,
        kv_heads: 1,
        head_dim: 0,
        latent: 576,
        element: 2,
        active_parameters: 37_000_000_000,
        weight_bytes: 671_000_000_000,
        query_heads: 128,
        attention_dim: 320,
    },
];

/// A machine as published, per GPU.
#[derive(Debug)]
pub struct HardwarePreset {
    /// Name in scenario files.
    pub name: &'static str,
    pub memory_bytes: u64,
    /// Memory bandwidth in bytes per second.
    pub memory_rate: u64,
    /// Dense bf16 operations per second.
    pub flops: u64,
    /// NIC bandwidth in bytes per second and direction.
    pub nic_rate: u64,
    /// Bandwidth to a GPU of the same node in bytes per second and direction.
    pub node_rate: u64,
    /// Percentage of `flops` that a forward pass reaches.
    pub flops_percent: u64,
    /// Percentage of `memory_rate` that a forward pass reaches.
    pub memory_percent: u64,
    /// Percentage of memory for weights and KV (`gpu_memory_utilization`).
    pub usable_percent: u64,
    /// Launching, scheduling and collectives of a step.
    pub step: Nanos,
}

/// The machines that `[topology] hardware` knows.
pub const HARDWARE: &[HardwarePreset] = &[
    // AMD Instinct MI300X data sheet: 192 GB HBM3, 5.3 TB/s, 1307.4 TFLOPS dense bf16; seven
    // Infinity Fabric links of 128 GB/s in both directions together, one to each of the other
    // seven GPUs. One 400 Gb/s NIC per GPU is the usual scale-out of its eight-GPU platform.
    // The percentages and the step time are assumptions; 90 % usable is vLLM's default.
    HardwarePreset {
        name: "mi300x",
        memory_bytes: 192_000_000_000,
        memory_rate: 5_300_000_000_000,
        flops: 1_307_400_000_000_000,
        nic_rate: 50_000_000_000,
        node_rate: 64_000_000_000,
        flops_percent: 45,
        memory_percent: 70,
        usable_percent: 90,
        step: Nanos::from_us(300),
    },
];

impl ModelGeometry {
    /// Heads on each of `tp` ranks; at least one, see `Geometry::kv_heads`.
    pub fn heads_per_rank(&self, tp: u16) -> u16 {
        if self.latent { 1 } else { (self.kv_heads / tp).max(1) }
    }

    /// Bytes that one token takes on each of `tp` ranks, over all layers that keep tokens.
    pub fn token_bytes_per_rank(&self, tp: u16) -> u64 {
        let state = kvferry_engine::core::layout::GroupKind::State;
        let kept = self.groups.iter().filter(|group| group.kind != state);
        let layers: usize = kept.map(|group| group.layers.len()).sum();
        layers as u64 * u64::from(self.heads_per_rank(tp)) * u64::from(self.head_bytes)
    }
}

impl HardwarePreset {
    /// Cost of a step of a model on `tp` GPUs, with `F` and `M` as the reached operations and
    /// bytes per second of one GPU:
    ///
    /// - token = 2 * active parameters / (tp * F)
    /// - pair = 2 * layers * query heads * attention dim / (tp * F)
    /// - weights = weight bytes / (tp * M); a large batch touches every expert
    /// - context = KV bytes of a token on a rank / M
    pub fn cost(&self, preset: &ModelPreset, model: &ModelGeometry, tp: u16) -> StepCost {
        let tp = u128::from(tp);
        let flops = u128::from(self.flops) * u128::from(self.flops_percent) / 100;
        let rate = u128::from(self.memory_rate) * u128::from(self.memory_percent) / 100;
        let pair = 2
            * u128::from(model.layers)
            * u128::from(preset.query_heads)
            * u128::from(preset.attention_dim);
        let token = 2 * u128::from(preset.active_parameters);
        let context = u128::from(model.token_bytes_per_rank(tp as u16));
        StepCost {
            step: self.step,
            weights: Nanos((u128::from(preset.weight_bytes) * NS / (tp * rate)) as u64),
            token_fs: (token * FS / (tp * flops)) as u64,
            pair_fs: (pair * FS / (tp * flops)) as u64,
            context_fs: (context * FS / rate) as u64,
        }
    }

    /// Blocks of `block_tokens` tokens that fit beside the weights: the usable memory of a rank
    /// less its share of the weights, over the bytes of a block. 0 if the weights do not fit.
    pub fn blocks(
        &self,
        preset: &ModelPreset,
        model: &ModelGeometry,
        tp: u16,
        block_tokens: u32,
    ) -> u32 {
        let usable = self.memory_bytes / 100 * self.usable_percent;
        let left = usable.saturating_sub(preset.weight_bytes / u64::from(tp));
        let block = model.token_bytes_per_rank(tp) * u64::from(block_tokens);
        u32::try_from(left / block.max(1)).unwrap_or(u32::MAX)
    }
}

const NS: u128 = 1_000_000_000;
const FS: u128 = 1_000_000_000_000_000;

/// Cost of a step where no machine is given: a small model on a small machine.
pub const SMALL: StepCost = StepCost {
    step: Nanos::from_us(100),
    weights: Nanos::from_us(50),
    token_fs: 1_000_000_000,
    pair_fs: 1_000_000,
    context_fs: 10_000_000,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepWork;
    use crate::run::{InstanceSettings, Run};
    use std::path::Path;

    fn run(model: &str, tp: u16) -> Run {
        let text = format!(
            "about = \"test\"\n[model]\npreset = \"{model}\"\nblock_tokens = 128\n\
             [topology]\nhardware = \"mi300x\"\n\
             prefill = [{{ tp = {tp} }}]\ndecode = [{{ tp = {tp} }}]"
        );
        let scenario = crate::parse("test", &text, Path::new(""), None);
        let scenario = scenario.unwrap_or_else(|why| panic!("{why}"));
        scenario.draw(1).unwrap_or_else(|why| panic!("{why}"))
    }

    #[test]
    fn kv_bytes_per_token_are_the_published_ones() {
        // Over all ranks, except that MLA has its latent on every rank.
        let bytes = |model, tp| run(model, tp).model.token_bytes_per_rank(tp) * u64::from(tp);
        assert_eq!(bytes("llama-3.1-70b", 8), 80 * 8 * 128 * 2 * 2);
        assert_eq!(bytes("qwen3-235b-a22b", 4), 94 * 4 * 128 * 2 * 2);
        assert_eq!(bytes("deepseek-r1", 8), 8 * 61 * 576 * 2);
        // Four heads on eight ranks: each head twice.
        assert_eq!(bytes("qwen3-235b-a22b", 8), 2 * 94 * 4 * 128 * 2 * 2);
    }

    #[test]
    fn llama_on_eight_mi300x_has_the_stated_speed() {
        let run = run("llama-3.1-70b", 8);
        let InstanceSettings { cost, blocks, .. } = run.instances[0];
        // 141.2 GFLOP per token at 8 x 1307.4 x 45 % TFLOPS; weights at 8 x 5.3 x 70 % TB/s.
        assert_eq!(cost.token_fs, 30_000_169_972);
        assert_eq!(cost.weights, Nanos(4_757_412));
        // (172.8 GB - 17.65 GB) over 128 tokens of 40,960 bytes.
        assert_eq!(blocks, 29_592);
        let mut prefill = StepWork::default();
        prefill.prefill(0, 8192);
        assert_eq!(cost.time(&prefill).0 / 1_000_000, 264);
        let mut decode = StepWork::default();
        (0..32).for_each(|_| decode.decode(8192));
        assert_eq!(cost.time(&decode).0 / 1_000_000, 7);
    }
}
