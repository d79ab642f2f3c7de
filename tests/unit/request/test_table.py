"""The closed table: shipped is what the rules give, a name stands for one thing, none leads out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torchrelay.compiler.errors import ForbiddenTarget, Unsupported
from torchrelay.compiler.graph import names
from torchrelay.compiler.request.operator_table import generate, table

SHIPPED = Path(table.__file__).with_name("operators.json")
INSTALLED = ".".join(torch.__version__.split(".")[:2])


def test_the_file_has_each_entry_once_and_in_order() -> None:
    tables = [table.load(version) for version in table.VERSIONS]
    assert generate.encode(reversed(tables)) == SHIPPED.read_text()


@pytest.mark.parametrize("known", [True, False], ids=["again", "for the first time"])
def test_the_shipped_table_is_the_generated_one(tmp_path: Path, known: bool) -> None:
    made = tmp_path / "made.json"
    made.write_text(
        generate.encode(table.load(version) for version in table.VERSIONS if known or version != INSTALLED)
    )
    # A process of its own, with nothing said by the environment: the table holds PyTorch's own defaults.
    command = [sys.executable, "-m", "torchrelay.compiler.request.operator_table.generate", str(made)]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    subprocess.run(command, env=kept, cwd=tmp_path, check=True, timeout=300)
    assert made.read_text() == SHIPPED.read_text()


@pytest.mark.parametrize("version", table.VERSIONS)
def test_there_is_a_table_for_each_version(version: str) -> None:
    ops = table.load(f"{version}.1+cu130")
    assert ops.torch == version
    assert {
        "torch.add",
        "torch._C._nn.gelu",
        "_operator.getitem",
        "torch.ops.aten.mm.default",
    } <= ops.functions
    assert "torch.ops.higher_order.cond" in ops.hops
    assert {"view", "sum", "__getitem__"} <= ops.methods
    assert ops.options["max_autotune"].type == "bool"


@pytest.mark.parametrize("version", ["", "2.9.0", "3.13.0", "x" * 10_000, "2.1300" * 99])
def test_there_is_no_table_for_another_version(version: str) -> None:
    with pytest.raises(Unsupported):
        table.load(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.130.0.dev20280101+cu150"])
def test_a_newer_version_has_the_newest_table(version: str) -> None:
    assert table.load(version) is table.load(table.VERSIONS[-1])


def test_what_a_newer_torch_has_no_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "torch.gone_since"
    newest = table.load(table.VERSIONS[-1])
    newer = msgspec.structs.replace(newest, functions=newest.functions | {gone})
    monkeypatch.setattr(names.table, "load", lambda version: newer)
    names.function_names.cache_clear()
    with pytest.raises(Unsupported, match=gone):
        names.resolve_target(gone)
    assert names.target_name(torch.add) == "torch.add"
    names.function_names.cache_clear()


@pytest.mark.parametrize("version", table.VERSIONS)
def test_no_name_in_a_table_reaches_outside(version: str) -> None:
    """A second look at the rules' result, by words that names with reach would have."""
    ops = table.load(version)
    found = {
        name
        for name in ops.functions | ops.hops | ops.methods
        if SUSPICIOUS & set(re.split(r"[._]+", name.removeprefix("torch._numpy.")))
    }
    assert found <= HARMLESS


SUSPICIOUS = frozenset(
    [
        "blob",
        "data_ptr",
        "default_dtype",
        "distributed",
        "dlpack",
        "eval",
        "exec",
        "file",
        "hook",
        "hooks",
        "import",
        "jit",
        "library",
        "load",
        "manual",
        "nccl",
        "numpy",
        "open",
        "path",
        "pickle",
        "profile",
        "profiler",
        "ptr",
        "reduce_ex",
        "register",
        "resize",
        "save",
        "seed",
        "set",
        "setattr",
        "share",
        "shared",
        "socket",
        "storage",
        "stream",
        "system",
        "thread",
        "threads",
    ]
)

# Reviewed one by one: what Dynamo itself writes for context managers and transforms, and pure functions.
HARMLESS = frozenset(
    {
        "is_distributed",
        "is_set_to",
        "storage_offset",
        "torch._C._autograd._saved_tensors_hooks_disable",
        "torch._C._autograd._saved_tensors_hooks_enable",
        "torch._C._functorch.set_inplace_requires_grad_allowed",
        "torch._C._set_fwd_grad_enabled",
        "torch._C._set_grad_enabled",
        "torch._dynamo.utils.numpy_attr_wrapper",
        "torch._numpy.resize",
        "torch._functorch.eager_transforms._set_tensor_requires_grad",
        "torch._functorch.vmap.lazy_load_decompositions",
        "torch.autograd.forward_ad._maybe_load_decompositions",
        "torch.is_distributed",
        "torch.ops.aten.is_distributed",
        "torch.ops.aten.is_distributed.default",
        "torch.ops.aten.is_set_to",
        "torch.ops.aten.is_set_to.default",
        "torch.ops.aten.nonzero_numpy",
        "torch.ops.aten.nonzero_numpy.default",
        "torch.ops.aten.numpy_T",
        "torch.ops.aten.numpy_T.default",
        "torch.ops.aten.storage_offset",
        "torch.ops.aten.storage_offset.default",
        "torch.ops.aten.sym_storage_offset",
        "torch.ops.aten.sym_storage_offset.default",
        "torch.ops.higher_order.wrap_with_set_grad_enabled",
    }
)


def test_every_name_stands_for_one_callable() -> None:
    ops = table.load(torch.__version__)
    for name in ops.functions | ops.hops:
        assert names.target_name(names.resolve_target(name)) == name


def test_every_function_can_be_written_as_code() -> None:
    """FX names each operator in the code it writes for a graph; one that it cannot name would fail later."""
    for name in sorted(table.load(torch.__version__).functions):
        if name.startswith(("_operator.", "builtins.getattr")):
            continue
        made = torch.fx.Graph()
        made.output(made.call_function(names.resolve_target(name), (1,)))
        assert made.python_code("self").src


@pytest.mark.parametrize("name", ["os.system", "torch.load", "torch.add.__class__", "torch", ""])
def test_no_other_name_resolves(name: str) -> None:
    with pytest.raises(ForbiddenTarget):
        names.resolve_target(name)


def test_attribute_chains_do_not_resolve_even_below_allowed_names() -> None:
    with pytest.raises(Unsupported):
        names.target_name(print)
    with pytest.raises(Unsupported):
        names.target_name(lambda x: x)
    with pytest.raises(Unsupported):
        names.target_name([].append)
