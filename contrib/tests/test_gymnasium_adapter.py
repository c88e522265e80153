"""Environments of Gymnasium: messages, rewards, and environments that cannot be played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.slow

NAMES = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "actions": NAMES}


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code(["gymnasium_adapter:gymnasium"])


def make(**options: Any) -> Any:
    return registry.find("environment", "gymnasium_adapter:gymnasium").bind(options)()


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("gymnasium", reason="gymnasium is not installed")


def test_the_lake_is_crossed(gym: Any) -> None:
    lake = make(**LAKE)
    assert lake.reset(seed=3) == "Actions: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert lake.act("down") == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    for action in ("down", "right", "right", "down"):
        assert "\x1b" not in lake.act(action)
        assert not lake.done
    assert (lake.get_reward(), lake.get_turn_reward()) == (0.0, 0.0)
    assert lake.act("right").endswith("HFF[G]")
    assert lake.done
    assert (lake.get_reward(), lake.get_turn_reward(), lake.get_turn_reward()) == (1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="the episode is over"):
        lake.act("left")
    assert lake.reset(seed=3).endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert (lake.done, lake.get_reward()) == (False, 0.0)
    lake.close()


def test_what_is_no_action_is_reported(gym: Any) -> None:
    lake = make(**LAKE)
    lake.reset(seed=0)
    with pytest.raises(ValueError, match="there is no action 'jump'; there are left, down, right, up"):
        lake.act("jump")
    numbered = make(id="FrozenLake-v1")
    numbered.reset(seed=0)
    assert numbered.act("1")


@pytest.fixture
def talking(gym: Any) -> Iterator[str]:
    """An environment that says what it observes, and counts its actions from 1."""

    class Talking(gym.Env):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
        observation_space, action_space = gym.spaces.Text(20), gym.spaces.Discrete(2, start=1)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return f"hello {seed}", {}

        def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return f"you said {action}", 0.5, False, False, {}

    gym.register("Talking-v0", entry_point=Talking, max_episode_steps=2)
    yield "Talking-v0"
    del gym.registry["Talking-v0"]


def test_an_observed_text_is_returned_and_a_limit_ends_it(talking: str) -> None:
    process_group = make(id=talking)
    assert process_group.reset(seed=7) == "Actions: 1, 2.\nhello 7"
    assert process_group.act("2") == "you said 2"
    assert not process_group.done
    process_group.act("1")
    assert process_group.done, "max_episode_steps"
    assert (process_group.get_reward(), process_group.get_turn_reward()) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "evil.payload:Lake-v0"}, "would import a module"),
        ({"id": "GymV26Environment-v0", "options": {"env_id": "evil.payload:Lake-v0"}}, "would import a module"),
        ({"id": "FrozenLake-v1", "options": {"render_mode": "human"}}, "environment.options.render_mode: it is chosen"),
    ],
)
def test_what_is_refused_before_anything_is_imported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "cannot make 'FrozenLak-v1': .*FrozenLake"),
        ({"id": "FrozenLake-v1", "options": {"slippery": True}}, "cannot make 'FrozenLake-v1': .*slippery"),
        ({"id": "FrozenLake-v1", "options": {"map_name": "9x9"}}, "cannot make 'FrozenLake-v1': '9x9'"),
        ({"id": "FrozenLake-v1", "actions": ["left", "right"]}, "has 4 actions; give each a name of its own"),
        ({"id": "FrozenLake-v1", "actions": ["a", "a", "b", "c"]}, "has 4 actions; give each a name of its own"),
        ({"id": "CartPole-v1"}, "CartPole-v1 can't be read: it neither draws as text.*choose one that does, as"),
    ],
)
def test_what_cannot_be_played_is_refused(gym: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)
