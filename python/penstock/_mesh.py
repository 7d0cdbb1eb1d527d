"""Seats of one process in a run of workers: alone, or connected with the other processes.

`execute` and the gangs of `penstock.spark` both come through here. Connecting proves a key in both
directions; the key is the caller's to carry, never on a command line, in the environment or in a log.

Examples
--------
>>> with alone(2) as seats:
...     seats.process, seats.processes, seats.threads, seats.peers
(0, 1, 2, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from penstock import _native

__all__ = ["Listener", "Seats", "alone", "join", "listen"]


class Seats:
    """The places of this process's workers; `penstock.dataflow.run_workers` fills them."""

    def __init__(self, native: _native.DataflowSeats) -> None:
        self._native = native

    @property
    def process(self) -> int:
        """Index of this process."""
        return self._native.process

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return self._native.processes

    @property
    def threads(self) -> int:
        """Workers of each process."""
        return self._native.threads

    @property
    def peers(self) -> int:
        """Workers of all processes."""
        return self.processes * self.threads

    def heard(self, index: int) -> bool:
        """Whether the program of a worker here was told that the run has ended."""
        return self._native.heard(index)

    def admit(self) -> tuple[int, int] | None:
        """Wait for the place of one worker more: its seat and its index; None when all dataflows are finished."""
        return self._native.admit()

    def stop(self, reason: str) -> None:
        """Stop all workers of the run, here and elsewhere: their next step raises `WorkerStopped`. From any thread."""
        self._native.stop(reason)

    def close(self) -> None:
        """Leave the run, after its workers have ended."""
        self._native.close()

    def __enter__(self) -> Seats:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Listener:
    """Waits for the other processes of one run; tell them its `address`, then `connect`."""

    def __init__(self, native: _native.DataflowListener) -> None:
        self._native = native

    @property
    def address(self) -> str:
        """Where it listens: ``host:port``."""
        return self._native.address

    def connect(
        self,
        process: int,
        addresses: Sequence[str],
        key: bytes,
        threads: int = 1,
        *,
        group: str = "",
        timeout: float | None = 30.0,
        joinable: bool = False,
    ) -> Seats:
        """Connect this process with every other; uses the listener up.

        Parameters
        ----------
        process : int
            Index of this process in `addresses`.
        addresses : sequence of str
            Of all processes, in order, this one's included; equal for all.
        key : bytes
            That only the processes of this run know: 32 random bytes, or what ``_native.key_of`` makes of them.
        threads : int
            Workers of each process, equal for all.
        group : str
            Name of the run: connections of another one are refused.
        timeout : float, optional
            Seconds until all must be connected.
        joinable : bool
            Whether workers may join and leave while they run; equal for all.

        Raises
        ------
        AuthenticationError
            When a process does not prove the key.
        ProtocolError
            When a process belongs to another run, or to one of another shape.
        WorkerLost
            When a process cannot be reached or does not come in time; `process` names it.
        """
        return Seats(self._native.connect(process, list(addresses), key, threads, group, timeout, joinable))

    def welcome(self, seats: Seats, key: bytes, *, group: str = "") -> None:
        """Take in processes that join the run of these seats (`join`), until they are closed; uses the listener up."""
        self._native.welcome(seats._native, key, group)

    def close(self) -> None:
        """Stop listening."""
        self._native.close()


def listen(host: str = "127.0.0.1", port: int = 0) -> Listener:
    """Listen for the other processes of a run; port 0 lets the system choose."""
    return Listener(_native.DataflowListener(host, port))


def join(
    process: int, doors: Sequence[tuple[int, str]], key: bytes, *, group: str = "", timeout: float | None = 30.0
) -> Seats | None:
    """Connect a process that joins a run: seats without workers, which `Seats.admit` lets come.

    Parameters
    ----------
    process : int
        Its number: greater than those of all processes that the run had.
    doors : sequence of (int, str)
        By process, where it takes in processes that join (`Listener.welcome`): of all that run or join. One that
        listens no more has left.
    key, group, timeout
        As for `Listener.connect`.

    Returns
    -------
    Seats or None
        None when all processes have left.

    Raises
    ------
    AuthenticationError, ProtocolError, WorkerLost
        As `Listener.connect`.
    """
    made = _native.dataflow_join(process, list(doors), key, group, timeout)
    return None if made is None else Seats(made)


def alone(threads: int, *, joinable: bool = False) -> Seats:
    """Seats of a run of one process; `joinable`: more workers may join while it runs."""
    return Seats(_native.dataflow_alone(threads, joinable))
