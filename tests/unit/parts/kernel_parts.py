"""Kernel entries as a file has them, for tests: every value a text, each with its line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.clients.jobfiles.yaml_lines import YamlPath, YamlReader, YamlTree
from torchrelay.compiler.errors import BadTuneJob


class _Reader(YamlReader):
    error = BadTuneJob


def reader(lines: Mapping[YamlPath, int]) -> YamlReader:
    return _Reader("job.yaml", YamlTree(None, dict(lines)))


def written(value: Any) -> Any:
    """`value` as YAML has it."""
    if isinstance(value, dict):
        return {str(name): written(each) for name, each in value.items()}
    if isinstance(value, list):
        return [written(each) for each in value]
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value))
