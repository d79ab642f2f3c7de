"""compiler/tuning/records.py: what names a problem and a place, and how a person reads them."""

import msgspec
import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing

LEFT = Operand("bfloat16", (128, 64), (64, 1))
RIGHT = Operand("bfloat16", (64, 32), (1, 64))
RESULT = Operand("bfloat16", (128, 32), (32, 1))
PLACE = DeviceEnvironment(
    device="NVIDIA H200", capability="9.0", driver="580", torch="2.11.0", triton="3.6.0", cuda="13.0"
)


def test_a_problem_reads_as_a_line():
    problem = Problem("mm", (LEFT, RIGHT), RESULT, (("precision", "high"),))
    assert problem.text() == "mm(bf16[128,64], bf16[64,32]:1,64) -> bf16[128,32] {precision=high}"
    assert Problem("mm", (LEFT, LEFT), RESULT).text() == "mm(bf16[128,64], bf16[128,64]) -> bf16[128,32]"


def test_people_are_told_the_settings_that_say_something():
    usual = {
        "precision": "highest",
        "arg.stride": "(1, 1, 1)",
        "arg.padding": "(0,)",
        "arg.groups": "1",
        "arg.transposed": "False",
    }
    assert Problem("mm", (LEFT, LEFT), RESULT, tuple(sorted(usual.items()))).brief() == (
        "mm(bf16[128,64], bf16[128,64]) -> bf16[128,32]"
    )
    other = {
        "precision": "high",
        "arg.stride": "(1, 2)",
        "arg.padding": "(0, 10)",
        "arg.groups": "11",
        "constants": "1",
    }
    assert Problem("mm", (LEFT, LEFT), RESULT, tuple(sorted(other.items()))).unusual_settings() == sorted(
        other.items()
    )


@pytest.mark.parametrize(
    "other",
    [
        Problem("bmm", (LEFT, RIGHT), RESULT),
        Problem("mm", (RIGHT, LEFT), RESULT),
        Problem("mm", (LEFT, RIGHT), msgspec.structs.replace(RESULT, dtype="float32")),
        Problem("mm", (LEFT, RIGHT), RESULT, (("precision", "high"),)),
    ],
)
def test_whatever_differs_in_a_problem_names_another(other):
    assert records.problem_digest(other) != records.problem_digest(Problem("mm", (LEFT, RIGHT), RESULT))
    assert other.text() != Problem("mm", (LEFT, RIGHT), RESULT).text()
    assert records.NAME.fullmatch(records.problem_digest(other))


@pytest.mark.parametrize("field", ["device", "capability", "driver", "torch", "triton", "cuda"])
def test_another_driver_device_or_version_is_another_place(field):
    assert msgspec.structs.replace(PLACE, **{field: "other"}).digest() != PLACE.digest()


def test_a_question_and_its_answer_travel():
    timing = Timing("aten mm", 0.25, 0.24, 0.26, 40)
    entry = records.TuningEntry(
        problem=Problem("mm", (LEFT, RIGHT), RESULT), place=PLACE, winner=timing, candidates=3, failed=1
    )
    for question in (queries.EntryLookup(PLACE, [entry.problem]), queries.SearchResult(entry)):
        sent = msgspec.msgpack.encode(question)
        assert decoding.from_msgpack(sent, type=queries.TuningQuery) == question
    assert decoding.from_msgpack(
        msgspec.msgpack.encode(queries.KnownEntries([entry])), type=queries.KnownEntries
    ).entries == [entry]


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(milliseconds):
    times = dict.fromkeys(("milliseconds", "low", "high"), milliseconds)
    sent = msgspec.msgpack.encode({"candidate": "aten mm", "samples": 1, **times})
    with pytest.raises(msgspec.ValidationError):
        decoding.from_msgpack(sent, type=Timing)


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.4), (0.1, 0.2)])
def test_a_median_outside_its_interval_is_refused(low, high):
    with pytest.raises(ValueError, match="within its interval"):
        Timing("aten mm", 0.25, low, high, 9)


def test_a_problem_has_one_form():
    with pytest.raises(ValueError, match="sorted"):
        Problem("mm", (LEFT, RIGHT), RESULT, (("b", "1"), ("a", "2")))
    twice = {"op": "mm", "operands": [], "result": RESULT, "settings": [["a", "1"], ["a", "2"]]}
    with pytest.raises(msgspec.ValidationError, match="each given once"):
        decoding.from_msgpack(msgspec.msgpack.encode(twice), type=Problem)
    with pytest.raises(ValueError, match="the dtype is float32"):
        Operand("f32", (8,), (1,))


@pytest.mark.parametrize("number", [-1, 10**30])
@pytest.mark.parametrize("field", ["size", "stride"])
def test_lengths_that_no_tensor_has_are_refused(field, number):
    """10**30 is a number in JSON, and none in MessagePack: it could not be named."""
    sent = msgspec.json.encode({"dtype": "float32", "size": [8], "stride": [1], field: [number]})
    with pytest.raises(msgspec.ValidationError):
        decoding.from_json(sent, type=Operand)


def test_what_is_kept_of_a_time_has_four_digits():
    assert [records.rounded(value) for value in (0.026724999770522118, 1.3309733991642065e-07, 12345.6)] == [
        0.02672,
        1.331e-07,
        12350.0,
    ]


@pytest.mark.parametrize("op", ["mm\n", "", "m m", "mm(", "ä", "m" * 129])
def test_a_name_is_one_word(op):
    sent = msgspec.msgpack.encode({"op": op, "operands": [], "result": RESULT})
    with pytest.raises(msgspec.ValidationError):
        decoding.from_msgpack(sent, type=Problem)
