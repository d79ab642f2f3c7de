"""Triton's builders of C extensions, called by position and by name, as its versions do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from torchrelay.compiler.torch_internals.triton import extensions
from torchrelay.compiler.torch_internals.triton.caches import extension_key

SOURCE = "int answer(void) { return 42; }"


def compile_module_from_src(src: str, name: str, library_dirs: list[str] | None = None) -> ModuleType:
    """As in Triton 3.6."""
    return _built(src, name)


def compile_module_from_file(src_path: str, name: str, library_dirs: list[str] | None = None) -> ModuleType:
    """As in Triton 3.9."""
    return _built(Path(src_path).read_text(), name)


def _built(source: str, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = f"/built/{name}.so"
    vars(module)["source"] = source
    return module


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "driver.c").write_text(SOURCE)
    return str(tmp_path / "driver.c")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("triton_driver")
    names = ("compile_module_from_src", "compile_module_from_file")
    for name in names:
        setattr(module, name, globals()[name])
    monkeypatch.setattr(extensions, "builders", lambda: [(module, name) for name in names])
    return module


def _all_calls(triton: ModuleType, file: str) -> list[ModuleType]:
    return [
        triton.compile_module_from_src(SOURCE, "a"),
        triton.compile_module_from_src(src=SOURCE, name="b", library_dirs=["/lib"]),
        triton.compile_module_from_file(file, "c"),
        triton.compile_module_from_file(src_path=file, name="d", library_dirs=["/lib"]),
    ]


def test_what_triton_builds_is_recorded(triton: ModuleType, file: str) -> None:
    found: dict[str, Path] = {}
    with extensions.recording_extensions(found):
        built = _all_calls(triton, file)
    assert [(module.__name__, module.source) for module in built] == [(name, SOURCE) for name in "abcd"]
    assert found == {extension_key(SOURCE, name): Path(f"/built/{name}.so") for name in "abcd"}
    assert triton.compile_module_from_src is compile_module_from_src


def test_what_an_artifact_brought_is_not_built(
    triton: ModuleType, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "load_extension", lambda name, path: ModuleType(f"{name} of {path}"))
    prebuilt = extensions.PrebuiltExtensions()
    prebuilt.add({extension_key(SOURCE, name): Path(f"/artifact/{name}.so") for name in "abd"})
    names = [module.__name__ for module in _all_calls(triton, file)]
    assert names == ["a of /artifact/a.so", "b of /artifact/b.so", "c", "d of /artifact/d.so"]
