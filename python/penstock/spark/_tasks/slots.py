"""How many task slots a cluster can ever offer.

Owns: reading that number, and the setting that bounds it, from the master URL and the configuration, and how many the
executors offer that are there, where no setting bounds them. Residents hold a slot each for the engine's life and the
queries need at least one more, so an engine that can never fit is refused at once, with the setting to change.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import SlotsError
from penstock.spark._engine.handles import open_engines

__all__ = ["Capacity", "capacity", "executor_count", "free_slots", "held_slots", "require_gang", "require_slots"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """The greatest number of tasks that can run at once.

    Attributes
    ----------
    slots : int or None
        None where the configuration sets no bound that can be read here.
    setting : str
        What bounds it, as the user wrote it.
    executors : int or None
        How many executors the configuration asks for, where it says so.
    cpus : int
        Cores of a slot (``spark.task.cpus``).
    """

    slots: int | None
    setting: str
    executors: int | None = None
    cpus: int = 1


def capacity(sc: Any) -> Capacity:
    """Read the capacity of a Spark context.

    Parameters
    ----------
    sc : pyspark.SparkContext
        Of a classic session.

    Returns
    -------
    Capacity
        Costs a few calls to the JVM.

    """
    conf = dict(sc.getConf().getAll())
    return from_settings(sc.master, conf, lambda: int(sc._jvm.java.lang.Runtime.getRuntime().availableProcessors()))


def _present(sc: Any, found: Capacity) -> Capacity:
    """The same, bounded by the executors that there are, where no setting bounds it and Spark has no more made.

    Ask when the executors have come: those of a context that has just started are still on their way.
    """
    if found.slots is not None or sc.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        return found
    try:
        context = sc._jsc.sc()
        slots = int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
    except Exception as error:  # py4j's own, or the context is gone
        log.debug("the slots of the executors cannot be found out: %s", error)
        return found
    setting = f"the executors that there are offer {slots}: add some ({found.setting})"
    return Capacity(slots, setting, found.executors, found.cpus)


def from_settings(master: str, conf: dict[str, str], processors: Any = os.cpu_count) -> Capacity:
    """The same from a master URL and settings.

    Examples
    --------
    >>> from_settings("local[4]", {})
    Capacity(slots=4, setting='local[4]', executors=None, cpus=1)
    >>> from_settings("local-cluster[2,2,1024]", {"spark.task.cpus": "2"}).slots
    2
    >>> from_settings("k8s://host", {"spark.executor.instances": "3"}).slots
    3
    """
    cpus = max(1, int(conf.get("spark.task.cpus", "1")))
    if local := re.fullmatch(r"local(?:\[\s*([0-9]+|\*)\s*(?:,\s*[0-9]+\s*)?\])?", master):
        threads = local.group(1) or "1"
        return Capacity((processors() if threads == "*" else int(threads)) // cpus, master, cpus=cpus)
    if cluster := re.fullmatch(r"local-cluster\[\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*[0-9]+\s*\]", master):
        count, cores = int(cluster.group(1)), int(cluster.group(2))
        return Capacity(count * (cores // cpus), master, count, cpus)
    # Standalone gives an executor all cores of its host, and as many executors as fit, unless told otherwise.
    standalone = master.startswith("spark://")
    cores_text = conf.get("spark.executor.cores", "" if standalone else "1")
    per_executor = int(cores_text) // cpus if cores_text else None
    shown = f"spark.executor.cores={cores_text or 'unset'}"
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        most = conf.get("spark.dynamicAllocation.maxExecutors", "")
        if not most.isdigit() or int(most) >= 2**31 - 1 or per_executor is None:
            return Capacity(None, "spark.dynamicAllocation.maxExecutors (unbounded)", cpus=cpus)
        setting = f"spark.dynamicAllocation.maxExecutors={most} with {shown}"
        return Capacity(int(most) * per_executor, setting, cpus=cpus)
    if standalone:
        most = conf.get("spark.cores.max", "")
        return Capacity(int(most) // cpus if most else None, f"spark.cores.max={most or 'unset'}", cpus=cpus)
    count = int(conf.get("spark.executor.instances", "2"))
    setting = f"spark.executor.instances={count} with {shown}"
    return Capacity(None if per_executor is None else count * per_executor, setting, count, cpus)


def require_slots(found: Capacity, workers: int, held: Mapping[str, int] | None = None) -> None:
    """Refuse an engine that can never get its slots.

    Parameters
    ----------
    found : Capacity
        Of the cluster.
    workers : int
        Slots that the engine holds.
    held : dict, optional
        Slots that other engines of the context hold, by their names.

    Raises
    ------
    SlotsError
        Naming the setting that bounds the capacity.

    Examples
    --------
    >>> require_slots(from_settings("local[2]", {}), 2)
    Traceback (most recent call last):
    ...
    penstock.errors.SlotsError: 2 workers hold 2 task slots and the queries need one more: 3; local[2] allows 2. \
Start Spark with local[3] or more
    """
    others = sum(held.values()) if held else 0
    need = others + workers + 1
    if found.slots is None or found.slots >= need:
        return
    beside = _beside(held)
    raise SlotsError(
        f"{workers} workers hold {workers} task slots{beside} and the queries need one more: {need};"
        f" {found.setting} allows {found.slots}. {_advice(found, need, bool(beside))}",
        needed=need,
        available=found.slots,
        setting=found.setting,
    )


def require_gang(found: Capacity, tasks: int, held: Mapping[str, int] | None = None) -> None:
    """Refuse a gang whose tasks can never all run at once; Spark itself would wait for ten minutes.

    Parameters
    ----------
    found : Capacity
        Of the cluster.
    tasks : int
        Tasks of the gang.
    held : dict, optional
        Slots that engines of the context hold, by their names.

    Raises
    ------
    SlotsError
        Naming the setting that bounds the capacity.

    Examples
    --------
    >>> require_gang(from_settings("local[2]", {}), 3)
    Traceback (most recent call last):
    ...
    penstock.errors.SlotsError: a gang of 3 tasks needs 3 task slots at once; local[2] allows 2. Start Spark with \
local[3] or more
    """
    need = tasks + (sum(held.values()) if held else 0)
    if found.slots is None or found.slots >= need:
        return
    beside = _beside(held)
    raise SlotsError(
        f"a gang of {tasks} tasks needs {tasks} task slots at once{beside}; {found.setting} allows {found.slots}."
        f" {_advice(found, need, bool(beside))}",
        needed=need,
        available=found.slots,
        setting=found.setting,
    )


def _beside(held: Mapping[str, int] | None) -> str:
    return "".join(f", engine {name} holds {count}" for name, count in held.items()) if held else ""


def _advice(found: Capacity, need: int, beside: bool = False) -> str:
    """What to set for so many slots; `beside` where other engines hold some of them."""
    name, cores = found.setting.partition("=")[0], need * found.cpus
    if re.match(r"local(\[|$)", name):
        text = f"Start Spark with local[{cores}] or more"
    elif name.startswith("local-"):
        text = f"Start Spark with more executors or cores, such as local-cluster[{need},{found.cpus},1024]"
    elif name == "spark.cores.max":
        text = f"Raise spark.cores.max to {cores} or more"
    else:
        text = f"Raise {name} or spark.executor.cores"
    return text + ", or close the other engine first" if beside else text


def held_slots(sc: Any, but: Any = None) -> dict[str, int]:
    """Slots that the engines of a Spark context hold, by the names of the engines; `but` is left out."""
    held: dict[str, int] = {}
    for engine in open_engines(sc):
        if engine is not but:
            # Users name engines, perhaps alike.
            held[engine.name] = held.get(engine.name, 0) + engine.workers
    return held


def free_slots(sc: Any, more: int) -> tuple[int | None, str]:
    """Slots that engines of a Spark context may still take, and what bounds them.

    Parameters
    ----------
    sc : pyspark.SparkContext
        Whose executors have come.
    more : int
        How many are wanted, for what is said where there are fewer.

    Returns
    -------
    (int or None, str)
        One slot is left for the queries' own tasks. None where nothing bounds them.
    """
    bound = capacity(sc)
    found, held = _present(sc, bound), sum(held_slots(sc).values())
    if found.slots is None:
        return None, found.setting
    free = max(0, found.slots - 1 - held)
    if bound.slots is not None and more > free:
        return free, f"{found.setting}. {_advice(found, held + more + 1)}"
    return free, found.setting


def executor_count(sc: Any) -> int:
    """Executors that are registered now; 0 in local mode, where the driver runs the tasks."""
    # The driver itself is listed too. Each element that was read would be calls of the JVM.
    return max(0, len(sc._jsc.sc().statusTracker().getExecutorInfos()) - 1)
