"""What has been measured of the zoo: JSON lines, one for each model, phase, way and precision; the last one counts."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, str, str, str]


class Records:
    """Of one file, which is only appended to. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._latest: dict[Key, Record] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # the last line of a run that was killed
                self._latest[key_of(record)] = record

    def get(self, model: str, phase: str, way: str, precision: str) -> Record | None:
        return self._latest.get((model, phase, way, precision))

    def all(self) -> list[Record]:
        return list(self._latest.values())

    def append(self, record: Record) -> None:
        record = {**record, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with self._lock:
            self._latest[key_of(record)] = record
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(record).replace(f"{sys.prefix}/", "") + "\n")


def key_of(record: Record) -> Key:
    return record["model"], record["phase"], record["way"], record["precision"]
