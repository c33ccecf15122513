"""Installs as a user does, in fresh environments: `make test-build`, which takes minutes."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pybind11
import pytest

pytestmark = pytest.mark.build
ROOT = Path(__file__).parents[1]
# In one process, which builds it once.
uses_sdist = pytest.mark.xdist_group("sdist")
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="there is no nvcc, so no CUDA code that could be built"
)


def run(*command, **environment):
    result = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


class Environment:
    """A new virtual environment without torch."""

    def __init__(self, folder):
        venv.create(folder)  # without a pip of its own, which would take as long as an install
        self.python = folder / "bin" / "python"
        output = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site_packages = Path(output.strip())

    def install(self, *what, **environment):
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        # Where it matters, a test asks for more than the CPU's code, which is built faster.
        return run(
            *pip, "install", "-v", "--no-deps", *what, **{"PADAM_EXT_BUILD": "cpu"} | environment
        )

    def lend_torch(self):
        """Makes torch and what it needs visible, as if it had been installed afterwards."""
        (self.site_packages / "lent.pth").write_text(sysconfig.get_path("purelib"))

    def native_modules(self):
        return list((self.site_packages / "padam_ext").glob("_native*.so"))


IMPORT_KERNELS = "import padam_ext.kernels.multi_tensor_padam as k; print(k.__file__)"
STEP = """
import torch, padam_ext
param = torch.nn.Parameter(torch.ones(5))
param.grad = torch.ones(5)
padam_ext.FusedPadam([param]).step()
print(padam_ext.__file__, padam_ext.available_backends(), param.tolist())
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    # Of a clone: two builds in one folder would get in each other's way.
    run("git", "clone", "--quiet", ROOT, folder / "clone")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, folder / "clone")
    return next(folder.glob("*.tar.gz"))


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


# First, since it takes longest: pytest-xdist deals tests out in the order of this file.
def test_an_editable_install(environment, tmp_path):
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    # With CUDA code where that can be built; it needs no driver.
    built = environment.install(
        "-e", tmp_path / "clone", PADAM_EXT_BUILD="auto", PADAM_EXT_CUDA_ARCHS="9.0"
    )
    environment.lend_torch()
    output = run(environment.python, "-W", "error", "-c", STEP)
    assert str(tmp_path / "clone") in output
    assert "('cpu', 'eager')" in output
    output = run(environment.python, "-c", IMPORT_KERNELS)
    assert str(tmp_path / "clone" / "kernels") in output
    report = run(environment.python, "-m", "padam_ext")
    if shutil.which("nvcc"):
        assert "padam_ext: built the native CPU and CUDA module, by nvcc" in built
        assert re.search(r"^CUDA +code for sm_90, by nvcc ", report, re.MULTILINE)
        assert "cuda     not available: this torch is for the CPU only" in report
    else:
        assert "no CUDA compiler was found" in built
        assert re.search(r"^CUDA +not built in", report, re.MULTILINE)


@uses_sdist
def test_the_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").iterdir()}
    assert sources <= names
    assert {"LICENSE", "README.md", "setup.py", "padam_ext/py.typed"} <= names
    assert {"kernels/padam_math.py", "kernels/multi_tensor_padam.py"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)


@uses_sdist
def test_without_torch_the_native_module_is_built_and_works_once_torch_comes(
    sdist, environment, tmp_path
):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    output = environment.install(sdist, PADAM_EXT_BUILD="auto", CUDACXX=str(broken))
    assert f"could not be built with {broken}, see above: CPU code only" in output
    assert "padam_ext: built the native CPU module\n" in output
    assert len(environment.native_modules()) == 1
    # `kernels` at the top level would be another project's name.
    assert (environment.site_packages / "padam_ext" / "kernels" / "padam_math.py").exists()
    assert not (environment.site_packages / "kernels").exists()
    environment.lend_torch()
    output = run(environment.python, "-W", "error", "-c", STEP)
    assert str(environment.site_packages) in output
    assert "('cpu', 'eager')" in output
    report = run(environment.python, "-m", "padam_ext")
    assert "cpu      available" in report
    assert "cuda     not available: " in report
    assert "CUDA       not built in\n" in report


def configure(folder, *options, **environment):
    """What CMake says, and what it is going to build."""
    output = run(
        Path(sysconfig.get_path("scripts"), "cmake"), "-S", ROOT / "csrc", "-B", folder,
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *options, **environment,
    )  # fmt: skip
    return output, (folder / "summary.txt").read_text()


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "built", "left_out"),
    [(None, "sm_80 sm_90 sm_100 sm_120", None), ("120;80;11;80", "sm_80 sm_120", "sm_11")],
)
def test_architectures(asked, built, left_out, tmp_path):
    options = [f"-DPADAM_CUDA_ARCHS={asked}"] if asked else []
    output, summary = configure(tmp_path, "-DPADAM_CUDA=ON", *options)
    assert summary.endswith(f" for {built}")
    assert left_out is None or f"does not know {left_out}, which is left out" in output


@needs_nvcc
def test_architectures_of_which_nvcc_knows_none(tmp_path):
    with pytest.raises(
        AssertionError,
        match=r"this CUDA\s+compiler knows none of PADAM_EXT_CUDA_ARCHS\s+\(11;12\);\s+it knows",
    ):
        configure(tmp_path, "-DPADAM_CUDA=ON", "-DPADAM_CUDA_ARCHS=11;12")


@uses_sdist
@needs_nvcc
def test_with_nvcc_the_cuda_code_is_built_and_needs_no_driver(sdist, environment):
    output = environment.install(sdist, PADAM_EXT_BUILD="cuda", PADAM_EXT_CUDA_ARCHS="9.0")
    assert "padam_ext: built the native CPU and CUDA module, by nvcc" in output
    environment.lend_torch()
    report = run(environment.python, "-m", "padam_ext")
    assert re.search(r"^CUDA +code for sm_90, by nvcc ", report, re.MULTILINE)
    assert "cuda     not available: this torch is for the CPU only" in report


@uses_sdist
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"PADAM_EXT_BUILD": "none"}, "pure-Python install, as PADAM_EXT_BUILD=none asks"),
        (
            {"PADAM_EXT_BUILD": "auto", "CXX": "no-such-compiler"},
            "pure-Python install: no C++ compiler was found",
        ),
    ],
    ids=["asked for", "no compiler"],
)
def test_a_pure_python_install_works_and_says_so(variables, line, sdist, environment):
    assert line in environment.install(sdist, **variables)
    assert not environment.native_modules()
    environment.lend_torch()
    output = run(environment.python, "-c", STEP)
    assert "('eager',)" in output
    assert "the native module was not built" in output  # the warning
    report = run(environment.python, "-m", "padam_ext")
    assert "cpu      not available: the native module was not built" in report
