"""``params.json``, which lies beside the data of a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

__all__ = ["read_params"]


def read_params(folder: str | Path, holds: str, by: str) -> dict[str, Any]:
    """The parameters of a folder. `holds` says what they are, `by` what names them.

    Raises
    ------
    ConfigError
        When the file is not there or is not a JSON object.
    """
    path = Path(folder) / "params.json"
    try:
        params = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; it holds {holds}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError(f"{path} holds a {type(params).__name__}; expected an object {by}")
    return params
