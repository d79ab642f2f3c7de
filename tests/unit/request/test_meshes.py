"""What a request says of meshes: the gate takes what the client makes, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_check import LIMITS, call, request
from torchrelay.compiler.errors import ForbiddenTarget, LimitExceeded, MalformedRequest, RelayError
from torchrelay.compiler.request import codec, key, meshes, schema
from torchrelay.compiler.request.validate import check_request

ROWS = schema.Mesh(shape=[2, 4], coordinate=[1, 3])


def lies(*placements: str) -> schema.TupleArg:
    return schema.TupleArg(list(placements))


def made(
    mesh: Any = 0, placements: Any = None, shape: Any = None, stride: Any = None, value: int = 0
) -> schema.Node:
    """from_local of a node's value, which is `R` in both dimensions unless something else is said."""
    return call(
        "torchrelay.from_local", schema.Ref(value), mesh, placements or lies("R", "S0"), shape, stride
    )


def spread(*nodes: schema.Node, over: tuple[schema.Mesh, ...] = (ROWS,)) -> schema.GraphRequest:
    return request(*nodes, meshes=list(over))


def test_what_a_client_sends_passes() -> None:
    sizes = schema.TupleArg([8, schema.Sym("s0")])
    check_request(
        spread(
            made(),
            call(
                "torchrelay.redistribute",
                schema.Ref(1),
                lies("Psum", "S-1"),
                True,
                schema.DTypeArg("float32"),
                None,
            ),
            call("torchrelay.to_local", schema.Ref(2), None),
            call("torchrelay.to_local", schema.Ref(2), lies("R", "R")),
            made(shape=sizes, stride=sizes),
        ),
        LIMITS,
    )


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (made(mesh=1), "no mesh, or meshes are out of order"),
        (made(mesh=True), "other arguments"),
        (made(mesh="0"), "other arguments"),
        (made(placements=lies("R")), "1 placements for 2 dimensions"),
        (made(placements=lies("R", "S0\n")), "not known"),
        (made(placements=lies("R", "Pxor")), "not known"),
        (made(placements=schema.TupleArg(["R", 3])), "not known"),
        (made(shape=schema.TupleArg([8])), "something else than sizes"),
        (made(shape=schema.TupleArg([-8]), stride=schema.TupleArg([1])), "something else than sizes"),
        (made(shape=schema.ListArg([8]), stride=schema.TupleArg([1])), "something else than sizes"),
        (call("torchrelay.from_local", 3, 0, lies("R", "R"), None, None), "other arguments"),
        (call("torchrelay.to_local", schema.Ref(0), lies(*"RRRRR")), "no placements"),
        (call("torchrelay.to_local", schema.Ref(0), None, name=1), "keyword arguments"),
        (call("torchrelay.redistribute", schema.Ref(0), lies("R"), False, "float32", None), "dtype"),
        (call("torchrelay.redistribute", schema.Ref(0), lies("R"), 1, None, None), "other arguments"),
    ],
)
def test_other_calls_are_refused_by_name(node: schema.Node, words: str) -> None:
    with pytest.raises(MalformedRequest, match=words):
        check_request(spread(made(), node), LIMITS)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (schema.Mesh(shape=[], coordinate=[]), MalformedRequest),
        (schema.Mesh(shape=[2], coordinate=[0, 0]), MalformedRequest),
        (schema.Mesh(shape=[2], coordinate=[2]), MalformedRequest),
        (schema.Mesh(shape=[2], coordinate=[-1]), MalformedRequest),
        (schema.Mesh(shape=[0], coordinate=[0]), MalformedRequest),
        (schema.Mesh(shape=[1] * 5, coordinate=[0] * 5), MalformedRequest),
        (schema.Mesh(shape=[1024, 2], coordinate=[0, 0]), LimitExceeded),
    ],
)
def test_other_meshes_are_refused(mesh: schema.Mesh, kind: type[RelayError]) -> None:
    node = made(placements=lies(*["R"] * max(1, len(mesh.shape))))
    with pytest.raises(kind, match="mesh 0"):
        check_request(spread(node, over=(mesh,)), LIMITS)


def test_a_mesh_that_nothing_uses_would_give_one_graph_two_keys() -> None:
    with pytest.raises(MalformedRequest, match="1 meshes are not used"):
        check_request(spread(made(), over=(ROWS, ROWS)), LIMITS)


def test_too_many_meshes_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="9 meshes"):
        check_request(spread(made(), over=(ROWS,) * 9), LIMITS)


def test_without_a_mesh_the_calls_are_no_operators() -> None:
    with pytest.raises(ForbiddenTarget, match="from_local"):
        check_request(request(made()), LIMITS)


def test_a_request_without_meshes_has_the_bytes_that_it_had_before_there_were_any() -> None:
    assert b"meshes" not in codec.encode_request(request())


def test_a_graph_is_asked_for_from_each_place_of_its_mesh() -> None:
    given = spread(made())
    found = meshes.at_all_coordinates(given)
    assert given in found and len(found) == 8
    assert len({key.key_of(each) for each in found}) == 8
    assert {msgspec.structs.replace(each, meshes=[ROWS]) == given for each in found} == {True}


def test_a_graph_of_no_mesh_or_of_several_is_asked_for_as_it_is() -> None:
    for each in (request(), spread(made(), made(mesh=1), over=(ROWS, ROWS))):
        assert meshes.at_all_coordinates(each) == [each]
