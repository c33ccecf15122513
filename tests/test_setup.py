"""setup.py's choices, without building anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_setup(*arguments, folder=ROOT, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=folder,
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
        ({"MAX_JOBS": "0"}, "MAX_JOBS must be a whole number from 1, got '0'"),
        ({"PADAM_EXT_CUDA_ARCHS": "80;sm_90"}, "must list compute .*'80;90', got 'sm_90'"),
        ({"PADAM_EXT_BUILD": "cpu", "CXX": "no-such-compiler"}, "needs a C.. compiler .* install"),
    ],
    ids=[
        "unknown",
        "no nvcc",
        "no compiler for cuda",
        "jobs",
        "architectures",
        "no compiler for cpu",
    ],
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


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CUDACXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}, "no CUDA compiler was found"),
        ({"CUDACXX": "no-such nvcc"}, "CUDACXX=no-such nvcc is no program"),
    ],
    ids=["nothing", "a wrong name"],
)
def test_why_there_is_no_cuda_code_is_told_in_one_line(environment, line, tmp_path):
    for name in ("c++", "cmake"):  # all that there is: no nvcc, and no build that could succeed
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    folders = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    result = run_setup("build_ext", *folders, PATH=str(tmp_path), PADAM_EXT_BUILD="", **environment)
    assert result.returncode != 0
    assert (
        f"padam_ext: {line} (looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH): CPU code only"
        in result.stderr
    )
    assert "the build failed, see above" in result.stderr


def test_arguments_behind_the_name_of_a_compiler(tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    result = run_setup(
        "--version", PADAM_EXT_BUILD="cuda", CUDACXX=f"{tmp_path / 'nvcc'} -ccbin g++"
    )
    assert result.returncode == 0, result.stderr


def test_a_module_that_an_earlier_build_left_is_told(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "padam_ext").mkdir()
    (tmp_path / "padam_ext" / "_native.so").touch()
    result = run_setup("--version", folder=tmp_path, PADAM_EXT_BUILD="none")
    assert f"an earlier build left {tmp_path / 'padam_ext' / '_native.so'}; delete" in result.stderr
