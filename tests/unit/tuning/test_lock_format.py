"""clients/jobfiles/tuning_lock.py: the file that a team reviews. What is written is read back; what is wrong
names its line."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import strategies
import torchrelay
from hypothesis import given, settings
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.compiler.errors import TuningLockError
from torchrelay.compiler.tuning import records

PLACE = records.DeviceEnvironment(
    device="NVIDIA H200",
    capability="9.0",
    driver="580.65.06",
    torch="2.13.0+cu130",
    triton="3.7.0",
    cuda="13.0",
)
LEFT = records.Operand("bfloat16", (128, 64), (64, 1))
RIGHT = records.Operand("bfloat16", (64, 32), (1, 64))
RESULT = records.Operand("bfloat16", (128, 32), (32, 1))
ATEN = records.Timing("aten mm", 0.0125, 0.0121, 0.0131, 60)
MM = records.TuningEntry(
    problem=records.Problem("mm", (LEFT, RIGHT), RESULT, (("precision", "high"), ("space", "DEFAULT"))),
    place=PLACE,
    winner=records.Timing("triton_mm BLOCK_M=64 num_warps=4", 0.0113, 0.0112, 0.0115, 80),
    runner_up=ATEN,
    aten=ATEN,
    candidates=19,
    failed=1,
    error=0.00012,
    clock="1980 MHz",
    seconds=3.5,
)
BMM = msgspec.structs.replace(
    MM, problem=records.Problem("bmm", (LEFT, RIGHT), RESULT), runner_up=None, error=None, clock=""
)
OLD = msgspec.structs.replace(MM, place=msgspec.structs.replace(PLACE, driver="570.10"))
TEXT = """\
# The kernels that this team takes for these problems, on these devices with these versions, and what was measured.
# Written by `torchrelay tune export`, used with TORCHRELAY_TUNING_LOCK=FILE, explained in docs/tuning.md.
# Times are milliseconds: the median, and a 95% confidence interval of it.

version = 1

[[place]]
device = "NVIDIA H200"
capability = "9.0"
driver = "580.65.06"
torch = "2.13.0+cu130"
triton = "3.7.0"
cuda = "13.0"

[[place.problem]]
problem = "bmm(bf16[128,64], bf16[64,32]:1,64) -> bf16[128,32]"
winner = "triton_mm BLOCK_M=64 num_warps=4"
winner_ms = { median = 0.0113, low = 0.0112, high = 0.0115, samples = 80 }
aten = "aten mm"
aten_ms = { median = 0.0125, low = 0.0121, high = 0.0131, samples = 60 }
candidates = 19
failed = 1
seconds = 3.5

[[place.problem]]
problem = "mm(bf16[128,64], bf16[64,32]:1,64) -> bf16[128,32]"
settings = { precision = "high", space = "DEFAULT" }
winner = "triton_mm BLOCK_M=64 num_warps=4"
winner_ms = { median = 0.0113, low = 0.0112, high = 0.0115, samples = 80 }
runner_up = "aten mm"
runner_up_ms = { median = 0.0125, low = 0.0121, high = 0.0131, samples = 60 }
aten = "aten mm"
aten_ms = { median = 0.0125, low = 0.0121, high = 0.0131, samples = 60 }
candidates = 19
failed = 1
error = 0.00012
clock = "1980 MHz"
seconds = 3.5
"""


@given(st.lists(strategies.tuning_entries, max_size=6, unique_by=records.entry_sort_key), st.randoms())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back_sorted(found: list[records.TuningEntry], chance: random.Random) -> None:
    written = tuning_lock.write(found)
    assert tuning_lock.read(written.encode(), "x.lock") == sorted(found, key=records.entry_sort_key)
    chance.shuffle(found)
    assert tuning_lock.write(found) == written


@given(strategies.tuning_problems)
def test_a_problem_is_its_text_and_settings(problem: records.Problem) -> None:
    assert records.parse_problem(problem.shape(), problem.settings) == problem


def test_the_file_reads_so() -> None:
    assert tuning_lock.write([MM, BMM]) == TEXT
    assert tuning_lock.read(TEXT.encode(), "x.lock") == [BMM, MM]


def test_the_example_of_the_documentation_is_as_written() -> None:
    page = (Path(torchrelay.__file__).parent / "docs" / "tuning.md").read_text()
    _, _, example = page.partition("```toml\n")
    head, _, _ = TEXT.partition("version = ")
    text = head + example.partition("```")[0]
    assert tuning_lock.write(tuning_lock.read(text.encode(), "tuning.md")) == text


def test_a_place_is_written_once_and_places_stand_in_order() -> None:
    written = tuning_lock.write([MM, OLD, BMM])
    assert [line for line in written.splitlines() if line.startswith("driver")] == [
        'driver = "570.10"',
        'driver = "580.65.06"',
    ]


def test_the_order_of_blocks_and_fields_does_not_matter() -> None:
    """As a hand, or git merging two branches, leaves them."""
    head, place, *blocks = TEXT.split("[[place")
    moved = [f"[[place{part}" for part in (place, blocks[1], place, blocks[0])]
    last = "\n".join(["[[ place . problem ]]", *reversed(blocks[0].splitlines()[1:])])
    assert tuning_lock.read("".join([head, *moved]).encode(), "x.lock") == [BMM, MM]
    assert tuning_lock.read("".join([head, *moved[:3], last]).encode(), "x.lock") == [BMM, MM]
    turned = TEXT.replace('precision = "high", space = "DEFAULT"', 'space = "DEFAULT", precision = "high"')
    assert tuning_lock.read(turned.encode(), "x.lock") == [BMM, MM] and turned != TEXT


def test_a_problem_given_twice_names_both_lines() -> None:
    with pytest.raises(
        TuningLockError, match=r"x.lock, line 26: bmm\(.*\) .* already, at line 16\. Keep one"
    ):
        tuning_lock.read(tuning_lock.write([BMM, MM, BMM]).encode(), "x.lock")


def test_what_a_screen_would_not_show_is_escaped() -> None:
    hidden = msgspec.structs.replace(BMM, clock='a"\\\n\u202eb\x7f é')
    written = tuning_lock.write([hidden])
    assert 'clock = "a\\"\\\\\\u000a\\u202eb\\u007f é"' in written
    assert tuning_lock.read(written.encode(), "x.lock") == [hidden]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("median = 0.0113", "median = -1", 18, "winner_ms.median: Expected `float` > 0"),
        ("median = 0.0113", "median = 0.02", 18, "a median lies within its interval"),
        ("median = 0.0113", "median = inf", 18, "winner_ms.median: Expected `float` < 1"),
        ("median = 0.0113, ", "", 18, "Object missing required field `median`"),
        ("candidates = 19", "candidates = 0", 21, "candidates: Expected `int` >= 1"),
        ("candidates = 19\n", "", 15, "missing required field `candidates`"),
        ("failed = 1", "fialed = 1", 22, "unknown field `fialed`"),
        ('aten = "aten mm"\n', "", 19, "aten and aten_ms go together"),
        ("bf16[128,64]", "bf16[128,64", 16, "is no tensor like"),
        ("-> ", "=> ", 16, "is no problem like mm"),
        ("[64,32]:1", f"[64,32]:{1 << 70}", 16, "int"),
        ("[64,32]:1", f"[64,32]:{'1,' * 80}1", 16, "length"),
        ('device = "NVIDIA H200"', "device = 200", 8, "device: Expected `str`"),
        ('cuda = "13.0"\n', "", 7, "missing required field `cuda`"),
        ('cuda = "13.0"', 'cuda = "13.0"\nrocm = "7"', 14, "unknown field `rocm`"),
        ("version = 1", "version = 2\nmore = 1", 5, "version 2, this torchrelay reads 1"),
        ("version = 1", "version = 1\nmore = 1", 6, "unknown field `more`"),
        ("version = 1\n", "", 0, "does not say its version"),
        ("[[place]]", "[[place", 7, "not TOML"),
        ('winner = "', 'winner = "\n', 17, "not TOML"),
        ("clock", "<<<<<<< HEAD\nclock", 37, "not TOML"),
        ("seconds = 3.5\n\n", "seconds = 3.5\n\n\xff\n", 25, "not TOML"),
        ("# The", "\x00", 1, "not TOML"),
    ],
)
def test_a_bad_file_names_its_line(old: str, new: str, line: int, words: str) -> None:
    assert old in TEXT
    with pytest.raises(TuningLockError) as caught:
        tuning_lock.read(TEXT.replace(old, new, 1).encode(), "team.lock")
        raise AssertionError("it was taken")
    where, _, what = caught.value.message.partition(": ")
    assert where == (f"team.lock, line {line}" if line else "team.lock")
    assert words in what
    assert caught.value.advice


def test_an_entry_that_the_service_would_refuse_is_refused_here() -> None:
    long = msgspec.structs.replace(ATEN, candidate="w" * 4096)
    large = msgspec.structs.replace(MM, winner=long, runner_up=long, aten=long, clock="c" * 4096)
    with pytest.raises(TuningLockError, match=r"x.lock, line 15: this entry has more than 16384 bytes"):
        tuning_lock.read(tuning_lock.write([large]).encode(), "x.lock")


def test_an_empty_file_is_no_lock() -> None:
    with pytest.raises(TuningLockError, match="the file is empty") as caught:
        tuning_lock.read(b"# nothing\n", "x.lock")
    assert "torchrelay tune export" in caught.value.advice


def test_a_file_that_is_not_text_names_its_line() -> None:
    with pytest.raises(TuningLockError, match=r"x.lock, line 3: this is not UTF-8"):
        tuning_lock.read(b"\n\n# \xff\n", "x.lock")


@pytest.mark.parametrize(
    "data", [b"a = " + b"[" * 100_000, b"version = " + b"1" * 5000, b"place = 3\nversion = 1"]
)
def test_no_text_breaks_the_reader(data: bytes) -> None:
    with pytest.raises(TuningLockError):
        tuning_lock.read(data, "x.lock")


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(TuningLockError, match=r"No such file or directory\. `torchrelay tune export FILE`"):
        tuning_lock.load(tmp_path / "team.lock")
    (tmp_path / "team.lock").write_text(TEXT)
    assert tuning_lock.load(tmp_path / "team.lock") == [BMM, MM]
