"""Run as a program by test_resume.py: one run that goes on from a checkpoint, and digests of what it ends with as JSON.

python -m tests.checkpoint.run_resumed CASE SWAP DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch

from tests.support.resumed_runs import digests, resumed

if __name__ == "__main__":
    torch.set_num_threads(1)
    case, swap, directory = sys.argv[1:]
    print(json.dumps(digests(resumed(json.loads(case), Path(swap), Path(directory)))))
