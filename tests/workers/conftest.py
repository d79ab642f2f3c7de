"""Some of these tests take what others have: their folders are on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]
