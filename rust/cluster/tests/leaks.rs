//! Closing gives back every thread and every socket. Alone in its process, to count them.

mod common;

use common::{Begin, Driver, release, until};
use penstock_cluster::Feed;
use serde_json::json;

/// Threads that are not ending. Who is joined is at its end, though the system may list it for a moment more.
fn threads() -> usize {
    const ENDING: u64 = 4; // PF_EXITING
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    let flags = stats.filter_map(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.filter(|flags| flags & ENDING == 0).count()
}

fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn nothing_is_left_after_closing() {
    let (threads_before, sockets_before) = (threads(), sockets());
    for stuck in [false, true] {
        let mut driver = Driver::new(2);
        let plan = if stuck { json!({"stuck_epoch": 0}) } else { json!({}) };
        driver.start("q", &[0, 1], &Begin::plan(plan));
        let address = driver.members[0].address.clone();
        let schema = common::schema();
        let connect = || Feed::connect(&address, &common::keys(), "q", 0, 0, 1, &schema).unwrap();
        let open = connect();
        driver.send(0, &release("q", 1, 0, &[]));
        // Unauthenticated, and half a request.
        let idle = std::net::TcpStream::connect(&address).unwrap();
        let gate = driver.gate.clone();
        let registry = std::mem::take(&mut driver.members);
        driver.registry.close();
        for seat in registry {
            seat.thread.join().unwrap();
        }
        if !stuck {
            assert_eq!(threads(), threads_before, "joined, not merely ending");
        }
        gate.open();
        drop((open, idle, driver));
        until("threads and sockets are back", || threads() == threads_before && sockets() == sockets_before);
    }
}
