"""Tries tiered_zero on the accelerator of this machine, and keeps what it finds.

    python tools/gpu_acceptance.py --out DIR

Works for ten minutes (--minutes) and stops; the same command again goes on where it stopped, until nothing is left.
Needs the checkout with its compiled libraries, and no network; tools/gpu_contact.sh brings both about. Each section
leaves one line in DIR/results.jsonl as soon as it is over, and DIR/summary.md says what they amount to (docs/gpu.md).
Sections run in processes of their own, so that one which crashes takes no other along. Ends with 1 if a check has
failed.

--smoke runs everything once on tiny models, within a minute or two: on the GPU if there is one, else on the lagging
device of tests/lagging, else on the CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools.acceptance import correctness, machine, peers, profile, ranks, speed, summary
from tools.acceptance.model import Course
from tools.acceptance.report import Section, Site, read_records, write_record

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What CUDA reads as it starts."""

SMOKE_COURSES = 4
"""As many of each group of courses are tried."""


def sections(smoke: bool = False) -> list[Section]:
    """List all, in their order: what decides most comes first."""
    first = correctness.first_courses()
    rest = [course for course in correctness.all_courses() if course not in first]
    if smoke:
        first, rest = (each[:: len(each) // SMOKE_COURSES] for each in (first, rest))
    return [
        Section(name="machine", group="machine", run=machine.describe_machine),
        Section(name="links", group="machine", run=machine.measure_links),
        Section(name="a kernel", group="contact", run=machine.launch_kernel),
        Section(name="a copy", group="contact", run=machine.copy_both_ways),
        Section(name="one step", group="contact", run=machine.take_one_step),
        Section(name="pytest -m gpu", group="tests", run=machine.run_gpu_tests, least_s=60.0),
        *peers.sections(),
        *speed.largest_sections(),
        Section(name="profile", group="profile", run=profile.profile_step, least_s=60.0),
        *correctness.parity_sections(first),
        *correctness.failure_sections(),
        *large_sections(),
        *ranks.sections(),
        *correctness.parity_sections(rest),
        speed.training_section("1.3b clip 1.0", "1.3b", 4, Course(bf16=True, clip=1.0)),
        speed.compute_section("1.3b", 1),
        speed.training_section("1.3b 1 row", "1.3b", 1, Course(bf16=True, clip=1.0)),
    ]


def large_sections() -> list[Section]:
    """7B, and 3B where its state is too much for the host's memory or the disk."""
    found = []
    for name in ("7b", "3b"):
        found.append(speed.compute_section(name, 8))
        for placement, clip in (("cpu/cpu", 1.0), ("cpu/cpu", 0.0), ("cpu/nvme", 1.0)):
            course, title = Course(placement=placement, bf16=True, clip=clip), f"{placement} clip {clip}"
            instead_of = f"7b {title}" if name == "3b" else ""
            found.append(speed.training_section(f"{name} {title}", name, 8, course, instead_of=instead_of))
    return found


# -- in a process of its own -------------------------------------------------------------------------------------------


def open_site(options: argparse.Namespace) -> Site:
    simulated = None
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None and options.smoke:
        from tests.lagging import build
        from tests.lagging.cuda import LaggingDevice

        if not build.why_not():
            torch.set_num_threads(1)  # of the streams' threads, too
            simulated = LaggingDevice(build.build())
            found = torch.device("cuda")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if found is None else torch.device(found.type, index)
    if device.type == "cpu" and not options.smoke:
        raise SystemExit("expected an accelerator; this torch finds none. --smoke tries everything without one.")
    if device.type != "cpu":
        torch.accelerator.set_device_index(index)
    return Site(
        device=device,
        directory=Path(options.dir),
        out=Path(options.out),
        simulated=simulated,
        smoke=options.smoke,
        until_s=options.until,
    )


def run_here(names: list[str], options: argparse.Namespace) -> None:
    """Run sections in this process, as far as the time goes."""
    site = open_site(options)
    known = {section.name: section for section in sections(options.smoke)}
    for name in names:
        if name == "exit":
            correctness.exit_without_close(site)
            return
        if name == ranks.BODY:
            ranks.run_rank(site)
            return
        if name != names[0] and site.left_s < known[name].least_s:
            return
        start_s = time.perf_counter()
        try:
            record = known[name].run(site)
        except Exception as error:
            traceback.print_exc()
            record = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        write_record(site.out / "results.jsonl", name, {**record, "took_s": round(time.perf_counter() - start_s, 1)})


# -- one process after the other ---------------------------------------------------------------------------------------


def run_child(command: list[str], timeout_s: float) -> int | None:
    """Return its exit code; None if it had to be stopped, with all that it has started."""
    process = subprocess.Popen(command, env={**DETERMINISTIC, **os.environ}, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_sections(options: argparse.Namespace) -> int:
    """Run what has no record yet, a group in a process, as far as the time goes."""
    out, budget_s = Path(options.out), 60 * options.minutes
    out.mkdir(parents=True, exist_ok=True)
    results, until_s = out / "results.jsonl", time.monotonic() + budget_s
    listed = sections(options.smoke)
    for _, group in groupby(listed, key=lambda section: "" if options.smoke else section.group):
        members = list(group)
        while left := unfinished(members, results):
            room_s = until_s - time.monotonic()
            if room_s < min(left[0].least_s, budget_s / 2):
                break
            limit_s = sum(section.most_s for section in left)
            with tempfile.TemporaryDirectory(prefix="acceptance-", dir=options.dir) as folder:
                command = [sys.executable, str(Path(__file__).resolve()), "--out", options.out, "--dir", folder]
                command += ["--until", str(until_s)] + ["--smoke"] * options.smoke
                command += [part for section in left for part in ("--section", section.name)]
                code = run_child(command, min(room_s, limit_s))
            after = unfinished(left, results)
            if code == 0 or not after:
                break  # what is left had no time
            if code is None and limit_s > room_s and room_s < budget_s - 60:
                break  # the next call gives it more
            found = f"ended with exit code {code}" if code is not None else f"had not ended after {room_s:.0f} s"
            write_record(results, after[0].name, {"passed": False, "error": found})
    records = read_records(results)
    summary.write(out / "summary.md", records, [section.name for section in listed])
    failed = [name for name, record in records.items() if record["passed"] is False]
    num_passed, num_left = sum(each["passed"] is True for each in records.values()), len(unfinished(listed, results))
    print(f"{num_passed} checks passed, {len(failed)} failed, {num_left} sections left", *failed, sep="\n  ")
    print(f"{out / 'summary.md'} has it all" + (": call again with the same --out to go on" if num_left else ""))
    return 1 if failed else 0


def unfinished(members: list[Section], results: Path) -> list[Section]:
    records = read_records(results)
    return [section for section in members if section.name not in records]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="where the records, the pictures and the trace go")
    parser.add_argument("--dir", default=".", help="where swap files are made, and the disk measured")
    parser.add_argument("--minutes", type=float, default=10.0, help="for this call")
    parser.add_argument("--without-kernels", action="store_true", help="go on where the C libraries are not built")
    parser.add_argument("--smoke", action="store_true", help="tiny models: does all of it run?")
    parser.add_argument("--section", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.section:
        run_here(options.section, options)
        return 0
    if (missing := machine.missing_kernels()) and not (options.without_kernels or options.smoke):
        parser.error(f"{missing}; or give --without-kernels: every update is then several times slower")
    return run_sections(options)


if __name__ == "__main__":
    sys.exit(main())
