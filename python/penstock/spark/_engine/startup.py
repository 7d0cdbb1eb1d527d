"""Bringing the members of an engine up.

Owns: the order in which that happens and what is said meanwhile: executors come first, so that residents spread over
them; each is examined with a tiny job; then the residents start, and wait for slots at most `start_timeout` seconds.

Who waits is told on stderr and in the log, after 5 s and then ever more rarely: what is missing, since when, what
Spark does instead, when the engine gives up, and what helps.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock._stderr import say
from penstock.errors import EngineError
from penstock.spark._engine import preflight
from penstock.spark._engine.hub import Hub, Member
from penstock.spark._engine.journal import tell
from penstock.spark._engine.residents import Residents
from penstock.spark._tasks.slots import executor_count

__all__ = ["Startup", "apart", "waits"]

log = logging.getLogger(__name__)

#: How long to wait for executors that the configuration promises before residents are placed, seconds.
_EXECUTORS_S = 20.0
#: Seconds until it is told for the first time what is waited for, and at most between two times.
_TELL_S = (5.0, 30.0)
_ADVICE = "Stop what else runs, offer more task slots, or start the engine with fewer workers."


def waits(what: str, waited: float, limit: float, busy: str, advice: str) -> str:
    """What is said to who waits.

    Parameters
    ----------
    what : str
        What is missing.
    waited, limit : float
        Seconds that it was waited for, and after which the engine gives up.
    busy : str
        What Spark does instead.
    advice : str
        What helps.

    Examples
    --------
    >>> said = waits("1 of 2 workers: resident 1", 30.2, 300.0, "4 tasks run, local[4]", "Stop what else runs.")
    >>> print(said.replace(_clock(30.2), "16:46:10"))
    waits for 1 of 2 workers: resident 1; for 30 s, since 16:46:10; gives up in 270 s (start_timeout=300). Now 4 tasks \
run, local[4]. Stop what else runs.
    """
    return (
        f"waits for {what}; for {waited:.0f} s, since {_clock(waited)}; gives up in {max(0.0, limit - waited):.0f} s"
        f" (start_timeout={limit:g}). Now {busy}. {advice}"
    )


def _clock(ago: float) -> str:
    """The time of day so many seconds ago, here."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago))


class Startup:
    """One start of an engine.

    Parameters
    ----------
    sc : SparkContext
        Of the engine.
    hub : Hub
        Its registry, which is open.
    name : str
        What it is called.
    workers : int
        How many members are to come.
    timeout, began : float
        Seconds that they have, since when (of `time.monotonic`).
    check : callable
        Asked in every wait; raises when the engine was closed.
    setting : str
        What bounds the task slots.
    """

    def __init__(
        self,
        sc: Any,
        hub: Hub,
        name: str,
        workers: int,
        timeout: float,
        began: float,
        check: Callable[[], None],
        setting: str = "",
    ) -> None:
        self._sc, self._hub = sc, hub
        self._name, self._workers = name, workers
        self._timeout, self._began = timeout, began
        self._deadline = began + timeout
        self._check = check
        #: How many connections the look at the executors has made to the registry, and closed.
        self.probes = 0
        self._setting = setting or "without a bound that is known"
        self._rest(began)

    def executors(self, promised: int | None) -> None:
        """Wait for the executors that residents are to spread over, and examine them.

        Raises
        ------
        EngineError
            When one cannot serve, or no slot comes free.
        """
        if (self._sc.master or "local").partition("[")[0] == "local":
            executors = 0
        else:
            executors = promised or self._before_any_job()
        if executors:
            self._await_executors(min(executors, self._workers))
        self._examine(executors)

    def members(self, residents: Residents) -> None:
        """Wait for the members, and examine them.

        Raises
        ------
        EngineError
            When slots do not come in time, or an executor cannot serve.
        """
        began = time.monotonic()
        self._rest(began)
        while not residents.wait(self._check, self._pause()):
            there, missing = len(residents.members), residents.missing()
            if time.monotonic() >= self._deadline:
                waited = time.monotonic() - self._began
                raise EngineError(
                    f"engine {self._name} has {there} of {self._workers} workers after {waited:.0f} s"
                    f" (start_timeout={self._timeout:g}); missing: {missing}. Are there {self._workers + 1} free task"
                    f" slots? Now {self._busy()}. {_ADVICE}"
                )
            self._tell(f"{self._workers - there} of {self._workers} workers: {missing}", there)
        residents.examine(self._misfit)
        preflight.judge([_seen(member) for member in residents.members], self._hub.address)
        if findings := apart(residents.members, self._hub.address):
            raise EngineError(f"executors cannot serve this engine\n{preflight.table(findings)}", findings=findings)

    def _before_any_job(self) -> int:
        """How many executors come though no job asks for them."""
        conf, name = self._sc.getConf(), "spark.dynamicAllocation."
        if conf.get(f"{name}enabled", "false").strip().lower() != "true":
            return 1
        counts = (f"{name}minExecutors", f"{name}initialExecutors", "spark.executor.instances")
        return max(int(conf.get(count, "0")) for count in counts)

    def _misfit(self, member: Member) -> str | None:
        """Why a member that comes later cannot serve: nobody waits for it who could be told at once."""
        findings = preflight.examine(_seen(member), preflight.versions(), self._hub.address)
        return "; ".join(f"{one.what}: {one.fix}" for one in findings) or None

    # What is said

    def _rest(self, began: float) -> None:
        """Something new is waited for."""
        self._since, self._next = began, began + _TELL_S[0]

    def _pause(self) -> float:
        """Seconds until there is something to say, or it is too late."""
        return max(0.05, min(self._next, self._deadline) - time.monotonic())

    def _tell(self, what: str, members: int = 0) -> None:
        """What is missing, on stderr and in the log; so many members serve."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + min(_TELL_S[1], now - self._since)
        waited = now - self._since
        text = waits(what, waited, self._timeout - (self._since - self._began), self._busy(), _ADVICE)
        say(f"penstock {self._name}: {text}")
        told: dict[str, Any] = {"members": members, "workers": self._workers, "seconds": waited, "reason": what}
        tell(log, logging.INFO, "start waits", engine=self._name, **told)

    def _busy(self) -> str:
        """What Spark does now, and what bounds it."""
        try:
            running = sum(int(one.numRunningTasks()) for one in self._sc._jsc.sc().statusTracker().getExecutorInfos())
            executors = executor_count(self._sc)
        except Exception as error:  # py4j's own, or the context is gone
            log.debug("what Spark does cannot be found out: %s", error)
            return f"Spark does not tell what runs ({self._setting})"
        tasks = f"{running} task{'' if running == 1 else 's'} run{'s' if running == 1 else ''}"
        where = f" on {executors} executor{'' if executors == 1 else 's'}" if executors else ""
        return f"{tasks}{where}, {self._setting}"

    def _await_executors(self, count: int) -> None:
        """Executors that are on their way come before residents are placed, so that they spread."""
        began = time.monotonic()
        self._rest(began)
        limit = min(self._deadline, began + _EXECUTORS_S)
        while (there := executor_count(self._sc)) < count and time.monotonic() < limit:
            self._hub.wait_for(lambda: False, self._check, 0.1)
            self._tell(
                f"{count - there} of {count} executors, to spread over them; begins without after {_EXECUTORS_S:g} s"
            )

    def _examine(self, executors: int) -> None:
        """Look at the executors with a tiny job, in a thread and job group of its own."""
        sc, hub = self._sc, self._hub
        tasks = max(1, min(2 * max(executors, executor_count(sc)), 256))
        look = preflight.probe(hub.address)
        group = f"penstock-{self._name}-preflight-{os.urandom(4).hex()}"
        found: list[Mapping[str, Any]] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                sc.setJobGroup(group, f"penstock {self._name}: preflight", False)
                found.extend(sc.parallelize(range(tasks), tasks).mapPartitions(look).collect())
            except BaseException as error:
                errors.append(error)
            finally:
                hub.wake()

        thread = threading.Thread(target=work, name=f"penstock-preflight-{self._name}", daemon=True)
        thread.start()
        try:
            self._rest(time.monotonic())
            while not hub.wait_for(lambda: not thread.is_alive(), self._check, self._pause()):
                if time.monotonic() >= self._deadline:
                    raise EngineError(
                        f"no task slot came free within {self._timeout:g} s (start_timeout): the executors"
                        f" could not be examined. Now {self._busy()}. {_ADVICE}"
                    )
                self._tell("a free task slot, to look at the executors")
        finally:
            if thread.is_alive():
                with contextlib.suppress(Exception):
                    sc.cancelJobGroup(group)
                thread.join(10)
        if errors:
            raise EngineError(f"the executors could not be examined: {_last_line(errors[0])}") from errors[0]
        self.probes = sum("registry_error" not in one for one in found)
        preflight.judge(found, hub.address)


def apart(members: Sequence[Member], registry: str) -> list[preflight.Finding]:
    """Members whose data ports only their own machine reaches, where some are on others.

    Each listens at the address of its connection to the registry, and the name of that may be a loopback address on the
    machine of the driver, as Debian writes it.
    """
    if len({member.host for member in members}) < 2:
        return []
    return [
        preflight.Finding(
            f"{member.host} (JVM {member.executor.rpartition('/')[2]})",
            f"its data port is {member.address}, which other machines cannot reach",
            f"the registry at {registry} has a loopback address there: set spark.driver.host to an address that is the"
            " same everywhere",
        )
        for member in members
        if _is_loopback(member.address)
    ]


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:  # a scope, or a name
        return False
    return found.is_loopback


def _seen(member: Member) -> dict[str, Any]:
    facts = {key: member.info.get(key) for key in ("penstock", "python", "pyarrow")}
    return {**facts, "host": member.host, "jvm": member.executor.rpartition("/")[2]}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "MISMATCH" in line]
    return (telling or lines or [type(error).__name__])[0]
