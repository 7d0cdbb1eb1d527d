//! How much of the memory that this process may have it has: what it holds against the least limit that holds for it.
//!
//! It holds its anonymous and shared memory ([`held_bytes`]); pages of files that are mapped belong to the system's cache, which takes
//! them back when it needs them, so an index that is mapped makes no scope small. The count is the system's, not ours, so it
//! sees what no counter of a dataflow does: fragmentation, other scopes, other dataflows and the interpreter. Where nothing can be
//! read, nothing is known, and nothing shrinks.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bounds::BoundsError;

/// A reading of memory, by any thread: the share in use, about 0 to 1; above 1 is over the limit.
#[derive(Clone)]
pub struct Memory(Arc<dyn Fn() -> Option<f64> + Send + Sync>);

impl Memory {
    /// What this process holds as a share of what its control group, or the machine, allows.
    pub fn host() -> Self {
        let limit = limit_bytes(Path::new("/"));
        Memory(Arc::new(move || Some(held_bytes()? as f64 / limit? as f64)))
    }

    /// What this process holds as a share of a budget.
    ///
    /// # Errors
    /// [`BoundsError::Zero`].
    pub fn budget(bytes: u64) -> Result<Self, BoundsError> {
        if bytes == 0 {
            return Err(BoundsError::Zero { what: "budget_bytes" });
        }
        Ok(Memory(Arc::new(move || Some(held_bytes()? as f64 / bytes as f64))))
    }

    /// Another reading; none when it knows nothing.
    pub fn reading(read: impl Fn() -> Option<f64> + Send + Sync + 'static) -> Self {
        Memory(Arc::new(read))
    }

    /// The share in use now.
    pub fn share(&self) -> Option<f64> {
        (self.0)()
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Memory").field(&self.share()).finish()
    }
}

/// The anonymous and shared memory of this process that is resident; all of its resident set where the system does not tell them apart.
pub fn held_bytes() -> Option<u64> {
    held(&fs::read_to_string("/proc/self/status").ok()?)
}

fn held(status: &str) -> Option<u64> {
    let parts = (kilobytes(status, "RssAnon:"), kilobytes(status, "RssShmem:"));
    match parts {
        (Some(own), Some(shared)) => Some(own + shared),
        _ => kilobytes(status, "VmRSS:"),
    }
}

/// The least of the limits of the control groups that this process is in, and the memory of the machine. `root` is `/`
/// outside tests.
pub fn limit_bytes(root: &Path) -> Option<u64> {
    let memory = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| kilobytes(&text, "MemTotal:"));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits: Vec<u64> = memory.into_iter().collect();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(kinds), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (mount, file) = match kinds {
            "" => ("sys/fs/cgroup", "memory.max"),
            kinds if kinds.split(',').any(|kind| kind == "memory") => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        let mount = root.join(mount);
        let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
        // Limits of the groups around hold as well; a container sees its own group as the mount.
        loop {
            limits.extend(fs::read_to_string(group.join(file)).ok().and_then(|text| text.trim().parse::<u64>().ok()));
            if group == mount || !group.pop() {
                break;
            }
        }
    }
    limits.into_iter().min()
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("penstock-bounded-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemFree: 1 kB\nMemTotal:       1000 kB\n");

    #[test]
    fn the_least_limit_of_all_groups_around_holds() {
        let unlimited = ("sys/fs/cgroup/a/b/memory.max", "max\n");
        let own = ("proc/self/cgroup", "0::/a/b\n");
        let root = tree("two", &[MACHINE, own, unlimited, ("sys/fs/cgroup/a/memory.max", "5000\n")]);
        assert_eq!(limit_bytes(&root), Some(5000));
        fs::write(root.join("sys/fs/cgroup/memory.max"), "4000").unwrap();
        assert_eq!(limit_bytes(&root), Some(4000));
        fs::write(root.join("sys/fs/cgroup/memory.max"), "99999999").unwrap();
        fs::write(root.join("sys/fs/cgroup/a/memory.max"), "max").unwrap();
        assert_eq!(limit_bytes(&root), Some(1000 * 1024), "the machine has less");
        fs::remove_dir_all(root).unwrap();
        let old = ("proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/x\n");
        let root = tree("one", &[MACHINE, old, ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "7000\n")]);
        assert_eq!(limit_bytes(&root), Some(7000));
        fs::remove_dir_all(root).unwrap();
        assert_eq!(limit_bytes(Path::new("/nowhere")), None);
    }

    #[test]
    fn pages_of_files_are_not_held() {
        let status = "Name:\tx\nVmRSS:\t  9000 kB\nRssAnon:\t  1000 kB\nRssFile:\t  7980 kB\nRssShmem:\t    20 kB\n";
        assert_eq!(held(status), Some(1020 * 1024));
        assert_eq!(held("VmRSS:\t  9000 kB\n"), Some(9000 * 1024), "an old kernel");
        assert_eq!(held(""), None);
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn what_is_held_follows_what_is_touched() {
        let before = held_bytes().unwrap();
        let block = vec![1u8; 64 << 20];
        let after = held_bytes().unwrap();
        assert!(after >= before + (48 << 20), "{before} then {after} bytes with {} more", block.len());
        assert!(Memory::host().share().is_some_and(|share| share > 0.0 && share < 1.5));
        assert!(Memory::budget(1 << 20).unwrap().share().is_some_and(|share| share > 1.0));
        assert_eq!(Memory::budget(0).unwrap_err(), BoundsError::Zero { what: "budget_bytes" });
    }
}
