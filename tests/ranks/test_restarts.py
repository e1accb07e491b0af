"""torchrun restarts ranks of which one was killed: they meet again, go on from the last commit, and clear the swap."""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch.distributed import TCPStore

from tests.ranks.torchrun import DEADLINE_S, SCRIPTS, launcher_environment
from tests.support.forked import ForkedProcess


def test_ranks_that_were_restarted_meet_again_and_resume_however_late_one_is(swap_path: Path, tmp_path: Path) -> None:
    # As torchrun's agent on one host: one store for all attempts, which keeps the addresses of the ended ranks.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, attempt: int) -> ForkedProcess:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        place |= {"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_RUN_ID": "run"}
        environment = launcher_environment({name: str(value) for name, value in place.items()})
        output = tmp_path / f"rank{rank}.txt"
        command = (SCRIPTS / "run_restarts.py", tmp_path, swap_path)
        return ForkedProcess(*command, stdout=output, stderr=output, env=environment, cwd=tmp_path)

    ended = [start(rank, 0) for rank in range(2)]
    assert [rank.wait(DEADLINE_S) for rank in ended] == [1, -9], (tmp_path / "rank0.txt").read_text()
    assert [*swap_path.iterdir()], "the killed rank has left its swap files"
    num_keys = store.num_keys()
    first = start(0, 1)
    while first.poll() is None and store.num_keys() == num_keys:
        time.sleep(0.01)  # until the first rank has given its address, and looks for that of the second
    assert first.poll() is None, (tmp_path / "rank0.txt").read_text()
    ranks = [first, start(1, 1)]
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0], (tmp_path / "rank0.txt").read_text()
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == [[1, 1]] * 2
    assert not [*swap_path.iterdir()]
