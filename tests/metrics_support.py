"""The text format of Prometheus, read as its description has it."""

from __future__ import annotations

import re
import urllib.request

from penstock.spark._engine.metrics import FAMILIES

LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


def parse(text: str) -> tuple[dict[str, str], list[tuple[str, dict[str, str], float]]]:
    """Kinds by metric, and samples: written from the format's description, not from what is tested."""
    assert text == "" or text.endswith("\n")
    kinds: dict[str, str] = {}
    samples: list[tuple[str, dict[str, str], float]] = []
    helped: set[str] = set()
    for line in text.split("\n")[:-1]:
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            if what == "HELP":
                assert name not in helped, "one help per metric"
                helped.add(name)
            else:
                assert what == "TYPE" and name not in kinds and name in helped
                assert rest in ("counter", "gauge", "histogram")
                kinds[name] = rest
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        labels, inside = {}, found[2] or ""
        while inside:
            one = LABEL.match(inside)
            assert one and one[1] not in labels, line
            labels[one[1]] = re.sub(r"\\(.)", lambda part: {"n": "\n"}.get(part[1], part[1]), one[2])
            inside = inside[one.end() :]
        last = list(kinds)[-1]
        suffixes = ("_bucket", "_sum", "_count") if kinds[last] == "histogram" else ("",)
        assert found[1] in [last + suffix for suffix in suffixes], "samples stand below their type"
        samples.append((found[1], labels, float(found[3])))
    keys = [(name, tuple(sorted(labels.items()))) for name, labels, _ in samples]
    assert len(set(keys)) == len(keys), "no sample twice"
    return kinds, samples


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        kinds, samples = parse(answer.read().decode())
    assert set(kinds) <= set(FAMILIES)
    assert all(FAMILIES[name].kind == kind for name, kind in kinds.items())
    return {(name, tuple(sorted(labels.items()))): value for name, labels, value in samples}


def of(samples: Samples, name: str, **labels: str) -> list[float]:
    """Values of a metric with these labels among its own."""
    return [value for (one, own), value in samples.items() if one == name and labels.items() <= dict(own).items()]
