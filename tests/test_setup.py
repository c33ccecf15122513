"""setup.py's choices, without building anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_setup(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PADAM_EXT_BUILD": "gpu"}, "must be auto, cpu, cuda or none, got 'gpu'"),
        ({"PADAM_EXT_BUILD": "cuda", "CUDACXX": "none"}, "needs a CUDA compiler .* CUDACXX"),
        ({"PADAM_EXT_BUILD": "cuda", "CXX": "none"}, "=cuda needs a C.. compiler .* install"),
        ({"PADAM_EXT_CUDA_ARCHS": "80;sm_90"}, "must list compute .*'80;90', got 'sm_90'"),
        ({"PADAM_EXT_BUILD": "cpu", "CXX": "no-such-compiler"}, "needs a C.. compiler .* install"),
    ],
    ids=["unknown", "no nvcc", "no compiler for cuda", "architectures", "no compiler for cpu"],
)
def test_refusals_say_what_to_do(environment, message):
    result = run_setup("--version", **environment)
    assert result.returncode != 0
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"PADAM_EXT_BUILD": "none"}, "padam_ext: pure-Python install, as PADAM_EXT_BUILD=none"),
        (
            {"PADAM_EXT_BUILD": "", "CXX": "no-such-compiler"},
            "padam_ext: pure-Python install: no C++ compiler was found",
        ),
        ({"CXX": "no-such-compiler"}, "padam_ext: pure-Python install: no C++ compiler was found"),
    ],
    ids=["asked for", "empty means auto", "no compiler"],
)
def test_a_pure_python_install_is_told_in_one_line(environment, line):
    result = run_setup("--version", **environment)
    assert result.returncode == 0, result.stderr
    assert sum(text.startswith(line) for text in result.stderr.splitlines()) == 1
