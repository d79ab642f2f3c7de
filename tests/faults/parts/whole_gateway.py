"""All that people, jobs and administrators do with a gateway, once."""

from __future__ import annotations

import httpx2
from service_parts import Running, client_of, compiled, follow, graph, post
from torchrelay.compiler.errors import CompileFailed, CompileKilled
from tuning_parts import entries, entry, found, lookup
from waiting import wait_until


def ended(http: httpx2.Client, body: bytes) -> str:
    """How a compile ended."""
    *_, (_, stage, _) = follow(http, post(http, body).json()["key"])
    return stage


def everything(running: Running) -> None:
    """The pool's compiles take a moment, so that who posts can follow them."""
    with running.http() as http:
        assert http.get("/readyz").json()["parts"]["redis"] == "ok"
        running.pool.questions = [lookup(2), found(entry(2)), lookup(2)]
        data = compiled(http, graph(1))
        assert post(http, graph(1)).content == data
        assert [entries(answer) for answer in running.pool.answers] == [[], [entry(2)], [entry(2)]]
        compiled(http, graph(2))
        first, second = running.pool.calls
        assert post(http, graph(3), wait="cache").status_code == 404
        missed = post(http, graph(4))
        for path in (
            f"/misses/{missed.json()['key']}",
            "/v1/stats",
            "/metrics",
            "/v1/cache",
            f"/v1/cache/{first}",
            f"/v1/compiles/{first}",
            "/v1/audit",
            "/v1/tokens",
            "/v1/tunings",
            "/v1/namespaces",
            "/v1/info",
        ):
            assert http.get(path).status_code == 200, path
        for quota in ({"compiles": 3}, {"bytes": 1 << 30, "compile_seconds": 100}):
            assert http.patch("/v1/namespaces/red", json=quota).status_code == 200
        made = http.post("/v1/tokens", json={"name": "x", "roles": ["compile"], "namespace": "red"}).json()
        with client_of(running.url, made["token"]) as red:
            assert post(red, graph(1), wait="cache").status_code == 404
            compiled(red, graph(1))
            assert red.post("/v1/report", json={"reason": "no_worker"}).status_code == 204
        assert http.delete(f"/v1/tokens/{made['record']['id']}").status_code == 200
        winner = f"/v1/autotunes/triton/{'0' * 64}"
        assert http.put(winner, json={"key": "K", "data": "{}"}).status_code == 200
        assert http.get(winner).status_code == 200
        used = {"scripts": ["1" * 64], "keys": [first]}
        assert http.post("/v1/prefetch", json=used).status_code in (200, 204)
        assert http.get(f"/v1/prefetch/{'1' * 64}").status_code == 200
        running.pool.errors = [CompileFailed("no"), CompileKilled("it died")]
        assert [ended(http, graph(size)) for size in (7, 8)] == ["failed", "done"]
        assert http.put(f"/v1/cache/{first}/pin").status_code == 200
        assert http.delete(f"/v1/cache/{first}/pin").status_code == 200
        assert http.post("/v1/cache", content=data).json()["outcome"] == "exists"
        assert http.delete(f"/v1/cache/{second}").status_code == 200
        assert http.post("/v1/keys/epoch").status_code == 200
        assert compiled(http, graph(1)) != data
        # It waits for bodies that began before: body_timeout_seconds.
        wait_until(lambda: http.delete("/v1/namespaces/red").json()["state"] == "done", seconds=30)
        assert http.post("/v1/cache/gc").status_code == 200
