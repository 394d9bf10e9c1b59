"""What `normkit audit` takes, and what it refuses by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

import normkit as nk
from normkit.cli import app
from normkit.surgery.auditing import load as loading
from normkit.surgery.auditing.checkpoint import RefusedError
from normkit.surgery.auditing.load import load
from normkit.surgery.auditing.loaded import audit_loaded
from surgery.families import Family

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

LLAMA = Family("llama", ("pre",))
GEMMA = Family("gemma", ("pre",))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["audit", *words], env={"COLUMNS": "140"})


def saved(folder: Path, family: Family = LLAMA, edit: Any = None, shard: str | None = None) -> Path:
    model = family.model()
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


def refused(source: Path | str, **more: Any) -> str:
    """Return the message of the refusal: one line, the same on the command line, exit code 2."""
    with pytest.raises(RefusedError) as caught:
        load(str(source), **more)
    result = run(str(source))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {caught.value}\n"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    result = run(str(saved(tmp_path)))
    assert result.exit_code == 0, result.stderr
    assert "pre  x ← x + F(N(x))  ×6" in result.stdout
    assert "LLAMA" in result.stdout


def test_the_weights_are_the_files(tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        model.model.norm.weight.fill_(0.625)

    assert float(load(str(saved(tmp_path, edit=edit))).model.model.norm.weight[3]) == 0.625


def test_sharded(tmp_path: Path) -> None:
    folder = saved(tmp_path, shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert run(str(folder)).exit_code == 0


def test_a_danger_is_exit_code_1_and_json_is_alone_on_stdout(tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1 + 0.01 * torch.randn_like(parameter))

    result = run(str(saved(tmp_path, GEMMA, edit)), "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["dangerous"] is True
    assert data["findings"][0]["code"] == "one-plus-doubled"
    assert data["streams"][0]["wiring"] == "pre"


def test_a_config_file_gets_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA.config().to_dict()))
    result = run(str(path), "--table")
    assert result.exit_code == 0, result.stderr
    assert "weights are random" in result.stdout
    assert "model.layers.2.post_attention_layernorm" in result.stdout


def test_a_large_config_stays_on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LARGE", 1000)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA.config().to_dict()))
    report = audit_loaded(load(str(path)))
    assert report.streams[0].wiring == "pre"
    assert any("on meta" in note for note in report.notes)


def test_a_function_that_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup_models.py").write_text(
        "import torch, normkit as nk\n"
        "def model(): return torch.nn.Sequential(nk.PreNorm(8, torch.nn.Linear(8, 8)), nk.RMSNorm(8))\n"
        "def both(): return model(), torch.ones(2, 8)\n"
        "def named(): return model(), {'input': torch.ones(2, 8)}\n"
        "def broken(): raise OSError('no disk')\n"
        "def other(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "no example input" in run("madeup_models:model").stdout
    for name in ("both", "named"):
        result = run(f"madeup_models:{name}")
        assert result.exit_code == 0
        assert "pre  x ← x + F(N(x))" in result.stdout
    assert "no disk" in refused("madeup_models:broken")
    assert "got int" in refused("madeup_models:other")
    assert "absent" in refused("madeup_models:absent")


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "config.json" in refused(tmp_path)
    assert "nomodule" in refused("nomodule:build")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    LLAMA.config().save_pretrained(tmp_path)
    assert "no weights" in refused(tmp_path)


def test_missing_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path, shard="20KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refused(folder)


def test_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    folder = saved(tmp_path, shard="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))
    assert "model.extra.weight" in refused(folder)


def test_an_index_that_names_files_elsewhere(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", shard="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = sorted(index["weight_map"])[0]
    (tmp_path / "outside.safetensors").write_bytes(b"")
    index["weight_map"][name] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    assert "outside its folder" in refused(folder)


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_corrupt_safetensors(tmp_path: Path, damage: str) -> None:
    file = saved(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[: len(whole) // 2], "header": b"\xff" * 64 + whole[64:], "empty": b""}[damage])
    assert "model.safetensors: not a whole safetensors file" in refused(tmp_path)


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    LLAMA.config().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil()}))
    assert "pytorch_model.bin: a pickle" in refused(tmp_path)
    torch.save({"model.norm.weight": torch.ones(32), "more": Evil()}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin: a pickle" in refused(tmp_path)
    assert not Evil.ran


def test_a_file_of_tensors_alone_is_read(tmp_path: Path) -> None:
    model = LLAMA.model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert run(str(tmp_path)).exit_code == 0


def test_code_that_a_checkpoint_brings_along_is_not_run(tmp_path: Path) -> None:
    saved(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "evil_config.C", "AutoModelForCausalLM": "evil_model.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "evil_config.py").write_text("raise SystemExit('ran')")
    message = refused(tmp_path)
    assert "evil_config.py" in message
    assert "--trust-remote-code" in message


CONFIG_CODE = """
from transformers import PretrainedConfig
class C(PretrainedConfig):
    model_type = "unheard_of"
    def __init__(self, vocab_size=50, hidden_size=24, **more):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**more)
"""
MODEL_CODE = """
import torch
from torch import nn
from transformers import PreTrainedModel
from .unheard_config import C
class M(PreTrainedModel):
    config_class = C
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.post_init()
    def forward(self, input_ids=None):
        return self.norm(self.embed(input_ids))
"""


def test_code_that_a_checkpoint_brings_along_runs_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "unheard_config.py").write_text(CONFIG_CODE)
    (folder / "unheard_model.py").write_text(MODEL_CODE)
    auto_map = {"AutoConfig": "unheard_config.C", "AutoModel": "unheard_model.M"}
    config = {"model_type": "unheard_of", "vocab_size": 50, "hidden_size": 24, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({"embed.weight": torch.randn(50, 24), "norm.weight": torch.ones(24)}, folder / "model.safetensors")
    result = run(str(folder), "--trust-remote-code", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["norms"][0]["eps"] == 1e-5


def test_an_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert "unheard_of" in refused(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in refused(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    assert "not readable as JSON" in refused(tmp_path / "config.json")


def test_weights_of_another_size(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "hidden_size": 48, "head_dim": 12}))
    assert "another shape" in refused(folder)


def test_norm_weights_that_the_files_lack_or_have_too_many_of(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path) / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.pre_feedforward_layernorm.weight"] = torch.ones(32)
    del state["model.layers.0.input_layernorm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    report = audit_loaded(load(str(tmp_path)))
    found = {finding.code: finding for finding in report.findings}
    assert found["not-in-checkpoint"].where == ("model.layers.0.input_layernorm.weight",)
    assert found["not-in-model"].where == ("model.layers.1.pre_feedforward_layernorm.weight",)
    assert report.dangerous


def test_names_are_public() -> None:
    assert {"audit", "Audit", "Finding"} <= {name for name in ("audit", "Audit", "Finding") if hasattr(nk, name)}
