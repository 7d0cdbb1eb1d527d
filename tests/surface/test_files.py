"""The limit on open files of the driver and of residents, and a driver that has reached it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest
from forked import in_child

from penstock.errors import ConfigError

pytest.importorskip("pyspark")

from penstock.spark._tasks.files import allow_files, require_files

#: A driver with so many open files left, and members that join it from another process until one cannot.
DRIVER = """
import json, os, resource, subprocess, sys, time
from penstock import _native

spare, secret = int(sys.argv[1]), bytes(range(32))
registry = _native.Registry("127.0.0.1", 0, secret, None, 20.0, False)
members = subprocess.Popen(
    [sys.executable, "-c", sys.argv[2], registry.address, secret.hex()],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
assert members.stdout.readline() == "ready\\n"
# A limit is on numbers, so none below the highest is to be free.
top = max(int(name) for name in os.listdir("/proc/self/fd"))
while os.dup(0) < top:
    pass
top = max(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name))
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1 + spare, top + 1 + spare))
members.stdin.write("join\\n")
members.stdin.flush()
told = json.loads(members.stdout.readline())
print(json.dumps([*told, registry.metrics()]), flush=True)
members.stdin.close()
members.wait()
os._exit(0)
"""

MEMBERS = """
import json, os, sys, threading
from penstock import _native

print("ready", flush=True)
sys.stdin.readline()
joined, error, others = 0, "", []
while not error and len(others) < 20:
    key = _native.key_of(bytes.fromhex(sys.argv[2]), "member", str(joined), False)
    try:
        # How long a dial tries again goes by the silence.
        member = _native.Member(sys.argv[1], key, json.dumps({"slot": joined}), 2.0, 1 << 20, [])
    except Exception as failed:
        # Who stood still for that long was given up for another reason, and is to try again.
        error, other = (str(failed), "") if "open files" in str(failed) else ("", str(failed))
        others += [other] * bool(other)
    else:
        threading.Thread(target=member.run, daemon=True).start()
        joined += 1
print(json.dumps([joined, error, others]), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the open files of a process")
@pytest.mark.parametrize("spare", [9, 10, 11])
def test_a_driver_without_open_files_counts_whom_it_cannot_serve_and_says_why(spare: int) -> None:
    """Each member takes three. The system has one more in its hands while it waits for who connects, or not yet."""
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, str(spare), MEMBERS], capture_output=True, text=True, timeout=300
    )
    assert driver.returncode == 0, driver.stderr
    joined, error, others, metrics = json.loads(driver.stdout)
    assert joined in (2, 3) and "open files" in error, (error, others)
    exhausted, refused = metrics["refused_exhausted"], metrics["refused"]
    assert 0 < exhausted <= refused <= exhausted + len(others), (metrics, others)


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes() -> None:
    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for raise_it in (allow_files, lambda: require_files(8)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            raise_it()
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert soft == hard or soft > 4 * 4_096, (soft, hard)

    in_child(work)


def test_workers_for_which_the_driver_has_too_few_open_files_are_refused() -> None:
    def work() -> None:
        # Beside those that are open: which are many behind other tests.
        limit = len(os.listdir("/dev/fd")) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        require_files(8)
        told = rf"^workers=64: .* need [0-9]+ open files .* is {limit}; ask for 1[0-9] at most, or raise"
        with pytest.raises(ConfigError, match=told):
            require_files(64)
        require_files(64, there=60)  # they have theirs open
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit - 90, limit - 90))
        with pytest.raises(ConfigError, match=rf"^workers=1: .* is {limit - 90}; raise the limit"):
            require_files(1)

    in_child(work)
