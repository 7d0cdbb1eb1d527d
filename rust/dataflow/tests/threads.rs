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
    #[derive(Clone, Copy, PartialEq)]
    enum Fails {
        Not,
        Program,
        Operator,
        Constructor,
    }
    let program = |fails: Fails| {
        move |worker: &mut Worker| -> Result<(), BoxError> {
            let worker_is_bad = worker.index() == 1;
            let mut input = worker.dataflow::<u64, _>("flow", |scope| {
                let (handle, stream) = scope.new_input::<Vec<u64>>();
                let bad = worker_is_bad;
                stream.exchange_by(|value| *value).inspect(move |_, _| assert!(!bad || fails != Fails::Operator));
                assert!(!bad || fails != Fails::Constructor);
                handle
            });
            for epoch in 1..20 {
                input.send((0..100).collect());
                input.advance_to(epoch)?;
                worker.step()?;
                if fails == Fails::Program && worker_is_bad && epoch == 10 {
                    return Err("enough".into());
                }
            }
            Ok(())
        }
    };
    for link in [Link::Tcp, Link::Unix] {
        assert!(on_mesh(mesh(3, 2, link), program(Fails::Not)).iter().all(Result::is_ok));
        for fails in [Fails::Program, Fails::Operator, Fails::Constructor] {
            assert!(on_mesh(mesh(3, 2, link), program(fails)).iter().all(Result::is_err));
        }
        let unused = mesh(2, 1, link);
        assert_eq!(threads(), before + 6);
        drop(unused);
    }
    assert_eq!(threads(), before);
}
