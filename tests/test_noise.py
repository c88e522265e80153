"""The helper that compares floats, the kernels that `make test-noise` moves, and its report."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from closeness import assert_close, rounding

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "other_cpu")]
import noise  # noqa: E402
from moved_kernels import move  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_move_each_number_goes_to_a_neighbour_and_numbers_of_few_digits_stay(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    up, down = torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)
    moved = move(x, 17)
    assert bool(((moved == up) | (moved == down) | (moved == x)).all())
    assert int((moved == x).sum()) < 5, "numbers of few digits by chance"
    assert 400 < int((moved == up).sum()) < 600
    assert torch.equal(move(x, 17), moved)
    assert not torch.equal(move(x, 18), moved)
    kept = torch.tensor([0.0, 1.0, -0.5, 37.0, math.inf, -math.inf, torch.finfo(dtype).min], dtype=dtype)
    assert torch.equal(move(kept, 17), kept)


def products(seed: str) -> list[str]:
    """The bits of a product in a process of its own: twice the same, and as a row of a larger one."""
    code = (
        "import torch\ntorch.manual_seed(0)\nx, w = torch.randn(4, 64), torch.randn(64, 32)\n"
        "for y in (x @ w, x @ w, (x[:1] @ w)):\n    print(y[0].numpy().tobytes().hex())\n"
    )
    environment = {**os.environ, "POSTTRAIN_NOISE": seed, "PYTHONPATH": str(ROOT / "tests" / "other_cpu")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_moved_kernels_are_steady_and_differ_by_seed_and_shape() -> None:
    plain, one, two = products(""), products("1"), products("2")
    assert one[0] == one[1]
    assert len({plain[0], one[0], two[0]}) == 3
    assert one[2] != one[0]
    numbers = [torch.frombuffer(bytearray.fromhex(bits[0]), dtype=torch.float32) for bits in (plain, one)]
    assert_close(numbers[1], numbers[0], rtol=0, atol=rounding(torch.float32, size=2.0, terms=64))


def test_report_names_a_bound_that_is_less_than_four_times_what_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(noise, "BUILD", tmp_path)
    monkeypatch.setattr(noise, "count_exact", lambda: 3)
    rows = {"this machine": (0.0, 0.0), "two threads": (2e-6, 3e-6)}
    for machine, differences in rows.items():
        folder = noise.folder_of(machine)
        folder.mkdir()
        lines = []
        for line, difference in enumerate(differences):
            row = {"test": "test_x.py::test", "site": f"test_x.py:{line}", "time": 1, "worst": difference / 1e-5}
            lines.append(json.dumps(row | {"differences": [difference], "bounds": [1e-5]}))
        (folder / "1.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert noise.report() == 1
    said = capsys.readouterr().out
    assert "test_x.py:1" in said
    assert "test_x.py:0" not in said
    folder = noise.folder_of("SSE4.1")
    folder.mkdir()
    (folder / "output.txt").write_text("FAILED test_x.py::test[a b] - assert 1 == 2\n", encoding="utf-8")
    noise.report()
    assert "test_x.py" in capsys.readouterr().out


def test_comparisons_are_written_down_with_their_bounds(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\nfrom closeness import approx, allclose, assert_close\n\n"
        "def test_it():\n"
        "    assert {'a': 1.0, 'b': 7.0} == approx({'a': 1.25, 'b': 7.0}, abs=1.0)\n"
        "    assert [2.5] == [approx(2.0, rel=0.5)]\n"
        "    assert allclose(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), atol=1.0, rtol=0.5)\n"
        "    assert_close(torch.zeros(1000), torch.full((1000,), 0.5), atol=1.0, rtol=0)\n"
        "    assert not allclose(torch.zeros(1), torch.ones(1))\n"
    )
    notes = tmp_path / "notes"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "POSTTRAIN_NOISE_RECORD": str(notes)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    rows = [json.loads(line) for path in notes.iterdir() for line in path.read_text().splitlines()]
    assert [row["differences"] for row in rows[:3]] == [[-0.25, 0.0], [0.5], [0.0, -0.5]]
    assert [row["bounds"] for row in rows[:3]] == [[1.0, 1.0], [1.0], [1.5, 2.25]]
    assert (len(rows), rows[3]["worst"], len(rows[3]["differences"])) == (4, 0.5, 250)
