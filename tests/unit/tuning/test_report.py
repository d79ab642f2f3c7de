"""A report says what was gained, where it stands below the ceilings, and what became slower; users' texts stay text."""

from __future__ import annotations

import html.parser
import sys

import msgspec
import pytest
from torchrelay.clients.commands.jobs import tune as tune_command
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.clients.reports.tuning import page as tuning_page
from torchrelay.clients.reports.tuning import plots, summary
from torchrelay.compiler.api.html import page as html_page
from torchrelay.compiler.api.tuning.jobs import TuneProgress, TuneResult
from torchrelay.compiler.errors import SettingsError, TuningLockError
from torchrelay.compiler.tuning.records import (
    CandidateFailure,
    DeviceEnvironment,
    Timing,
    TuningEntry,
    parse_problem,
)

PLACE = DeviceEnvironment("NVIDIA H200", "9.0", "580.1", "2.13.0", "3.7.0", "13.0")
MM = parse_problem("mm(bf16[1024,1024], bf16[1024,1024]) -> bf16[1024,1024]")
SKINNY = parse_problem("mm(bf16[8,1024], bf16[1024,1024]) -> bf16[8,1024]")
EVIL = "<script>alert('x')</script>\"&\u202e"


def timing(candidate: str, milliseconds: float) -> Timing:
    return Timing(candidate, milliseconds, milliseconds * 0.99, milliseconds * 1.01, 40)


def entry(problem=MM, milliseconds=1.0, aten=1.25, default=1.5, **more) -> TuningEntry:
    return TuningEntry(
        problem=problem,
        place=more.pop("place", PLACE),
        winner=timing("triton_mm BLOCK_M=64, BLOCK_N=32, num_warps=4", milliseconds),
        aten=None if aten is None else timing("aten mm", aten),
        default=None if default is None else timing("aten mm", default),
        candidates=20,
        failed=2,
        seconds=4.0,
        **more,
    )


def ceiling(shape: str, milliseconds: float) -> TuneResult:
    problem = parse_problem(shape)
    made = TuningEntry(problem=problem, place=PLACE, winner=timing("aten", milliseconds), candidates=1)
    return TuneResult(item="ceiling", entry=made, ceiling=True)


CEILINGS = [
    ceiling("copy(f32[1000000]) -> f32[1000000]", 0.01),  # 800 GB/s
    ceiling("mm(bf16[4096,4096], bf16[4096,4096]) -> bf16[4096,4096]", 2 * 4096**3 / 8e12 * 1e3),  # 8 TFLOP/s
]


class Read(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_what_a_step_saves_is_counted_by_graph():
    results = [
        TuneResult(item="a", entry=entry(MM, 1.0, default=1.5), graphs=[("ab" * 32, 12), ("cd" * 32, 1)]),
        TuneResult(item="b", entry=entry(SKINNY, 0.5, default=0.6), graphs=[("ab" * 32, 2)]),
        TuneResult(
            item="c",
            entry=entry(parse_problem("bmm(f32[2,4,4], f32[2,4,4]) -> f32[2,4,4]"), 3.0, default=None),
            graphs=[("ab" * 32, 1)],
        ),
    ]
    report = summary.report("job", results)
    first, second = report.graphs
    assert (first.key, first.problems, second.key) == ("ab" * 32, 2, "cd" * 32)
    assert first.saved == pytest.approx(12 * 0.5 + 2 * 0.1)
    assert second.saved == pytest.approx(0.5)
    rows = {row.result.item: row for row in report.devices[0].rows}
    assert rows["a"].saved == pytest.approx(13 * 0.5)
    assert rows["c"].saved is None


def test_totals_leave_out_what_was_known_and_what_is_a_ceiling():
    results = [
        TuneResult(item="a", entry=entry(MM, 1.0, aten=1.21, default=1.44)),
        TuneResult(item="b", entry=entry(SKINNY, 1.0, aten=1.0, default=1.0), known=True),
        *CEILINGS,
    ]
    report = summary.report("job", results)
    assert (report.problems, report.known, report.seconds) == (2, 1, 4.0)
    assert report.of_aten == pytest.approx(1.1)
    assert report.of_default == pytest.approx(1.2)


def test_an_item_that_another_one_repeats_counts_once():
    twice = [TuneResult(item=name, entry=entry()) for name in "ab"]
    assert summary.report("job", twice).problems == 1


def test_how_matrices_are_padded_is_shown_and_gains_nothing_twice():
    pad = parse_problem("pad_mm.mm(bf16[1000,1001], bf16[1001,1000]) -> bf16[1000,1000]")
    results = [TuneResult(item="a", entry=entry(pad, 1.0, aten=9.0, default=9.0), graphs=[("ab" * 32, 1)])]
    report = summary.report("job", results)
    assert (report.problems, report.of_default, report.of_aten) == (1, None, None)
    assert all(graph.saved == 0 for graph in report.graphs)


def test_a_row_has_its_share_of_the_roofline():
    report = summary.report("job", [TuneResult(item="a", entry=entry()), *CEILINGS])
    (row,) = report.devices[0].rows
    assert row.share is not None and row.share.bound == "compute"
    assert row.share.share == pytest.approx(2 * 1024**3 / 8e12 / 1e-3)
    text = Read(tuning_page.page(report)).text
    assert "27%" in text and "800 GB/s" in text and "8.00 TFLOP/s" in text


def test_regressions_stand_before_everything_else():
    old = [entry(MM, 0.5), entry(SKINNY, 2.0)]
    new = [TuneResult(item="a", entry=entry(MM, 1.0)), TuneResult(item="b", entry=entry(SKINNY, 1.0))]
    report = summary.report("job", new, old=old, against="last.lock")
    assert report.changes is not None and [change.kind for change in report.changes] == ["slower", "faster"]
    text = Read(tuning_page.page(report)).text
    assert text.index("1 slower than in") < text.index("slower +100.0%") < text.index("of the roofline")
    nothing = summary.report("job", new[1:], old=old, against="last.lock")
    assert "Nothing is slower" in tuning_page.page(nothing)


def test_a_jobs_report_does_not_miss_what_the_job_did_not_have(job):
    old = [entry(MM), entry(SKINNY)]
    results = [TuneResult(item="a", entry=entry(MM))]
    part = summary.report("job", results, job=job, old=old)
    whole = summary.report("file.lock", results, old=old)
    assert part.changes == []
    assert whole.changes is not None and [change.kind for change in whole.changes] == ["gone"]


def test_what_users_wrote_is_text_in_the_page():
    evil = msgspec.structs.replace(
        entry(), winner=timing(EVIL, 1.0), place=msgspec.structs.replace(PLACE, device=EVIL), clock=EVIL
    )
    results = [
        TuneResult(
            item=EVIL,
            line=3,
            entry=evil,
            timings=[timing(EVIL, 1.0), timing("aten mm", 2.0)],
            failures=[CandidateFailure(EVIL, EVIL)],
            graphs=[(EVIL, 1)],
        )
    ]
    page = tuning_page.page(summary.report(EVIL, results, old=[entry()], against=EVIL))
    read = Read(page)
    assert "script" not in read.tags and not read.open
    assert "\u202e" not in page
    assert "alert" in read.text


def test_a_page_loads_nothing_and_closes_what_it_opens():
    results = [
        TuneResult(
            item="a",
            entry=entry(),
            timings=[timing(f"triton_mm BLOCK_M={n}", 1.0 + n / 7) for n in range(60)],
            failures=[CandidateFailure("triton_mm", "out of resource")],
        ),
        *CEILINGS,
    ]
    page = tuning_page.page(summary.report("job", results))
    read = Read(page)
    assert not read.open
    assert not [mark for mark in ("http:", "https:", "url(", "@import") if mark in page]
    assert "default-src 'none'" in page
    assert "and 20 more" in read.text  # of 60 candidates
    assert read.tags.count("svg") == 1  # the roofline


def test_what_came_to_nothing_is_listed_with_its_line_and_why(job):
    progress = [
        TuneProgress(item=n, line=line, kind="operator", state=state, text=text, detail=detail)
        for n, (line, state, text, detail) in enumerate(
            [
                (4, "failed", "mm(...)", f"no candidate works {EVIL}"),
                (7, "done", "bmm(...)", ""),
                (9, "skipped", "conv(...)", "the budget was over"),
            ]
        )
    ]
    report = summary.report("job", [], job=job, progress=progress)
    read = Read(tuning_page.page(report))
    assert "line 4" in read.text and "no candidate works" in read.text and "script" not in read.tags
    assert "the budget was over" in read.text and "bmm" not in read.text


def test_a_report_of_nothing_says_so():
    page = tuning_page.page(summary.report("job", []))
    assert "Nothing has been found yet" in page


@pytest.mark.parametrize(
    ("milliseconds", "shown"), [(0.0113, "11.3"), (0.9996, "1000"), (12.345, "12.3"), (1234.5, "1234")]
)
def test_times_have_three_digits(milliseconds, shown):
    assert html_page.milliseconds(milliseconds).startswith(shown)


# --- the command -------------------------------------------------------------------------------------------


def test_a_lock_file_alone_gives_a_page_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    lock, old, out = tmp_path / "new.lock", tmp_path / "old.lock", tmp_path / "out" / "report"
    large = parse_problem("mm(bf16[4096,4096], bf16[4096,4096]) -> bf16[4096,4096]")
    copied = msgspec.structs.replace(entry(CEILINGS[0].entry.problem, 0.01), aten=None, default=None)
    lock.write_text(tuning_lock.write([entry(), entry(SKINNY), entry(large, 20.0), copied]))
    old.write_text(tuning_lock.write([entry(MM, 0.5)]))
    tune_command.write_report(str(lock), out, old, True)
    said = capsys.readouterr().out
    assert said.startswith("3 problems, 1 slower than in old.lock: ")
    assert sorted(path.name for path in out.iterdir()) == ["faster.png", "index.html"]
    assert (out / "faster.png").read_bytes().startswith(b"\x89PNG")
    assert "new.lock" in (out / "index.html").read_text()


def test_without_pictures_nothing_but_the_page_is_written(tmp_path, monkeypatch):
    lock = tmp_path / "a.lock"
    lock.write_text(tuning_lock.write([entry()]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="matplotlib") as error:
        tune_command.write_report(str(lock), tmp_path / "out", None, True)
    assert "[report]'`" in str(error.value)
    assert not (tmp_path / "out").exists()
    tune_command.write_report(str(lock), tmp_path / "out", None, False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.html"]


def test_a_file_that_is_no_lock_is_named(tmp_path):
    with pytest.raises(TuningLockError, match=r"nothing\.lock"):
        tune_command.write_report(str(tmp_path / "nothing.lock"), tmp_path / "out", None, False)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    lock = tmp_path / "a.lock"
    lock.write_text(tuning_lock.write([entry()]))
    with pytest.raises(SettingsError, match=r"a\.lock/out cannot be written"):
        tune_command.write_report(str(lock), lock / "out", None, False)


def test_the_picture_draws_names_that_are_no_formulas():
    pytest.importorskip("matplotlib")
    drawn = plots.faster(summary.report("$\\frac{$", [TuneResult(item="$\\frac{$", entry=entry())]))
    assert drawn is not None and drawn.startswith(b"\x89PNG")


def test_without_another_choice_to_compare_with_there_is_no_picture():
    alone = TuneResult(item="a", entry=entry(aten=None, default=None))
    assert plots.faster(summary.report("job", [alone])) is None


@pytest.fixture
def job():
    from torchrelay.compiler.api.tuning.jobs import TuneJob
    from torchrelay.compiler.request import schema

    return TuneJob(
        id="0" * 16,
        name="job",
        state="done",
        by="someone",
        created=1.0,
        toolchain=schema.Toolchain("cp311", "2.13.0", "3.7.0", "13.0", "linux-x86_64"),
        target=schema.Target("cuda", "NVIDIA H200", "9.0", 132, []),
    )


def test_one_candidate_no_error_and_few_flops_read_as_people_say_them():
    mm = parse_problem("mm(f64[1,1], f64[1,1]) -> f64[1,1]")
    tiny = TuningEntry(problem=mm, place=PLACE, winner=timing("aten", 0.04), candidates=1, error=0.0)
    text = Read(tuning_page.page(summary.report("job", [TuneResult(item="a", entry=tiny)]))).text
    assert "1 candidate" in text and "1 candidates" not in text
    assert "equal to the reference" in text
    assert "50.0 kFLOP/s" in text
