"""Source that runs at compile time: compiled for tokens with the permission alone, in their own namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from command_line import torchrelay, user
from request_parts import kernel, kernels_body, kernels_request
from service_parts import TOKEN, ArtifactPool, RedisServer, Running, StartGateway, compiled, graph, post
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import errors
from torchrelay.compiler.request import codec, key, schema
from torchrelay.service.base.settings import ServiceSettings
from waiting import wait_until


def token(http: httpx2.Client, *, source: bool, **more: Any) -> str:
    asked = {"name": "ada", "roles": ["compile"], "allow_source": source, **more}
    answer = http.post("/v1/tokens", json=asked)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


# --- the gate --------------------------------------------------------------------------------------------


def test_without_the_permission_nothing_is_compiled_and_the_answer_says_what_to_ask_for(
    gateway: Running, http: httpx2.Client
) -> None:
    with gateway.http(token(http, source=False)) as ada:
        for _ in range(2):
            answer = post(ada, kernels_body())
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "source_forbidden")
            assert "'ada'" in error["message"] and "'scale'" in error["message"]
            assert "--allow-source" in error["hint"]
        assert ada.get(f"/v1/compiles/{key.key_of(kernels_request(kernel()))}").status_code == 404
        assert post(ada, graph()).status_code == 202  # everything else is as before
        wait_until(lambda: len(gateway.pool.calls) == 1, seconds=30)


def test_with_the_permission_a_worker_gets_the_source_and_the_log_says_whose(
    gateway: Running, http: httpx2.Client
) -> None:
    with gateway.http(token(http, source=True)) as ada:
        compiled(ada, kernels_body(kernel(), kernel(3, "other")))
    (compiled_key,) = gateway.pool.calls
    told = {entry["action"]: entry for entry in http.get("/v1/audit").json()["entries"]}
    assert told["compile"]["key"] == compiled_key
    assert (told["compile"]["name"], told["compile"]["detail"]) == ("ada", "source: scale, other")
    assert told["token_created"]["detail"].endswith("for ada: compile, source")


def test_what_was_compiled_from_source_is_served_to_all_of_the_namespace_and_to_nobody_else(
    gateway: Running, http: httpx2.Client
) -> None:
    with gateway.http(token(http, source=True)) as ada:
        data = compiled(ada, kernels_body())
    with gateway.http(token(http, source=False)) as reader:
        assert post(reader, kernels_body()).content == data
    for source in (False, True):
        with gateway.http(token(http, source=source, namespace="blue")) as stranger:
            answer = post(stranger, kernels_body())
            assert answer.status_code == (202 if source else 403)
    wait_until(lambda: gateway.pool.namespaces == ["default", "blue"], seconds=30)


def test_a_compile_in_progress_is_not_joined_without_the_permission(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(seconds=30))
    with gateway.http() as http:
        with gateway.http(token(http, source=True)) as ada:
            assert post(ada, kernels_body()).status_code == 202
        with gateway.http(token(http, source=False)) as reader:
            assert post(reader, kernels_body()).status_code == 403


def test_looking_alone_needs_no_permission(gateway: Running, http: httpx2.Client) -> None:
    with gateway.http(token(http, source=False)) as reader:
        assert post(reader, kernels_body(), wait="cache").status_code == 404
    assert gateway.pool.calls == []


def test_the_owners_own_token_has_it_where_the_settings_say_so(
    start_gateway: StartGateway, http: httpx2.Client
) -> None:
    assert post(http, kernels_body()).status_code == 403
    with start_gateway(token_allow_source=True).http() as owner:
        assert post(owner, kernels_body()).status_code == 202


def test_only_who_has_the_permission_gives_it(gateway: Running, http: httpx2.Client) -> None:
    asked = {"name": "bob", "roles": ["compile"], "allow_source": True}
    for source in (False, True):
        administrator = token(http, source=source, roles=["admin"], namespace="red")
        with gateway.http(administrator) as admin:
            answer = admin.post("/v1/tokens", json=asked)
            assert answer.status_code == (201 if source else 403)
            assert admin.post("/v1/tokens", json={**asked, "allow_source": False}).status_code == 201
            assert post(admin, kernels_body()).status_code == (202 if source else 403)


def test_a_token_from_before_there_was_the_permission_does_not_have_it(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    secret = token(http, source=True)
    redis = redis_server.client()
    ((field, stored),) = redis.hgetall("torchrelay:tokens").items()
    record = json.loads(stored)
    assert record.pop("allow_source") is True
    redis.hset("torchrelay:tokens", field, json.dumps(record))
    with gateway.http(secret) as ada:
        assert post(ada, kernels_body()).status_code == 403
    assert http.get("/v1/tokens").json()[0]["allow_source"] is False


# --- what is checked before any of it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"kernels": []}, 422, "forbidden_target"),
        ({"kernels": [kernel(), kernel(3)]}, 422, "malformed"),
        ({"kernels": [kernel(), kernel()]}, 422, "malformed"),
        ({"kernels": [msgspec.structs.replace(kernel(), name="a b")]}, 422, "malformed"),
        ({"kernels": [schema.KernelSource("k", "x" * 5000, [])]}, 413, "limit_exceeded"),
        ({"kernels": [kernel(n) for n in range(9)]}, 413, "limit_exceeded"),
        ({"target": schema.Target("cpu", "", "", 0, [])}, 422, "malformed"),
    ],
)
def test_kernels_that_are_not_as_they_must_be(
    changes: dict[str, Any], status: int, code: str, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(token_allow_source=True, request_kernels=8, request_source_bytes=4000)
    asked = msgspec.structs.replace(kernels_request(kernel()), **changes)
    with gateway.http() as http:
        answer = post(http, codec.pack_request(asked))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert gateway.pool.calls == []


@pytest.mark.parametrize(
    "call",
    [
        {"kernel": schema.UserKernel(1)},
        {"kernel": schema.UserKernel(-1)},
        {"kernel": 0},
        {"grid": schema.ListArg([])},
        {"grid": schema.ListArg([schema.TupleArg([1, 1, 1])] * 2)},
        {"grid": schema.ListArg([schema.TupleArg([1, 1])])},
        {"grid": schema.ListArg([schema.TupleArg([1, 1, "1"])])},
        {"grid": schema.ListArg([schema.TupleArg([1, 1, True])])},
        {"grid": schema.ListArg([schema.TupleArg([1, 1, schema.Ref(9)])])},
        {"constant_args": schema.DictArg([("BLOCK", "a\nb")])},
        {"constant_args": schema.DictArg([("BLOCK", schema.ListArg([]))])},
        {"constant_args": schema.DictArg([("BLOCK", schema.TritonDType("dtype"))])},
        {"constant_args": schema.DictArg([("x_ptr", 1)])},
        {"constant_args": schema.DictArg([("BLOCK=1)", 1)])},
        {"constant_args": schema.DictArg([(1, 1)])},
        {"kwargs": schema.DictArg([("x_ptr", 1)])},
        {"kwargs": schema.DictArg([("x_ptr", schema.Ref(9))])},
        {"kwargs": schema.DictArg([("x ptr", schema.Ref(0))])},
        {"kwargs": schema.ListArg([])},
        {"more": 1},
    ],
)
def test_a_call_that_is_not_as_it_must_be(call: dict[str, Any], start_gateway: StartGateway) -> None:
    gateway = start_gateway(token_allow_source=True)
    with gateway.http() as http:
        answer = post(http, kernels_body(kernel(), **call))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "malformed")
    assert gateway.pool.calls == []


def test_a_kernel_is_no_value_of_any_other_operator(start_gateway: StartGateway) -> None:
    gateway = start_gateway(token_allow_source=True)
    asked = kernels_request(kernel())
    for value in (schema.UserKernel(0), schema.TritonDType("float16")):
        extra = schema.Node("call_function", "_operator.add", [schema.Ref(0), value])
        nodes = [*asked.graph.nodes[:-1], extra, asked.graph.nodes[-1]]
        with gateway.http() as http:
            answer = post(http, codec.pack_request(msgspec.structs.replace(asked, graph=schema.Graph(nodes))))
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "malformed")


# --- who works with it -----------------------------------------------------------------------------------


def test_the_command_gives_the_permission_and_shows_who_has_it(gateway: Running, tmp_path: Path) -> None:
    environment = user(tmp_path, gateway.url, TOKEN)

    def run(*arguments: str) -> str:
        return torchrelay("token", *arguments, environment=environment, status=0).stdout

    allowed = run("create", "ada", "--role", "compile", "--allow-source").strip()
    plain = run("create", "bob", "--role", "compile").strip()
    for secret, status in ((plain, 403), (allowed, 202)):
        with gateway.http(secret) as http:
            assert post(http, kernels_body()).status_code == status
    lines = {line.split()[1]: line for line in run("ls").splitlines()[1:] if line.split()[1:]}
    assert "compile, source" in lines["ada"]
    assert "source" not in lines["bob"]


def test_the_client_hears_what_to_ask_for(gateway: Running, http: httpx2.Client) -> None:
    settings = ClientSettings(
        url=gateway.url, token=token(http, source=False), cache_dir=Path("/nonexistent")
    )
    asked = kernels_request(kernel())
    with GatewayClient(settings) as mine, pytest.raises(errors.SourceForbidden, match="--allow-source"):
        mine.submit(codec.pack_request(asked), key.key_of(asked), cache_only=False, deadline=30.0).result()


def test_the_settings_name_the_limits() -> None:
    limits = ServiceSettings(request_kernels=3, request_source_bytes=4).limits
    assert (limits.kernels, limits.source_bytes) == (3, 4)
