"""Builds the native module with CMake and Ninja; everything else is in pyproject.toml.

PADAM_EXT_BUILD chooses what is built:
    auto  (default) native CPU code if there is a C++ compiler, else a pure-Python install; with
          CUDA code if there is a CUDA compiler as well
    cpu   native CPU code; an error without a C++ compiler
    cuda  native CPU and CUDA code; an error without either compiler
    none  a pure-Python install

PADAM_EXT_CUDA_ARCHS lists compute capabilities, as in "80;90"; the default is those that
csrc/cuda.cmake names. The CUDA compiler is the one that CUDACXX names, else nvcc on PATH, else that
in CUDA_HOME or CUDA_PATH. MAX_JOBS bounds the number of parallel compilations.
PADAM_EXT_CMAKE_ARGS is handed to CMake.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def say(message: str) -> None:
    """Prints one line that `pip install -v` shows."""
    print(f"padam_ext: {message}", file=sys.stderr, flush=True)


def cxx_compiler() -> str | None:
    """The C++ compiler that CMake would take, or None."""
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)[0]] if asked else ["c++", "g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def cuda_compiler() -> str | None:
    """The CUDA compiler, or None."""
    if asked := os.environ.get("CUDACXX"):
        return shutil.which(asked)
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    candidates = ["nvcc", *(str(Path(home, "bin", "nvcc")) for home in homes)]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def cuda_architectures() -> list[str]:
    """The compute capabilities asked for, as CMake writes them; none for the default."""
    asked = os.environ.get("PADAM_EXT_CUDA_ARCHS", "")
    names = [name for name in re.split(r"[;,\s]+", asked) if name]
    for name in names:
        if not re.fullmatch(r"\d{2,3}|\d{1,2}\.\d", name):
            raise SystemExit(
                f"PADAM_EXT_CUDA_ARCHS must list compute capabilities, as in '80;90', got {name!r}"
            )
    return [name.replace(".", "") for name in names]


def native_extensions() -> list[Extension]:
    """The native module, or nothing for a pure-Python install."""
    choice = os.environ.get("PADAM_EXT_BUILD") or "auto"
    if choice not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"PADAM_EXT_BUILD must be auto, cpu, cuda or none, got {choice!r}")
    if choice == "none":
        say("pure-Python install, as PADAM_EXT_BUILD=none asks")
        return []
    if cxx_compiler() is None:
        if choice in ("cpu", "cuda"):
            raise SystemExit(
                f"PADAM_EXT_BUILD={choice} needs a C++ compiler and found none: install one "
                "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install) or name it in CXX"
            )
        say("pure-Python install: no C++ compiler was found, so steps run as PyTorch operations")
        return []
    if choice == "cuda" and cuda_compiler() is None:
        raise SystemExit(
            "PADAM_EXT_BUILD=cuda needs a CUDA compiler and found none: install the CUDA toolkit "
            "(developer.nvidia.com/cuda-downloads, or conda install cuda-nvcc cuda-cudart-dev), "
            "then put nvcc on PATH or name it in CUDACXX"
        )
    cuda_architectures()  # refuses what it cannot read before anything is built
    return [Extension("padam_ext._native", sources=[])]


class CMakeBuild(build_ext):
    """Has csrc/CMakeLists.txt build the module where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        """Configures, builds, and reports what was built."""
        import pybind11  # of the build environment

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cmake = shutil.which("cmake") or "cmake"
        jobs = os.environ.get("MAX_JOBS")
        choice = os.environ.get("PADAM_EXT_BUILD") or "auto"
        nvcc = None if choice == "cpu" else cuda_compiler()
        cuda = {"cpu": "OFF", "cuda": "REQUIRED"}.get(choice, "AUTO" if nvcc else "OFF")
        if choice == "auto" and nvcc is None:
            say("no CUDA compiler was found (CUDACXX, PATH, CUDA_HOME): CPU code only")
        archs = cuda_architectures()
        environment = os.environ | ({"CUDACXX": nvcc} if nvcc else {})
        # A fresh folder each time: CMake's cache would remember tools of an earlier isolated
        # build environment, which no longer exist.
        with TemporaryDirectory(prefix="padam_ext-build-") as build:
            configure = [
                cmake, "-S", str(ROOT / "csrc"), "-B", build, "-G", "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DPADAM_CUDA={cuda}",
                *([f"-DPADAM_CUDA_ARCHS={';'.join(archs)}"] if archs else []),
                *shlex.split(os.environ.get("PADAM_EXT_CMAKE_ARGS", "")),
            ]  # fmt: skip
            subprocess.run(configure, check=True, env=environment)
            parallel = ["--parallel", jobs] if jobs else []
            subprocess.run([cmake, "--build", build, *parallel], check=True)
            subprocess.run([cmake, "--install", build, "--prefix", str(target)], check=True)
            say(f"built the {Path(build, 'summary.txt').read_text()}")


setup(ext_modules=native_extensions(), cmdclass={"build_ext": CMakeBuild})
