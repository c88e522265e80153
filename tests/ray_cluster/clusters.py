"""A Ray cluster on this machine: a head without processors, where commands are typed, and nodes of one each."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small_runs import MOST_SECONDS, end_of, make_recipe, start, train_command

TESTS = Path(__file__).parent.parent
SHORT = {"num_prompts": 4, "group_size": 2, "max_tokens": 6, "temperature": 1.5}


class Machines:
    """A cluster, and the command on its head."""

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add() for _ in range(num_nodes)]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1)

    def kill(self, node: Any) -> None:
        """As when the power fails: all of its processes at once, nobody is told."""
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def started(self, folder: Path, recipe: Any, *options: str, **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address, **variables}
        return start(train_command(folder, recipe, *options), environment, cwd=folder)

    def ended(self, folder: Path, recipe: Any, *options: str, **variables: str) -> tuple[int, str]:
        """(exit code, what it said on the standard error) of a command."""
        return end_of(self.started(folder, recipe, *options, **variables))


@contextmanager
def machines(num_nodes: int) -> Iterator[Machines]:
    """A cluster that is gone behind the block."""
    made = Machines(num_nodes)
    try:
        yield made
    finally:
        made.cluster.shutdown()


def recipe_of(reward: str, launcher: str = "ray", processes: int = 2, **options: Any) -> Any:
    """Five short steps with a checkpoint behind each; ``options`` are those of the reward."""
    scale: dict[str, Any] = {"processes": processes, "launcher": launcher}
    restarts = options.pop("restarts", None)
    return make_recipe(
        "grpo",
        rewards=[{"name": f"rank_components:{reward}", **options}],
        rollout=SHORT,
        train={"steps": 5, "lr": 1e-4, "save_every": 1, "keep_checkpoints": 9},
        scale=scale | ({} if restarts is None else {"restarts": restarts}),
    )


def wait_until(
    what: Callable[[], object], seconds: float = MOST_SECONDS, process: subprocess.Popen[str] | None = None
) -> None:
    """Until ``what`` is true; not longer than the ``process`` works."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    """Whether a process of this number works."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def node_of(made: Machines, process: int) -> Any:
    """The node of the cluster that a rank is on: its raylet is one of its ancestors."""
    ancestors = set()
    while process > 1:
        ancestors.add(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    raylets = {info.process.pid: node for node in made.nodes for info in node.all_processes["raylet"]}
    return next(node for pid, node in raylets.items() if pid in ancestors)
