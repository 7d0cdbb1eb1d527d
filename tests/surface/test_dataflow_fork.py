"""Handles of the dataflow layer in a forked child."""

from __future__ import annotations

import pytest
from forked import in_child

from penstock import _mesh, errors
from penstock.dataflow import Worker, run_here


def test_a_forked_child_is_told() -> None:
    with _mesh.alone(1) as seats:

        def program(worker: Worker) -> None:
            with worker.dataflow() as scope:
                handle, stream = scope.input()
                probe = stream.probe()

            def child() -> None:
                for call in (worker.step, worker.step_or_park, lambda: handle.send([1]), probe.done, handle.close):
                    with pytest.raises(errors.ForkError, match="forked child"):
                        call()
                with pytest.raises(errors.ForkError):
                    seats.stop("from the child")

            in_child(child)
            handle.close()
            worker.step_while(lambda: not probe.done())

        run_here(seats, program)
