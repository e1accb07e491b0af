"""`tiered-zero plan CONFIG`: the plan as a table and as JSON, and whether it fits."""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tiered_zero.cli.console import DEMO_MODEL
from tiered_zero.cli.main import main
from tiered_zero.native.update import available_cpus
from tiered_zero.plan.gpt_shape import num_parameters
from tiered_zero.plan.machine import Machine, default_path
from tiered_zero.sizes import format_nbytes

CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt_nvme.json")


def plan_json(*options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["plan", *options, "--json"])
    return result.exit_code, json.loads(result.stdout)


def state_nbytes(values: dict[str, Any]) -> int:
    return sum(row["nbytes"] for row in values["rows"] if row["kind"] == "state")


def test_the_demo_fits_and_its_state_is_master_weights_and_two_moments() -> None:
    code, values = plan_json(CONFIG)
    assert (code, values["problem"]) == (0, None)
    assert values["num_parameters"] == num_parameters(DEMO_MODEL)
    exact = 12 * num_parameters(DEMO_MODEL)
    assert exact <= state_nbytes(values) <= 1.01 * exact
    assert {row["tier"] for row in values["rows"] if row["kind"] == "state"} == {"nvme"}


def test_state_is_counted_on_each_of_its_tiers(tmp_path: Path) -> None:
    values = json.loads(Path(CONFIG).read_text())
    values["tiered_zero"]["state_limits"] = {"host": "8MiB"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tiers = {
        row["tier"]: row["nbytes"]
        for row in plan_json(str(tmp_path / "config.json"))[1]["rows"]
        if row["kind"] == "state"
    }
    assert tiers.keys() == {"host", "nvme"} and 0 < tiers["host"] <= 8 << 20
    assert sum(tiers.values()) == state_nbytes(plan_json(CONFIG)[1])
    values["tiered_zero"]["state_limits"]["nvme"] = tiers["nvme"] - 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, found = plan_json(str(tmp_path / "config.json"))
    assert code == 1 and "state_limits.nvme), 1 bytes too little" in found["problem"]


@pytest.fixture
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory has 1 TiB free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))


@pytest.mark.usefixtures("large_disk")
def test_seven_billion_parameters_are_planned_without_memory_for_them() -> None:
    code, values = plan_json(CONFIG, "--params", "7B")
    assert "vocab=128256,context=8192" in values["model"], "as real models of that size have"
    assert values["num_parameters"] == pytest.approx(7e9, rel=0.02)
    assert state_nbytes(values) == pytest.approx(12 * values["num_parameters"], rel=0.01)
    assert code == 1 and "device memory; 16.0 MiB is allowed" in values["problem"]


@pytest.mark.usefixtures("large_disk")
def test_another_machine_is_planned_for_by_option() -> None:
    code, values = plan_json(CONFIG, "--params", "7e9", "--device-memory", "24GiB", "--host-memory", "64GiB")
    assert (code, values["problem"]) == (0, None)
    code, values = plan_json(CONFIG, "--params", "7e9", "--device-memory", "24GiB", "--host-memory", "1GiB")
    assert code == 1 and "host memory; 896.0 MiB is allowed (--host-memory, less an eighth" in values["problem"]
    least = re.search(r"[Rr]aise --host-memory to at least (\S+ \w+)", values["problem"])
    assert (
        least
        and plan_json(
            CONFIG, "--params", "7e9", "--device-memory", "24GiB", "--host-memory", least[1].replace(" ", "")
        )[0]
        == 0
    )
    result = CliRunner().invoke(main, ["plan", CONFIG, "--params", "7e9"])
    assert "add for example --device-memory 24GiB" in result.stderr
    wrong = CliRunner().invoke(main, ["plan", CONFIG, "--device-memory", "much"])
    assert wrong.exit_code == 2 and "'much' is no size" in wrong.stderr


def write(path: Path, **changed: Any) -> str:
    """The demo's config with other top-level keys; None leaves one out."""
    values = {**json.loads(Path(CONFIG).read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(path)


def test_without_an_optimizer_an_evaluation_is_planned_and_the_first_line_says_so(tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", optimizer=None, scheduler=None)
    shown = CliRunner().invoke(main, ["plan", config])
    assert shown.exit_code == 0 and shown.stdout.startswith("No optimizer is named: this is the plan of an evaluation.")
    assert "--optimizer AdamW" in shown.stdout.splitlines()[0]
    assert not plan_json(config)[1]["trains"] and state_nbytes(plan_json(config)[1]) == 0
    trained = plan_json(config, "--optimizer", "AdamW")[1]
    assert trained["trains"] and state_nbytes(trained) == state_nbytes(plan_json(CONFIG)[1])


def test_options_replace_keys_of_a_section_that_is_null_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(Path(CONFIG).read_text()), "tiered_zero": None}))
    code, values = plan_json(str(path), "--sequence-length", "128")
    assert code == 0 and values["activations"] is not None
    wrong = write(path, tiered_zero=3)
    for command in (["plan", wrong, "--sequence-length", "128"], ["train", wrong, "--report", str(tmp_path / "run")]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 1 and "tiered_zero: expected an object; found 3" in shown.stderr


def test_the_disk_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # training in the checkout leaves the directory there
    values = plan_json(CONFIG)[1]
    (directory,), (drive,) = values["directories"], values["drives"]
    needed = sum(row["nbytes"] for row in values["rows"] if row["tier"] == "nvme")
    assert directory["path"] == "swap" and directory["nbytes"] == drive["nbytes"] == needed
    for free_nbytes, code in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_nbytes))  # noqa: B023
        shown = CliRunner().invoke(main, ["plan", CONFIG])
        assert shown.exit_code == code and "nvme_path swap: 144.8 MiB of" in shown.stdout
        assert "(it does not exist yet)" in shown.stdout
        assert ("The plan needs 144.8 MiB in swap; 144.8 MiB are free there." in shown.stderr) == bool(code)


def test_ranks_share_the_host_and_the_state(tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", tiered_zero={"device": "cpu", "device_memory_limit": "16MiB"})
    alone, both = (plan_json(config, "--ranks", ranks, "--host-memory", "8GiB")[1] for ranks in ("1", "2"))
    assert state_nbytes(both) == pytest.approx(state_nbytes(alone) / 2, rel=0.01)
    assert both["directories"][0]["nbytes"] == pytest.approx(alone["directories"][0]["nbytes"], rel=0.01)
    shown = CliRunner().invoke(main, ["plan", config, "--ranks", "2", "--host-memory", "8GiB"])
    assert "Rank 0 of 2" in shown.stdout
    assert "3.5 GiB (--host-memory for 2 ranks" in " ".join(shown.stdout.split())


def test_a_model_of_a_hugging_face_config_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["GPT2LMHeadModel"]}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert plan_json(CONFIG, "--model-config", str(path))[1]["num_parameters"] == 2 * 49984 + 132 * 64 + 128
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    shown = CliRunner().invoke(main, ["plan", CONFIG, "--model-config", str(tmp_path)])
    assert shown.exit_code == 1 and "model_type: expected one that transformers" in shown.stderr
    monkeypatch.setitem(sys.modules, "transformers", None)
    shown = CliRunner().invoke(main, ["plan", CONFIG, "--model-config", str(tmp_path)])
    assert shown.exit_code == 1 and "pip install -c constraints.txt '.[hf]'" in shown.stderr


def test_a_model_of_ones_own_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    Path("own_models.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(300, 200)\ndef wrong(): return 3\n"
        "def reads(): return torch.nn.Linear(1, 1).weight.item()\n"
    )
    assert plan_json(CONFIG, "--model", "own_models:build")[1]["num_parameters"] == 300 * 200 + 200
    for name, message in (
        ("own_models:wrong", "expected it to return a torch.nn.Module; found int"),
        ("own_models:reads", "cannot be built on the meta device"),
        ("own_models:absent", "has no attribute 'absent'"),
        ("absent:build", "No module named 'absent'"),
    ):
        shown = CliRunner().invoke(main, ["plan", CONFIG, "--model", name])
        assert shown.exit_code == 1 and message in shown.stderr


def test_the_plan_names_its_update_policy() -> None:
    assert plan_json(CONFIG)[1]["update_policy"]["policy"] == "overlapped"
    assert "update policy: overlapped" in CliRunner().invoke(main, ["plan", CONFIG]).stdout


def test_what_does_not_fit_is_shown_and_said() -> None:
    result = CliRunner().invoke(main, ["plan", CONFIG, "--model", "gpt:layers=1,hidden=4096"])
    assert result.exit_code == 1
    assert "master weights and optimizer state (fp32)" in result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "MiB of device memory" in errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt", "--params", "1e9"], "Give one of"),
        (["--params", "7"], "at least 1e6 parameters"),
        (["--params", "many"], "no number of parameters; write 7B"),
        (["--model", "bert"], "expected gpt:layers=24,hidden=2048 or module:function; found 'bert'"),
        (["--model", "gpt:layer=2"], "no setting 'layer'"),
    ],
)
def test_wrong_options_are_usage_errors(options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", CONFIG, *options])
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.usefixtures("large_disk")
def test_activations_of_a_long_sequence_are_estimated(tmp_path: Path) -> None:
    """2 h L bytes a token for the inputs of checkpoints, as many as the budget takes; the rest is the device's."""
    section = {"device": "nvme", "nvme_path": "swap", "limit": "6GiB"}
    values = json.loads(Path(CONFIG).read_text())
    values |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = write(tmp_path / "config.json", **{**values, "tiered_zero": {"activations": section}})
    options = (config, "--params", "7B", "--device-memory", "80GiB")
    long = (*options, "--sequence-length", "32768")
    found = plan_json(*long, "--host-memory", "64GiB")[1]["activations"]
    hidden, layers = (
        int(re.findall(rf"{name}=(\d+)", plan_json(*options)[1]["model"])[0]) for name in ("hidden", "layers")
    )
    assert found["tokens"] == 32768 and found["num_boundaries"] == layers
    assert found["boundary_nbytes"] == 2 * hidden * 32768
    fit = (6 << 30) // found["boundary_nbytes"] * found["boundary_nbytes"]
    shown = CliRunner().invoke(main, ["plan", *long]).stdout
    assert f"{format_nbytes(fit)} of the inputs fit the budget on nvme." in shown
    assert re.search(r"In sum they need \S+ GiB of device memory; the plan leaves \S+ GiB of 80\.0 GiB\.", shown)
    small = CliRunner().invoke(main, ["plan", *long, "--device-memory", "24GiB"])
    assert small.exit_code == 1 and "Activations do not fit: they need" in small.stderr
    assert "Take fewer tokens a micro-batch, offload inputs" in small.stderr
    assert "--sequence-length" in CliRunner().invoke(main, ["plan", *options]).stdout, "the default length is said"


LAYERS_OF_LLAMA_70B = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256},
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}


def test_a_model_whose_activations_do_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(LAYERS_OF_LLAMA_70B))
    nvme = {"device": "nvme", "nvme_path": "swap"}
    zero = {"stage": 3, "offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": nvme}
    given = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    (tmp_path / "config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **given}))
    options = (str(tmp_path / "config.json"), "--model-config", str(tmp_path / "model.json"), "--disk", "2TB")
    machine = ("--device-memory", "20GiB", "--host-memory", "64GiB")
    code, values = plan_json(*options, *machine, "--sequence-length", "8192")
    assert code == 1 and values["problem"].startswith("Activations do not fit")
    assert values["update_policy"]["policy"] == "overlapped", "a device of its own size is an accelerator"
    assert plan_json(*options, *machine, "--sequence-length", "2048")[0] == 0
    assumed = CliRunner().invoke(main, ["plan", *options, *machine])
    assert assumed.exit_code == 0 and "131,072 tokens (the most that the model takes" in assumed.stdout
    assert "so they do not fit" in assumed.stdout, "a length that was assumed is no verdict"
    usage = " ".join(CliRunner().invoke(main, ["plan", "--help"]).stdout.split())
    assert "Otherwise a line says whether activations fit for the longest sample" in usage
    zero = {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, **given, "zero_optimization": zero})
    )
    shown = CliRunner().invoke(main, ["plan", *options, *machine, "--sequence-length", "2048"])
    assert shown.exit_code == 1 and "of device memory; 17.5 GiB is allowed" in shown.stderr
    assert "leaves 0 B of 20.0 GiB. The placement is the cause, not the number of tokens.\n" in shown.stderr


def test_fit_is_judged_by_the_disks_that_are_given(tmp_path: Path) -> None:
    needed = plan_json(CONFIG)[1]["drives"][0]["nbytes"]
    for disks, code, nbytes in (
        ([f"{needed}"], 0, needed),
        ([f"{needed - 1}:7GB/s,5GB/s"], 1, needed),
        (["1TB", "1TB::1200TBW"], 0, -(-needed // 2)),
    ):
        options = [part for disk in disks for part in ("--disk", disk)]
        found, values = plan_json(CONFIG, *options)
        assert found == code and [drive["nbytes"] for drive in values["drives"]] == [nbytes] * len(disks)
        assert code == 0 or f"; disk {disks[0]} has " in values["problem"]
    (drive,) = plan_json(CONFIG, "--disk", "2TB:7GB/s,5GB/s:1200TBW")[1]["drives"]
    assert (drive["read_bytes_per_s"], drive["write_bytes_per_s"]) == (7 * 10**9, 5 * 10**9)
    steps = 1200 * 10**12 // drive["written_nbytes_per_step"]
    shown = CliRunner().invoke(main, ["plan", CONFIG, "--disk", "2TB:7GB/s,5GB/s:1200TBW"]).stdout
    assert f"rated for (1200 TB) is written after {steps:,} steps" in shown


def test_each_drive_takes_its_share_of_what_a_step_writes(tmp_path: Path) -> None:
    """Parameters, masters and state once a step, whatever the number of micro-batches."""
    swap = {"device": "nvme", "nvme_path": "swap"}
    zero = {"stage": 3, "offload_param": {**swap, "max_in_cpu": 0}, "offload_optimizer": {**swap, "nvme_path": "state"}}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    config = write(tmp_path / "config.json", zero_optimization=zero, **batch)
    disks = ("--disk", "1TB:1MB/s,1GB/s", "--disk", "1TB:1GB/s,1MB/s")
    values = plan_json(config, *disks)[1]
    param, state = (
        sum(row["nbytes"] for row in values["rows"] if (row["tier"], row["kind"]) == ("nvme", kind))
        for kind in ("param", "state")
    )
    assert [drive["written_nbytes_per_step"] for drive in values["drives"]] == [param, state]
    shown = CliRunner().invoke(main, ["plan", config, *disks]).stdout
    assert f"writes {format_nbytes(state)}" in shown
    config = write(tmp_path / "config.json", optimizer=None, scheduler=None)
    (drive,) = plan_json(config, *disks[:2])[1]["drives"]
    assert not drive["written_nbytes_per_step"], "of an evaluation"


def test_a_disk_for_a_plan_without_nvme_is_said_to_have_no_effect() -> None:
    config = str(Path(CONFIG).with_name("gpt_device.json"))
    for options, is_said in (((config, "--disk", "1TB"), True), ((config,), False), ((CONFIG, "--disk", "1TB"), False)):
        assert ("--disk has no effect" in CliRunner().invoke(main, ["plan", *options]).stdout) == is_said


def test_a_machine_that_is_described_has_its_own_sizes_and_disks(tmp_path: Path) -> None:
    """An option goes before what the file says. Without a file the record of this machine is named, if there is one."""
    disk = {"path": "a drive", "nbytes": "2TB", "read_bytes_per_s": "7GB/s", "write_bytes_per_s": "5GB/s"}
    values = {"name": "card", "device": "cuda", "device_nbytes": "24GiB", "host_nbytes": "64GiB", "disks": [disk]}
    path = tmp_path / "card.json"
    path.write_text(json.dumps(values))
    code, found = plan_json(CONFIG, "--params", "7e9", "--machine", str(path))
    given = ("--device-memory", "24GiB", "--host-memory", "64GiB", "--disk", "2TB:7GB/s,5GB/s")
    by_options = plan_json(CONFIG, "--params", "7e9", *given)[1]
    assert (code, found["rows"], found["machine"]["name"]) == (0, by_options["rows"], "card")
    (drive,), (same,) = found["drives"], by_options["drives"]
    assert drive["disk"] == "a drive" and drive["read_bytes_per_s"] == same["read_bytes_per_s"] == 7 * 10**9
    assert plan_json(CONFIG, "--params", "7e9", "--machine", str(path), "--host-memory", "1GiB")[0] == 1
    shown = CliRunner().invoke(main, ["plan", CONFIG, "--machine", str(path)]).stdout
    assert f"The machine is card, as {path} describes it." in shown
    assert "No seconds are predicted; rates of card are not known: flops_per_s.bf16," in shown
    for left_out, expected in (("host_nbytes", "host_nbytes"), ("device_nbytes", "device_nbytes"), ("disks", "--disk")):
        path.write_text(json.dumps({name: value for name, value in values.items() if name != left_out}))
        refused = CliRunner().invoke(main, ["plan", CONFIG, "--machine", str(path)])
        assert refused.exit_code == 1 and f"{path}: expected" in refused.stderr and expected in refused.stderr
    assert "The rates of this machine are not known; measure them" in CliRunner().invoke(main, ["plan", CONFIG]).stdout
    here = Machine(name=platform.node(), num_cores=available_cpus(), date="2026-01-02")
    here.save(default_path())
    assert "Rates of this machine, measured 2026-01-02, are in" in CliRunner().invoke(main, ["plan", CONFIG]).stdout
    path.write_text("{}")
    wrong = CliRunner().invoke(main, ["plan", CONFIG, "--machine", str(path)])
    assert wrong.exit_code == 1 and "describes no machine: name: Field required" in wrong.stderr


def test_a_plan_ends_with_the_seconds_of_a_step_where_the_rates_are_known() -> None:
    machine = str(Path(CONFIG).parent / "machines" / "rtx4090.json")
    options = (CONFIG, "--params", "1.3e9", "--sequence-length", "1024", "--machine", machine)
    found = plan_json(*options)[1]
    seconds, (drive,) = found["seconds"], found["drives"]
    assert seconds["seconds"] >= max(seconds["by_resource"].values()) > 0
    assert seconds["tokens_per_s"] == pytest.approx(seconds["tokens"] / seconds["seconds"])
    assert seconds["bound_by"] in seconds["by_resource"] and seconds["shorter_by"]
    assert seconds["hidden_from_tokens"].keys() == {"host", "nvme"}
    assert sum(seconds["written_nbytes"].values()) == drive["written_nbytes_per_step"]
    shown = CliRunner().invoke(main, ["plan", *options]).stdout
    _, _, screen = shown.partition("Predicted step on a desktop")
    for word in (
        "bytes",
        "seconds",
        "tokens/s; bound by",
        "busy)",
        "hidden",
        "shorter",
    ):
        assert word in screen
    assert f"is written after {drive['steps_to_tbw']:,} steps" in shown
    assert plan_json(CONFIG)[1]["seconds"] is None, "no rates are known"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("much", "'much' is no size; write bytes, or a number with KiB to TiB, or KB to TB"),
        ("-1TB", "'-1TB' is no size"),
        ("0TB", "'0TB' is not above zero"),
        ("24", "'24' has no unit and would be bytes; add one, such as 24GiB"),
    ],
)
def test_a_size_of_hardware_is_above_zero_and_has_a_unit(wrong: str, why: str) -> None:
    for option in ("--disk", "--device-memory", "--host-memory"):
        result = CliRunner().invoke(main, ["plan", CONFIG, option, wrong])
        assert result.exit_code == 2 and why in result.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("2TB:7GB/s", "'7GB/s' is not two rates, of reads and of writes"),
        ("2TB:0GB/s,5GB/s", "'0GB' is not above zero"),
        ("2TB:7,5", "'7' has no unit and would be bytes"),
        ("2TB:7GB/s,5GB/s:1200", "'1200' is no number above zero with TBW or PBW"),
        ("2TB:7GB/s,5GB/s:0TBW", "'0TBW' is no number above zero with TBW or PBW"),
        ("2TB:7GB/s,5GB/s:1200TBW:3", "it has more than three parts"),
    ],
)
def test_a_drive_is_refused_with_its_form_and_the_wrong_part(wrong: str, why: str) -> None:
    result = CliRunner().invoke(main, ["plan", CONFIG, "--disk", wrong])
    form = "expected SIZE[:READ,WRITE[:TBW]], such as 2TB:7GB/s,5GB/s:1200TBW"
    assert result.exit_code == 2 and f"{form}; found '{wrong}': {why}" in result.stderr


def test_activations_of_an_unknown_model_are_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_model.py").write_text("import torch\ndef build(): return torch.nn.Linear(4, 4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    shown = CliRunner().invoke(main, ["plan", CONFIG, "--model", "some_model:build"])
    assert "Activations are not estimated" in shown.stdout


def test_an_accelerator_has_a_row_for_the_temporaries_of_its_update() -> None:
    config = str(Path(CONFIG).with_name("gpt_device.json"))
    for options, is_planned in (((), False), (("--device-memory", "24GiB"), True)):
        kinds = {row["kind"] for row in plan_json(config, *options)[1]["rows"]}
        assert ("update_temporary" in kinds) == is_planned and "state" in kinds


@pytest.mark.usefixtures("large_disk")
def test_a_placement_is_chosen_for_a_machine_and_its_config_is_written(tmp_path: Path) -> None:
    given, out = tmp_path / "config.json", tmp_path / "out.json"
    offload = {"offload_optimizer": {"nvme_path": str(tmp_path)}}
    given.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": offload, "train_batch_size": 1}))
    machine = str(Path(CONFIG).parent / "machines" / "rtx4090.json")
    options = ["--params", "7B", "--machine", machine, "--optimizer", "AdamW"]
    code, values = plan_json(str(given), *options, "--sequence-length", "512", "--choose", str(out))
    assert (code, values["problem"]) == (0, None)
    assert len(values["choice"]) == 4 and values["choice"][1].startswith("  1. ")
    again = plan_json(str(out), *options)[1]
    assert again["rows"] == values["rows"] and again["choice"] is None
    shown = CliRunner().invoke(main, ["plan", str(out), *options, "--host-memory", "64GiB"]).stdout
    assert f"({machine}, less an eighth for activations)" in shown and "(--host-memory, less an eighth" in shown


def test_a_placement_is_not_chosen_by_sizes_alone(tmp_path: Path) -> None:
    given = write(tmp_path / "config.json", tiered_zero={"placement": "auto"})
    options = ("--device-memory", "24GiB", "--host-memory", "64GiB", "--disk", "1TB")
    shown = CliRunner().invoke(main, ["plan", given, *options])
    assert shown.exit_code == 1 and "auto needs predicted seconds; rates of the machine that options" in shown.stderr
    assert "(--machine FILE), or leave tiered_zero.placement out." in shown.stderr
