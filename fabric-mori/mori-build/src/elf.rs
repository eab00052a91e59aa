//! As much of ELF as tells libraries apart: build id and exported names. 64 bits, little endian.

use std::path::Path;

const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
const SHT_DYNSYM: u32 = 11;
const SYMBOL: usize = 24;

/// A library's bytes.
pub(crate) struct Elf {
    bytes: Vec<u8>,
}

impl Elf {
    pub(crate) fn open(path: &Path) -> Result<Elf, String> {
        Elf::new(std::fs::read(path).map_err(|why| why.to_string())?)
    }

    pub(crate) fn new(bytes: Vec<u8>) -> Result<Elf, String> {
        if !bytes.starts_with(b"\x7fELF\x02\x01") || bytes.len() < 64 {
            return Err("no ELF library of 64 bits, little endian".into());
        }
        Ok(Elf { bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The GNU build id, in hexadecimal.
    pub(crate) fn build_id(&self) -> Option<String> {
        let table = (self.u64(32)?, self.u16(54)?, self.u16(56)?);
        for part in self.entries(table) {
            if self.u32(part)? != PT_NOTE {
                continue;
            }
            let notes = self.range(self.u64(part + 8)?, self.u64(part + 32)?)?;
            let align = if self.u64(part + 48)? == 8 { 8 } else { 4 };
            if let Some(id) = build_id_in(notes, align) {
                return Some(id.iter().map(|byte| format!("{byte:02x}")).collect());
            }
        }
        None
    }

    /// The names that the library defines for others.
    pub(crate) fn exports(&self) -> Option<Vec<&str>> {
        let table = (self.u64(40)?, self.u16(58)?, self.u16(60)?);
        let section = self.entries(table).find(|at| self.u32(at + 4) == Some(SHT_DYNSYM))?;
        let symbols = self.range(self.u64(section + 24)?, self.u64(section + 32)?)?;
        let strings = self.entries(table).nth(usize::try_from(self.u32(section + 40)?).ok()?)?;
        let strings = self.range(self.u64(strings + 24)?, self.u64(strings + 32)?)?;
        let mut names = Vec::new();
        for symbol in symbols.chunks_exact(SYMBOL) {
            if symbol[6..8] == [0, 0] {
                continue;
            }
            let name = usize::try_from(u32_at(symbol, 0)?).ok()?;
            let name = strings.get(name..)?.split(|byte| *byte == 0).next()?;
            names.extend(std::str::from_utf8(name));
        }
        Some(names)
    }

    /// The offsets of the entries of a table that starts at, has entries of, and so many.
    fn entries(
        &self,
        (start, size, count): (u64, u16, u16),
    ) -> impl Iterator<Item = usize> + use<> {
        let (start, size) = (usize::try_from(start).unwrap_or(usize::MAX), usize::from(size));
        (0..usize::from(count)).map_while(move |i| start.checked_add(i.checked_mul(size)?))
    }

    fn range(&self, start: u64, len: u64) -> Option<&[u8]> {
        let start = usize::try_from(start).ok()?;
        self.bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(array(&self.bytes, at)?))
    }

    fn u32(&self, at: usize) -> Option<u32> {
        u32_at(&self.bytes, at)
    }

    fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_le_bytes(array(&self.bytes, at)?))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(array(bytes, at)?))
}

fn build_id_in(mut notes: &[u8], align: usize) -> Option<&[u8]> {
    loop {
        let name_len = usize::try_from(u32_at(notes, 0)?).ok()?;
        let desc_len = usize::try_from(u32_at(notes, 4)?).ok()?;
        let desc = 12_usize.checked_add(name_len.checked_next_multiple_of(align)?)?;
        let id = notes.get(desc..desc.checked_add(desc_len)?)?;
        if u32_at(notes, 8)? == NT_GNU_BUILD_ID && notes.get(12..12 + name_len)? == b"GNU\0" {
            return Some(id);
        }
        notes = notes.get(desc.checked_add(desc_len.checked_next_multiple_of(align)?)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_byte_is_trusted() {
        let whole = std::fs::read("/proc/self/exe").expect("an executable");
        let mut elf = Elf::new(whole.clone()).expect("an ELF");
        assert!(elf.exports().is_some());
        for part in [0, 63, 64, 65, 1_000, whole.len() / 2, whole.len() - 1] {
            if let Ok(cut) = Elf::new(whole[..part].to_vec()) {
                cut.build_id();
                cut.exports();
            }
        }
        // The rest of the headers and the notes.
        for at in 6..1_024 {
            for value in [0, 0x7f, 0xff] {
                let before = std::mem::replace(&mut elf.bytes[at], value);
                elf.build_id();
                elf.exports();
                elf.bytes[at] = before;
            }
        }
    }
}
