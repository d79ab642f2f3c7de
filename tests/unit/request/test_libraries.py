"""Operators of known libraries: the gate takes them with their library's version, and a worker only its own version."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_check import LIMITS, call, request
from torchrelay.compiler.errors import ForbiddenTarget, LibraryMismatch, MalformedRequest
from torchrelay.compiler.graph import names, toolchain
from torchrelay.compiler.request import codec, key, schema
from torchrelay.compiler.request.operator_table import table
from torchrelay.compiler.request.validate import check_request

OPERATOR = "torch.ops.transformers.grouped_mm_fallback"
LIBRARY = schema.Library("transformers", "5.24.0", "ab" * 32)


def calling(target: str = OPERATOR, *named: schema.Library) -> schema.GraphRequest:
    return request(call(target, schema.Ref(0), schema.Ref(0), schema.Ref(0)), libraries=list(named))


def test_a_known_librarys_operator_passes_with_the_version_and_the_source_it_has() -> None:
    check_request(calling(OPERATOR, LIBRARY), LIMITS)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (calling(OPERATOR), MalformedRequest),
        (calling("torch.ops.aten.relu.default", LIBRARY), MalformedRequest),
        (calling(OPERATOR, LIBRARY, LIBRARY), MalformedRequest),
        (calling(OPERATOR, msgspec.structs.replace(LIBRARY, name="os")), MalformedRequest),
        (calling(OPERATOR, msgspec.structs.replace(LIBRARY, version="5/../x")), MalformedRequest),
        (calling(OPERATOR, msgspec.structs.replace(LIBRARY, source="ab")), MalformedRequest),
        (calling("torch.ops.transformers.grouped_mm_fallback_backward", LIBRARY), ForbiddenTarget),
        (calling("torch.ops.transformers.other", LIBRARY), ForbiddenTarget),
        (calling("torch.ops.unknown.operator.default"), ForbiddenTarget),
    ],
)
def test_anything_else_is_refused(given: schema.GraphRequest, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        check_request(given, LIMITS)


def test_another_version_and_another_source_are_other_keys_and_no_library_changes_none() -> None:
    others = [
        calling(OPERATOR, msgspec.structs.replace(LIBRARY, version="5.24.1")),
        calling(OPERATOR, msgspec.structs.replace(LIBRARY, source="cd" * 32)),
    ]
    assert len({key.key_of(each) for each in (calling(OPERATOR, LIBRARY), *others)}) == 3
    assert b"libraries" not in codec.encode_request(request())


def test_a_worker_with_another_version_refuses_with_both_versions() -> None:
    have = toolchain.local_library("transformers")
    toolchain.require_libraries([have])
    with pytest.raises(
        LibraryMismatch, match=rf"the worker has transformers {have.version} .*client 1\.2\.3"
    ):
        toolchain.require_libraries([msgspec.structs.replace(have, version="1.2.3")])
    with pytest.raises(LibraryMismatch, match="client"):
        toolchain.require_libraries([msgspec.structs.replace(have, source="0" * 64)])


def test_the_operator_is_the_one_that_the_module_registers() -> None:
    for name, library in table.LIBRARIES.items():
        toolchain.require_libraries([toolchain.local_library(name)])
        for operator in library.operators:
            assert names.target_name(names.resolve_target(operator)) == operator


def test_a_worker_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = table.KnownLibrary("torchrelay_absent", frozenset())
    monkeypatch.setitem(toolchain.LIBRARIES, "torchrelay-absent", absent)
    with pytest.raises(LibraryMismatch, match="no usable torchrelay-absent"):
        toolchain.require_libraries([schema.Library("torchrelay-absent", "1", "0" * 64)])
