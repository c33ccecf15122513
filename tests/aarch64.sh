#!/usr/bin/env bash
# `make test-aarch64`: the native module for aarch64, built by a cross compiler and run by qemu, with
# Debian's Python of that architecture. On Debian, once, as root:
#   dpkg --add-architecture arm64 && apt-get update
#   apt-get install g++-aarch64-linux-gnu qemu-user
set -euo pipefail
folder=$PWD/build/aarch64
bin=$PWD/${1:-.venv/bin}
version=3.11 # Debian 12's
root=$folder/root site=$folder/site
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v $program > /dev/null || {
        echo "test-aarch64 needs $program; the head of tests/aarch64.sh says how to install it" >&2
        exit 1
    }
done

# Debian's packages, unpacked beside this machine's own.
if [ ! -d "$root" ]; then
    mkdir -p "$folder/debs"
    packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
        --no-breaks --no-replaces --no-enhances libpython$version-dev:arm64 \
        libpython$version-stdlib:arm64 python$version-minimal:arm64 libstdc++6:arm64 libgomp1:arm64 |
        grep "^[a-z].*:arm64" | sort -u)
    # shellcheck disable=SC2086 # one argument for each package
    (cd "$folder/debs" && apt-get download $packages)
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$root"; done
fi

# pip takes what a package needs from this machine's architecture, so all are named.
if [ ! -d "$site" ]; then
    "$bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$site" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux2014_aarch64 --platform any --implementation cp \
        --python-version $version --only-binary=:all: torch==2.9.1 numpy==2.3.5 pytest==9.1.1 \
        hypothesis expecttest filelock typing_extensions sympy mpmath networkx jinja2 markupsafe \
        fsspec iniconfig packaging pluggy pygments sortedcontainers attrs
fi
PADAM_EXT_BUILD=none "$bin/pip" install --quiet --disable-pip-version-check --no-deps --upgrade \
    --target "$site" .
"$bin/cmake" -S csrc -B "$folder/cmake" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CXX_FLAGS="-isystem $root/usr/include" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
    -Dpybind11_DIR="$("$bin/python" -c "import pybind11; print(pybind11.get_cmake_dir())")" \
    -DPython_EXECUTABLE="$bin/python" -DPython_INCLUDE_DIR="$root/usr/include/python$version" \
    -DPYTHON_MODULE_EXTENSION=.cpython-${version/./}-aarch64-linux-gnu.so > "$folder/cmake.log"
"$bin/cmake" --build "$folder/cmake"
cp "$folder"/cmake/_native*.so "$site/padam_ext/"

# Emulation is slow: the CPU's own code, in the files about numbers, of which few have random cases.
PYTHONPATH=$site OMP_NUM_THREADS=2 qemu-aarch64 -L "$root" "$root/usr/bin/python$version" -P -m pytest \
    -p no:cacheprovider --hypothesis-profile=ci --expect-package-in="$site" -k cpu \
    tests/test_native.py tests/test_update.py tests/test_ranges.py tests/test_running_maximum.py \
    tests/test_peers.py tests/test_layouts.py
