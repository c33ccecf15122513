"""Installs as a user does, in fresh environments: `make test-build`, which takes minutes."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.build
ROOT = Path(__file__).parents[1]


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
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        output = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site_packages = Path(output.strip())

    def install(self, *what, **environment):
        pip = (self.python, "-m", "pip", "--disable-pip-version-check", "install", "-v")
        return run(*pip, "--no-deps", *what, **environment)

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
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


def test_the_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").iterdir()}
    assert sources <= names
    assert {"LICENSE", "README.md", "setup.py", "padam_ext/py.typed"} <= names
    assert {"kernels/padam_math.py", "kernels/multi_tensor_padam.py"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)


def test_without_torch_the_native_module_is_built_and_works_once_torch_comes(sdist, environment):
    output = environment.install(sdist)
    assert "padam_ext: built the native CPU module" in output
    assert len(environment.native_modules()) == 1
    # `kernels` at the top level would be another project's name.
    assert (environment.site_packages / "padam_ext" / "kernels" / "padam_math.py").exists()
    assert not (environment.site_packages / "kernels").exists()
    environment.lend_torch()
    output = run(environment.python, "-W", "error", "-c", STEP)
    assert str(environment.site_packages) in output
    assert "('cpu', 'eager')" in output
    assert "cpu      available" in run(environment.python, "-m", "padam_ext")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"PADAM_EXT_BUILD": "none"}, "pure-Python install, as PADAM_EXT_BUILD=none asks"),
        ({"CXX": "no-such-compiler"}, "pure-Python install: no C++ compiler was found"),
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


def test_an_editable_install(environment, tmp_path):
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    environment.install("-e", tmp_path / "clone")
    environment.lend_torch()
    output = run(environment.python, "-W", "error", "-c", STEP)
    assert str(tmp_path / "clone") in output
    assert "('cpu', 'eager')" in output
    output = run(environment.python, "-c", IMPORT_KERNELS)
    assert str(tmp_path / "clone" / "kernels") in output
