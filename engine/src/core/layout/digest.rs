//! What an instance says of its KV cache before anybody connects, so that only engines that fit are
//! paired.

use super::check::{Mismatch, check_shapes, equal, refuse};
use super::geometry::{Geometry, RankLayout};
use serde::{Deserialize, Serialize};

/// A digest of what has to fit between two engines: all that [`super::check::check`] compares but
/// where things lie and the shape of a state, which the hello compares.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutDigest {
    /// The KV cache, without addresses.
    pub geometry: Geometry,
    /// Rows of its layers, in their order; equal neighbours are one entry.
    pub rows: Vec<LayerRows>,
}

/// Neighbouring layers whose rows are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerRows {
    pub layers: u16,
    /// Bytes per element.
    pub element: u32,
    /// Elements of K and V together, per token and head.
    pub elements: u64,
}

impl LayoutDigest {
    /// Of an engine with these ranks, whose layers have equal shapes on all of them.
    pub fn new(geometry: &Geometry, ranks: &[RankLayout]) -> LayoutDigest {
        let mut rows: Vec<LayerRows> = Vec::new();
        for layer in ranks.first().map_or(&[][..], |rank| &rank.layers) {
            let elements = layer.row_elements();
            match rows.last_mut() {
                Some(last) if (last.element, last.elements) == (layer.element, elements) => {
                    last.layers = last.layers.saturating_add(1);
                }
                _ => rows.push(LayerRows { layers: 1, element: layer.element, elements }),
            }
        }
        LayoutDigest { geometry: geometry.clone(), rows }
    }

    /// Whether KV of this engine can be moved to another. Both may be anything that a peer sends;
    /// time is bounded by their size.
    ///
    /// # Errors
    /// Names the first property that does not fit, with both values.
    pub fn check(&self, receiver: &LayoutDigest) -> Result<(), Mismatch> {
        check_shapes(&self.geometry, &receiver.geometry)?;
        for (side, fit) in [("source", self), ("receiver", receiver)] {
            whole_rows(side, &fit.rows, u32::from(fit.geometry.layers))?;
        }
        check_rows(&self.rows, &receiver.rows)
    }
}

/// Refuses rows that are not those of `layers` layers: what was added to them would have no bound.
fn whole_rows(side: &str, rows: &[LayerRows], layers: u32) -> Result<(), Mismatch> {
    let sum: u64 = rows.iter().map(|row| u64::from(row.layers)).sum();
    if sum != u64::from(layers) || rows.iter().any(|row| row.layers == 0) {
        return refuse(format_args!("{side} rows: of {sum} layers, not of {layers}"));
    }
    Ok(())
}

/// Refuses rows that differ between the two sides, each of which is whole.
fn check_rows(source: &[LayerRows], receiver: &[LayerRows]) -> Result<(), Mismatch> {
    let mut first = 0;
    for (one, other) in source.iter().zip(receiver) {
        equal(&format!("element size of layer {first}"), one.element, other.element)?;
        let what = format!("elements per token and head of layer {first}");
        equal(&what, one.elements, other.elements)?;
        first += u32::from(one.layers.min(other.layers));
        equal(
            &format!("layers with rows as those before layer {first}"),
            one.layers,
            other.layers,
        )?;
    }
    equal("kinds of rows", source.len(), receiver.len())
}
