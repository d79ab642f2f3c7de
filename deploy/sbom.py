"""Print an image's bill of materials (CycloneDX JSON): what its lock files pin, and the pages' JavaScript.

    python deploy/sbom.py deploy/locks/server-3.12.txt deploy/locks/torch-3.12.txt > dist/worker-3.12.cdx.json

Needs cyclonedx-bom.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VENDORED = ROOT / "service" / "gateway" / "pages" / "vendor" / "vendored.json"


def bill(locks: list[Path]) -> dict[str, Any]:
    entries = [entry for lock in locks for entry in lock.read_text().replace("\\\n", " ").splitlines()]
    pinned = "\n".join(dict.fromkeys(entries))  # torch's file and the service's both have what both need
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "-", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", "1.6", "--of", "JSON"]
    made = subprocess.run(command, input=pinned, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(made.stdout)
    for file in json.loads(VENDORED.read_text()):
        reference = f"pkg:npm/{file['package'].replace('@', '%40')}@{file['version']}"
        found["components"].append(
            {
                "type": "file",
                "bom-ref": f"{reference}#{file['path']}",
                "name": file["file"],
                "version": file["version"],
                "purl": reference,
                "licenses": [{"license": {"id": file["licence"]}}],
                "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(bill([Path(name) for name in sys.argv[1:]]), indent=2))
