"""The client's way from a Dynamo graph to a callable, without a service: capture, compile, sign, verify, load, bind.

Run as a program, this file is the process that compiles: it forks for each request, as a fork server does.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torchrelay.clients.artifacts import load
from torchrelay.clients.artifacts.source import ArtifactRequest
from torchrelay.clients.artifacts.verification import verify
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust
from torchrelay.compiler.errors import RelayError, SizesDiffer, SpecializeInputs, Unsupported, from_code
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.graph.toolchain import local_target
from torchrelay.compiler.pipeline import pipeline, precompiled_header
from torchrelay.compiler.request import codec, validate
from torchrelay.compiler.request import key as keys
from torchrelay.compiler.torch_internals.dynamo import backend_interface
from torchrelay.compiler.torch_internals.inductor import compile_fx


class CompileProcess:
    """Compiles requests, each in a child of its own, with one precompiled C++ header for all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a process that uses a GPU cannot fork
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def compile(self, request: bytes, key: str) -> bytes:
        """An unsigned artifact. Raises what compile_request raises."""
        assert self._process.stdin is not None and self._process.stdout is not None
        (self._folder / "request").write_bytes(request)
        self._process.stdin.write(f"{key}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer:
            raise from_code(*answer)
        return (self._folder / "artifact").read_bytes()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class LocalBackend:
    """A back end of torch.compile that has each graph compiled by `process`, or here what cannot be sent, as the client
    does. graphs: how many it has bound. refused: why the others could not be sent."""

    def __init__(self, process: CompileProcess, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._signer = Ed25519PrivateKey.generate()
        self._trust = Trust.of([self._signer.public_key()])
        self._compiled: dict[str, bytes] = {}
        self.graphs = 0
        self.refused: list[str] = []

    def __call__(self, gm: torch.fx.GraphModule, examples: list[Any], **options: Any) -> Callable[..., Any]:
        try:
            captured = capture(gm, examples, mode="default", options={})
        except Unsupported as error:
            self.refused.append(error.message)
            return compile_fx.compile_graph(gm, examples, {})
        canonical = codec.encode_request(captured.request)
        wanted = ArtifactRequest(captured, canonical, keys.key_of(captured.request, canonical))
        try:
            try:
                compiled = self._loaded(wanted)
            except SizesDiffer:
                compiled = self._loaded(wanted.with_exact_sizes())
        except SpecializeInputs as error:
            raise backend_interface.restart_analysis([captured.floats[p] for p in error.positions]) from None
        self.graphs += 1
        return captured.bind(compiled)

    def _loaded(self, wanted: ArtifactRequest) -> Callable[..., Any]:
        request = wanted.captured.request
        body = codec.pack_request(request)
        validate.check_request(codec.unpack_request(body), codec.Limits())
        if wanted.key not in self._compiled:
            unsigned = self._process.compile(body, wanted.key)
            signature = container.make_signature(
                unsigned, self._signer, key=wanted.key, namespace="", epoch=0, signed_at=0
            )
            signed = container.with_head(unsigned, container.head_with(unsigned, signature))
            self._compiled[wanted.key] = signed
        opened = verify(self._compiled[wanted.key], self._trust, key=wanted.key, request=request)
        return load.load(opened, wanted.captured, self._folder / "cache")


def main(folder: Path) -> None:
    pipeline.preload()
    pipeline.compile_once(folder)
    headers = folder / "headers"
    headers.mkdir()
    _in_child(lambda: precompiled_header.build(local_target("cpu"), str(torch.__version__), headers))
    answer = folder / "answer"
    for line in sys.stdin:
        answer.write_text(json.dumps(["crash", "the compile's process ended"]))
        _in_child(functools.partial(_answer, folder, headers, line.strip()))
        print(answer.read_text(), flush=True)


def _answer(folder: Path, headers: Path, key: str) -> None:
    (folder / "answer").write_text(json.dumps(_compiled(folder, headers, key)))


def _compiled(folder: Path, headers: Path, key: str) -> list[str]:
    """[] or the error's code and message."""
    request = codec.unpack_request((folder / "request").read_bytes())
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder) as work,
            precompiled_header.borrowed(headers, Path(work, "headers")),
        ):
            made = pipeline.compile_request(
                request,
                key=key,
                worker="test",
                workdir=Path(work),
                progress=lambda stage, detail: None,
                threads=1,
            )
    except RelayError as error:
        return [error.code, error.message]
    except Exception:
        return ["crash", traceback.format_exc()]
    (folder / "artifact").write_bytes(made)
    return []


def _in_child(work: Callable[[], Any]) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.dup2(2, 1)  # what a compiler prints is no answer
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
