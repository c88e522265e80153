"""Tool calls in conversations, executed as in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from posttrain.data.render.assistant import reply_frame
from posttrain.errors import UnallowedCode, UsageError
from posttrain.recipes.sections import TURN_DEFAULTS, Component
from posttrain.sampling.base import Reply
from posttrain.sampling.environments.contract import Session, build_toolset
from posttrain.sampling.environments.pool import Pool
from posttrain.sampling.episodes import Actor, EpisodeRespondent, Stage, set_stage
from posttrain.sampling.models import OpenedModel
from posttrain.types import Call, Example, Finish

NO_TOOLS = "--no-tools"


@dataclass(slots=True)
class ToolUse:
    """Tools available in a conversation, with their environment if any."""

    stage: Stage
    sampler: OpenedModel
    pool: Pool = field(default_factory=Pool)
    session: Session | None = None
    failure: str = ""
    calls: tuple[Call, ...] = ()
    _actor: Actor | None = None

    def open(self, seed: int) -> str:
        """Start an episode unless one is in progress. Returns the environment's opening, possibly empty.

        Raises:
            UsageError: the environment failed, for example because it requires fields from a dataset row.
        """
        if self.session is not None:
            self.session.num_late = 0
            return ""
        session = Session(self.stage.toolset, self.pool, self.stage.tool_seconds)
        session.begin(Example("chat", ()), seed)
        opening = session.opening()
        if session.failure:
            raise UsageError(
                f"environment {self.stage.toolset.name!r}: {session.failure}; use {NO_TOOLS} to chat without it"
            )
        self.session = session
        return opening

    def begin(self, prompt: Sequence[int]) -> None:
        """Start an answer to ``prompt``."""
        assert self.session is not None, "opened"
        self._actor = Actor(self.session, prompt)

    def pass_on(self, turn: Sequence[int], finish: Finish) -> Reply:
        """Run a turn's calls, and set ``calls`` and ``failure``."""
        actor = self._actor
        assert actor is not None, "begun"
        assert self.session is not None, "opened"
        respondent = EpisodeRespondent(self.stage, self.sampler.tokenizer, {(0, 0): actor})
        respondent.hear(0, 0, turn, finish)
        reply = respondent.reply(0, 0)
        self.calls = actor.turns[-1].calls
        self.failure = self.session.failure
        if self.failure or self.session.done:
            self.reset()
        return reply

    def follow(self, content: str, last: int) -> list[int] | None:
        """Tokenize a user message following an answer; None without a chat template."""
        template = self.stage.template
        if not template.chat:
            return None
        frame = reply_frame(self.sampler.tokenizer, template, ("user",))
        return frame.encode(self.sampler.tokenizer, template, [content], ("", ""), last)

    def reset(self) -> None:
        """End the episode. The next message starts a new one."""
        session = self.session
        self.session = None
        if session is not None:
            closing = session.close()
            if closing is not None:
                self.pool.wait(closing)


@contextmanager
def offered(sampler: OpenedModel, template: Component | None, tools: Sequence[Component]) -> Iterator[ToolUse | None]:
    """Provide the given tools, or the run's own if none are given; None if there are none.

    Raises:
        UnallowedCode: the run's recipe names code that was not allowed.
        UsageError: unusable tools, or an environment that replies as a user.
    """
    try:
        stage = _stage_of(sampler, template, tools)
    except UnallowedCode as error:
        raise UnallowedCode(f"{error}; use {NO_TOOLS} to chat without it") from None
    if stage is None:
        yield None
        return
    try:
        if stage.toolset.responder is not None:
            raise UsageError(f"environment {stage.toolset.name!r}: it replies as the user; use {NO_TOOLS}")
        grader = replace(sampler.grader, template=stage.template)
        with Pool() as pool:
            use = ToolUse(stage, replace(sampler, grader=grader, stage=stage), pool)
            try:
                yield use
            finally:
                use.reset()
    finally:
        stage.close()


def _stage_of(sampler: OpenedModel, template: Component | None, tools: Sequence[Component]) -> Stage | None:
    if not tools:
        return sampler.on_stage(template).stage
    limits: dict[str, object] = {}
    max_turn_tokens = None
    recipe = sampler.source.recipe
    if recipe is not None and recipe.rollout is not None:
        limits = {key: getattr(recipe.rollout, key) for key in TURN_DEFAULTS}
        max_turn_tokens = recipe.rollout.max_turn_tokens
    return set_stage(build_toolset(None, tools), sampler.grader.template, sampler.tokenizer, limits, max_turn_tokens)


def show_calls(calls: Sequence[Call]) -> str:
    """Format calls and results, one per line."""
    lines = []
    for call in calls:
        lines.append(f"-> {call.tool} {call.raw_arguments} ({call.outcome}): {call.result}")
    return "\n".join(lines)
