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

/// True if two layers with the same nested shape, strides, element size and region share a byte.
pub(super) fn collide(one: &LayerLayout, other: &LayerLayout) -> bool {
    let element = i128::from(one.element);
    let axes: Vec<(i128, i128)> = axes(one)
        .into_iter()
        .map(|(stride, entries)| (i128::from(stride) * element, i128::from(entries)))
        .collect();
    reaches(&axes, i128::from(other.base) - i128::from(one.base), element)
}

/// True if `distance` is less than `element` away from a difference of two positions on `axes`.
/// Nested axes leave at most two candidates each: what is within an axis is shorter than its step.
fn reaches(axes: &[(i128, i128)], distance: i128, element: i128) -> bool {
    let Some(((stride, entries), within)) = axes.split_last() else {
        return distance.abs() < element;
    };
    let near = distance.div_euclid(*stride);
    [near, near + 1]
        .into_iter()
        .any(|steps| steps.abs() < *entries && reaches(within, distance - steps * stride, element))
}
