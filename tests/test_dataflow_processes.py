"""The dataflow layer on processes: results, crashes, Ctrl-C, secrets, coordination."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock import _children, _mesh, errors
from penstock.dataflow import Worker, run_here, run_workers

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "fox", "ends"]


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition: Any, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def _count(worker: Worker) -> Any:
    with worker.dataflow("words") as scope:
        handle, stream = scope.input()
        batches, rows = scope.input()
        seen = stream.exchange(lambda word: word).collect()
        everywhere = stream.broadcast().collect()
        by_column = rows.exchange("n").collect()
    handle.send(WORDS[worker.index :: worker.peers])
    batches.send(pa.record_batch({"n": list(range(worker.index, 40, worker.peers))}))
    return [seen, everywhere, by_column]


def test_processes_and_threads_agree_wherever_they_are_cut() -> None:
    def homes(results: list[Any]) -> tuple[list[Any], list[Any]]:
        words = [sorted(w for _, block in seen for w in block) for seen, _, _ in results]
        numbers = [sorted(n for _, block in rows for n in block["n"].to_pylist()) for _, _, rows in results]
        for _, everywhere, _ in results:
            assert Counter(w for _, block in everywhere for w in block) == Counter(WORDS)
        return words, numbers

    # Each process has a PYTHONHASHSEED of its own.
    threads = homes(pk.execute(_count, workers=4))
    assert homes(pk.execute(_count, workers=2, processes=2)) == threads
    assert Counter(word for part in threads[0] for word in part) == Counter(WORDS)
    assert sorted(n for part in threads[1] for n in part) == list(range(40))


def test_barriers_and_sequencers_work_across_processes() -> None:
    def program(worker: Worker) -> Any:
        barrier, log = worker.barrier(), worker.sequencer()
        rounds = [barrier.wait() for _ in range(50)]
        for number in range(20):
            log.push((worker.index, number))
            worker.step()
        log.close()
        return rounds, list(log), log.finished

    results = pk.execute(program, workers=2, processes=2)
    rounds, log, finished = results[0]
    assert all(result == results[0] for result in results) and finished
    assert rounds == list(range(1, 51))
    assert sorted(log) == [(worker, number) for worker in range(4) for number in range(20)]
    for worker in range(4):
        assert [number for owner, number in log if owner == worker] == list(range(20)), "own pushes keep their order"


def test_an_element_is_the_next_one_until_it_has_been_unpickled() -> None:
    def program(worker: Worker) -> Any:
        tries: list[str] = []

        class Fails:
            """Unpickling it is interrupted at first."""

            def __reduce__(self) -> Any:
                return made, ()

        def made() -> str:
            tries.append("")
            if len(tries) > 2:
                return "made"
            raise KeyboardInterrupt

        class Reads:
            """Unpickling it reads from the log."""

            def __reduce__(self) -> Any:
                return reads, ()

        def reads() -> str:
            with pytest.raises(errors.DataflowError, match="is being read already: by a wait that runs this"):
                log.next()
            assert not log.finished
            log.push("pushed")
            return "read"

        log, got = worker.sequencer(), []
        import penstock.dataflow as home

        # By reference: what a function of the program closes over would be pickled with it.
        home.made, home.reads = made, reads  # type: ignore[attr-defined]
        for function in (made, reads):
            function.__module__, function.__qualname__ = home.__name__, function.__name__
        for element in (Fails(), Reads(), "after"):
            log.push(element)
        for read in (log.wait_next, log.next):
            with pytest.raises(KeyboardInterrupt):
                read()
            assert not log.finished
        got.extend(log.wait_next() for _ in range(4))
        log.close()
        got.extend(log)
        del home.made, home.reads  # type: ignore[attr-defined]
        return got, log.finished

    assert pk.execute(program, workers=1) == [(["made", "read", "after", "pushed"], True)]


def test_an_element_that_cannot_be_unpickled_is_named_once_and_keeps_nobody_from_what_is_behind_it() -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return int, ("x",)

    def program(worker: Worker) -> Any:
        log: Any = worker.sequencer()
        if worker.index == 1:
            log.push("first")
            log.push(Bad())
            log.push("last")
        log.close()
        got = [log.wait_next(timeout=60)]
        with pytest.raises(
            errors.BlockError, match=r"element 1 of what worker 1 pushed .*; it counts as read"
        ) as caught:
            log.wait_next(timeout=60)
        assert isinstance(caught.value.__cause__, ValueError)
        assert not log.finished
        return got + list(log), log.finished

    assert pk.execute(program, workers=2) == [(["first", "last"], True)] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_logic_pushes_to_a_sequencer_for_which_its_worker_waits(workers: int) -> None:
    def program(worker: Worker) -> list[int]:
        log: Any = worker.sequencer()
        with worker.dataflow() as scope:
            numbers, stream = scope.input()

            def seen(number: int) -> None:
                assert not log.finished
                with pytest.raises(errors.DataflowError, match="is being read already: by a wait that runs this step"):
                    log.next()
                log.push(number)

            stream.exchange(lambda number: number).inspect(seen)
            ends, over = scope.input()
            over.broadcast().inspect(lambda _: log.close())
        if worker.index == 0:
            numbers.send([0, 1, 2, 3, 4, 5])
        got = sorted(log.wait_next(timeout=60) for _ in range(6))
        if worker.index == 0:
            ends.send(["end"])
        with pytest.raises(EOFError):
            log.wait_next(timeout=60)
        assert log.finished
        return got

    assert pk.execute(program, workers=workers) == [[0, 1, 2, 3, 4, 5]] * workers


def test_functions_that_are_pushed_build_the_same_dataflows_everywhere() -> None:
    def program(worker: Worker) -> Any:
        log = worker.sequencer()
        factor = worker.index + 2
        log.push(lambda stream: (factor, stream.map(lambda x: x * factor)))
        log.close()
        made = []
        for number, build in enumerate(log):
            with worker.dataflow(f"request {number}") as scope:
                handle, stream = scope.input()
                factor_there, scaled = build(stream)
                made.append((factor_there, scaled.exchange(lambda x: 0).collect()))
            handle.send([1])
        return made

    first, second = pk.execute(program, workers=1, processes=2)
    assert [factor for factor, _ in first] == [factor for factor, _ in second]
    assert sorted(factor for factor, _ in first) == [2, 3]
    for (factor, seen), (_, seen_there) in zip(first, second, strict=True):
        assert [x for _, block in seen + seen_there for x in block] == [factor] * 2


# What goes wrong


def test_a_process_that_is_done_long_before_another_leaves_in_order() -> None:
    def program(worker: Worker) -> int:
        ended = []

        def slow_end(capability: Any) -> Any:
            capability.drop()

            def logic(input: Any, output: Any, frontiers: Any) -> None:
                for _ in input:
                    pass
                if not frontiers.frontier() and not ended:
                    ended.append(True)
                    # The other process has nothing to wait for any more, and is gone when this one goes on.
                    time.sleep(2.0 * worker.index)

            return logic

        with worker.dataflow() as scope:
            _handle, stream = scope.input()
            stream.unary(slow_end)
        # The end of worker 0's input is the last thing that worker 1 waits for.
        time.sleep(1.0 - worker.index)
        return worker.index

    assert pk.execute(program, workers=1, processes=2) == [0, 1]


@pytest.mark.fault
def test_a_killed_process_is_found_though_one_that_it_started_holds_its_sockets(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def program(worker: Worker) -> None:
        if worker.index == 1:
            if (child := os.fork()) == 0:
                signal.pause()
            started.write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        worker.barrier().wait()

    try:
        with pytest.raises(errors.WorkerLost, match=r"process 1 \(worker 1\) was killed by SIGKILL"):
            pk.execute(program, workers=1, processes=2)
        assert _alive(int(started.read_text())), "it holds them to the end"
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)


@pytest.mark.fault
def test_an_error_without_a_message_is_the_error() -> None:
    def program(worker: Worker) -> None:
        if worker.index == 1:
            raise errors.ProgramError("")
        worker.barrier().wait()

    with pytest.raises(errors.ProgramError) as caught:
        pk.execute(program, workers=1, processes=2)
    assert (caught.value.message, caught.value.worker) == ("", 1)


@pytest.mark.fault
def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    def program(worker: Worker) -> None:
        if worker.index == 1:
            os.kill(os.getpid(), signal.SIGRTMIN + 3)
        worker.barrier().wait()

    with pytest.raises(errors.WorkerLost, match=rf"was killed by signal {signal.SIGRTMIN + 3}"):
        pk.execute(program, workers=1, processes=2)


@pytest.mark.fault
@pytest.mark.parametrize("wait", ["probe", "barrier"])
def test_a_killed_process_is_named_and_the_others_stop(wait: str) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _handle, stream = scope.input()
            probe = stream.probe()
        barrier = worker.barrier()
        barrier.wait()
        if worker.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if wait == "barrier":
            barrier.wait()
        worker.step_while(lambda: not probe.done())

    with pytest.raises(errors.WorkerLost, match=r"process 1 \(worker 1\) was killed by SIGKILL") as caught:
        pk.execute(program, workers=1, processes=3)
    assert (caught.value.process, caught.value.exitcode) == (1, -signal.SIGKILL)


@pytest.mark.fault
def test_a_process_that_ends_itself_is_named() -> None:
    def program(worker: Worker) -> None:
        if worker.index == 0:
            os._exit(7)
        worker.barrier().wait()

    with pytest.raises(errors.WorkerLost, match=r"process 0 .* ended with exit code 7"):
        pk.execute(program, workers=1, processes=2)


def test_a_program_that_raises_in_another_process_is_the_cause_with_its_place() -> None:
    def program(worker: Worker) -> None:
        barrier = worker.barrier()
        barrier.wait()
        if worker.index == 2:
            raise LookupError("over there")
        barrier.wait()

    with pytest.raises(errors.ProgramError, match="the program of worker 2 raised LookupError: over there") as caught:
        pk.execute(program, workers=2, processes=2)
    assert (caught.value.worker, caught.value.process) == (2, 1)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "test_dataflow_processes.py" in caught.value.traceback


def test_logic_that_raises_in_another_process_is_the_users_error() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda x: x).map(lambda x: 1 // x)
        handle.send(list(range(9)))

    with pytest.raises(errors.UserFunctionError, match="ZeroDivisionError") as caught:
        pk.execute(program, workers=1, processes=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and "item: 0" in str(caught.value)


def test_what_cannot_leave_its_process_is_named() -> None:
    with pytest.raises(errors.ProgramError, match="the result of worker 1 cannot be sent") as caught:
        pk.execute(lambda worker: threading.Lock() if worker.index else None, workers=1, processes=2)
    assert (caught.value.worker, caught.value.process) == (1, 1)

    lock = threading.Lock()
    with pytest.raises(errors.ProgramError, match="the program cannot be sent to other processes"):
        pk.execute(lambda worker: lock, workers=1, processes=2)

    def block(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.broadcast()
        handle.send([threading.Lock()])

    with pytest.raises(
        errors.BlockError, match="broadcast: a block that goes to another process cannot be pickled"
    ) as of:
        pk.execute(block, workers=1, processes=2)
    assert "item: <unlocked _thread.lock object" in str(of.value)

    def exchanged(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda item: 0).exchange(lambda item: 1)
        handle.send(["fine", threading.Lock(), "fine"])

    with pytest.raises((errors.BlockError, errors.WorkerStopped), match="exchange <lambda>: a block") as of:
        pk.execute(exchanged, workers=1, processes=2)
    assert "item: <unlocked _thread.lock object" in str(of.value)


def test_different_dataflows_are_found_out_across_processes() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow("common") as scope:
            scope.input()
        if worker.index == 1:
            with worker.dataflow("extra") as scope:
                _, stream = scope.input()
                probe = stream.probe()
            worker.step_while(lambda: not probe.done())

    with pytest.raises(errors.GraphError, match="extra"):
        pk.execute(program, workers=1, processes=2)


def test_processes_that_do_not_start_in_time_are_an_error() -> None:
    with pytest.raises(errors.WorkerLost, match="did not start in time"):
        pk.execute(lambda worker: None, workers=1, processes=2, start_timeout=0.001)


# Secrets


def test_a_process_that_never_takes_its_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_children, "_BOOT", "import signal; signal.pause()")
    ballast = bytes(8 << 20)  # more than a socket holds
    with pytest.raises(errors.WorkerLost, match="did not start in time"):
        pk.execute(lambda worker: len(ballast), workers=1, processes=2, start_timeout=1.0)


def test_the_secret_of_a_run_is_neither_on_a_command_line_nor_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = bytes(range(32))
    monkeypatch.setattr(secrets, "token_bytes", lambda count: secret[:count])

    def program(worker: Worker) -> bytes:
        return Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()

    for shown in pk.execute(program, workers=1, processes=2):
        assert secret not in shown and secret.hex().encode() not in shown


def _pair(first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    """What two processes of a run say that were told different things; both are threads here."""
    listeners = [_mesh.listen(), _mesh.listen()]
    addresses = [listener.address for listener in listeners]
    outcomes: list[Any] = [None, None]

    def connect(process: int, told: dict[str, Any]) -> None:
        # Who dials is answered at once, or refused; who waits does so until its time is over.
        patience = 60.0 if process == 0 else 6.0
        facts = {"key": secrets.token_bytes(32), "threads": 1, "group": "run", "timeout": patience} | told
        try:
            with listeners[process].connect(process, addresses, **facts) as seats:
                outcomes[process] = run_here(seats, lambda worker: worker.barrier().wait())
        except errors.PenstockError as error:
            outcomes[process] = error

    threads = [threading.Thread(target=connect, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return outcomes


def test_processes_meet_when_they_agree() -> None:
    secret = secrets.token_bytes(32)
    agreed = {"key": secret, "timeout": 60.0}
    assert _pair(agreed, agreed) == [1, 1]


def test_the_main_thread_learns_that_what_it_sent_was_taken() -> None:
    """Though nothing comes of it: the other worker's input stands still."""
    secret, listeners = secrets.token_bytes(32), [_mesh.listen(), _mesh.listen()]
    addresses = [listener.address for listener in listeners]

    def parts(worker: Worker) -> tuple[Any, Any]:
        with worker.dataflow() as scope:
            blobs, stream = scope.input()
            stream.exchange(lambda blob: 1).inspect(lambda *_: None)
        return blobs, worker.barrier()

    def far(worker: Worker) -> None:
        _, barrier = parts(worker)
        barrier.wait()

    def near(worker: Worker) -> int:
        blobs, barrier = parts(worker)
        blobs.advance_to(1)
        sent = 0
        while not worker.is_congested:
            blobs.send([bytes(1 << 20)])
            worker.step()
            sent += 1
        while worker.is_congested:
            worker.step_or_park()
        blobs.close()
        barrier.wait()
        return sent

    def other() -> None:
        with listeners[1].connect(1, addresses, secret) as seats:
            run_workers(seats, far)

    thread = threading.Thread(target=other)
    thread.start()
    with listeners[0].connect(0, addresses, secret) as seats:
        assert run_here(seats, near) > 1
    thread.join(60)
    assert not thread.is_alive()


def test_strangers_are_refused() -> None:
    secret = secrets.token_bytes(32)
    dialled, waited = _pair({}, {})
    assert isinstance(dialled, errors.AuthenticationError) and isinstance(waited, errors.WorkerLost)
    assert waited.process == 0
    for other in ({"group": "other"}, {"threads": 2}):
        dialled, waited = _pair({"key": secret}, {"key": secret} | other)
        assert isinstance(dialled, errors.ProtocolError) and isinstance(waited, errors.WorkerLost)


def test_bytes_that_prove_nothing_do_not_disturb_a_run() -> None:
    listeners = [_mesh.listen(), _mesh.listen()]
    addresses = [listener.address for listener in listeners]
    host, _, port = addresses[1].rpartition(":")
    noise = [socket.create_connection((host, int(port))) for _ in range(8)]
    for stream in noise:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    secret = secrets.token_bytes(32)
    results: list[Any] = [None, None]

    def run(process: int) -> None:
        with listeners[process].connect(process, addresses, secret, timeout=20.0) as seats:
            results[process] = run_here(seats, lambda worker: worker.barrier().wait())

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for stream in noise:
        stream.close()
    assert results == [1, 1]


def test_a_weak_or_short_secret_and_a_used_listener_are_refused() -> None:
    listener = _mesh.listen()
    with pytest.raises(errors.ConfigError, match="not random"):
        listener.connect(0, [listener.address], bytes(32))
    with pytest.raises(errors.ConfigError, match="5 bytes that are no key"):
        listener.connect(0, [listener.address], b"short")
    with pytest.raises(errors.ConfigError, match="no process 3"):
        listener.connect(3, [listener.address], secrets.token_bytes(32))
    with pytest.raises(errors.ClosedError):
        listener.connect(0, [listener.address], secrets.token_bytes(32))


# Ctrl-C and death, seen from outside


def _script(body: str) -> subprocess.Popen[str]:
    code = "import os, sys, time\nimport penstock as pk\n" + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


WAITS = {
    "park": "while True: worker.step_or_park()",
    "barrier": "worker.barrier().wait() if worker.index == 0 else worker.step_while(lambda: not probe.done())",
    "sequencer": "worker.sequencer().wait_next() if worker.index == 0 else worker.step_while(lambda: not probe.done())",
    "python": "while True: pass",
}


@pytest.mark.fault
@pytest.mark.parametrize("wait", sorted(WAITS))
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_ends_every_wait_and_leaves_no_process(wait: str, processes: int) -> None:
    script = _script(
        f"""
        def program(worker):
            with worker.dataflow() as scope:
                handle, stream = scope.input()
                probe = stream.probe()
            worker.barrier().wait()
            os.write(1, b"%d\\n" % os.getpid())
            {WAITS[wait]}
        try:
            pk.execute(program, workers=2, processes={processes})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    assert script.stdout is not None
    pids = {int(script.stdout.readline()) for _ in range(2 * processes)}
    assert len(pids) == processes
    script.send_signal(signal.SIGINT)
    try:
        out, err = script.communicate(timeout=60)
    finally:
        script.kill()  # what a test starts ends with it
    assert out.split() == ["interrupted"] and script.returncode == 0, err
    _until(lambda: not any(_alive(pid) for pid in pids))


@pytest.mark.fault
def test_ctrl_c_just_before_the_wait_for_the_workers_ends_it() -> None:
    """No system call is interrupted by a signal that has come by then: as `interrupt_main`, it is seen by who looks."""
    script = _script(
        """
        import _thread, threading
        def program(worker):
            main = threading.main_thread().ident
            while sys._current_frames()[main].f_code.co_name != "collect_outcomes":
                pass
            _thread.interrupt_main()
            worker.sequencer().wait_next()
        try:
            pk.execute(program, workers=1)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    try:
        out, err = script.communicate(timeout=30)
    finally:
        script.kill()
    assert out.split() == ["interrupted"] and script.returncode == 0, err


@pytest.mark.fault
def test_ctrl_c_on_a_worker_in_the_main_thread() -> None:
    script = _script(
        """
        from penstock import _mesh
        from penstock.dataflow import run_here
        def program(worker):
            barrier = worker.barrier()
            with worker.dataflow() as scope:
                handle, stream = scope.input()
            print("ready", flush=True)
            while True:
                worker.step_or_park()
        try:
            with _mesh.alone(1) as seats:
                run_here(seats, program)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    assert script.stdout is not None and script.stdout.readline() == "ready\n"
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60)
    assert out.split() == ["interrupted"] and script.returncode == 0, err


@pytest.mark.fault
def test_children_die_with_their_parent() -> None:
    script = _script(
        """
        def program(worker):
            worker.barrier().wait()
            os.write(1, b"%d\\n" % os.getpid())
            while True: pass
        pk.execute(program, workers=1, processes=2)
        """
    )
    assert script.stdout is not None
    pids = [int(script.stdout.readline()) for _ in range(2)]
    assert all(_alive(pid) for pid in pids)
    script.kill()
    script.wait()
    script.stdout.close()
    assert script.stderr is not None
    script.stderr.close()
    _until(lambda: not any(_alive(pid) for pid in pids))


def test_a_library_that_is_only_on_the_parents_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "only_here_4711.py").write_text("def program(worker):\n    return worker.index * 10\n")
    sys.path.insert(0, str(tmp_path))
    try:
        from only_here_4711 import program  # type: ignore[import-not-found]

        assert pk.execute(program, workers=1, processes=2) == [0, 10]
    finally:
        sys.path.remove(str(tmp_path))


_LOW = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + {room}, hard))
"""
_FEW_FILES = pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="so many files may not be open here"
)


@_FEW_FILES
@pytest.mark.parametrize("room", [4, 12])
def test_a_soft_limit_on_open_files_is_raised_as_far_as_processes_need(room: int) -> None:
    """Too few for this process to start them, or for them to hear of each other; and for those that may come later."""
    script = _script(
        _LOW.format(room=room)
        + textwrap.dedent(
            """
            def program(worker):
                with worker.dataflow() as scope:
                    handle, stream = scope.input()
                    stream.broadcast().collect()
                worker.bootstrap()
                if worker.index == 0:
                    worker.admit()
                while worker.peers < 7:
                    worker.step_or_park()
                handle.send([worker.index])
                return worker.peers, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 3 * 106
            print(set(pk.execute(program, workers=1, processes=6, join=100)))
            """
        )
    )
    out, err = script.communicate(timeout=100)
    assert out == "{(7, True)}\n" and script.returncode == 0, err[-2000:]


@_FEW_FILES
def test_a_soft_limit_on_open_files_is_raised_as_far_as_the_processes_of_a_flow_need() -> None:
    script = _script(
        _LOW.format(room=4)
        + textwrap.dedent(
            """
            import pyarrow as pa
            def limit(batch):
                return pa.record_batch({"soft": [resource.getrlimit(resource.RLIMIT_NOFILE)[0]] * batch.num_rows})
            flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).map_batches(limit, schema="soft bigint")
            with flow.run(pa.table({"k": range(100)}), processes=1) as results:
                results.rescale(3)
                print(min(row["soft"] for batch in results for row in batch.to_pylist()) > 3 * 256)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard := len(os.listdir("/dev/fd")) + 40, hard))
            try:
                flow.collect(pa.table({"k": range(100)}), processes=50)
            except pk.errors.ConfigError as error:
                print(error)
            """
        )
    )
    out, err = script.communicate(timeout=100)
    assert script.returncode == 0, err[-2000:]
    told, refused = out.splitlines()
    assert told == "True" and refused.startswith("processes=50: 50 worker processes need "), refused
