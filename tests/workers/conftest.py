"""The engines of these tests are on the path, here and in the fork servers that are started from here; and the parts
of the service's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "service"))
