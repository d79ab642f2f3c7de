VERSION = "0.1.0"
"""Of torchrelay, as in pyproject.toml. A copy on PYTHONPATH has no other place for it."""


def install_hint(extra: str) -> str:
    """How to install what an extra brings. The package is on no index: whatever has its name there is not it."""
    return f"Run `pip install '.[{extra}]'` in the folder of torchrelay's source"
