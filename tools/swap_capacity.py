"""What a run of a config needs on NVMe, on a storage host that has no torch.

    python tools/swap_capacity.py config.json --model gpt:layers=24,hidden=2048 --tbw 600 --step-seconds 1.5

The same answer as `tiered-zero swap capacity`, by the same config, layout and planner. It needs Python 3.10 or newer
and pydantic, and runs from the checkout or as one file:

    python tools/swap_capacity.py --build-zipapp swap_capacity.pyz
    scp swap_capacity.pyz host:
    ssh host python3 swap_capacity.pyz config.json --params 7B
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("__init__.py", "errors.py", "sizes.py", "version.py", "config/*.py", "layout/*.py", "plan/*.py")
"""Of the package, what the answer needs."""


def build_zipapp(path: str) -> None:
    """Write one file that runs as this script does."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(__file__, "__main__.py")
        for file in sorted(file for part in PARTS for file in (ROOT / "tiered_zero").glob(part)):
            archive.write(file, file.relative_to(ROOT).as_posix())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="the DeepSpeed-style JSON")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="gpt:...", help="such as gpt:layers=24,hidden=2048")
    model.add_argument("--params", metavar="7B", help="a GPT of about that size")
    parser.add_argument("--tbw", type=float, metavar="TB", help="what one drive is rated to take, in 10**12 bytes")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="measured time of a step")
    parser.add_argument(
        "--save-every", type=int, default=1, metavar="N", help="steps from one in-place commit to the next"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--build-zipapp", metavar="OUT", help="write this tool as one file, and do nothing else")
    options = parser.parse_args()
    if options.build_zipapp:
        build_zipapp(options.build_zipapp)
        return 0
    if options.config is None or (options.model is None and options.params is None):
        parser.error("give a config, and one of the arguments --model --params")
    positive = options.tbw, options.step_seconds, options.save_every
    if any(value is not None and not value > 0 for value in positive):
        parser.error("--tbw, --step-seconds and --save-every are above zero")

    if (ROOT / "tiered_zero").is_dir():  # in the one file the package lies beside __main__.py
        sys.path.insert(0, str(ROOT))
    from tiered_zero.config.load import load
    from tiered_zero.errors import ConfigError
    from tiered_zero.plan.gpt_shape import gpt_of_size, parse_count, parse_gpt
    from tiered_zero.plan.swap_capacity import SwapNeed, capacity_lines, capacity_report, plan_gpt

    try:
        shape = gpt_of_size(parse_count(options.params)) if options.model is None else parse_gpt(options.model)
        config = load(options.config, to_train=False)
        need = SwapNeed.of(plan_gpt(config, shape))
    except ConfigError as error:
        parser.error(str(error))
    report = capacity_report(config, shape, need, options.tbw, options.step_seconds, options.save_every)
    print(json.dumps(report) if options.json else "\n".join(capacity_lines(report)))
    return 0 if report["fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
