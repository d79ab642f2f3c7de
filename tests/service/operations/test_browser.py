"""The pages in a real browser: they load nothing foreign, run nothing that users wrote, are accessible, and work.

Skips without Chromium, Playwright and axe (`make .venv/.browser`). RELAY_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from service_parts import TOKEN, Running, compiled, graph, post
from torchrelay.compiler.api import lowered
from torchrelay.compiler.api.runs import GraphRecord, Outcome, RefusedOperator, RunRecord, TracedFunction
from torchrelay.compiler.api.training.events import JobNote
from torchrelay.compiler.api.training.node_messages import node_job_id
from torchrelay.compiler.artifact import container
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing, TuningEntry
from training_parts import TrainingPool, begun
from waiting import wait_until

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("axe_playwright_python")
CHROMIUM = shutil.which("chromium") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{7*7}}\u202e"
SIZES = {"wide": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """A browser's page; what it was refused, and whatever was loaded or run that must not be."""

    def __init__(self, context: Any, gateway: Running) -> None:
        self.page = context.new_page()
        self.url = gateway.url
        self.problems: list[str] = []
        self.page.on(
            "dialog", lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss())
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", self._check_address)

    def _note(self, message: Any) -> None:
        if message.type == "error" and "status of 4" not in message.text:
            self.problems.append(message.text)

    def _check_address(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"loads {request.url}")

    def open(self, path: str) -> Any:
        answer = self.page.goto(f"{self.url}/{path}")
        assert answer is not None
        return answer

    def sign_in(self, token: str = TOKEN) -> None:
        self.page.fill("#token", token)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def follow(self, what: Any) -> None:
        """Clicks on what leads to another page, and waits for that."""
        with self.page.expect_navigation():
            (self.page.locator(what) if isinstance(what, str) else what).click()

    def violations(self) -> list[str]:
        """What axe finds wrong by WCAG 2.2 AA."""
        self.page.evaluate(AXE)
        options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
        found = self.page.evaluate("options => axe.run(document, options)", options)["violations"]
        return [f"{each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]


@pytest.fixture
def show(chromium: Any, gateway: Running) -> Iterator[Any]:
    contexts = []

    def start(**options: Any) -> Shown:
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        return Shown(context, gateway)

    yield start
    for context in contexts:
        context.close()


def lowered_part(name: str, layers: int = 30, nodes: int = 40) -> lowered.LoweredPart:
    """A graph of layers, each a chain whose last node takes its first."""
    count = layers * nodes
    inputs = [[each - 1, *[each - nodes + 1] * (each % nodes == nodes - 1)] for each in range(count)]
    return lowered.LoweredPart(
        name=name,
        text="\n".join(f'  {name}{each}: "{EVIL}"' for each in range(count)),
        names=[f"{name}{each}" for each in range(count)],
        targets=["placeholder", *[name] * (count - 1)],
        inputs=[[], *inputs[1:]],
        sources=[str(each) for each in range(count)],
    )


@pytest.fixture
def paths(gateway: Running, http: httpx2.Client) -> dict[str, str]:
    """Addresses of every kind of page, of a namespace in which what users can choose is hostile."""
    gateway.pool.tuned = [(EVIL, 2)]
    gateway.pool.unverified = EVIL
    gateway.pool.members = {
        container.LIBRARIES: msgspec.msgpack.encode([([], f"// {EVIL}\nint main() {{}}\n", EVIL)]),
        lowered.MEMBER: msgspec.msgpack.encode(
            lowered.Lowering([lowered.LoweredLevel("joint", [lowered_part(EVIL)], EVIL)])
        ),
    }
    compiled(http, graph(1))
    compiled(http, graph(2))
    key, missed = gateway.pool.calls[-2:]
    outcomes: list[tuple[str, Outcome]] = [(key, "hit"), (missed, "miss"), ("", "fallback")]
    graphs = tuple(
        GraphRecord(
            key=each, outcome=outcome, seconds=1.5, nodes=40, reason=EVIL, ended=3.0, stages={"wait": 1.0}
        )
        for each, outcome in outcomes
    )
    told = RunRecord(
        program=EVIL,
        pid=1,
        ended=1.8e9,
        torch=EVIL,
        hits=1,
        misses=1,
        fallbacks={EVIL: 1},
        graphs=graphs,
        seconds={"wait": 3.0, EVIL: 9.0},
        started={EVIL: 2},
        traced=(TracedFunction(EVIL, EVIL),),
        sources={key: lowered.NodeSources([EVIL], [EVIL], {str(each): (0, 0) for each in range(40)})},
        refused=(RefusedOperator(EVIL, EVIL, 1),),
        rank=0,
        launch="none/0/h/29500/2",
    )
    place = DeviceEnvironment(EVIL, EVIL, "", "2.13.0", "", "")
    side = Operand("float32", (64, 64), (64, 1))
    winners = [
        TuningEntry(
            problem=Problem("mm", (side, side), side, (("arg", EVIL),)),
            place=msgspec.structs.replace(place, torch=torch),
            winner=Timing(EVIL, milliseconds, milliseconds, milliseconds, 9),
            candidates=3,
        )
        for torch, milliseconds in (("2.11.0", 1.0), (EVIL, 2.0))
    ]
    http.post("/v1/tunings", content=msgspec.json.encode({"entries": winners})).raise_for_status()
    runs = [
        http.post("/v1/runs", content=msgspec.json.encode(each)).json()["run"]
        for each in (told, msgspec.structs.replace(told, rank=1), told)
    ]
    http.post("/v1/report", json={"reason": "unsupported"})
    http.post("/v1/tokens", json={"name": "alice", "roles": ["read", "compile"]}).raise_for_status()
    return {
        **{f"overview-{period}": f"overview?period={period}" for period in ("day", "year")},
        "now": "now",
        "runs": "runs",
        "run": f"runs/{runs[0]}",
        "compared": f"runs/{runs[-1]}?with={runs[0]}",
        "miss": f"misses/{missed}",
        "artifacts": "artifacts",
        "artifact": f"artifacts/{key}",
        "code": f"artifacts/{key}/code",
        "graph": f"artifacts/{key}/graph",
        "kernels": "kernels",
        "administration": "administration",
        "docs": "docs",
        "errors": "errors",
        "sign-in": "sign-in",
        "error": f"runs/{'0' * 16}",
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_runs_nothing(
    show: Any, paths: dict[str, str], size: str, scheme: str
) -> None:
    shown = show(viewport=SIZES[size], color_scheme=scheme)
    shown.open("sign-in")
    shown.sign_in()
    found = {}
    for name, path in paths.items():
        shown.open(path)
        if folder := os.environ.get("RELAY_SCREENSHOTS"):
            shown.page.screenshot(path=Path(folder) / f"{name}-{size}-{scheme}.png", full_page=True)
        problems = shown.violations()
        scripts = shown.page.evaluate("[...document.scripts].map(each => each.src)")
        scripts = [
            each
            for each in scripts
            if name not in ("now", "graph") or not re.fullmatch(rf"{shown.url}/static/\w+\.js", each)
        ]
        if scripts or shown.page.evaluate("document.querySelectorAll('main img').length"):
            problems.append("what a user wrote became an element")
        if (over := shown.page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
            problems.append(f"{over} pixels wider than the window")
        if "49" in shown.page.title():
            problems.append("a template ran what a user wrote")
        if problems:
            found[name] = problems
    assert found == {}
    assert shown.problems == []


def test_hostile_texts_are_shown_as_they_are(show: Any, paths: dict[str, str]) -> None:
    shown = show()
    shown.open(paths["run"])
    shown.sign_in()
    text = EVIL.replace("\u202e", "\ufffd")
    assert shown.page.text_content("h1") == text
    assert shown.page.locator("td", has_text=text).count() >= 3
    assert shown.problems == []


def test_a_person_signs_in_looks_around_and_signs_out(show: Any, paths: dict[str, str]) -> None:
    shown = show()
    page = shown.page
    shown.open("overview?period=day")
    assert page.title() == "Sign in"
    shown.sign_in("wrong")
    assert "not known" in page.text_content("[role=alert]")
    shown.sign_in()
    assert page.url.endswith("/overview?period=day") and page.title() == "Overview"
    shown.follow(".periods >> text=month")
    assert page.get_attribute("[aria-current]", "href") == "?period=month"
    shown.follow("text=All runs")
    shown.follow(page.locator("table a").first)
    assert re.search("/runs/[0-9a-f]{16}$", page.url)
    shown.follow("text=Compare with the run before")
    assert page.locator("h2", has_text="Compared with").count() == 1
    shown.follow("text=what differs")
    assert "/misses/" in page.url and "differ" in page.text_content("main")
    shown.follow("text=Sign out")
    assert page.title() == "Sign in"
    assert shown.open("runs").status == 401
    assert shown.problems == []


def test_a_page_renews_itself(
    show: Any, paths: dict[str, str], gateway: Running, http: httpx2.Client
) -> None:
    shown = show()
    shown.open("now")
    shown.sign_in()
    assert "None runs or waits." in shown.page.text_content("#now")
    gateway.pool.seconds = 8.0
    key = post(http, graph(77)).json()["key"]
    shown.page.wait_for_selector(f"#now code:has-text('{key[:12]}')")
    shown.page.wait_for_selector("#now >> text=None runs or waits.")
    assert shown.problems == []


@pytest.mark.parametrize("size", SIZES)
def test_a_jobs_page_renews_itself_is_accessible_and_stops_the_job(
    chromium: Any, start_gateway: Callable[..., Running], tmp_path: Path, size: str
) -> None:
    pool = TrainingPool(tmp_path, pace=0.3)
    pool.says, pool.inserted = [EVIL], [JobNote(level="warning", text=EVIL, rank=1)]
    gateway = start_gateway(pool)
    with gateway.http() as http:
        done = begun(http, capture=False, name=EVIL.replace("\u202e", ""))
        wait_until(lambda: bool(pool.engine(node_job_id("default", done)).turns), seconds=20)
        pool.pace = 60.0
        open_one = begun(http, capture=False)
    context = chromium.new_context(viewport=SIZES[size])
    shown = Shown(context, gateway)
    page = shown.page
    shown.open(f"jobs/{done}")
    shown.sign_in()
    page.wait_for_selector("#job pre:has-text('step 3')")
    page.wait_for_selector(".tiles strong:has-text('done')")
    text = EVIL.replace("\u202e", "\ufffd")
    assert text in page.text_content("pre") and text[:-1] in page.text_content("h1")
    for path in (f"jobs/{done}", "jobs", f"jobs/{open_one}"):
        shown.open(path)
        if folder := os.environ.get("RELAY_SCREENSHOTS"):
            page.screenshot(
                path=Path(folder) / f"{path.partition('/')[0]}-{path[-4:]}-{size}.png", full_page=True
            )
        assert shown.violations() == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    shown.follow("text=Stop")
    page.wait_for_selector(".tiles strong:has-text('cancelled')")
    assert shown.problems == []
    context.close()


def test_a_graph_opens_by_module_moves_and_tells_of_a_node(
    show: Any, gateway: Running, http: httpx2.Client
) -> None:
    layers, nodes = 100, 50
    levels = [lowered.LoweredLevel("joint", [lowered_part("n", layers, nodes)])]
    gateway.pool.members = {lowered.MEMBER: msgspec.msgpack.encode(lowered.Lowering(levels))}
    compiled(http, graph(1))
    key = gateway.pool.calls[-1]
    places = {str(each): (0, each // nodes) for each in range(layers * nodes)}
    shared = lowered.NodeSources(["train.py:7"], [f"h.{layer}" for layer in range(layers)], places)
    told = RunRecord(program="train.py", pid=1, ended=1.8e9, sources={key: shared})
    http.post("/v1/runs", content=msgspec.json.encode(told)).raise_for_status()
    shown = show()
    page = shown.page
    shown.open(f"artifacts/{key}/graph")
    shown.sign_in()
    boxes = page.locator("#graph g")
    page.wait_for_selector("#graph g.group")
    assert boxes.count() == 1  # 5,000 nodes in 100 layers, more than are shown at first
    page.locator("#graph g[aria-label='open module h, 5000 nodes']").click()
    assert page.locator("#graph g.group").count() == layers
    page.locator("#graph g[aria-label='open module h.1, 50 nodes']").press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "close module h.1"
    page.locator("#graph g[aria-label='node n52']").press("Enter")
    about = page.text_content("#node")
    assert "train.py:7" in about and "n51" in about and "h.1" in about
    before = page.get_attribute("#graph svg", "viewBox")
    area = page.locator("#graph svg").bounding_box()
    page.mouse.move(area["x"] + 30, area["y"] + 200)
    page.mouse.down()
    page.mouse.move(area["x"] + 90, area["y"] + 120)
    page.mouse.up()
    moved = page.get_attribute("#graph svg", "viewBox")
    page.click("text=Larger")
    assert len({before, moved, page.get_attribute("#graph svg", "viewBox")}) == 3
    page.click("text=Close all")
    assert boxes.count() == 1
    assert shown.violations() == shown.problems == []


def test_pages_work_without_scripts_and_by_the_keyboard(show: Any, paths: dict[str, str]) -> None:
    shown = show(java_script_enabled=False)
    shown.open("overview")
    shown.sign_in()
    for _ in range(4):
        shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_url("**/runs")
    assert shown.page.text_content("h1") == "Runs"
    shown.open(paths["graph"])
    assert "needs JavaScript" in shown.page.text_content("main")
    assert shown.page.locator("tbody tr").count() == 100


def test_an_administrator_pins_downloads_and_removes_an_artifact(
    show: Any, paths: dict[str, str], http: httpx2.Client, tmp_path: Path
) -> None:
    shown, key = show(), paths["artifact"].partition("/")[2]
    page = shown.page
    shown.open(paths["run"])
    shown.sign_in()
    shown.follow(page.locator(f"a[href$='{key}']").first)
    shown.follow("button[value=pin]")
    assert page.locator("text=pinned: never evicted").count() == 1
    assert http.get(f"/v1/cache/{key}").json()["entry"]["pinned"]
    with page.expect_download() as started:
        page.click("text=Download")
    started.value.save_as(tmp_path / "artifact")
    assert (tmp_path / "artifact").read_bytes() == http.get(f"/v1/artifacts/{key}").content
    shown.follow("a[href$='/code']")
    assert EVIL.replace("\u202e", "\ufffd") in page.text_content("pre")
    shown.follow(f"text=artifact {key[:12]}")
    shown.follow("button[value=unpin]")
    shown.follow("button[value=remove]")
    assert page.url.endswith("/artifacts") and key[:12] not in page.text_content("main")
    assert http.get(f"/v1/cache/{key}").status_code == 404
    assert shown.problems == []


def test_the_hours_of_a_year_are_downloaded(show: Any, paths: dict[str, str], tmp_path: Path) -> None:
    shown = show()
    shown.open("overview")
    shown.sign_in()
    with shown.page.expect_download() as started:
        shown.page.click("text=each hour of a year")
    assert started.value.suggested_filename == "torchrelay-hours.csv"
    started.value.save_as(tmp_path / "hours.csv")
    names, first, *_ = (tmp_path / "hours.csv").read_text().splitlines()
    assert names.startswith("began,requests,hits") and re.match(r"\d{4}-\d\d-\d\dT\d\d:00:00Z,\d+,", first)
