"""The first half hour with a GPU, rehearsed with a stand-in for the card."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """
import sys
import torch
from benchmarks import contact_rows, first_contact, workloads

class StandIn(first_contact.Card):
    device = torch.device("cpu")
    test_seconds = 60
    test_command = (sys.executable, "-m", "pytest", "-p", "no:xdist", "tests/test_options.py")
    kernels = lambda self: ["cpu"]
    describe = lambda self: {"stands in": "for a card"}
    memory = lambda self: 1_500_000
    release = lambda self: None

contact_rows.STEPS = 3
torch.set_num_threads(1)
sys.exit(first_contact.main(StandIn()))
"""


def start(out, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, "-c", STAND_IN, "--out", out, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def results(out):
    lines = (out / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_it_goes_on_after_it_was_killed(tmp_path):
    out = tmp_path / "out"
    first = start(out)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (
        (out / "results.jsonl").exists() and len(results(out)) >= 6
    ):
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = results(out)
    assert [entry["stage"] for entry in before[:4]] == [
        "versions",
        "smoke",
        "tests",
        "copy bandwidth",
    ]
    assert before[2]["exit"] == 0
    with (out / "results.jsonl").open("a") as file:
        file.write('{"stage": "cut o')

    elsewhere = tmp_path / "elsewhere"
    second = start(elsewhere, "--done", out, "--seconds", "3000")
    printed, _ = second.communicate(timeout=400)
    assert second.returncode == 0, printed
    after = results(elsewhere)
    names = [entry["stage"] for entry in [*before, *after]]
    assert len(set(names)) == len(names) > 20
    errors = [entry for entry in after if "error" in entry]
    assert errors == []
    rows = [entry for entry in after if "FusedPadam, cpu" in entry["stage"]]
    assert all(row["ms"] > 0 for row in rows)
    third = start(tmp_path / "third", "--done", out, elsewhere)
    assert third.communicate(timeout=100)[0].startswith("All done")


def test_a_call_ends_before_its_time_is_over(tmp_path):
    call = start(tmp_path / "out", "--seconds", "1")
    printed, _ = call.communicate(timeout=100)
    assert call.returncode == 3
    assert "No time left for 'versions': call again" in printed
