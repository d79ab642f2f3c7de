"""The next release adds a field to each message: parts of this one ignore it, or refuse the message where it could
change what is meant (docs/decisions/0038)."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType

import msgspec
import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training import events
from torchrelay.compiler.artifact import container, signing
from torchrelay.compiler.artifact.programs import records as programs
from torchrelay.compiler.artifact.programs import shared
from torchrelay.compiler.request import schema
from torchrelay.compiler.request.operator_table import table
from torchrelay.compiler.tuning import records
from torchrelay.workers.settings import SlotSettings
from torchrelay.workers.slot.actor import CompileSlot
from torchrelay.workers.training.capture import CaptureActor
from torchrelay.workers.training.job_driver import JobDriverActor

PLACES = (
    *("compiler.api", "compiler.artifact", "compiler.request", "compiler.tuning"),
    *("service", "workers.messages", "workers.settings", "workers.training.messages"),
)
IDENTITY = (
    *(schema.WireStruct, schema._Arg, records.TuningRecord),
    *(table.OperatorTable, table.ConfigOption, table._Section),
    *(container.Envelope, container.Signature, signing.Statement, shared.ProgramUpload),
)
"""What a key, a digest or a signature is made of; and all of a program's records."""
ASKED = {
    *("TokenRequest", "QuotaChange", "RotateRequest", "Rotation", "Revocation", "SignQuery"),
    *("TrainRequest", "TrainSpec", "ProfileSpec", "SearchJobSpec", "TuningTask", "KernelSpec"),
    *("TuneRequest", "TuneOptions", "TuneBudget", "OperatorTuneItem", "GraphTuneItem", "KernelTuneItem"),
    *("TuningsRequest", "EntryLookup", "SearchRequest", "TaskRequest"),
}
"""What somebody wants done. A field that is not understood could change what that is."""
FILES = {"Issuer", "SignInFile", "SignInRule", "Ring"}
"""Written by people, or with private keys beside them."""


def modules(name: str) -> Iterator[ModuleType]:
    root = importlib.import_module(f"torchrelay.{name}")
    yield root
    if hasattr(root, "__path__"):
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not found.name.endswith(("__main__", ".generate")):
                yield importlib.import_module(found.name)


def structs() -> list[type[msgspec.Struct]]:
    found = {
        value
        for place in PLACES
        for module in modules(place)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and not getattr(
            value, "__parameters__", ()
        )  # generic: its subclasses are messages, and it cannot be decoded
    }
    return sorted(found, key=lambda struct: (struct.__module__, struct.__name__))


def is_strict(struct: type[msgspec.Struct]) -> bool:
    named = struct.__name__ in ASKED | FILES or struct.__module__ == programs.__name__
    return named or issubclass(struct, IDENTITY)


STRUCTS = structs()


def refuses(struct: type[msgspec.Struct]) -> bool:
    """Whether a message with one more field is refused for that field."""
    config = struct.__struct_config__
    if config.array_like:
        return config.forbid_unknown_fields
    message: dict[str, object] = {"of_the_next_release": [1]}
    if config.tag is not None:
        message = {config.tag_field: config.tag, **message}
    try:
        decoding.from_msgpack(msgspec.msgpack.encode(message), type=struct)
    except msgspec.ValidationError as error:  # else a field is missing
        return "unknown field `of_the_next_release`" in str(error)
    return False


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: f"{struct.__module__}.{struct.__name__}"[11:])
def test_a_field_of_the_next_release(struct: type[msgspec.Struct]) -> None:
    assert refuses(struct) == is_strict(struct)


@pytest.mark.parametrize("name", sorted(ASKED - {"SignQuery"}))  # that is a query string
def test_what_is_refused_is_sent_only_when_it_is_used(name: str) -> None:
    """Else nothing that the next release asks for could be asked of this one."""
    (struct,) = [each for each in STRUCTS if each.__name__ == name]
    required = all(default is msgspec.NODEFAULT for default in struct.__struct_defaults__)
    unset = all(default is msgspec.UNSET for default in struct.__struct_defaults__)
    assert struct.__struct_config__.omit_defaults or required or unset


def test_slot_settings_reach_a_worker_that_knows_fewer_of_them() -> None:
    class Newer(SlotSettings, frozen=True, kw_only=True):
        of_the_next_release: int = 1

    sent = Newer(worker="w", kind="cpu", isolation="off", of_the_next_release=2)
    assert pickle.loads(pickle.dumps(sent)) == SlotSettings(worker="w", kind="cpu", isolation="off")


METHODS: dict[type, str] = {
    CompileSlot: "start lost compile search cancel reply close stop_idle_searches",
    CaptureActor: "placed run",
    JobDriverActor: """warm begin events cancel held close controller attempt turned resize order package warm_process
        record _abandon _abandon_soon _cancelled_as _clear _end_ranks _end_warm _failed _failed_once _fit _new_events
        _not_started _order_ranks _out_of_time _ray_folder _run _save _set_state _take _warm_up _watch_time _why""",
}
"""Ray sends an actor's class as a list of its methods' names, private ones too, all of which the node must have."""


@pytest.mark.parametrize("actor", METHODS)
def test_an_actors_class_has_all_methods_that_the_release_before_names(actor: type) -> None:
    assert [name for name in METHODS[actor].split() if not hasattr(actor, name)] == []


@pytest.mark.parametrize("encode", [msgspec.msgpack.encode, msgspec.json.encode])
def test_an_event_of_an_unknown_kind_is_a_note_in_its_place(encode: Callable[[object], bytes]) -> None:
    decode = decoding.from_msgpack if encode is msgspec.msgpack.encode else decoding.from_json
    step = events.FirstStep(rank=1, at=2.0)
    sent = [{"number": 4, "event": {"type": "thawed", "rank": 1}}, events.NumberedEvent(5, step)]
    note, known = events.read_events(encode(sent), decode)
    assert (note.number, known) == (4, sent[1])
    assert isinstance(note.event, events.JobNote) and "thawed" in note.event.text
    with pytest.raises(msgspec.DecodeError):
        events.read_events(b"no events", decode)
