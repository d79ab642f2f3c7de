"""Artifacts as people and scripts look at them, and what a form of a page may do."""

from __future__ import annotations

import time

import httpx2
import msgspec
import pytest
from page_parts import BROWSER, a_graph, record, stranger, tell
from service_parts import Running, compiled, graph
from torchrelay.compiler.api import lowered
from torchrelay.compiler.artifact import container

CPP = '// kernel\n\textern "C" void kernel(float* out) { out[0] = 1 < 2; }\n'


def made(gateway: Running, http: httpx2.Client, number: int = 1) -> str:
    compiled(http, graph(number))
    return gateway.pool.calls[-1]


@pytest.fixture
def browser(gateway: Running, http: httpx2.Client) -> httpx2.Client:
    """Signed in as an administrator."""
    return signed_in(gateway, http.headers["authorization"].partition(" ")[2])


def signed_in(gateway: Running, token: str) -> httpx2.Client:
    client = stranger(gateway)
    assert client.post("/sign-in", data={"token": token}).status_code == 303
    return client


def test_an_artifact_says_what_it_is_and_which_runs_used_it(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    gateway.pool.tuned = [("mm 64x64", 3)]
    key, other = made(gateway, http), made(gateway, http, 2)
    run = tell(http, record(program="uses.py", graphs=(a_graph(key), a_graph(key))))["run"]
    tell(http, record(program="other.py", graphs=(a_graph(other),)))
    found = http.get(f"/artifacts/{key}").json()
    assert {name: found[name] for name in http.get(f"/v1/cache/{key}").json()} == http.get(
        f"/v1/cache/{key}"
    ).json()
    assert [(each["run"], each["program"]) for each in found["runs"]] == [(run, "uses.py")]
    assert (found["runs_read"], found["actions"]) == (2, ["pin", "remove"])
    page = browser.get(f"/artifacts/{key}")
    assert page.status_code == 200
    for text in (key, "uses.py", "mm 64x64", "code.py", "1 of the latest 2 runs", found["entry"]["digest"]):
        assert text in page.text
    assert "other.py" not in page.text


def test_cpp_and_levels_are_shown_with_their_lines(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    levels = [
        lowered.LoweredLevel("prims", [lowered.LoweredPart(name="forward", text="a = 1\nb = <2>")]),
        lowered.LoweredLevel("ptx", [], "the graph has no Triton kernel"),
    ]
    gateway.pool.members = {
        container.LIBRARIES: msgspec.msgpack.encode([(["float*"], CPP, "libraries/k.so")]),
        lowered.MEMBER: msgspec.msgpack.encode(lowered.Lowering(levels)),
    }
    key = made(gateway, http)
    assert http.get(f"/artifacts/{key}/code").json() == {
        "key": key,
        "kernels": [{"name": "libraries/k.so", "text": CPP, "drawable": False}],
        "levels": [
            {
                "level": "prims",
                "listings": [{"name": "forward", "text": "a = 1\nb = <2>", "drawable": False}],
                "missing": "",
            },
            {"level": "ptx", "listings": [], "missing": "the graph has no Triton kernel"},
        ],
    }
    page = browser.get(f"/artifacts/{key}/code").text
    assert "a = 1\nb = &lt;2&gt;" in page and "out[0] = 1 &lt; 2" in page
    assert "the graph has no Triton kernel" in page


def joint(nodes: int = 5) -> lowered.LoweredPart:
    """A parameter, and what its gradient is made of; more nodes follow one another."""
    more = range(5, nodes)
    return lowered.LoweredPart(
        name="joint",
        text='    primals_1: "f32[4]" = ...\n    mul: "f32[4]cpu" = torch.ops.aten.mul.Tensor(primals_1, 2);',
        names=["primals_1", "tangents_1", "mul", "mul_1", "output", *(f"neg_{each}" for each in more)],
        targets=[
            "placeholder",
            "placeholder",
            "aten.mul.Tensor",
            "aten.mul.Tensor",
            "output",
            *["neg"] * len(more),
        ],
        inputs=[[], [], [0], [1, 0], [2, 3], *([each - 1] for each in more)],
        sources=["0", "", "1", "1", "", *[""] * len(more)],
    )


def with_graphs(gateway: Running, http: httpx2.Client, *parts: lowered.LoweredPart) -> str:
    listed = [lowered.LoweredLevel("joint", list(parts)), lowered.LoweredLevel("ptx", [], "none")]
    gateway.pool.members = {lowered.MEMBER: msgspec.msgpack.encode(lowered.Lowering(listed))}
    return made(gateway, http)


def test_a_graph_has_the_modules_and_lines_that_its_author_shared(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    key = with_graphs(gateway, http, joint())
    drawn = http.get(f"/artifacts/{key}/graph").json()
    assert (drawn["level"], drawn["part"], drawn["drawable"]) == ("joint", "joint", [["joint", "joint"]])
    assert "--share" in drawn["note"]
    assert [node["name"] for node in drawn["nodes"] if node.get("module")] == ["tangents_1", "mul_1"]
    assert drawn["nodes"][2] == {
        "name": "mul",
        "target": "aten.mul.Tensor",
        "type": "f32[4]cpu",
        "inputs": [0],
    }
    sources = lowered.NodeSources(["train.py:3"], ["blocks.0"], {"1": (0, 0), "0": (-1, 0), "9": (7, 7)})
    tell(http, record(sources={key: sources}))
    drawn = http.get(f"/artifacts/{key}/graph", params={"level": "joint", "part": "joint"}).json()
    modules = [node.get("module", "") for node in drawn["nodes"]]
    assert modules == ["blocks.0", "backward.blocks.0", "blocks.0", "backward.blocks.0", ""]
    assert [node.get("line", "") for node in drawn["nodes"]] == ["", "", "train.py:3", "train.py:3", ""]
    assert drawn["note"] == ""
    page = browser.get(f"/artifacts/{key}/graph").text
    assert "blocks.0" in page and "train.py:3" in page
    assert 'href="graph?level=joint&amp;part=joint' in browser.get(f"/artifacts/{key}/code").text
    assert "train.py" in browser.get(f"/artifacts/{key}").text  # the run that shared it


def test_many_nodes_without_a_module_are_in_groups(gateway: Running, http: httpx2.Client) -> None:
    key = with_graphs(gateway, http, joint(120))
    modules = [node["module"] for node in http.get(f"/artifacts/{key}/graph").json()["nodes"]]
    assert list(dict.fromkeys(modules)) == ["nodes 0 to 49", "backward", "nodes 50 to 99", "nodes 100 to 149"]


@pytest.mark.parametrize(
    "damage",
    [{"inputs": [[9], [-1], [2], [3], [1 << 62]]}, {"targets": []}, {"sources": ["0"]}, {"names": ["x"] * 9}],
)
def test_a_graph_that_says_nonsense_is_drawn_as_far_as_it_goes(
    gateway: Running, http: httpx2.Client, damage: dict[str, list[object]]
) -> None:
    key = with_graphs(gateway, http, msgspec.structs.replace(joint(), **damage))
    nodes = http.get(f"/artifacts/{key}/graph").json()["nodes"]
    assert all(used < position for position, node in enumerate(nodes) for used in node.get("inputs", []))


def test_what_cannot_be_drawn_is_said(gateway: Running, http: httpx2.Client) -> None:
    key, other = with_graphs(gateway, http, joint()), made(gateway, http, 2)
    for params in ({"level": "ptx"}, {"part": "forward"}):
        answer = http.get(f"/artifacts/{key}/graph", params=params)
        assert answer.status_code == 404
        assert answer.json()["error"]["hint"] == "There are joint joint"
    assert http.get(f"/artifacts/{key}/graph", params={"level": "machine"}).status_code == 422
    gateway.pool.members = {}
    plain = made(gateway, http, 3)
    assert "torchrelay lower" in http.get(f"/artifacts/{plain}/graph").json()["error"]["hint"]
    assert other != plain


@pytest.mark.parametrize("damaged", [b"\xc1", msgspec.msgpack.encode([["x", 1]]), b""])
def test_a_member_that_cannot_be_read_is_said_so(
    gateway: Running, http: httpx2.Client, damaged: bytes
) -> None:
    gateway.pool.members = {container.LIBRARIES: damaged}
    key = made(gateway, http)
    answer = http.get(f"/artifacts/{key}/code")
    assert answer.status_code == 404
    assert container.LIBRARIES in answer.json()["error"]["message"]
    assert http.get(f"/artifacts/{key}").status_code == 200


def test_artifacts_without_code_say_so(gateway: Running, http: httpx2.Client, browser: httpx2.Client) -> None:
    key = made(gateway, http)
    assert http.get(f"/artifacts/{key}/code").json() == {"key": key, "kernels": [], "levels": []}
    assert "There is no C++ in it" in browser.get(f"/artifacts/{key}/code").text
    assert http.get(f"/artifacts/{'0' * 64}").status_code == 404


def test_artifacts_are_listed_in_pages_the_last_used_first(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.cache.admin.LISTED", 2)
    keys = []
    for number in range(4):
        keys.append(made(gateway, http, number))
        http.get("/artifacts")  # uses are written, each at its own time
        time.sleep(0.005)
    http.put(f"/v1/cache/{keys[0]}/pin")
    first = http.get("/artifacts").json()
    assert [each["key"] for each in first["entries"]] == [keys[3], keys[2]]
    assert [each["key"] for each in first["pinned"]] == [keys[0]]
    rest = http.get("/artifacts", params={"first": first["following"]}).json()
    assert [each["key"] for each in rest["entries"]] == [keys[1]]
    assert (rest["pinned"], rest["following"]) == ([], 0)
    page = browser.get("/artifacts").text
    assert f"artifacts/{keys[0]}" in page and "artifacts?first=2" in page


def test_a_form_pins_unpins_and_removes(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    key = made(gateway, http)
    for action, pinned in (("pin", True), ("unpin", False)):
        answer = browser.post(f"/artifacts/{key}", data={"action": action})
        assert (answer.status_code, answer.headers["location"]) == (303, key)
        assert http.get(f"/v1/cache/{key}").json()["entry"]["pinned"] is pinned
    refused = browser.post(f"/artifacts/{key}", data={"action": "burn"})
    assert refused.status_code == 422, refused.text
    assert "pin, unpin, remove" in refused.text, refused.text
    answer = browser.post(f"/artifacts/{key}?namespace=default", data={"action": "remove"})
    assert answer.headers["location"] == "../artifacts?namespace=default"
    assert http.get(f"/v1/cache/{key}").status_code == 404
    actions = [each["action"] for each in http.get("/v1/audit").json()["entries"]]
    assert {"pinned", "unpinned", "deleted"} <= set(actions)


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
    ],
)
def test_a_form_of_another_site_or_port_does_nothing(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client, headers: dict[str, str]
) -> None:
    key = made(gateway, http)
    answer = browser.post(f"/artifacts/{key}", data={"action": "remove"}, headers=headers)
    assert answer.status_code == 403 and "another site" in answer.text
    assert http.get(f"/v1/cache/{key}").status_code == 200


@pytest.mark.parametrize("name", ["Host", "X-Forwarded-Host"])
def test_a_form_of_ours_is_taken_behind_a_proxy(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client, name: str
) -> None:
    key = made(gateway, http)
    headers = {"Origin": "https://relay.example:8443", name: "relay.example:8443"}
    assert browser.post(f"/artifacts/{key}", data={"action": "pin"}, headers=headers).status_code == 303


def test_who_is_no_administrator_sees_no_buttons_and_has_none(gateway: Running, http: httpx2.Client) -> None:
    key = made(gateway, http)
    token = http.post("/v1/tokens", json={"name": "reader", "roles": ["read"]}).json()["token"]
    reader = signed_in(gateway, token)
    page = reader.get(f"/artifacts/{key}")
    assert page.status_code == 200 and 'name="action"' not in page.text
    assert reader.post(f"/artifacts/{key}", data={"action": "remove"}).status_code == 403
    assert stranger(gateway).post(f"/artifacts/{key}", data={"action": "remove"}).status_code == 401
    assert reader.delete(f"/v1/cache/{key}").status_code == 401  # a browser's token opens pages alone
    assert http.get(f"/v1/cache/{key}").status_code == 200


def test_the_file_is_downloaded_as_it_was_signed(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    key = made(gateway, http)
    answer = browser.get(f"/artifacts/{key}/file", headers=BROWSER)
    assert answer.content == http.get(f"/v1/artifacts/{key}").content
    assert answer.headers["content-disposition"] == f'attachment; filename="{key}.artifact"'
