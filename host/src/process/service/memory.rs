//! How much memory there is for what is to be allocated at once.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can be allocated without swapping, as the kernel estimates them, and no more than the
/// control groups of this process may have; none where neither is known.
pub(crate) fn available() -> Option<u64> {
    let free = fs::read_to_string("/proc/meminfo").ok().and_then(|text| in_meminfo(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").ok();
    let limits = groups.iter().flat_map(|text| limits(text, Path::new("/sys/fs/cgroup")));
    limits.chain(free).min()
}

fn in_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1_024))
}

/// Limits of the control group of version 2 and of those that it is in. A container may see itself
/// as the root.
fn limits(groups: &str, root: &Path) -> Vec<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let folders = Path::new(own).ancestors().map(|group| root.join(group));
    let limit = |folder: PathBuf| {
        let text = fs::read_to_string(folder.join("memory.max")).ok()?;
        text.trim().parse().ok()
    };
    folders.filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_what_limits_is_known() {
        assert_eq!(in_meminfo("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12_288));
        assert_eq!(in_meminfo("MemTotal: 9 kB\n"), None);
        let root = std::env::temp_dir().join(format!("kvferry-groups-{}", std::process::id()));
        fs::create_dir_all(root.join("a/b")).expect("a folder");
        for (group, limit) in [("a/b", "max\n"), ("a", "4096\n"), ("", "8192\n")] {
            fs::write(root.join(group).join("memory.max"), limit).expect("a file");
        }
        assert_eq!(limits("1:name=x:/y\n0::/a/b\n", &root), [4_096, 8_192]);
        assert_eq!(limits("", &root), [8_192]);
        fs::remove_dir_all(root).expect("it is there");
        assert!(available().is_some_and(|bytes| bytes > 0));
    }
}
