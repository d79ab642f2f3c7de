"""A training job's file: what it becomes, and how what is wrong is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torchrelay
from torchrelay.clients.jobfiles import train_file
from torchrelay.compiler.api.training.jobs import ProfileSpec, TrainSpec
from torchrelay.compiler.errors import BadTrainJob

EXAMPLES = sorted((Path(torchrelay.__file__).parent / "examples" / "train").glob("*.yaml"))
WHOLE = """\
name: gpt
script: train.py
arguments: [--layers, 4, --python, 3.10, --flag, off, "true"]
directory: ..
requirements:
  - einops>=0.8
environment: {NCCL_DEBUG: WARN, LEVEL: 1, EMPTY: ""}
device: cuda
workers: 8
min_workers: 4
cpus: 2.5
memory: 16GiB
precision: bf16
retries: 5
checkpoints: s3://bucket/gpt
compile: off
capture: false
tune: true
profile: {steps: 10:15, ranks: [0, 7], nvtx: true}
timeout: 2h
"""


def read(text: str, **options: object) -> train_file.TrainFileJob:
    return train_file.read(text.encode(), "job.yaml", name="job", options=options)


def refused(text: str, **options: object) -> str:
    with pytest.raises(BadTrainJob) as caught:
        read(text, **options)
    assert "docs/training.md" in str(caught.value)
    return caught.value.message


def test_every_field_arrives_with_its_line() -> None:
    job = read(WHOLE)
    assert job.spec == TrainSpec(
        name="gpt",
        script="train.py",
        arguments=["--layers", "4", "--python", "3.10", "--flag", "off", "true"],
        requirements=["einops>=0.8"],
        environment={"NCCL_DEBUG": "WARN", "LEVEL": "1", "EMPTY": ""},
        device="cuda",
        workers=8,
        min_workers=4,
        cpus=2.5,
        memory_bytes=16 << 30,
        precision="bf16",
        retries=5,
        checkpoints="s3://bucket/gpt",
        compile="off",
        capture=False,
        tune=True,
        profile=ProfileSpec(10, 15, [0, 7], nvtx=True),
        timeout_seconds=7200,
    )
    assert job.directory == ".."
    assert job.lines["workers"] == 9 and job.lines["package"] == 4 and job.lines["memory_bytes"] == 12
    assert set(job.lines.values()) == {*range(1, 6), *range(7, 21)}
    assert {*train_file.FIELDS.values()} == {each.name for each in msgspec.structs.fields(TrainSpec)} - {
        "kind"
    }


def test_what_a_file_leaves_out_is_the_records_default() -> None:
    assert read("script: train.py").spec == TrainSpec(name="job", script="train.py")
    assert read("function: package.module:main").spec == TrainSpec(name="job", function="package.module:main")
    assert read('script: a.py\nprofile: "3:5"').spec.profile == ProfileSpec(3, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers: 2", "line 1: a job has a script"),
        ("script: a.py\nfunction: m:f", "line 2: a job has a script"),
        ("script: ../a.py", "line 1: script is '../a.py'"),
        ("script: /a.py", "line 1: script is '/a.py'"),
        ("function: module.main", "line 1: function is 'module.main'"),
        ("script: a.py\nworker: 2", "line 2: 'worker' is not a field here; the fields are arguments, "),
        ("script: a.py\nworkers: two", "line 2: workers: Expected `int`, got `str`"),
        ("script: a.py\nworkers: 2\nmin_workers: 3", "line 3: min_workers is 3, and workers 2"),
        ("script: a.py\n\ndevice: tpu", "line 3: device is 'tpu'; allowed: cpu, cuda"),
        ("script: a.py\nprecision: int4", "line 2: precision is 'int4'; allowed: fp32, tf32, bf16, fp16"),
        (
            "script: a.py\nmemory: much",
            "line 2: memory is 'much'; allowed: bytes of each rank, or like 16GiB",
        ),
        ("script: a.py\ncpus: 0", "line 2: cpus: Expected `float` > 0"),
        ("script: a.py\nretries: -1", "line 2: retries: Expected `int` >= 0"),
        (
            "script: a.py\ncheckpoints: out",
            "line 2: checkpoints is 'out'; allowed: a folder that all nodes see",
        ),
        ("script: a.py\ncapture: yes", "line 2: capture: Expected `bool`"),
        ("script: a.py\nprofile: 15:10", "line 2: profile's steps end at 10, and begin at 15"),
        ("script: a.py\nprofile:\n  steps: all", "line 3: profile's steps are like 10:15"),
        (
            "script: a.py\nprofile:\n  steps: 1:2\n  ranks: [1]",
            "line 4: profile's ranks are from 0 to 0",
        ),
        ("script: a.py\ntimeout: soon", "line 2: timeout is 'soon'; allowed: a number, or like 90s"),
        ("script: a.py\narguments: --x", "line 2: arguments: Expected `list`, got `str`"),
        (
            "script: a.py\narguments:\n- a\n- {b: c}",
            "line 4: arguments, item 2: Expected `str`",
        ),
        ("script: a.py\nenvironment:\n  1X: 2", "line 2: environment: Expected `str` matching"),
        ("script: a.py\nscript: b.py", "line 2: script is given twice"),
        ("script: &x a.py", "line 1: anchors and aliases are not used here"),
        ("- script", "line 1: fields are expected here"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(text: str, said: str) -> None:
    assert refused(text).startswith(f"job.yaml, {said}")


def test_options_come_before_the_file_and_have_no_line() -> None:
    text = "script: a.py\nworkers: 2\narguments: [--old, 3.10]"
    job = read(text, workers=4, function="m:f", arguments=["--new"])
    assert job.spec == TrainSpec(name="job", function="m:f", workers=4, arguments=["--new"])
    assert job.lines == {}
    assert refused(text, workers=0) == "job.yaml: workers: Expected `int` >= 1"


def test_a_job_without_a_file_names_the_command_line() -> None:
    job = train_file.of_options({"script": "a.py", "memory": "512M", "arguments": ["--n", "007"]}, name="a")
    assert job.spec == TrainSpec(name="a", script="a.py", memory_bytes=512 << 20, arguments=["--n", "007"])
    with pytest.raises(BadTrainJob, match="the command line: device is 'gpu'; allowed: cpu, cuda"):
        train_file.of_options({"script": "a.py", "device": "gpu"}, name="a")


def test_a_job_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(WHOLE)
    program = (
        "import sys, pathlib; from torchrelay.clients.jobfiles import train_file; "
        f"train_file.load(pathlib.Path({str(tmp_path / 'job.yaml')!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_examples_are_jobs_whose_scripts_are_there(file: Path) -> None:
    job = train_file.load(file)
    assert (file.parent / job.directory / job.spec.script).is_file()


def test_the_documented_file_is_one() -> None:
    page = Path(torchrelay.__file__).parent / "docs" / "training.md"
    block = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    job = train_file.read(block.encode(), "job.yaml")
    assert set(job.lines) == {*train_file.FIELDS.values()} - {"function"}
