import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import padam_ext
from cases import EXECUTED, INTERPRETED
from padam_ext import native
from pretending import use_variant
from totals import totals

# Every way to compute a step. A backend that cannot run here is listed all the same: its tests
# fail, they are not skipped. Triton's interpreter and compiler do not mix in one process, so
# `make test-interpret` makes one of its own, for the triton backend only. The code of the CUDA
# kernel runs here on the CPU, thread by thread. `make test-ptx` has a process of its own, too.
LEVELS = native.module.available_simd_levels() if native.module else ["missing"]
VARIANTS = [*(f"cpu-{level}" for level in LEVELS), "eager", "cuda-on-host"] + [
    pytest.param(name, marks=pytest.mark.gpu) for name in ("triton@cuda", "cuda@cuda", "eager@cuda")
]
if INTERPRETED:
    VARIANTS = ["triton"]
OTHER_TARGETS = ("triton-sm_80", "triton-sm_100")
if EXECUTED:
    VARIANTS = ["triton-sm_90", *OTHER_TARGETS]
    VARIANTS.append(pytest.param("cuda-90", marks=pytest.mark.nvcc))


# Of these markers, each is written in the files that it selects.
MARKERS_OF_FILES = (
    "build",
    "clients",
    "compile",
    "distributed",
    "gpu",
    "nvcc",
    "order",
    "paper",
    "ptx",
    "sanitize",
    "site",
)


def pytest_ignore_collect(collection_path, config):
    """With `-m MARKER`, reads the files that name it: others may import what is not installed."""
    marker = config.getoption("markexpr")
    if marker in MARKERS_OF_FILES and collection_path.suffix == ".py":
        return f"mark.{marker}" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config, items):
    """Markers that depend on which backend a test has."""
    other_levels = {f"cpu-{level}" for level in LEVELS[1:]}
    gpu_asked_for = "gpu" in config.getoption("markexpr")
    kept, left = [], []
    turns = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        variant = params.get("backend", params.get("prepare"))
        if item.get_closest_marker("gpu") and not gpu_asked_for:
            left.append(item)
            continue
        if "@" in str(variant) and not item.get_closest_marker("gpu_variants"):
            left.append(item)
            continue
        # Of what is tested for sm_90 other targets take a part each, and of the preparation's many
        # cases all do.
        takes_turns = "prepare" in params or variant in OTHER_TARGETS
        if EXECUTED and takes_turns:
            turns[variant] += 1
            if turns[variant] % 4 != (variant == OTHER_TARGETS[0]):
                left.append(item)
                continue
        kept.append(item)
        if variant in other_levels and not item.get_closest_marker("numbers"):
            # This test looks at what happens before a kernel is called, where the SIMD level makes
            # no difference. The best level stands for all in `make test`.
            item.add_marker(pytest.mark.slow)
        if INTERPRETED and variant == "triton" and not item.get_closest_marker("ptx"):
            item.add_marker(pytest.mark.interpret)
        if EXECUTED and variant and item.get_closest_marker("ptx_variants"):
            item.add_marker(pytest.mark.ptx)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(params=VARIANTS)
def backend(request, monkeypatch):
    """The name of each backend in turn; the CPU's once for each SIMD level.

    Beside @ stands the device on which the test then makes its tensors.
    """
    variant, _, device = request.param.partition("@")
    name = use_variant(variant, monkeypatch)
    with torch.device(device or "cpu"):
        yield name


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of several processes
        session.config.workeroutput["totals"] = dict(totals)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    totals.update(getattr(node, "workeroutput", {}).get("totals", {}))


def pytest_terminal_summary(terminalreporter):
    if totals:
        counts = ", ".join(f"{count:,} {what}" for what, count in totals.items())
        terminalreporter.write_line(f"Executed: {counts}")


def pytest_addoption(parser):
    parser.addoption("--expect-package-in", help="fail unless this folder's padam_ext is tested")


def pytest_configure(config):
    # What torch warns of once per process would be found by whichever test came first.
    torch.set_warn_always(True)
    if config.getoption("markexpr") == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("torch sees no GPU here, which these tests need")
    browser_is_there = shutil.which("chromium") and shutil.which("chromedriver")
    if config.getoption("markexpr") == "site" and not browser_is_there:
        raise pytest.UsageError(
            "test-site needs chromium and its driver: apt-get install chromium chromium-driver"
        )
    folder = config.getoption("--expect-package-in")
    if folder and Path(folder).resolve() not in Path(padam_ext.__file__).resolve().parents:
        raise pytest.UsageError(f"testing {padam_ext.__file__}, which is not in {folder}")


@pytest.fixture
def one_thread():
    """More of them get in the way of the other processes that run tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick_runs(one_thread, monkeypatch):
    """For the paper's experiments: nobody asks what machine this is, which takes a second."""
    monkeypatch.setattr("benchmarks.paper.training.environment", lambda device: {"device": "here"})


@pytest.fixture
def tiny_data(quick_runs, monkeypatch):
    """A hundred digits and a thousand words for the paper's experiments."""
    from benchmarks.paper import images, text

    train_data, test_data = images.digits()
    parts = (
        torch.utils.data.Subset(train_data, range(100)),
        torch.utils.data.Subset(test_data, range(50)),
    )
    monkeypatch.setattr(images, "digits", lambda: parts)
    corpus = text.python_documentation()
    small = text.Corpus(corpus.train[:1500] % 300, corpus.test[:300] % 300, 300)
    monkeypatch.setattr(text, "python_documentation", lambda: small)


@pytest.fixture
def ptb(tmp_path):
    """A folder with files like the Penn Treebank's."""
    folder = tmp_path / "ptb"
    folder.mkdir()
    (folder / "ptb.train.txt").write_text(" the cat sat on the mat \n" * 30)
    (folder / "ptb.test.txt").write_text(" the cat \n" * 9)
    return folder
