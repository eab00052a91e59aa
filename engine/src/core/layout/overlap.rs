//! Whether tensors share bytes with themselves or each other.

use super::geometry::LayerLayout;

/// Axes with more than one entry as `(stride, entries)`, the smallest stride first.
fn axes(layer: &LayerLayout) -> Vec<(u64, u64)> {
    let mut axes: Vec<(u64, u64)> = (0..4)
        .filter(|axis| layer.shape[*axis] > 1)
        .map(|axis| (layer.stride[axis], u64::from(layer.shape[axis])))
        .collect();
    axes.sort_unstable();
    axes
}

/// True if every element has bytes of its own: each axis steps over all that lies within it.
/// False too for strides that interlock without touching, which no engine makes, and for extents
/// beyond `u64`.
pub(super) fn is_nested(layer: &LayerLayout) -> bool {
    let mut extent = 1u64;
    for (stride, entries) in axes(layer) {
        let reach = stride.checked_mul(entries - 1).and_then(|far| far.checked_add(extent));
        match reach {
            Some(reach) if stride >= extent => extent = reach,
            _ => return false,
        }
    }
    true
}

/// One past the last byte of a layer in its region, if it fits `u64`.
pub(super) fn end(layer: &LayerLayout) -> Option<u64> {
    let mut last = 0u64;
    for (entries, stride) in layer.shape.iter().zip(layer.stride) {
        if *entries > 1 {
            last = last.checked_add(stride.checked_mul(u64::from(*entries) - 1)?)?;
        }
    }
    last.checked_add(1)?.checked_mul(u64::from(layer.element))?.checked_add(layer.base)
}

/// Where the bytes of a nested layer lie, relative to its base.
pub(super) struct ByteExtent {
    /// Per axis with more than one entry, the smallest stride first: stride in bytes, entries, and
    /// the bytes from the first to the end of the last element within one step.
    axes: Vec<(i128, i128, i128)>,
    element: i128,
}

impl ByteExtent {
    /// The footprint of a layer that [`is_nested`].
    pub(super) fn new(layer: &LayerLayout) -> ByteExtent {
        let element = i128::from(layer.element);
        let mut extent = element;
        let axes = axes(layer).into_iter().map(|(stride, entries)| {
            let (stride, entries) = (i128::from(stride) * element, i128::from(entries));
            let within = extent;
            extent += stride * (entries - 1);
            (stride, entries, within)
        });
        ByteExtent { axes: axes.collect(), element }
    }

    /// True if the same footprint `distance` bytes further shares a byte with this one.
    pub(super) fn meets(&self, distance: u64) -> bool {
        self.reaches(self.axes.len(), i128::from(distance))
    }

    /// [`ByteExtent::meets`] for the first `depth` axes. What is within an axis is shorter than its
    /// step, so only the two nearest steps can meet.
    fn reaches(&self, depth: usize, distance: i128) -> bool {
        let Some((stride, entries, within)) = self.axes[..depth].last() else {
            return distance.abs() < self.element;
        };
        let near = distance.div_euclid(*stride);
        [near, near + 1].into_iter().any(|steps| {
            let rest = distance - steps * stride;
            steps.abs() < *entries && rest.abs() < *within && self.reaches(depth - 1, rest)
        })
    }
}
