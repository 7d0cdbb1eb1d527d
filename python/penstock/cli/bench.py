"""``penstock bench``: the way to the benches, which are part of a checkout and not of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

import penstock
from penstock.cli.common import UsageError

__all__ = ["SETTINGS", "bench"]

#: Where the package of the benches lies in the checkout that this package is used from.
_FOLDER = Path(str(penstock.__file__)).resolve().parents[2] / "benches" / "python"

#: The options are those of the benches, ``--help`` among them.
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def bench(context: typer.Context) -> int:
    """Measure penstock beside its peers on this machine (in a checkout)."""
    if not _FOLDER.is_dir():
        raise UsageError(
            "the benches are not in the installed package: git clone https://github.com/penstock/penstock, then"
            " make setup and .venv/bin/penstock bench there"
        )
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    from penstock_bench.command import run

    return run(context.args)
