"""Parts that others made, started on this machine and ended by pid: a Kafka broker, PostgreSQL, a store that speaks S3.

Every part has free ports, a folder of its own and a log there, and comes up within `START_S` or fails with the end of
its log. What is not to be had here fails with what to install, unless `PENSTOCK_REAL_WITHOUT` names the part.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "target" / "real"

#: Seconds that a part has to come up, and to end.
START_S = 60.0


def lacking(part: str, why: str) -> NoReturn:
    """Fails what needs a part that is not there, or skips it where `PENSTOCK_REAL_WITHOUT` (a,b,...) names the part."""
    if part in os.environ.get("PENSTOCK_REAL_WITHOUT", "").split(","):
        pytest.skip(f"without {part}: {why}")
    pytest.fail(f"{why}; PENSTOCK_REAL_WITHOUT={part} leaves out what needs it", pytrace=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], what: str, timeout: float = START_S, pause: float = 0.05) -> Any:
    """Poll until a condition holds; what it gave."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(pause)
    return found


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = f"{home}/bin/java" if home else shutil.which("java")
    if not found:
        lacking("java", "no Java 17 or later: neither JAVA_HOME nor java on PATH")
    return found


class Process:
    """A process with a log, ended by pid."""

    def __init__(self, command: Sequence[str], log: Path, **options: Any) -> None:
        self.log = log
        with open(log, "ab") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
        self.pid = self.popen.pid

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """As `until`; the end of the process is an error at once."""

        def alive() -> Any:
            found = condition()
            if not found and self.popen.poll() is not None:
                end = self.log.read_text(errors="replace")[-2000:]
                raise AssertionError(f"{what}: it ended with {self.popen.returncode}\n{end}")
            return found

        return until(alive, what)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(how)
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(20)


@contextlib.contextmanager
def kafka(folder: Path) -> Iterator[str]:
    """A broker that is its own controller; gives its address."""
    broker, controller = free_port(), free_port()
    folder.mkdir(parents=True)
    settings = folder / "server.properties"
    settings.write_text(
        f"""process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder / "data"}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
auto.create.topics.enable=false
"""
    )
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=WARN, out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.out.layout.ConversionPattern=%d %p %c %m%n\n"
    )
    run = [java(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{PARTS / 'broker'}/*"]
    run += [f"-Dlog4j.configuration=file:{folder / 'log4j.properties'}"]
    form = ["kafka.tools.StorageTool", "format", "-t", "cGVuc3RvY2stcmVhbC0wMA", "-c", str(settings)]
    done = subprocess.run([*run, *form], capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    process = Process([*run, "kafka.Kafka", str(settings)], folder / "broker.log")
    try:
        process.until(lambda: listens(broker), "the broker")
        yield f"127.0.0.1:{broker}"
    finally:
        process.end()


def postgres_programs() -> tuple[str, str]:
    """Paths of initdb and postgres."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for places in (None, os.pathsep.join(map(str, folders))):
        found = [shutil.which(name, path=places) for name in ("initdb", "postgres")]
        if all(found):
            return str(found[0]), str(found[1])
    lacking(
        "postgresql",
        "no PostgreSQL: neither on PATH nor below /usr/lib/postgresql (Debian: apt-get install postgresql)",
    )


def unprivileged(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """For who is root, which PostgreSQL refuses: a prefix of the command, and options of the process."""
    if os.getuid() != 0:
        return [], {}
    # Root by another number: the files stay ours.
    prefix = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    with contextlib.suppress(OSError):
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix, {}
    user = "postgres" if "postgres" in {entry.pw_name for entry in pwd.getpwall()} else "nobody"
    shutil.chown(folder, user)
    return [], {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def serves(place: dict[str, Any]) -> bool:
    """Whether PostgreSQL takes queries; it listens before."""
    import pg8000.native

    try:
        pg8000.native.Connection(**place).close()
    except (pg8000.native.InterfaceError, pg8000.native.DatabaseError):
        return False
    return True


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[dict[str, Any]]:
    """A server without passwords on loopback; gives what a client needs."""
    initdb, server = postgres_programs()
    folder.mkdir(parents=True)
    prefix, options = unprivileged(folder)
    data, port = folder / "data", free_port()
    init = [*prefix, initdb, "-D", str(data), "-U", "penstock", "-A", "trust", "-E", "UTF8", "--no-sync"]
    done = subprocess.run(init, capture_output=True, text=True, timeout=START_S, cwd=folder, check=False, **options)
    if done.returncode != 0:
        lacking("postgresql", f"initdb does not work here: {done.stderr.strip()[-300:]}")
    command = [*prefix, server, "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-c", "unix_socket_directories="]
    process = Process(command, folder / "postgres.log", cwd=folder, **options)
    try:
        place = {"host": "127.0.0.1", "port": port, "user": "penstock", "database": "postgres"}
        process.until(lambda: serves(place), "PostgreSQL")
        yield place
    finally:
        process.end(signal.SIGINT)  # a fast shutdown


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    """A store that speaks S3, in memory, with a bucket ``state``; gives its address."""
    folder.mkdir(parents=True)
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = Process([sys.executable, "-c", code], folder / "s3.log")
    try:
        process.until(lambda: listens(port), "the store")
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="real",
            aws_secret_access_key="real",
        )
        client.create_bucket(Bucket="state")
        yield f"127.0.0.1:{port}"
    finally:
        process.end()


# Processes


def children() -> dict[int, list[int]]:
    """Of each process, those that it started."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry.name))
    return found


def descendants(pid: int) -> set[int]:
    tree, found, rest = children(), set(), [pid]
    while rest:
        for child in tree.get(rest.pop(), ()):
            if child not in found:
                found.add(child)
                rest.append(child)
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether it runs: what has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has."""
    found = set()
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(handle)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def connections(ports: set[int]) -> set[str]:
    """Inodes of the sockets of this machine that are connected to one of these ports."""
    found = set()
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "01" and int(words[2].rpartition(":")[2], 16) in ports:  # established
                    found.add(words[9])
    return found
