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


def say_what_is_left() -> None:
    """Tells of modules that an earlier build left, which an editable install goes on using."""
    for module in ROOT.glob("padam_ext/_native*"):
        say(f"an earlier build left {module}; delete it, or an editable install goes on using it")


def program(variable: str, *candidates: str) -> str | None:
    """The program that an environment variable names, arguments behind it, else a candidate."""
    asked = shlex.split(os.environ.get(variable, ""))
    return next(filter(None, map(shutil.which, asked[:1] or candidates)), None)


def cxx_compiler() -> str | None:
    """The C++ compiler that CMake would take, or None."""
    return program("CXX", "c++", "g++", "clang++")


def cuda_compiler() -> str | None:
    """The CUDA compiler, or None."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    return program("CUDACXX", "nvcc", *(str(Path(home, "bin", "nvcc")) for home in homes))


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
        say_what_is_left()
        return []
    if cxx_compiler() is None:
        if choice in ("cpu", "cuda"):
            raise SystemExit(
                f"PADAM_EXT_BUILD={choice} needs a C++ compiler and found none: install one "
                "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install) or name it in CXX"
            )
        say("pure-Python install: no C++ compiler was found, so steps run as PyTorch operations")
        say_what_is_left()
        return []
    if choice == "cuda" and cuda_compiler() is None:
        raise SystemExit(
            "PADAM_EXT_BUILD=cuda needs a CUDA compiler and found none: install the CUDA toolkit "
            "(developer.nvidia.com/cuda-downloads, or conda install cuda-nvcc cuda-cudart-dev), "
            "then put nvcc on PATH or name it in CUDACXX"
        )
    # What cannot be read is refused before anything is built.
    cuda_architectures()
    if not re.fullmatch(r"([1-9]\d*)?", jobs := os.environ.get("MAX_JOBS", "")):
        raise SystemExit(f"MAX_JOBS must be a whole number from 1, got {jobs!r}")
    return [Extension("padam_ext._native", sources=[])]


class CMakeBuild(build_ext):
    """Has csrc/CMakeLists.txt build the module where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        """Builds with CUDA code if there is a CUDA compiler, else without."""
        choice = os.environ.get("PADAM_EXT_BUILD") or "auto"
        nvcc = None if choice == "cpu" else cuda_compiler()
        if choice == "auto" and nvcc is None:
            asked = os.environ.get("CUDACXX")
            missing = f"CUDACXX={asked} is no program" if asked else "no CUDA compiler was found"
            say(f"{missing} (looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH): CPU code only")
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        try:
            build(target, nvcc)
        except subprocess.CalledProcessError as error:
            if choice != "auto" or nvcc is None:
                raise SystemExit("padam_ext: the build failed, see above") from error
            say(f"the CUDA code could not be built with {nvcc}, see above: CPU code only")
            build(target, None)


def build(target: Path, nvcc: str | None) -> None:
    """Configures, builds, installs into a folder, and reports what was built."""
    import pybind11  # of the build environment

    cmake = shutil.which("cmake") or "cmake"
    # What CUDACXX has behind the program's name is for CMake; empty means that it is not set.
    environment = os.environ | ({"CUDACXX": os.environ.get("CUDACXX") or nvcc} if nvcc else {})
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPADAM_CUDA={'ON' if nvcc else 'OFF'}",
        *shlex.split(os.environ.get("PADAM_EXT_CMAKE_ARGS", "")),
    ]
    if archs := cuda_architectures():
        options.append(f"-DPADAM_CUDA_ARCHS={';'.join(archs)}")
    jobs = os.environ.get("MAX_JOBS")
    # A fresh folder each time: CMake's cache would remember tools of an earlier isolated build
    # environment, which no longer exist.
    with TemporaryDirectory(prefix="padam_ext-build-") as folder:
        configure = [cmake, "-S", str(ROOT / "csrc"), "-B", folder, "-G", "Ninja", *options]
        subprocess.run(configure, check=True, env=environment)
        subprocess.run(
            [cmake, "--build", folder, *(["--parallel", jobs] if jobs else [])], check=True
        )
        subprocess.run([cmake, "--install", folder, "--prefix", str(target)], check=True)
        say(f"built the {Path(folder, 'summary.txt').read_text()}")


setup(ext_modules=native_extensions(), cmdclass={"build_ext": CMakeBuild})
