//! What a figure was taken on: cores, CPU, load, and how much of them others used, or the host took, meanwhile.
//!
//! Owns: reading these from `/proc`; elsewhere they are null. Invariant: only the CPUs that this process may use are
//! looked at, so a process that is pinned to two cores is judged by its neighbours on these two.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

use serde_json::Value;

/// The kernel reports CPU time to programs in hundredths of a second, whatever its own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// A figure is doubtful when others used more CPUs than this, or the machine's host took more.
pub const NOISY: f64 = 0.05;

/// CPU time as a number of busy CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Of this process and everything that it has started.
    pub own: Option<f64>,
    /// Of everybody else on the CPUs that this process may use.
    pub foreign: Option<f64>,
    /// What the host of this machine gave to other machines while work waited here. It comes in bursts.
    pub stolen: Option<f64>,
}

/// Seconds of the CPUs that this process may use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Clocks {
    busy: f64,
    stolen: f64,
}

/// Reads the clocks twice, to tell what was used in between.
#[derive(Debug)]
pub struct Meter {
    begin: Instant,
    clocks: Option<Clocks>,
    own: Option<f64>,
}

impl Meter {
    /// Begins.
    #[must_use]
    pub fn start() -> Self {
        Self { begin: Instant::now(), clocks: clocks(), own: own_seconds() }
    }

    /// What was used so far; see [`Meter::stop`].
    #[must_use]
    pub fn look(&self) -> Usage {
        Self { ..*self }.stop()
    }

    /// Ends. Under a tenth of a second the kernel's resolution says nothing, so neither does this.
    #[must_use]
    pub fn stop(self) -> Usage {
        let wall = self.begin.elapsed().as_secs_f64();
        if wall < 0.1 {
            return Usage::default();
        }
        let rounded = |value: f64| (value.max(0.0) * 1e3).round() / 1e3;
        let own = self.own.zip(own_seconds()).map(|(before, after)| (after - before) / wall);
        let clocks = self.clocks.zip(clocks());
        Usage {
            own: own.map(rounded),
            foreign: clocks.zip(own).map(|((before, after), own)| rounded((after.busy - before.busy) / wall - own)),
            stolen: clocks.map(|(before, after)| rounded((after.stolen - before.stolen) / wall)),
        }
    }
}

/// How many CPUs this process may use.
#[must_use]
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Numbers of workers above two that this process has a core each for: 4, 8 and 16 at most.
pub fn wide() -> impl Iterator<Item = usize> {
    let cores = cores();
    [4, 8, 16].into_iter().filter(move |workers| *workers <= cores)
}

/// The name of the CPU; null where the system does not tell.
#[must_use]
pub fn cpu() -> Value {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(':')).map_or(Value::Null, |(_, name)| name.trim().into())
}

/// Resident memory of this process in bytes; none where the system does not tell.
pub fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The load average of the last minute; null where the system does not tell.
#[must_use]
pub fn load() -> Value {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).map_or(Value::Null, Value::from)
}

/// Seconds that the machine's host has taken from the CPUs of this process so far, where the system tells.
#[must_use]
pub fn stolen() -> Option<f64> {
    clocks().map(|clocks| clocks.stolen)
}

/// Seconds for which the CPUs that this process may use worked here, and for which the host had taken them.
fn clocks() -> Option<Clocks> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed = cpu_list(list)?;
    Some(clocks_of(&fs::read_to_string("/proc/stat").ok()?, &allowed))
}

fn clocks_of(stat: &str, allowed: &[usize]) -> Clocks {
    let (mut busy, mut stolen) = (0, 0);
    for line in stat.lines() {
        let mut words = line.split_whitespace();
        let number = words.next().and_then(|word| word.strip_prefix("cpu")).and_then(|number| number.parse().ok());
        if number.is_some_and(|number: usize| allowed.contains(&number)) {
            let fields = words.map_while(|word| word.parse::<u64>().ok()).collect::<Vec<_>>();
            // user, nice, system, idle, iowait, irq, softirq, steal
            busy += [0, 1, 2, 5, 6].iter().filter_map(|at| fields.get(*at)).sum::<u64>();
            stolen += fields.get(7).copied().unwrap_or(0);
        }
    }
    Clocks { busy: busy as f64 / TICKS_PER_SECOND, stolen: stolen as f64 / TICKS_PER_SECOND }
}

/// Seconds of CPU that this process, its descendants, and the ended children that they have waited for have used: a peer runs in a process of
/// its own, which is not waited for before its last run.
fn own_seconds() -> Option<f64> {
    let mut of_children: HashMap<u32, Vec<(u32, u64)>> = HashMap::new();
    let mut of_this = None;
    let here = std::process::id();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that has ended meanwhile has none.
        let Some((parent, ticks)) =
            fs::read_to_string(entry.path().join("stat")).ok().as_deref().and_then(parent_and_ticks)
        else {
            continue;
        };
        if number == here {
            of_this = Some(ticks);
        } else {
            of_children.entry(parent).or_default().push((number, ticks));
        }
    }
    let (mut total, mut waiting) = (of_this?, vec![here]);
    while let Some(number) = waiting.pop() {
        for (child, ticks) in of_children.remove(&number).unwrap_or_default() {
            total += ticks;
            waiting.push(child);
        }
    }
    Some(total as f64 / TICKS_PER_SECOND)
}

/// The parent of a process, and the CPU time of it and of the ended children that it has waited for, from its line in `/proc`.
fn parent_and_ticks(stat: &str) -> Option<(u32, u64)> {
    // The name in parentheses may hold spaces; the parent is field 4 of the whole line, utime, stime, cutime and cstime are 14 to 17.
    let mut words = stat.rsplit_once(')')?.1.split_whitespace().skip(1);
    let parent = words.next()?.parse().ok()?;
    let ticks = words.skip(9).take(4).map(str::parse::<u64>).sum::<Result<u64, _>>().ok()?;
    Some((parent, ticks))
}

/// Reads a list such as `0-2,5`.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(cpu_list("\t0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("7"), Some(vec![7]));
        assert_eq!(cpu_list("none"), None);
    }

    #[test]
    fn what_the_host_took_is_not_what_others_used() {
        let stat =
            "cpu 1 2 3 4 5 6 7 8 9 10\ncpu0 100 0 20 999 77 3 7 50 100 0\ncpu1 9 9 9 9 9 9 9 9 9 9\ncpu2 70 0 0 0\n";
        assert_eq!(clocks_of(stat, &[0, 2]), Clocks { busy: 2.0, stolen: 0.5 });
        assert_eq!(clocks_of("intr 5", &[0]), Clocks { busy: 0.0, stolen: 0.0 });
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn own_work_counts_as_own() {
        let (meter, begin) = (Meter::start(), Instant::now());
        // As much work as the clocks can tell, however long others make it take.
        let before = own_seconds().unwrap();
        while own_seconds().unwrap() - before < 0.1 || begin.elapsed() < Duration::from_millis(110) {
            std::hint::spin_loop();
        }
        let usage = meter.stop();
        assert!(usage.own.is_some_and(|own| own > 0.0), "{usage:?}");
        assert!(usage.foreign.is_some() && usage.stolen.is_some(), "{usage:?}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn work_of_a_process_that_still_runs_counts_as_own() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("there is a shell");
        let (before, begin) = (own_seconds().unwrap(), Instant::now());
        while own_seconds().unwrap() - before < 0.2 && begin.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let used = own_seconds().unwrap() - before;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(used >= 0.2, "{used} s of a child that spins");
    }

    #[test]
    fn a_line_of_a_process_is_read() {
        let line = "7 (a (b) c) S 5 7 7 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 99 0 0";
        assert_eq!(parent_and_ticks(line), Some((5, 100)));
        assert_eq!(parent_and_ticks("7 (cut"), None);
    }

    #[test]
    fn what_was_too_short_says_nothing() {
        let begin = Instant::now();
        let usage = Meter::start().stop();
        assert!(usage == Usage::default() || begin.elapsed() >= Duration::from_millis(100), "{usage:?}");
    }
}
