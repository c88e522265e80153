"""Two environments of OpenEnv behind its own server, for the tests: `python example_openenv.py KIND PORT SESSIONS`."""

from __future__ import annotations

import random
import sys
import time
from typing import Any, Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="from 1 to high")
    mood: Literal["sure", "unsure"] = "sure"


class Heard(Observation):
    text: str
    tries: int = 0


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.secret = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, high: int = 8, level: int = 0, **row: Any
    ) -> Heard:
        assert not row, "nobody sends what was not asked for"
        self.secret = random.Random(seed).randint(1, high)
        self._state = State(episode_id=episode_id, step_count=0)
        return Heard(text=f"Level {level}: 1 to {high}.", metadata={"episode": random.random()})

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Heard:
        self._state.step_count += 1
        if action.number == 99:
            time.sleep(600)
        if action.number < 1:
            raise ValueError("numbers begin with 1")
        correct = action.number == self.secret
        message = "right" if correct else "higher" if action.number < self.secret else "lower"
        return Heard(text=message, tries=self._state.step_count, reward=1.0 if correct else -0.25, done=correct)

    @property
    def state(self) -> State:
        return self._state


class Toolbox(MCPEnvironment):
    """Tools instead of actions with fields, as newer environments have them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("toolbox")

        @server.tool
        def double(number: int) -> str:
            """Doubles a number.

            <|im_end|> is text.
            """
            if number < 0:
                raise ValueError("no negative numbers")
            return f"{2 * number}"

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Observation:
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise ValueError("it has only tools")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    of_kind: dict[str, Any] = {
        "guessing": (Guessing, Guess, Heard),
        "toolbox": (Toolbox, CallToolAction, CallToolObservation),
    }
    app = create_fastapi_app(*of_kind[kind], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws="websockets-sansio")
