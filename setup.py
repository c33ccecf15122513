"""Builds the native module with CMake and Ninja; everything else is in pyproject.toml.

PADAM_EXT_BUILD chooses what is built:
    auto  (default) native CPU code if there is a C++ compiler, else a pure-Python install
    cpu   native CPU code; an error without a C++ compiler
    cuda  an error in this version, which has no CUDA code yet
    none  a pure-Python install

MAX_JOBS bounds the number of parallel compilations. PADAM_EXT_CMAKE_ARGS is handed to CMake.
"""

import os
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


def native_extensions() -> list[Extension]:
    """The native module, or nothing for a pure-Python install."""
    choice = os.environ.get("PADAM_EXT_BUILD") or "auto"
    if choice not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"PADAM_EXT_BUILD must be auto, cpu, cuda or none, got {choice!r}")
    if choice == "cuda":
        raise SystemExit(
            "PADAM_EXT_BUILD=cuda: this version of padam_ext has no CUDA code; use auto or cpu"
        )
    if choice == "none":
        say("pure-Python install, as PADAM_EXT_BUILD=none asks")
        return []
    if cxx_compiler() is None:
        if choice == "cpu":
            raise SystemExit(
                "PADAM_EXT_BUILD=cpu needs a C++ compiler and found none: install one "
                "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install) or name it in CXX"
            )
        say("pure-Python install: no C++ compiler was found, so steps run as PyTorch operations")
        return []
    return [Extension("padam_ext._native", sources=[])]


class CMakeBuild(build_ext):
    """Has csrc/CMakeLists.txt build the module where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        """Configures, builds, and reports what was built."""
        import pybind11  # of the build environment

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cmake = shutil.which("cmake") or "cmake"
        jobs = os.environ.get("MAX_JOBS")
        # A fresh folder each time: CMake's cache would remember tools of an earlier isolated
        # build environment, which no longer exist.
        with TemporaryDirectory(prefix="padam_ext-build-") as build:
            configure = [
                cmake, "-S", str(ROOT / "csrc"), "-B", build, "-G", "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                *shlex.split(os.environ.get("PADAM_EXT_CMAKE_ARGS", "")),
            ]  # fmt: skip
            subprocess.run(configure, check=True)
            parallel = ["--parallel", jobs] if jobs else []
            subprocess.run([cmake, "--build", build, *parallel], check=True)
            subprocess.run([cmake, "--install", build, "--prefix", str(target)], check=True)
        say(f"built the native CPU module with {cxx_compiler()}")


setup(ext_modules=native_extensions(), cmdclass={"build_ext": CMakeBuild})
