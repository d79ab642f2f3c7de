"""README, CONTRIBUTING, CHANGELOG and docs/ say what is there: links, paths, commands, settings, job files, code.

`make check` runs this file. It needs no network and no service.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torchrelay
from certificates import Authority
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torchrelay.clients.jobfiles import train_file, tune_file, tuning_lock
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.api.training import rank_environment
from torchrelay.service.access.oidc.sign_in_file import read_issuers

ROOT = Path(torchrelay.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("[!_]*.md"), *(ROOT / "docs").glob("[!_]*/*.md")])
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
PARSER = MarkdownIt("commonmark").enable("table")

GIVEN = """
import os, signal, torch
class Model(torch.nn.Linear):
    calls = 0
    def forward(self, text, targets):
        self.calls += 1
        if self.calls == 3:  # the job is cancelled
            os.kill(os.getpid(), signal.SIGTERM)
        return (super().forward(text) - targets).square().mean()
dataset = torch.utils.data.TensorDataset(torch.ones(256, 4), torch.ones(256, 1))
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
"""
"""What the pages' Python takes for given."""


INCOMPLETE = ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage")


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens(page: Path) -> Iterator[Token]:
    """Blocks, and what stands inside them."""
    for token in PARSER.parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def blocks(page: Path, language: str) -> list[str]:
    return [each.content for each in tokens(page) if each.type == "fence" and each.info == language]


def inline(page: Path) -> list[str]:
    return [each.content for each in tokens(page) if each.type == "code_inline"]


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Command lines, and whether they have all their arguments: in a text they need not."""
    for line in "\n".join(each.content for each in tokens(page) if each.type == "fence").splitlines():
        if line.startswith("torchrelay "):
            yield line, True
    for text in inline(page):
        first, *others = text.split(" | ")  # `torchrelay token create | ls | revoke`
        if first.startswith("torchrelay "):
            yield first, False
            for other in others:
                yield f"{first.rpartition(' ')[0]} {other}", False


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    found = set()
    parsed = PARSER.parse(page.read_text(encoding="utf-8"))
    for opening, heading in pairwise(parsed):
        if opening.type == "heading_open":
            text = "".join(each.content for each in heading.children or ())
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return found


@pytest.fixture(scope="module")
def command_line() -> Any:
    """The real commands, which parse their arguments and then do nothing."""
    import typer.main
    from torchrelay.clients.commands import application

    def silence(command: Any) -> None:
        for each in getattr(command, "commands", {}).values():
            silence(each)
        if not hasattr(command, "commands"):
            command.callback = None

    command = typer.main.get_command(application())
    silence(command)
    return command


@pytest.fixture(scope="module")
def passed_on() -> dict[str, set[str]]:
    """The options of the commands that are programs of their own."""
    found = {}
    programs = {
        "up": ["torchrelay.service", "up"],
        **{role: ["torchrelay.service", role] for role in ("gateway", "dispatcher", "signer", "worker")},
        "demo": ["torchrelay.examples.demo"],
    }
    for name, module in programs.items():
        program = [sys.executable, "-m", *module, "--help"]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        found[name] = set(re.findall(r"--[a-z-]+", done.stdout))
    return found


def variables() -> set[str]:
    from torchrelay.service.base.settings import ServiceSettings

    return (
        {f"TORCHRELAY_{name.upper()}" for name in ClientSettings.__struct_fields__}
        | {f"TORCHRELAY_SERVICE_{name.upper()}" for name in ServiceSettings.model_fields}
        | {value for name, value in vars(rank_environment).items() if name.endswith("_ENVIRONMENT")}
    )


def test_every_page_is_read() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/glossary.md"} <= {*map(called, PAGES)}


def test_no_page_of_docs_is_too_long_to_read() -> None:
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [called(page) for page in pages if page.read_text().count("\n") > 250] == []


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_links_and_their_anchors_are_there(page: Path) -> None:
    targets = [each.attrGet("href") or each.attrGet("src") for each in tokens(page)]
    for target in (str(each) for each in targets if each and not re.match("[a-z]+:", str(each))):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_paths_of_the_repository_exist(page: Path) -> None:
    for text in inline(page):
        for word in text.split():
            path, _, test = word.partition("::")
            if re.fullmatch(r"[\w./-]+", path) and path.partition("/")[0] in FOLDERS and "/" in path:
                assert (ROOT / path).exists(), f"{word} is not there"
                assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_commands_and_their_options_exist(
    page: Path, command_line: Any, passed_on: dict[str, set[str]]
) -> None:
    for line, whole in commands(page):
        first, *arguments = shlex.split(line, comments=True)[1:]
        if first in passed_on:
            given = {each.partition("=")[0] for each in arguments if each.startswith("--")}
            assert given <= passed_on[first], line
        elif arguments:
            try:
                command_line.main([first, *arguments], standalone_mode=False)
            except Exception as error:
                if whole or type(error).__name__ not in INCOMPLETE:
                    raise AssertionError(f"{line}: {error}") from error
        else:
            assert first in command_line.commands, line


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_settings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = variables()
    for name in re.findall(r"(?<!\w)TORCHRELAY_[A-Z_]*[A-Z](?!\w|\*|_\*)", text):
        assert name in known, f"{name} is no setting"
    for end in re.findall(r"\.\.\.(_[A-Z_]+)", text):
        assert any(name.endswith(end) for name in known), f"...{end} is no setting's end"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=called)
def test_job_files_can_be_read(page: Path) -> None:
    for text in blocks(page, "yaml"):
        reader = train_file if re.search("^(script|function):", text, re.MULTILINE) else tune_file
        whole = text.replace('..."', "0" * 60 + '"')  # a key, cut short
        reader.read(whole.encode(), called(page))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=called)
def test_lock_and_sign_in_files_can_be_read(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in blocks(page, "toml"):
        if "issuers" in tomllib.loads(text):
            text = re.sub('ca_file = ".*"', f'ca_file = "{Authority(tmp_path).file}"', text)
            (tmp_path / "sign-in.toml").write_text(text)
            assert read_issuers(tmp_path / "sign-in.toml")
        else:
            tuning_lock.read(text.encode(), called(page))


PYTHON = [(page, text) for page in PAGES for text in blocks(page, "python")]


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=[called(page) for page, _ in PYTHON])
def test_python_runs(page: Path, text: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    environment |= {"XDG_CONFIG_HOME": str(tmp_path), "TORCH_COMPILE_DISABLE": "1"}
    environment[rank_environment.CHECKPOINTS_ENVIRONMENT] = str(tmp_path)
    program = [sys.executable, "-c", GIVEN + text]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
