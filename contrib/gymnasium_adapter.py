"""Environments of Gymnasium with texts: the model reads their text rendering, or their observations."""

from __future__ import annotations

import re
from typing import Any

from posttrain.errors import UsageError
from posttrain.registry import register
from posttrain.untrusted import harmless

# What a drawing sets off by its background (where the player stands), and every other code of a terminal.
_MARKED = re.compile(r"\x1b\[4[0-9]m(.*?)\x1b\[0m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[0-9;]*m")
_CHOSEN_HERE = ("render_mode", "disable_env_checker")


@register("environment")
def gymnasium(*, id: str, options: dict[str, Any] | None = None, actions: list[str] | None = None) -> Gymnasium:
    """An environment of Gymnasium with numbered actions; pays the sum of its rewards.

    ``{name: "gymnasium_adapter:gymnasium", id: FrozenLake-v1, actions: [left, down, right, up]}``. The model is
    told what ``render_mode="ansi"`` draws, with what stands out by its background in square brackets, or the
    observation itself where that is a text; its tool is ``act``. The reward of each turn goes to ``turn_rewards``.

    Args:
        id: as in ``gymnasium.make``, of an environment that an installed package registers.
        options: of the environment.
        actions: names for its actions, in their order; by default they are called by their numbers.

    Source: Towers et al. (2024), "Gymnasium: a standard interface for reinforcement learning environments".

    Raises:
        UsageError: ``gymnasium`` is not installed.
        UsageError: no such environment, options that it refuses, nothing to read, or actions that are not numbered.
    """
    env, reads_text = _make(id, options or {})
    count = getattr(env.action_space, "n", None)
    if count is None:
        raise UsageError(f"environment.id: {id} takes {env.action_space}; only numbered actions can be called by name")
    first = int(env.action_space.start)
    names = [str(first + n) for n in range(int(count))] if actions is None else actions
    if len(names) != count or len(set(names)) < len(names):
        raise UsageError(f"environment.actions: {id} has {count} actions; give each a name of its own, in their order")
    return Gymnasium(env, {name: first + n for n, name in enumerate(names)}, reads_text)


def _make(id: str, options: dict[str, Any]) -> tuple[Any, bool]:
    """The environment, and whether what it observes is text; otherwise it draws."""
    if ":" in id or id.startswith("GymV"):  # those wrap an older gym, which imports what its options name
        raise UsageError(
            f"environment.id: {id!r} would import a module; give the name alone of an environment that an installed "
            "package registers, or write a class of your own (docs/how-to/tools-and-environments.md)"
        )
    for key in _CHOSEN_HERE:
        if key in options:
            raise UsageError(f"environment.options.{key}: it is chosen here; leave it out")
    try:
        import gymnasium as gym
        from gymnasium.envs.registration import load_env_creator
    except ImportError:
        raise UsageError("this environment needs the package gymnasium: pip install gymnasium") from None
    try:
        entry = gym.spec(id).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        draws = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        chosen = {"render_mode": "ansi"} if draws else {}
        env = gym.make(id, disable_env_checker=True, **chosen, **options)
    except Exception as error:  # an environment raises what it likes
        raise UsageError(f"environment: gymnasium cannot make {id!r}: {harmless(str(error))}") from error
    reads_text = isinstance(env.observation_space, gym.spaces.Text)
    if not draws and not reads_text:
        raise UsageError(
            f"environment.id: {id} can't be read: it neither draws as text (ansi) nor observes text; choose one that "
            "does, as FrozenLake-v1, or say what is seen in an environment of your own (module:Class)"
        )
    return env, reads_text


class Gymnasium:
    """See ``gymnasium``."""

    def __init__(self, env: Any, actions: dict[str, int], reads_text: bool) -> None:
        self._env, self._actions, self._reads_text = env, actions, reads_text
        self.done, self._total, self._due = False, 0.0, 0.0

    def reset(self, *, seed: int) -> str:
        """A new episode."""
        self.done, self._total, self._due = False, 0.0, 0.0
        observation, _ = self._env.reset(seed=seed)
        return f"Actions: {', '.join(self._actions)}.\n{self._shown(observation)}"

    def act(self, action: str) -> str:
        """Takes an action; says what is seen then.

        Args:
            action: one of the actions.
        """
        if self.done:
            raise ValueError("the episode is over")
        if action not in self._actions:
            raise ValueError(f"there is no action {action!r}; there are {', '.join(self._actions)}")
        observation, reward, terminated, truncated, _ = self._env.step(self._actions[action])
        self._total += float(reward)
        self._due += float(reward)
        self.done = bool(terminated or truncated)
        return self._shown(observation)

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self._total

    def get_turn_reward(self) -> float:
        """The rewards since it was asked last."""
        due, self._due = self._due, 0.0
        return due

    def close(self) -> None:
        """Give back what the environment holds."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._reads_text:
            return str(observation)
        return _CODE.sub("", _MARKED.sub(r"[\1]", str(self._env.render()))).strip("\n")
