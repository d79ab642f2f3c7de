VERSION = "0.1.0"
"""Of torchrelay, as in pyproject.toml. A copy on PYTHONPATH has no other place for it."""


def install_hint(extra: str = "") -> str:
    """How to install what an extra brings, from where this package came (pip keeps a note of a path or an address).

    Never by the name alone: it is on no index, and whatever has it there is not this package.
    """
    # Here, since every import of torchrelay runs this module.
    import json
    import shlex
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    extras = f"[{extra}]" if extra else ""
    try:
        origin = json.loads(metadata.distribution("torchrelay").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        origin = {}
    url = origin.get("url", "")
    path = unquote(urlsplit(url).path)
    if url.startswith("file:") and Path(path).exists():
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"Run `pip install {editable}{shlex.quote(path + extras)}`"
    if url and not url.startswith("file:"):
        commit = origin.get("vcs_info")
        address = f"{commit['vcs']}+{url}@{commit['commit_id']}" if commit else url
        return f"Run `pip install {shlex.quote(f'torchrelay{extras} @ {address}')}`"
    return f"Run `pip install {shlex.quote(f'.{extras}')}` in the folder of torchrelay's source"
