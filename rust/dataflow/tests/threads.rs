//! Threads end with their fabric. A test program of its own: it counts the threads of the whole process.

mod support;

use penstock_dataflow::{BoxError, Worker};
use support::{Link, mesh, on_mesh};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn no_thread_is_left_after_success_failure_or_an_unused_fabric() {
    let before = threads();
    let program = |fail: bool| {
        move |worker: &mut Worker| -> Result<(), BoxError> {
            let mut input = worker.dataflow::<u64, _>("flow", |scope| {
                let (handle, stream) = scope.new_input::<Vec<u64>>();
                stream.exchange_by(|value| *value).inspect(|_, _| ());
                handle
            });
            for epoch in 1..20 {
                input.send((0..100).collect());
                input.advance_to(epoch)?;
                worker.step()?;
                if fail && worker.index() == 1 && epoch == 10 {
                    return Err("enough".into());
                }
            }
            Ok(())
        }
    };
    for link in [Link::Tcp, Link::Unix] {
        assert!(on_mesh(mesh(3, 2, link), program(false)).iter().all(Result::is_ok));
        assert!(on_mesh(mesh(3, 2, link), program(true)).iter().all(Result::is_err));
        let unused = mesh(2, 1, link);
        assert_eq!(threads(), before + 6);
        drop(unused);
    }
    assert_eq!(threads(), before);
}
