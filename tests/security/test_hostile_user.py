"""Another user of this machine writes where he can: nothing that he wrote is run or trusted, and nothing that is not
his is removed. Needs root, which can become another user."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor import codecache, output_code, triton_bundler
from torchrelay.clients.artifacts.disk_cache import DiskCache
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.artifacts.shared_libraries import loading_folder, store_library
from torchrelay.clients.artifacts.verification import FILE, TrustStore
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.errors import SettingsError
from torchrelay.compiler.process.own_files import own_folder, read_own, why_exposed
from torchrelay.compiler.torch_internals.dynamo.programs import generated_code
from torchrelay.compiler.torch_internals.loading.prebuilt_libraries import (
    install_library_lookup,
    loading_from,
)

OTHER = 65534
KEY = "ab" * 32
As = Callable[[Callable[[], object]], None]


@pytest.fixture
def as_other(tmp_path: Path) -> As:
    """Does something as another user, who may come as far as the test's folder."""
    if os.getuid():
        pytest.skip("only root can become another user")
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | 0o011)

    def do(action: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(OTHER)
                os.setuid(OTHER)
                action()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0

    return do


@pytest.fixture
def others_folder(tmp_path: Path, as_other: As) -> Path:
    """A folder of the other user, in one where all may write."""
    tmp_path.chmod(0o777)
    folder = tmp_path / "his"
    as_other(lambda: folder.mkdir(mode=0o755))
    return folder


# --- files ------------------------------------------------------------------------------------------------------


def test_his_file_is_no_secret_of_this_user_whatever_its_mode(others_folder: Path, as_other: As) -> None:
    secret = others_folder / "secret"
    as_other(lambda: (secret.write_bytes(b"x" * 32), secret.chmod(0o600)))
    with pytest.raises(SettingsError, match=rf"belongs to another user \(uid {OTHER}"):
        read_own(secret)


@pytest.mark.parametrize(("mode", "told"), [(0o640, "readable"), (0o620, "writable"), (0o604, "readable")])
def test_a_secret_that_others_can_open_is_none(tmp_path: Path, mode: int, told: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(mode)
    with pytest.raises(SettingsError, match=f"is {told} by others") as error:
        read_own(secret)
    assert error.value.advice == f"chmod 600 {secret}"


def test_a_secret_that_is_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(SettingsError, match="no regular file"):
        read_own(tmp_path / "secret")


def test_his_list_of_keys_is_not_trusted(others_folder: Path, as_other: As) -> None:
    pinned = "A" * 43 + "="
    settings = ClientSettings(cache_dir=others_folder, state_dir=others_folder, public_keys=(pinned,))
    own = TrustStore(settings).trust()
    record = json.loads(_recorded(settings))
    record[0]["keys"].append({**record[0]["keys"][0], "id": "f" * len(record[0]["keys"][0]["id"])})
    (others_folder / FILE).unlink(missing_ok=True)
    as_other(lambda: (others_folder / FILE).write_text(json.dumps(record)))
    assert TrustStore(settings).trust() == own


def _recorded(settings: ClientSettings) -> str:
    """The file of a client that has learned nothing more than its settings say."""
    assert settings.state_dir is not None
    store = TrustStore(settings)
    store._write(store._known)
    return (settings.state_dir / FILE).read_text()


def test_a_program_with_his_key_is_not_read(others_folder: Path, as_other: As) -> None:
    key = others_folder / "programs.key"
    as_other(lambda: (key.write_bytes(b"k" * 32), key.chmod(0o600)))
    with pytest.raises(SettingsError, match="belongs to another user"):
        ProgramStore(others_folder, others_folder)._secret()


# --- the cache folder -------------------------------------------------------------------------------------------


def test_his_cache_is_read_and_nothing_that_its_links_lead_to_is_removed(
    tmp_path: Path, others_folder: Path, as_other: As, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / KEY).write_bytes(b"x" * 5000)

    def lay_out() -> None:
        (others_folder / "artifacts" / KEY[:2]).mkdir(parents=True)
        (others_folder / "artifacts" / KEY[:2] / KEY).write_bytes(b"a signed artifact")
        (others_folder / "artifacts" / "cd").symlink_to(mine)
        (others_folder / "programs").symlink_to(mine)

    as_other(lay_out)
    cache = DiskCache(others_folder, 1000)
    assert cache.get(KEY) == b"a signed artifact"
    assert not cache.put("cd" * 32, b"y")
    cache.remove(KEY)
    cache.trim()
    assert [path.name for path in mine.iterdir()] == [KEY]
    assert (others_folder / "artifacts" / KEY[:2] / KEY).exists()
    assert f"belongs to another user (uid {OTHER}" in caplog.text


def test_a_folder_of_ours_within_his_is_used_as_it_was_checked(others_folder: Path, as_other: As) -> None:
    """He exchanges it between the check and the use."""
    DiskCache(others_folder, 1000).put(KEY, b"x")
    with own_folder(others_folder / "artifacts") as folder:
        as_other(lambda: (others_folder / "artifacts").rename(others_folder / "moved"))
        as_other(lambda: (others_folder / "artifacts").mkdir())
        assert (folder / KEY[:2] / KEY).read_bytes() == b"x"
    assert not DiskCache(others_folder, 1000).put(KEY, b"y")


# --- what is loaded ---------------------------------------------------------------------------------------------


def test_no_folder_that_he_can_exchange_is_loaded_from(others_folder: Path, tmp_path: Path) -> None:
    inside = others_folder / "ours"
    inside.mkdir(mode=0o700)
    assert "belongs to another user" in why_exposed(inside)
    assert "others may write to" in why_exposed(tmp_path)
    tmp_path.chmod(0o1777)
    assert why_exposed(tmp_path) == ""


def test_libraries_lie_where_he_cannot_write(others_folder: Path, as_other: As) -> None:
    """Also where both the temporary folder and the cache are his."""
    program = """
        import sys
        from pathlib import Path
        from torchrelay.clients.artifacts.shared_libraries import store_library
        path = store_library(b"verified", Path(sys.argv[1]))
        for each in (path, path.parent):
            status = each.stat()
            print(status.st_uid, oct(status.st_mode & 0o777))
        print(path.read_text(), path.parent)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(others_folder)]
    environment = {**os.environ, "TMPDIR": str(others_folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    file, folder, (content, place) = (line.split() for line in done.stdout.splitlines())
    assert file[0] == str(os.getuid())
    assert folder == [str(os.getuid()), "0o700"]
    assert content == "verified"
    assert others_folder not in Path(place).parents
    assert not Path(place).exists()  # it has gone with its process


def test_two_artifacts_libraries_with_one_content_are_one_file(tmp_path: Path) -> None:
    assert (
        store_library(b"one", tmp_path) == store_library(b"one", tmp_path) != store_library(b"two", tmp_path)
    )
    assert loading_folder(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.fixture
def inductor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache folder, as /tmp/torchinductor_USER is where another user has made it first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    install_library_lookup()
    generated_code.install()
    return tmp_path / "inductor"


def _called(key: str, source: str) -> str:
    """What PyTorch's own loading of an artifact's code makes of it."""
    graph = object.__new__(output_code.CompiledFxGraph)
    graph.cache_key, graph.source_code, graph.cache_linemap = key, source, []
    graph.compiled_fn_runner = None

    class Constants:
        def unwrap(self, graph: object) -> None:
            return None

    graph.after_deserialization(Constants())  # type: ignore[arg-type]
    return str(graph.current_callable([]))  # type: ignore[misc]


def test_code_that_lies_under_the_name_of_an_artifacts_is_not_run(
    inductor_cache: Path, tmp_path: Path
) -> None:
    key, verified = "c" + "a" * 51, "def call(args):\n    return 'verified'\n"
    planted = Path(codecache.get_path(key, "py")[2])
    planted.parent.mkdir(parents=True)
    planted.write_text("def call(args):\n    return 'planted'\n")
    with loading_from({}, loading_folder(tmp_path)):
        assert _called(key, verified) == "verified"
        kernel = "def kernel():\n    return 'verified'\n"
        where = Path(codecache.PyCodeCache.load(kernel).__file__ or "")
        assert loading_folder(tmp_path) in where.parents
    assert _called(key, verified) == "planted"  # as PyTorch does elsewhere: the plant works


def test_a_version_of_pytorch_that_names_its_files_otherwise_runs_none_of_them(
    inductor_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecache, "get_path", lambda key, *rest: (key, "", str(tmp_path / f"{key}.py")))
    with (
        loading_from({}, loading_folder(tmp_path)),
        pytest.raises(RuntimeError, match="is not in the folder"),
    ):
        _called("k" * 50, "def call(args):\n    return 'verified'\n")


def test_a_gpu_binary_that_lies_under_the_name_of_an_artifacts_is_not_loaded(
    inductor_cache: Path, tmp_path: Path
) -> None:
    planted = inductor_cache / "triton" / "0" / "HASH" / "kernel.cubin"
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"planted")
    files = [triton_bundler.TritonKernelArtifact("kernel.cubin", b"verified")]
    bundle = triton_bundler.TritonBundle([triton_bundler.TritonKernelArtifacts("HASH", 0, files)], [])
    with loading_from({}, loading_folder(tmp_path)):
        triton_bundler.TritonBundler.read_and_emit(bundle)
        found = Path(triton_bundler.triton_cache_dir(0), "HASH", "kernel.cubin")
        assert found.read_bytes() == b"verified"
        assert loading_folder(tmp_path) in found.parents
    assert "TRITON_CACHE_DIR" not in os.environ
