"""Runs of the study, measured in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normkit.lab.claim import Bench
from normkit.lab.corpus import Corpus, load_corpus, unigram_entropy
from normkit.lab.draws import Draws
from normkit.lab.grid.curves import CURVES
from normkit.lab.grid.options import Grid
from normkit.lab.grid.reading import FREQUENCIES
from normkit.lab.grid.study import STUDY, WATCHED, arms, made
from normkit.lab.model.training import heldout_windows
from normkit.lab.settings import Settings


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return load_corpus(str(text))


@pytest.fixture(autouse=True)
def importable(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(brought))


def measure(grid: Grid, arm: str, corpus: Corpus, folder: Path | None = None, seed: int = 0) -> dict[str, Any]:
    settings = Settings(seeds=(seed,), grid=grid.to_text())
    (params,) = [a.params for a in arms(settings) if a.name == arm]
    return STUDY.measure(params, Bench(settings, Draws(STUDY.id, arm, seed), corpus, folder))


def own(function: str, **more: Any) -> Grid:
    return Grid(models=(f"brought_models:{function}",), lrs=(1e-2,), steps=20, rows=4, **more)


@pytest.mark.parametrize("function", ["logits_only", "in_a_dict"])
def test_a_model_of_ones_own_is_trained_on_the_same_batches_and_watched(function: str, corpus: Corpus, tmp_path: Path):
    arm = f"model/brought_models:{function}/warmup-0/lr-0.01"
    values = measure(own(function), arm, corpus, tmp_path)
    assert values == measure(own(function), arm, corpus)  # neither files nor what ran before change a bit
    assert values["curve"][1] < values["curve"][0]
    (log,) = (tmp_path / WATCHED).iterdir()
    readings = [json.loads(line) for line in log.read_text().splitlines()]
    assert {r["step"] for r in readings} == {0, 10}
    assert {r["name"] for r in readings} == {"mix.norm_in", "norm"}
    assert all(r["training"] and r["gradient"] > 0 for r in readings)
    points = [json.loads(line) for line in (tmp_path / CURVES).read_text().splitlines()]
    assert [p["loss"] for p in points if "step" in p] == pytest.approx(values["curve"], rel=1e-6)  # float32 means
    assert points[-1]["heldout"] == values["heldout"]


def test_what_overflows_inside_a_model_is_flagged_with_its_place(corpus: Corpus):
    values = measure(own("overflowing"), "model/brought_models:overflowing/warmup-0/lr-0.01", corpus)
    assert "danger, not-finite: side" in values["flags"]
    clean = measure(own("logits_only"), "model/brought_models:logits_only/warmup-0/lr-0.01", corpus)
    assert clean["flags"] == []


def test_what_a_killed_run_left_among_the_readings_is_void(corpus: Corpus, tmp_path: Path):
    arm = "model/brought_models:logits_only/warmup-0/lr-0.01"
    for _ in range(2):
        measure(own("logits_only"), arm, corpus, tmp_path)
    (log,) = (tmp_path / WATCHED).iterdir()
    assert len(log.read_text().splitlines()) == 4  # two norms, two steps read


def test_rates_and_wirings_of_one_seed_start_from_the_same_weights_and_seeds_do_not(corpus: Corpus):
    def first(arm: str, grid: Grid, seed: int = 0) -> float:
        return measure(grid, arm, corpus, seed=seed)["curve"][0]

    # So small a rate leaves the first ten losses to the initial weights and the batches alone.
    still = Grid(wirings=("pre",), norms=("rms",), lrs=(1e-12, 2e-12), steps=10, rows=2, depth=1, width=16)
    a, b = (first(f"pre/rms/warmup-0/lr-{lr!r}", still) for lr in still.lrs)
    assert a == pytest.approx(b, abs=1e-6)
    assert abs(a - first("pre/rms/warmup-0/lr-1e-12", still, seed=1)) > 1e-3
    mine = own("logits_only")
    arm = "model/brought_models:logits_only/warmup-0/lr-0.01"
    assert first(arm, mine) != first(arm, mine, seed=1)
    own_still = Grid(models=mine.models, lrs=(1e-12, 2e-12), steps=10, rows=2)
    a, b = (first(f"model/{mine.models[0]}/warmup-0/lr-{lr!r}", own_still) for lr in own_still.lrs)
    assert a == pytest.approx(b, abs=1e-6)


def test_a_rate_that_is_far_too_high_diverges_and_says_when(corpus: Corpus):
    grid = Grid(wirings=("pre",), norms=("none",), lrs=(1e20,), steps=20, rows=2, depth=1, width=16)
    values = measure(grid, "pre/none/warmup-0/lr-1e+20", corpus)
    assert (values["outcome"], values["trained"], values["heldout"], values["gain"]) == ("diverged", False, None, 0.0)
    assert values["diverged at"] in range(20)


def test_the_bytes_frequencies_gain_nothing(corpus: Corpus):
    values = measure(own("logits_only"), FREQUENCIES, corpus)
    assert values["outcome"] == "stuck"
    assert -0.01 < values["gain"] < 0  # another text's frequencies cost a little more than its own
    assert values["heldout"] > unigram_entropy(heldout_windows(corpus)[:, 1:])
    assert math.isfinite(values["heldout"])


def test_another_source_of_a_model_is_another_measurement(brought: Path):
    def code() -> str:
        return arms(Settings(grid=own("logits_only").to_text()))[0].params["code"]

    before, file = code(), brought / "brought_models.py"
    source = file.read_text()
    try:
        file.write_text(source.replace("width=8", "width=16"))
        assert code() != before
    finally:
        file.write_text(source)
    assert code() == before


def test_autocast_rounds_products_and_leaves_weights_and_stream(corpus: Corpus):
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.setdefault(name, set()).add(output.dtype)

    grid = Grid(
        wirings=("pre",), norms=("rms",), lrs=(1e-3,), steps=10, rows=2, depth=2, width=16, precision="bfloat16"
    )
    (params,) = [a.params for a in arms(Settings(grid=grid.to_text())) if a.name == "pre/rms/warmup-0/lr-0.001"]
    model = made(params, Draws(STUDY.id, "any", 0))
    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    logits = model(heldout_windows(corpus)[:2, :-1])
    assert logits.dtype == torch.float32
    assert seen["inner.head"] == seen["inner.attentions.0.output"] == {torch.bfloat16}
    assert seen["inner.embedding"] == seen["inner.steps.0"] == seen["inner.final_norm"] == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_autocast_starts_from_the_same_weights_and_is_a_measurement_of_its_own(corpus: Corpus):
    def first(precision: str) -> float:
        still = Grid(wirings=("pre",), norms=("rms",), lrs=(1e-12,), steps=10, rows=2, depth=1, width=16)
        grid = replace(still, precision=precision)
        return measure(grid, "pre/rms/warmup-0/lr-1e-12", corpus)["curve"][0]

    # A loss moves by at most twice as much as a logit. Logits are about 1 (a normed stream, Xavier's head) and come out
    # of four products in a row of bfloat16 numbers, each rounded by 2⁻⁹ at most, as is the result: 2 × 4 × 3 × 2⁻⁹.
    assert 0 < abs(first("float32") - first("bfloat16")) < 24 * 2**-9
    assert "precision" not in arms(Settings(grid=own("logits_only").to_text()))[0].params
    assert arms(Settings(grid=own("logits_only", precision="bfloat16").to_text()))[0].params["precision"] == "bfloat16"
    with pytest.raises(ValueError, match="--precision 'half': expected one of float32, bfloat16"):
        own("logits_only", precision="half")
