//! Values in slots that others use later.

/// Values by the number of their slot.
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    /// The one that was freed last is used next.
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    #[inline]
    pub(crate) fn add(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(value);
                slot
            }
            None => {
                let slot = u32::try_from(self.slots.len()).expect("fewer than 2^32 values");
                self.slots.push(Some(value));
                slot
            }
        }
    }

    /// Takes a value out of its slot.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub(crate) fn take(&mut self, slot: u32) -> T {
        self.free.push(slot);
        self.slots[slot as usize].take().expect("a value is taken once")
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The values, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }
}
