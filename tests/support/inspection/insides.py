"""Hand on what tests use of the inside folders as it is, so that a move in there changes this file and no test.

A name is here because a test outside its folder's own unit tests needs it; a folder's own tests import it directly."""

# ruff: noqa: F401 -- tests import these names from here

from tiered_zero import store
from tiered_zero.assembly import build as assembly_build
from tiered_zero.assembly import spec as assembly_spec
from tiered_zero.assembly.machine import SHUTDOWN
from tiered_zero.assembly.spec import planning_notices, specify_run
from tiered_zero.checkpoint import capture, directory, save_directory, tag_writer, weights
from tiered_zero.checkpoint.capture import Capture
from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.checkpoint.commit import Commits
from tiered_zero.checkpoint.directory import TagInfo, find_tag, list_tags, read_declared
from tiered_zero.checkpoint.open import find_damage, open_commit, open_tag
from tiered_zero.checkpoint.prune import prune
from tiered_zero.checkpoint.reader import TensorReader
from tiered_zero.checkpoint.resume import find_checkpoint
from tiered_zero.checkpoint.save_directory import LOCK_NAME
from tiered_zero.checkpoint.shares import Share
from tiered_zero.checkpoint.tag_manifest import Part, RecordName, Source, TagManifest, TensorEntry, WrittenBy
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.checkpoint.values import decode, encode
from tiered_zero.engine.deepspeed_names import MISSING
from tiered_zero.grads import in_flight, overflow
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.in_flight import InFlightGradients
from tiered_zero.grads.norms import GradCopy, GradNorm
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.params import materialize, state_dict
from tiered_zero.params.driver_thread import CallPhase
from tiered_zero.params.flat_storage import FlatStorage
from tiered_zero.params.guarded_parameter import OffloadedParameter
from tiered_zero.params.model_spec import list_params, module_tree
from tiered_zero.params.offloaded_params import OffloadedParams
from tiered_zero.params.pager import Pager
from tiered_zero.params.unit_state import LEGAL_CHANGES, UnitState, WeightState
from tiered_zero.params.update_guard import UpdateGuard
from tiered_zero.store import (
    checksums,
    files,
    manifest,
    record_writer,
    records,
    runs,
    stripes,
    swap_store,
)
from tiered_zero.store.checked_json import decode_checked, encode_checked
from tiered_zero.store.directory import OWNER_NAME, PREFIX, Owner, SwapDir
from tiered_zero.store.manifest import MANIFEST_NAME, Contents, Record
from tiered_zero.store.manifest import load as load_manifests
from tiered_zero.store.ranges import Range
from tiered_zero.store.record_writer import RecordWriter
from tiered_zero.store.runs import RunInfo, collect_garbage, leftover_notices, list_runs
from tiered_zero.store.stripes import DATA_NAME
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.store.transfers import StoreTransfer
from tiered_zero.store.two_phase_commit import TwoPhaseCommit
from tiered_zero.store.verify import verify_run
from tiered_zero.tiers import rack, unit_update
from tiered_zero.tiers.device import DeviceTier
from tiered_zero.tiers.host import HostTier
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.step_gradients import StepGradients, UnitShare
from tiered_zero.tiers.tier import BufferView, HostBuffer, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.update import optimizer_state, state_view
from tiered_zero.update.eager import EagerUpdate
from tiered_zero.update.overlapped import DelayedPolicy, OverlappedPolicy
from tiered_zero.update.places import UnitParameters
from tiered_zero.update.policy import BarrierPolicy
from tiered_zero.update.stepper import StreamingStepper
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork
