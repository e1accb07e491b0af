"""Hand on what tests use of the inside folders as it is, so that a move in there changes this file and no test.

A name is here because a test outside its folder's own unit tests needs it; a folder's own tests import it directly."""

# ruff: noqa: F401 -- tests import these names from here

from tiered_zero import record
from tiered_zero.assembly import build as assembly_build
from tiered_zero.assembly import machine_rates
from tiered_zero.assembly import spec as assembly_spec
from tiered_zero.assembly.choice import estimate_of
from tiered_zero.assembly.open_machine import SHUTDOWN
from tiered_zero.assembly.spec import PlannedMachine, planning_notices, specify_run
from tiered_zero.checkpoint import save as checkpoint_save
from tiered_zero.checkpoint import tag, tag_writer, weights
from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.checkpoint.dcp import DcpReader
from tiered_zero.checkpoint.driver import from_json, to_json
from tiered_zero.checkpoint.in_place import Commits
from tiered_zero.checkpoint.index import (
    Part,
    RankPart,
    Share,
    Source,
    StoreLocation,
    TagManifest,
    TensorEntry,
    WrittenBy,
    describe,
)
from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.checkpoint.save import Capture
from tiered_zero.checkpoint.tag import (
    Commit,
    TagInfo,
    find_checkpoint,
    find_damage,
    list_tags,
    look_at,
    open_commit,
    open_reader,
    prune,
)
from tiered_zero.checkpoint.tag_writer import LOCK_NAME, TagWriter
from tiered_zero.engine.deepspeed_names import MISSING
from tiered_zero.grads import check, gradient
from tiered_zero.grads.gradient import InFlightGradients, UnitGradients
from tiered_zero.grads.store import GradientStore
from tiered_zero.native.norms import GradCopy, GradNorm
from tiered_zero.record import data_files, files, manifest
from tiered_zero.record import directory as swap_dir
from tiered_zero.record import store as swap_store
from tiered_zero.record.data_files import DATA_NAME, RecordFiles, RecordReader, RecordWriter
from tiered_zero.record.directory import (
    OWNER_NAME,
    PREFIX,
    Owner,
    RunInfo,
    SwapDir,
    collect_garbage,
    leftover_notices,
    list_runs,
)
from tiered_zero.record.files import VERSION as FILE_VERSION
from tiered_zero.record.files import prepare_file, unlock
from tiered_zero.record.manifest import MANIFEST_NAME, Contents, Range, Record
from tiered_zero.record.manifest import load as load_manifests
from tiered_zero.record.store import SwapStore
from tiered_zero.tiers import rack, tier
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.step_gradients import StepGradients, UnitShare
from tiered_zero.tiers.tier import (
    DeviceTier,
    Home,
    HostTier,
    Inventory,
    Slot,
    Tier,
    UnitUpdate,
    as_bytes,
)
from tiered_zero.unit import materialize, offloaded
from tiered_zero.unit.guard import OffloadedParameter
from tiered_zero.unit.model import list_params, module_tree
from tiered_zero.unit.offloaded import OffloadedParams
from tiered_zero.unit.pager import Pager
from tiered_zero.unit.quantized_layers import is_4bit, statistics
from tiered_zero.unit.unit import LEGAL_CHANGES, FlatStorage, UnitState, WeightState
from tiered_zero.update import state_view
from tiered_zero.update.pipeline import UpdateJob, UpdatePipeline
from tiered_zero.update.policy import BarrierPolicy, DelayedPolicy, OverlappedPolicy
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork, UnitParameters
