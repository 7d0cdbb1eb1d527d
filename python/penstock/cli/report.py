"""``penstock report``: the page and the picture of a run, made again from its timeline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock._extras import how_to_install
from penstock._stderr import say
from penstock.cli.common import UsageError, check_output, whole_file, writing
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.report._timeline import Timeline

__all__ = ["report"]

#: A timeline is bounded where it is made; a larger file is something else.
_MOST_BYTES = 1 << 30


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="timeline.json of a run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The page; default report.html beside FILE."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="The picture as well, a .png (needs matplotlib)."),
    ] = None,
) -> None:
    """Make the page of a run again from its timeline.

    The page needs no other file: latency per slice with the migrations marked, load of the workers, epochs, conditions.
    What the run checked at its end stands at the top, as it was found then.
    """
    from penstock.report._html import no_picture, save_page

    timeline = _read(file)
    page = output if output is not None else file.resolve().parent / "report.html"
    check_output(page)
    if picture is not None:
        check_output(picture, option="--picture")
        if picture.suffix.lower() != ".png":
            raise UsageError(f"--picture {picture}: the picture is a PNG; name it .png")
        if picture.resolve() == page.resolve():
            raise UsageError(f"--picture {picture}: is the page itself; name another file")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--picture needs matplotlib: {how_to_install('report')}")
    for made in (page, picture):
        if made is not None and made.resolve() == file.resolve():
            raise UsageError(f"{made}: is the timeline itself; name another file")
    with whole_file(page) as part, writing(page):
        why = save_page(timeline, part)
    print(f"wrote {page}")
    if picture is None:
        if why is not None:
            say(f"penstock: no picture in {page}: {why}")
        return
    try:
        from penstock.report._plot import latency_png

        drawn = latency_png(timeline)
    except Exception as error:
        raise ConfigError(f"--picture {picture}: {no_picture(error)}") from error
    with whole_file(picture, "--picture") as part, writing(picture, "--picture"):
        part.write_bytes(drawn)
    print(f"wrote {picture}")


def _read(file: Path) -> Timeline:
    from penstock.report._timeline import Timeline

    if not file.exists():
        raise UsageError(f"{file}: does not exist; a run writes timeline.json into its output folder")
    if not file.is_file():
        raise UsageError(f"{file}: is a folder or a device; name its timeline.json")
    if file.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{file}: has {file.stat().st_size:,} bytes, too many for a timeline")
    try:
        return Timeline.from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 is one as well
        raise UsageError(f"{file}: {error}") from error
