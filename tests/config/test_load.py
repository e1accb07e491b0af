"""What a user may write, and what each thing written becomes: a value, a notice, or one clear error."""

import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.config.load import load
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def load_with(**sections: Any) -> Config:
    return load({"train_batch_size": 8, **sections})


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_with(**sections)
    return str(caught.value)


def sizes(config: Config) -> tuple[int, int, int]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.json"
    path.write_text(text)
    return path


def one_cycle(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1], "cycle_max_lr": 1, **params}}}


class TestSource:
    def test_dict_path_and_args_agree(self, tmp_path: Path) -> None:
        path = write(tmp_path, '{"train_batch_size": 8}')
        expected = load({"train_batch_size": 8})
        assert load(path) == load(str(path)) == load(None, Namespace(deepspeed_config=str(path))) == expected

    def test_args_without_a_config_are_no_source(self) -> None:
        assert load({"train_batch_size": 8}, Namespace(deepspeed_config=None)).train_batch_size == 8

    def test_both_and_neither_are_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path, '{"train_batch_size": 8}')
        with pytest.raises(ConfigError, match="found both"):
            load({"train_batch_size": 8}, Namespace(deepspeed_config=str(path)))
        with pytest.raises(ConfigError, match="found neither"):
            load(None)

    def test_the_dict_given_is_not_changed(self) -> None:
        given = {"train_batch_size": "8", "zero_optimization": {"cpu_offload": True, "stage": 1}, "bfloat16": {}}
        before = json.dumps(given)
        load(given)
        assert json.dumps(given) == before

    @pytest.mark.parametrize("config", [3, ["a"], b"{}"])
    def test_anything_else_is_refused(self, config: Any) -> None:
        with pytest.raises(ConfigError, match="expected a dict or the path"):
            load(config)

    def test_a_key_that_is_no_string(self) -> None:
        with pytest.raises(ConfigError, match="expected a string as key"):
            load({"train_batch_size": 8, "fp16": {1: 2}})


class TestBatch:
    """train = micro * accumulation * ranks; every non-empty subset of the three, at 2 ranks, numbers and strings."""

    FULL: ClassVar = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}

    @pytest.mark.parametrize("convert", [int, str, float, lambda size: f"{size}.0"])
    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (("train_batch_size",), (24, 12, 1)),
            (("train_micro_batch_size_per_gpu",), (8, 4, 1)),
            (("train_batch_size", "train_micro_batch_size_per_gpu"), (24, 4, 3)),
            (("train_batch_size", "gradient_accumulation_steps"), (24, 4, 3)),
            (("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), (24, 4, 3)),
            (tuple(FULL), (24, 4, 3)),
        ],
    )
    def test_subsets(self, names: tuple[str, ...], expected: tuple[int, int, int], convert: Any) -> None:
        config = load({name: convert(self.FULL[name]) for name in names}, world_size=2)
        assert sizes(config) == expected
        auto = load({name: convert(self.FULL[name]) if name in names else "auto" for name in self.FULL}, world_size=2)
        assert sizes(auto) == expected
        sources = {row.path: row.source for row in config.explain()}
        assert {sources[name] for name in self.FULL if name not in names} <= {"derived"}
        assert {sources[name] for name in names} == {"file"}

    @pytest.mark.parametrize(
        ("given", "found"),
        [
            ({}, "neither"),
            ({"gradient_accumulation_steps": 2}, "neither"),
            ({"train_batch_size": "auto"}, '"auto" for train_batch_size'),
        ],
    )
    def test_too_few(self, given: dict[str, Any], found: str) -> None:
        with pytest.raises(ConfigError, match=f"expected a number for at least one of them, .*; found {found}"):
            load(given)

    def test_a_contradiction_names_all_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"found 25 against 4 x 3 x 2 = 24"):
            load({**self.FULL, "train_batch_size": 25}, world_size=2)

    @pytest.mark.parametrize("other", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
    def test_no_whole_answer(self, other: str) -> None:
        with pytest.raises(ConfigError, match="found 16 against"):
            load({"train_batch_size": 16, other: 3})
        with pytest.raises(ConfigError, match="found 2 against"):
            load({"train_batch_size": 2, other: 3})
        with pytest.raises(ConfigError, match="found 3 against"):
            load({"train_batch_size": 3}, world_size=2)

    @pytest.mark.parametrize("value", [0, -8, "-8", 2.5, "eight", True, [8], {}, "nan", float("inf")])
    def test_no_size(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="train_batch_size: expected"):
            load({"train_batch_size": value})

    @given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 8))
    def test_any_two_give_the_third(self, micro: int, steps: int, ranks: int) -> None:
        full = dict(zip(self.FULL, (micro * steps * ranks, micro, steps), strict=True))
        for pair in itertools.combinations(full, 2):
            assert sizes(load({name: full[name] for name in pair}, world_size=ranks)) == tuple(full.values())


class TestSpelling:
    def test_bare_names_are_equal_and_quiet(self) -> None:
        config = load_with(gradient_clipping=0, zero_optimization={"stage": 3, "prefetch_bucket_size": 7})
        assert config.zero_optimization.stage3_prefetch_bucket_size == 7
        assert config.notices == ()
        row = next(row for row in config.explain() if row.path.endswith("prefetch_bucket_size"))
        assert row.source == "renamed" and "written as zero_optimization.prefetch_bucket_size" in row.effect

    def test_cpu_offload(self) -> None:
        config = load_with(zero_optimization={"stage": 3, "cpu_offload": True, "cpu_offload_param": True})
        assert config.zero_optimization.offload_optimizer.device == "cpu"
        assert config.zero_optimization.offload_param.device == "cpu"
        assert "zero_optimization.cpu_offload -> zero_optimization.offload_optimizer" in config.notices[0]

    @pytest.mark.parametrize("off", [False, None, "auto"])
    def test_cpu_offload_off(self, off: object) -> None:
        config = load_with(
            zero_optimization={"cpu_offload": off, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
        )
        assert config.zero_optimization.offload_optimizer.device == "nvme"

    @pytest.mark.parametrize("value", [1, 0, "true", {}])
    def test_cpu_offload_is_a_switch(self, value: object) -> None:
        assert "zero_optimization.cpu_offload: expected true or false" in refused(
            zero_optimization={"cpu_offload": value}
        )

    def test_old_and_new_together(self) -> None:
        text = refused(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "nvme"}})
        assert "zero_optimization.cpu_offload, zero_optimization.offload_optimizer: expected one value" in text
        assert "bfloat16, bf16" in refused(bfloat16={"enabled": True}, bf16={"enabled": False})

    @pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
    def test_zero_as_a_bool(self, value: bool, stage: int) -> None:
        config = load_with(zero_optimization=value)
        assert config.zero_optimization.stage == stage
        assert any(f"read as stage {stage}" in line for line in config.notices)

    def test_bfloat16(self) -> None:
        assert load_with(bfloat16={"enabled": True}).param_dtype_name == "bfloat16"

    @pytest.mark.parametrize("name", ["thread_count", "num_threads", "intra_op_parallelism"])
    def test_thread_counts(self, name: str) -> None:
        config = load_with(aio={name: "6"})
        assert config.aio.intra_op_parallelism == 6
        assert any("read under another name" in line for line in config.notices) == (name != "intra_op_parallelism")

    def test_thread_counts_together(self) -> None:
        assert load_with(aio={"thread_count": 4, "num_threads": "4"}).aio.intra_op_parallelism == 4
        text = refused(aio={"thread_count": 4, "intra_op_parallelism": 2})
        assert "aio.thread_count, aio.intra_op_parallelism: expected one value; found 4 and 2" in text
        assert "expected one value" in refused(aio={"thread_count": float("nan"), "num_threads": 4})

    def test_aio_inside_zero(self) -> None:
        config = load_with(zero_optimization={"aio": {"thread_count": 3, "block_size": 8192}})
        assert (config.aio.intra_op_parallelism, config.aio.block_size) == (3, 8192)


class TestNumbers:
    @pytest.mark.parametrize("value", [1e9, "1e9", 1_000_000_000, "1000000000", " 1000000000 "])
    def test_counts(self, value: object) -> None:
        assert load_with(zero_optimization={"sub_group_size": value}).zero_optimization.sub_group_size == 10**9

    def test_large_counts_are_exact(self) -> None:
        assert load_with(steps_per_print="9007199254740993").steps_per_print == 2**53 + 1

    def test_fractions_of_elements_round_down(self) -> None:
        config = load_with(zero_optimization={"stage3_prefetch_bucket_size": 15099494.4})
        assert config.zero_optimization.stage3_prefetch_bucket_size == 15099494
        assert any("15099494.4 elements rounded down to 15099494" in line for line in config.notices)

    def test_other_fractions_are_refused(self) -> None:
        assert "aio.queue_depth: expected a whole number; found 5.5" in refused(aio={"queue_depth": 5.5})

    def test_trainers_write_infinity(self) -> None:
        assert load_with(steps_per_print=float("inf")).steps_per_print is None

    def test_zero_sub_group_is_the_default(self) -> None:
        config = load_with(zero_optimization={"sub_group_size": 0})
        assert config.zero_optimization.sub_group_size == 10**9
        assert any("sub_group_size: 0 read as the default" in line for line in config.notices)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5, "nan", True, "big", [1]])
    def test_loss_scale(self, value: object) -> None:
        assert refused(fp16={"enabled": True, "loss_scale": value}).startswith("fp16.loss_scale: expected")

    @pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
    def test_a_dynamic_scale_moves(self, name: str) -> None:
        assert "above 0 with a dynamic loss scale" in refused(fp16={"enabled": True, name: 0})
        assert load_with(fp16={"enabled": True, "loss_scale": "128", name: 0}).fp16.loss_scale == 128.0

    @pytest.mark.parametrize("value", [-1, float("nan"), "x", True])
    def test_gradient_clipping(self, value: object) -> None:
        assert refused(gradient_clipping=value).startswith("gradient_clipping: expected")

    @pytest.mark.parametrize(
        ("text", "nbytes"), [("1.5GiB", 3 << 29), ("512 MB", 512_000_000), (4096, 4096), (None, None)]
    )
    def test_limits(self, text: object, nbytes: int | None) -> None:
        assert load_with(tiered_zero={"host_memory_limit": text}).tiered_zero.host_memory_limit == nbytes

    @pytest.mark.parametrize("value", [0, -1, "-4KiB", "many", True, 1.5])
    def test_no_limit(self, value: object) -> None:
        assert refused(tiered_zero={"device_memory_limit": value}).startswith("tiered_zero.device_memory_limit: ")


class TestAuto:
    def test_resolved_and_said(self) -> None:
        config = load_with(
            train_micro_batch_size_per_gpu="auto",
            gradient_clipping="auto",
            bf16={"enabled": "auto"},
            zero_optimization={"stage3_prefetch_bucket_size": "auto", "allgather_partitions": "auto"},
            optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", "auto"], "eps": "1e-7"}},
        )
        assert config.optimizer is not None
        assert config.optimizer.params == {"eps": 1e-7}
        assert config.train_micro_batch_size_per_gpu == 8
        (line,) = (line for line in config.notices if '"auto" resolved' in line)
        for resolved in (
            "train_micro_batch_size_per_gpu = 8",
            "gradient_clipping = 1.0",
            "bf16.enabled = False",
            "zero_optimization.stage3_prefetch_bucket_size = 50000000",
            "optimizer.params.lr = its default",
            "optimizer.params.betas = its default",
        ):
            assert resolved in line
        rows = {row.path: row for row in config.explain()}
        assert rows["bf16.enabled"].source == rows["optimizer.params.lr"].source == "auto"
        assert rows["zero_optimization.allgather_partitions"].fate.value == "no effect"

    def test_everywhere(self) -> None:
        """A file that says "auto" for every honoured key but the batch loads to the defaults, and is to choose."""
        tree: dict[str, Any] = {}
        for row in load_with().explain():
            *sections, name = row.path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = "auto"
        config = load({**tree, "train_batch_size": 8})
        assert config.model_dump() == load_with(tiered_zero={"placement": "auto"}).model_dump()

    def test_our_own_auto_is_a_value(self) -> None:
        config = load_with(tiered_zero={"device": "auto", "io_engine": "auto"}, gradient_clipping=0)
        assert config.notices == ()

    def test_schedules(self) -> None:
        params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "1e2", "total_num_steps": 300}
        config = load_with(scheduler={"type": "WarmupDecayLR", "params": params})
        assert config.scheduler is not None
        assert config.scheduler.params == {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": None,
            "warmup_num_steps": 100,
            "total_num_steps": 300,
        }
        config = load_with(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": None, "warmup_num_steps": None}})
        assert config.scheduler is not None
        assert config.scheduler.params == {"warmup_max_lr": None}
        text = refused(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
        assert text.startswith("scheduler.params.total_num_steps: expected a number")


class TestUnknown:
    @pytest.mark.parametrize(
        ("sections", "path", "nearest"),
        [
            ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
            ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "zero_optimization.stage"),
            (
                {"zero_optimization": {"offload_param": {"devcie": "cpu"}}},
                "zero_optimization.offload_param.devcie",
                "zero_optimization.offload_param.device",
            ),
            ({"aio": {"intra_op_paralelism": 2}}, "aio.intra_op_paralelism", "aio.intra_op_parallelism"),
            ({"learning_rate": 0.1}, "learning_rate", "optimizer.params.lr?"),
            ({"optimizer": {"torch_adam": True}}, "optimizer.torch_adam", "optimizer.params.torch_adam?"),
            ({"warmup_max_lr": 1}, "warmup_max_lr", "scheduler.params.warmup_max_lr?"),
            ({"sub_group_size": 5}, "sub_group_size", "zero_optimization.sub_group_size"),
            ({"tiered_zero": {"host_limit": 1}}, "tiered_zero.host_limit", "tiered_zero.host_memory_limit"),
            ({"checkpoint": {"tag_validate": 1}}, "checkpoint.tag_validate", "checkpoint.tag_validation"),
            ({"optimizer": {"type": "Adam", "adam_wmode": 1}}, "optimizer.adam_wmode", "optimizer."),
            (
                {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
                "scheduler.params.warmup_steps",
                "warmup_num_steps",
            ),
        ],
    )
    def test_the_nearest_key_is_named(self, sections: dict[str, Any], path: str, nearest: str) -> None:
        text = refused(**sections)
        assert text.startswith(f"{path}: unknown key. " if nearest != "warmup_num_steps" else f"{path}: expected")
        assert f"Did you mean {nearest}" in text or nearest == "optimizer."

    def test_a_key_that_is_like_no_other_gets_the_keys_of_its_section(self) -> None:
        assert refused(aio={"foo": 1}).startswith("aio.foo: unknown key. Remove it; aio takes block_size, ")
        assert refused(zzzz=1) == "zzzz: unknown key. Remove it; tiered-zero explain lists the keys in use."

    @pytest.mark.parametrize(
        ("sections", "expected"),
        [
            ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0, 1, 2 or 3; found 4"),
            ({"zero_optimization": 3}, "zero_optimization: expected an object; found 3"),
            ({"fp16": {"enabled": "perhaps"}}, "fp16.enabled: expected"),
            ({"optimizer": {"params": {}}}, "optimizer.type: expected a value; found none"),
            ({"optimizer": {"type": "Adam", "params": 3}}, "optimizer.params: expected an object"),
            ({"optimizer": {"type": "Adam", "params": {"lr": float("nan")}}}, "optimizer.params.lr: expected a finite"),
            ({"": 1}, "'': unknown key."),
            ({"scheduler": {"type": "OneCycle"}}, "scheduler.params.cycle_min_lr: expected a number"),
            (one_cycle(decay_lr_rate=[0.1]), "scheduler.params.decay_lr_rate: expected a number; found [0.1]"),
            (one_cycle(cycle_momentum=[True]), "scheduler.params.cycle_momentum: expected a valid boolean; found"),
            (one_cycle(cycle_first_step_size=[3]), "scheduler.params.cycle_first_step_size: "),
            (one_cycle(cycle_max_mom=[0.9, "a"]), "scheduler.params.cycle_max_mom: expected a number, or a list"),
            (one_cycle(cycle_max_mom=[0.9, float("nan")]), "scheduler.params.cycle_max_mom: expected a finite number"),
            (one_cycle(cycle_min_mom=[None, 0.8]), "scheduler.params.cycle_min_mom: expected a number, or a list"),
        ],
    )
    def test_wrong_types(self, sections: dict[str, Any], expected: str) -> None:
        assert refused(**sections).startswith(expected)

    def test_every_problem_is_listed_once(self) -> None:
        text = refused(aio={"queue_depth": -1, "block_size": "x"}, tiered_zero={"weights": {"a": 1}})
        assert [line.split(":")[0] for line in text.splitlines()] == [
            "aio.block_size",
            "aio.queue_depth",
            "tiered_zero.weights",
        ]


class TestPlacement:
    @pytest.mark.parametrize("path", [None, "/swap"])
    @pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
    @pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_every_combination_loads_or_is_refused(
        self, stage: int, param: str, optimizer: str, path: str | None
    ) -> None:
        zero = {
            "stage": stage,
            "offload_param": {"device": param, "nvme_path": path},
            "offload_optimizer": {"device": optimizer, "nvme_path": path},
        }
        effective = param if stage == 3 else "none"  # DeepSpeed reads no offload_param below
        if path is None and "nvme" in (effective, optimizer):
            assert "nvme_path: expected a directory for device nvme" in refused(zero_optimization=zero)
        else:
            loaded = load_with(zero_optimization=zero)
            assert loaded.zero_optimization.offload_param.device == effective
            assert loaded.zero_optimization.offload_optimizer.device == optimizer
            said = any("honoured at stage 0" in line for line in loaded.notices)
            assert said == (stage == 0 and optimizer != "none")
            dropped = f"config: zero_optimization.offload_param.device '{param}' without effect"
            assert any(line.startswith(dropped) for line in loaded.notices) == (param != effective)

    @pytest.mark.parametrize(("value", "ratio"), [(0.25, 0.25), ("0.5", 0.5), (0, 0.0), ("auto", 1.0), (None, 1.0)])
    def test_ratio(self, value: object, ratio: float) -> None:
        offload = load_with(zero_optimization={"offload_optimizer": {"device": "cpu", "ratio": value}})
        assert offload.zero_optimization.offload_optimizer.ratio == ratio

    @pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "half", True])
    def test_no_ratio(self, value: object) -> None:
        text = refused(zero_optimization={"offload_optimizer": {"device": "cpu", "ratio": value}})
        assert text.startswith("zero_optimization.offload_optimizer.ratio: expected")

    def test_state_limits(self) -> None:
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
        limits = {"nvme": "1TiB", "device": 4096, "host": "auto"}
        loaded = load_with(zero_optimization=zero, tiered_zero={"state_limits": limits})
        assert list(loaded.tiered_zero.state_limits.by_tier.items()) == [("device", 4096), ("nvme", 1 << 40)]
        assert load_with().tiered_zero.state_limits.by_tier == {}
        text = refused(zero_optimization=zero, tiered_zero={"state_limits": {"cpu": 1}})
        assert text.startswith("tiered_zero.state_limits.cpu: unknown key.")
        text = refused(zero_optimization=zero, tiered_zero={"state_limits": {"host": 0}})
        assert text.startswith("tiered_zero.state_limits.host: expected a size above zero")

    @pytest.mark.parametrize(("device", "tier"), [("none", "host"), ("none", "nvme"), ("cpu", "nvme")])
    def test_a_limit_on_a_tier_without_state(self, device: str, tier: str) -> None:
        text = refused(
            zero_optimization={"offload_optimizer": {"device": device}}, tiered_zero={"state_limits": {tier: "1GiB"}}
        )
        assert text.startswith(f"tiered_zero.state_limits.{tier}: expected offload_optimizer.device")
        assert f"found '{device}'" in text

    def test_one_word_on_what_stays_on_the_device(self) -> None:
        text = refused(
            zero_optimization={"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            tiered_zero={"state_limits": {"device": "1GiB"}},
        )
        assert "offload_optimizer.ratio, tiered_zero.state_limits.device: expected one of them" in text

    @pytest.mark.parametrize(
        ("given", "expected"),
        [("/a", ("/a",)), ("/a, /b,", ("/a", "/b")), (["/a", "/b"], ("/a", "/b")), ("", ()), (None, ())],
    )
    def test_nvme_paths(self, given: object, expected: tuple[str, ...]) -> None:
        config = load_with(zero_optimization={"offload_param": {"nvme_path": given}})
        assert config.zero_optimization.offload_param.nvme_paths == expected

    def test_a_tilde_in_nvme_path_is_the_home_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/ada")
        config = load_with(zero_optimization={"offload_param": {"nvme_path": "~/swap, /b/~"}})
        assert config.zero_optimization.offload_param.nvme_paths == ("/home/ada/swap", "/b/~")

    @pytest.mark.parametrize("path", ["$TMPDIR/swap", "/local/${USER}", "s3://bucket/swap"])
    def test_a_path_that_would_be_made_as_it_stands(self, path: str) -> None:
        for paths in (path, ["/a", path]):
            text = refused(zero_optimization={"offload_optimizer": {"device": "nvme", "nvme_path": paths}})
            assert text.startswith("zero_optimization.offload_optimizer.nvme_path: expected a path")

    def test_what_the_file_sets_differs_from_defaults(self) -> None:
        section = load_with(zero_optimization={"offload_param": {"buffer_count": 5}}).zero_optimization.offload_param
        assert section.model_fields_set == {"buffer_count"}
        section = load_with(
            zero_optimization={"offload_param": {"buffer_size": "auto"}}
        ).zero_optimization.offload_param
        assert section.model_fields_set == set()

    def test_one_precision(self) -> None:
        assert "expected at most one; found both" in refused(fp16={"enabled": True}, bf16={"enabled": True})
        assert load_with(fp16={"enabled": True}, bf16={"enabled": False}).param_dtype_name == "float16"
        assert load_with().param_dtype_name == "float32"

    def test_state_formats(self) -> None:
        assert "expected 'fp32', 'bf16_remainder'" in refused(tiered_zero={"state_format": "bf16"})
        assert not any("moments" in line for line in load_with(tiered_zero={"state_format": "bf16_remainder"}).notices)
        for name in ("lossy_bf16_moments", "lossy_8bit_moments"):
            assert any(name in line for line in load_with(tiered_zero={"state_format": name}).notices), "lossy is said"


class TestOptimizer:
    @pytest.mark.parametrize(
        ("kind", "params", "algorithm"),
        [
            ("Adam", {}, "AdamW"),
            ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam"),
            ("AdamW", {"adam_w_mode": False}, "AdamW"),
            ("adamw", {"torch_adam": True}, "AdamW"),
            ("lion", {}, "Lion"),
            ("sgd", {}, "SGD"),
            ("RMSprop", {}, "RMSprop"),
        ],
    )
    def test_algorithm(self, kind: str, params: dict[str, Any], algorithm: str) -> None:
        config = load_with(optimizer={"type": kind, "params": params})
        assert config.optimizer is not None
        assert config.optimizer.algorithm == algorithm
        assert any("runs as AdamW" in line for line in config.notices) == (kind == "Adam")

    @pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "MuAdam", "Muon"])
    def test_refused(self, kind: str) -> None:
        assert "Refused:" in refused(optimizer={"type": kind})

    def test_max_grad_norm(self) -> None:
        text = refused(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}})
        assert "set gradient_clipping at the top level" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_our_configs_load(path: Path) -> None:
    config = load(path)
    assert all(row.path for row in config.explain())
    assert len(config.notices) <= 4


def test_the_notebooks_configs() -> None:
    by_name = {path.stem: load(path) for path in CONFIGS if path.stem.startswith("notebook_")}
    assert set(by_name) == {"notebook_zero1", "notebook_zero1_inline", "notebook_zero_r", "notebook_offload"}
    for config in by_name.values():
        assert sizes(config) == (16, 16, 1)
        assert config.fp16.enabled and config.fp16.initial_scale_power == 32
        assert config.scheduler is not None and config.scheduler.type == "WarmupDecayLR"
    offload = by_name["notebook_offload"].zero_optimization
    assert (offload.stage, offload.offload_param.device, offload.offload_optimizer.device) == (3, "cpu", "cpu")


def test_frozen() -> None:
    config = load_with()
    with pytest.raises(ValueError, match="frozen"):
        config.fp16.enabled = True  # type: ignore[misc]


def test_cpu_checkpointing_is_a_device_of_activations_unless_these_name_one() -> None:
    section = {"cpu_checkpointing": True}
    assert load({"train_batch_size": 1, "activation_checkpointing": section}).activations_device == "cpu"
    for device in ("none", "nvme"):
        own = {"activations": {"device": device, "nvme_path": "swap"}}
        config = {"train_batch_size": 1, "activation_checkpointing": section, "tiered_zero": own}
        assert load(config).activations_device == device
    with pytest.raises(ConfigError, match=r"tiered_zero\.activations\.nvme_path: expected a directory"):
        load({"train_batch_size": 1, "tiered_zero": {"activations": {"device": "nvme"}}})
