"""`slipstream estimate`: the command as it is typed, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.checkpoint.model_io import save_model
from slipstream.cli.main import main
from slipstream.distributed.progress_bar import waiting
from slipstream.files.safetensors_layout import plan_layout

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as other libraries write it: a config, and weights whose header is there and whose data is not."""
    made = tmp_path / "llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    items = [("model.embed_tokens.weight", "BF16", (100, 32)), ("lm_head.weight", "BF16", (100, 32)), ("model.norm.weight", "BF16", (32,))]
    for layer in range(2):
        items += [(f"model.layers.{layer}.mlp.up_proj.weight", "BF16", (64, 32)), (f"model.layers.{layer}.norm.weight", "BF16", (32,))]
    header, layout = plan_layout(items)
    with open(made / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(layout.size)
    return made


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["estimate", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_tables_and_what_fits(folder, capsys):
    """A table for each use and what fits."""
    code, out, err = asked(capsys, str(folder))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{folder} (folder): 10,592 parameters in 7 tensors, 20.69 KB of BF16"
    assert lines[1] == "largest layer: model.embed_tokens"
    heads = [line.split() for line in lines if line.startswith("  ")]
    assert [row[0] for row in heads] == [
        "type",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int4",
        "precision",
        "float32",
        "float16",
        "bfloat16",
        "bfloat16",
    ]
    assert "Inference, batch 1, sequence 64" in lines
    assert "Training with adamw, batch 1, sequence 64" in lines
    assert any(line.startswith("cpu has ") and "runs in float32" in line and "trains in float32" in line for line in lines)


def test_json_output(folder, capsys):
    """Json has the same figures in bytes."""
    code, out, _ = asked(capsys, str(folder), "--json", "--dtypes", "float32", "bf16", "--batch-size", "4", "--sequence_length", "16")
    data = json.loads(out)
    assert code == 0
    assert [row["dtype"] for row in data["inference"]] == ["float32", "bfloat16"]
    entry = data["inference"][0]
    assert entry["weights"] == 4 * 10_592
    assert entry["cache"] == 2 * 2 * 32 * 4 * (4 * 16)
    assert entry["total"] == entry["weights"] + entry["cache"] + entry["activations"]
    mixed = data["training"][1]
    assert mixed["precision"] == "bfloat16 mixed"
    assert (mixed["weights"], mixed["gradients"], mixed["optimizer"]) == (4 * 10_592, 4 * 10_592, 8 * 10_592)


@pytest.mark.parametrize(("flag", "shown", "hidden"), [("--inference", "Inference", "Training"), ("--training", "Training", "Inference")])
def test_one_use_alone(folder, capsys, flag, shown, hidden):
    """One use alone."""
    _, out, _ = asked(capsys, str(folder), flag)
    assert f"\n{shown}" in out
    assert f"\n{hidden}" not in out


def test_types_before_model(folder, capsys):
    """Types before the model and with commas."""
    _, before, _ = asked(capsys, "--dtypes", "int8", "fp16", str(folder), "--json")
    _, commas, _ = asked(capsys, str(folder), "--dtypes=int8,fp16", "--json")
    assert (
        [row["dtype"] for row in json.loads(before)["inference"]]
        == [row["dtype"] for row in json.loads(commas)["inference"]]
        == ["int8", "float16"]
    )


def test_the_name_that_users_know(folder, capsys):
    """The name that users know."""
    assert main(["estimate-memory", str(folder), "--inference"]) == 0
    assert "Inference" in capsys.readouterr().out


def test_entry_points(tmp_path, capsys, monkeypatch):
    """An entry point in a file and in a package."""
    (tmp_path / "nets_of_a_user.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(8, 4)\n\nnet = torch.nn.Linear(8, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    for given in ("nets_of_a_user.py:build", "nets_of_a_user:build", "nets_of_a_user:net"):
        code, out, _ = asked(capsys, given, "--json", "--optimizer", "sgd")
        data = json.loads(out)
        assert code == 0
        assert data["parameters"] == 36
        assert (data["training"][0]["gradients"], data["training"][0]["optimizer"]) == (144, 0)
        assert data["training"][0]["activations"] > 0
    sys.modules.pop("nets_of_a_user")


def test_entry_point_prints_to_stderr(tmp_path, capsys):
    """What an entry point prints is not part of the answer."""
    (tmp_path / "loud.py").write_text("import torch\n\ndef build():\n    print('made')\n    return torch.nn.Linear(8, 4)\n")
    _, out, err = asked(capsys, f"{tmp_path / 'loud.py'}:build", "--json")
    assert json.loads(out)["parameters"] == 36
    assert "made" in err


def test_long_steps_reported(capsys, monkeypatch):
    """What takes long gives a sign of life on a terminal."""
    with waiting("calling quiet:build", after=0.0):
        pass
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with waiting("calling slow:build", after=0.0):
        pass
    err = capsys.readouterr().err
    assert "calling slow:build ... 00:0" in err
    assert "quiet" not in err
    assert err.endswith(" \r")


def test_weights_without_config(tmp_path, capsys):
    """Weights alone say that activations are not counted."""
    save_model(torch.nn.Linear(8, 4), tmp_path / "plain")
    _, out, _ = asked(capsys, str(tmp_path / "plain"), "--dtypes", "float32")
    assert "Activations are not counted" in out
    assert out.count("?") == 3


MISTAKES = {
    "type": (["{folder}", "--dtypes", "float12"], "--dtypes float12", "Write one or more of float32, float16, bfloat16, int8, int4"),
    "batch": (["{folder}", "--batch-size", "0"], "--batch-size 0", "above zero"),
    "length": (["{folder}", "--sequence_length", "-3"], "--sequence-length -3", "above zero"),
    "optimizer": (["{folder}", "--optimizer", "lion"], "lion", "adamw"),
    "path": (["{tmp}/absent.json"], "There is nothing at", "In {tmp} there are"),
    "empty": (["{tmp}/empty"], "holds neither a config.json nor weights", "it holds readme.txt"),
    "config": (["{tmp}/other.json"], "has no model_type", "entry point"),
    "unknown": (["{tmp}/strange.json"], "cannot build a model of the type 'no-such-model'", ""),
    "foreign code": (["{tmp}/foreign.json"], "asks for code that comes with the model (modeling.Model)", "--trust-remote-code"),
    "python file": (["{tmp}/net.py"], "is a Python file", "net.py:function"),
    "no such name": (
        ["{tmp}/net.py:bild"],
        "there is no bild",
        "Did you mean build? Functions, classes and models in it: build, text, leaves.",
    ),
    "no model": (["{tmp}/net.py:number"], "is a int, which cannot be called", "returns a model"),
    "another thing": (["{tmp}/net.py:text"], "returned a str, not a model", "torch.nn.Module"),
    "raises": (["{tmp}/net.py:build"], "raised ZeroDivisionError: division by zero (at {tmp}/net.py:4)", "meta device"),
    "leaves": (["{tmp}/net.py:leaves"], "leaves ended with sys.exit(3) (at {tmp}/net.py:12)", "return a model"),
    "needs another": (["{tmp}/needing.py:build"], "needs no_such_package, which is not installed (at {tmp}/needing.py:1)", "Install it"),
    "sizes": (["{tmp}/odd.json"], "cannot build a model of the type 'llama'", "num_attention_heads is 0"),
    "no module": (["no_such_package.models:build"], "No module named 'no_such_package'", "package.module:function"),
    "broken": (["{tmp}/broken.py:build"], "cannot be imported: SyntaxError", ""),
    "not weights": (["{tmp}/short.safetensors"], "short.safetensors is not a safetensors file that can be trusted", ""),
    "timm": (["{folder}", "--library_name", "timm"], "--library-name timm", "timm.create_model"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_explained(tmp_path, folder, capsys, name):
    """Mistakes are messages that say what to write."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").write_text("nothing")
    (tmp_path / "other.json").write_text('{"learning_rate": 1}')
    (tmp_path / "strange.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "foreign.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoModel": "modeling.Model"}}))
    (tmp_path / "short.safetensors").write_bytes(b"1234")
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef build():\n    return 1 / 0\n\ndef text():\n    return 'x'\n\nnumber = 3\n\ndef leaves():\n    exit(3)\n"
    )
    (tmp_path / "needing.py").write_text("import no_such_package\n")
    (tmp_path / "odd.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 0}))
    arguments, what, remedy = MISTAKES[name]
    places = {"tmp": tmp_path, "folder": folder}
    code, out, err = asked(capsys, *(argument.format(**places) for argument in arguments))
    assert code in (1, 2)
    assert out == ""
    assert what.format(**places) in err
    assert remedy.format(**places) in err
    assert "Traceback" not in err


def test_hub_offline(capsys, monkeypatch, tmp_path):
    """A name of the hub is refused at once when it is logged to be offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, _, err = asked(capsys, "some-org/some-model")
    assert code == 2
    assert "There is no file, folder or entry point 'some-org/some-model' here" in err
    assert "HF_HUB_OFFLINE" in err


def test_hub_unreachable(capsys, monkeypatch):
    """A hub that does not answer is logged to be out of reach."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    code, _, err = asked(capsys, "some-org/some-model")
    assert code == 2
    assert "this machine is offline" in err


def test_folder_without_torch(folder):
    """A folder of weights is answered without torch."""
    program = (
        "import sys; from slipstream.cli.main import main\n"
        f"assert main(['estimate', {str(folder)!r}]) == 0 and main(['estimate', '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "KV cache" in done.stdout
    assert "package.module:function" in done.stdout


def test_sharded_training(folder, capsys):
    """A table of what each rank holds, from headers alone; ranks that hold different amounts have rows of their own."""
    code, out, err = asked(capsys, str(folder), "--training", "--dtypes", "float32", "--num_processes", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    begin = lines.index("Sharded training with adamw, for each rank of 2 processes = dp_shard 2")
    assert lines[begin + 1] == "  2 blocks and the root: numbered layers of model.layers, by their names"
    assert lines[begin + 2] == "  largest all-gather: the root"
    assert lines[begin + 4].split() == ["float32", "20.69", "KB", "20.69", "KB", "41.38", "KB", "25.12", "KB", "170.69", "KB"]
    sizes = ("--num-processes", "6", "--dp-replicate-size", "2")
    code, out, _ = asked(capsys, str(folder), "--training", "--dtypes", "float32", *sizes, "--json")
    found = json.loads(out)
    assert found["mesh"] == {"dp_replicate": 2, "dp_shard": 3}
    assert [row["rank"] for row in found["sharded"]] == [0, 2]
    first, last = found["sharded"]
    assert first["optimizer"] > last["optimizer"]
    assert first["largest_block"] == ""
    assert first["largest_gather"] == (2 * 102 * 32 + 33) * 4  # 100 and 32 rows are padded to multiples of 3
    assert first["parameters"] == last["parameters"] == (2 * 34 * 32 + 11 + 2 * (22 * 32 + 11)) * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--num_processes", "6", "--dp_replicate_size", "4"), "dp_shard would be 6 / 4, which is no whole number"),
        (("--num_processes", "6", "--dp_shard_size", "4"), "The mesh dp_shard 4 is for 4 processes, but there are 6"),
        (("--num_processes", "0"), "--num_processes 0: it must be at least 1"),
        (("--dp_replicate_size", "2"), "alone does not say how many processes there are"),
        (("--dp_shard_size", "-1"), "Give --num_processes too"),
        (("--dp_shard_size", "0"), "The mesh axis dp_shard was given the size 0"),
        (("--num_processes", "2", "--inference"), "--num_processes is about sharded training"),
    ],
)
def test_mesh_mistakes(folder, capsys, arguments, text):
    """Sizes that do not fit are an error with the arithmetic."""
    code, out, err = asked(capsys, str(folder), *arguments)
    assert (code, out) == (2, "")
    assert text in err
