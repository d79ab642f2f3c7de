"""Every script and job file of examples/ has a test that runs it."""

from __future__ import annotations

from pathlib import Path

import torchrelay

ROOT = Path(torchrelay.__file__).parent

KERNELS = ("tests/unit/jobfiles/test_example_kernels.py", "tests/gpu/search/test_kernel_jobs.py")
GPU_JOBS = ("tests/gpu/search/test_example_jobs.py",)
TRAINING_JOBS = ("tests/e2e/training/test_example_jobs.py",)

RUN_BY = {
    "char_gpt.py": ("tests/e2e/client/test_examples.py",),
    "digits_cnn.py": ("tests/e2e/client/test_examples.py",),
    "remote_module.py": ("tests/train_parallel/test_parallel.py",),
    "cpp_inference/infer.cpp": ("tests/train/test_export.py",),
    "demo/__main__.py": ("tests/e2e/own_service/test_demo.py",),
    "export/char_gpt.py": ("tests/train/test_export.py",),
    "kernels/matmul.py": KERNELS,
    "kernels/pointwise.py": KERNELS,
    "kernels/reduction.py": KERNELS,
    "kernels/softmax.py": KERNELS,
    "kernels/matmul.yaml": KERNELS,
    "kernels/pointwise.yaml": GPU_JOBS,
    "kernels/reduction.yaml": GPU_JOBS,
    "kernels/softmax.yaml": GPU_JOBS,
    "train/char_gpt.py": ("tests/train/test_train_examples.py",),
    "train/digits.py": ("tests/train/test_train_examples.py",),
    "train/char_gpt.yaml": TRAINING_JOBS,
    "train/digits.yaml": TRAINING_JOBS,
    "tune/attention.yaml": GPU_JOBS,
    "tune/cpu.yaml": ("tests/e2e/tuning/test_tune_examples.py",),
    "tune/gpt2.yaml": GPU_JOBS,
    "tune/llama-7b.yaml": GPU_JOBS,
    "tune/resnet50.yaml": GPU_JOBS,
}
PARTS = {"demo/figure.py", "demo/runs.py", "train/ranks.py", "cpp_inference/CMakeLists.txt"}
"""Of the examples above; harness/ is what demo, benchmarks and tests run on."""


def test_every_example_is_run_by_a_test() -> None:
    files = {
        path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*.*") if path.is_file()
    }
    files = {path for path in files if path.suffix in (".py", ".yaml", ".cpp", ".txt")}
    ours = {path.as_posix() for path in files if path.parts[0] != "harness" and path.name != "__init__.py"}
    assert ours == set(RUN_BY) | PARTS


def test_these_tests_name_what_they_run() -> None:
    for example, tests in RUN_BY.items():
        path = Path(example)
        name = path.parent.name if path.name == "__main__.py" else path.stem
        for test in tests:
            assert name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not run {example}"
