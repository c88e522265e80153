"""Tools in conversations: calls run with the limits of training, in the same sandboxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from posttrain.data.render.assistant import reply_frame
from posttrain.errors import UnallowedCode, UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.base import Reply
from posttrain.sampling.environments.contract import Session, build_toolset
from posttrain.sampling.environments.pool import Pool
from posttrain.sampling.episodes import Actor, EpisodeRespondent, Stage, set_stage
from posttrain.sampling.models import OpenedModel
from posttrain.types import Call, Example, Finish

NO_TOOLS = "--no-tools"


@dataclass(slots=True)
class ToolUse:
    """Tools offered in a conversation, and the environment they belong to, if any."""

    stage: Stage
    sampler: OpenedModel
    pool: Pool = field(default_factory=Pool)
    session: Session | None = None
    failure: str = ""
    calls: tuple[Call, ...] = ()
    _actor: Actor | None = None

    def open(self, seed: int) -> str:
        """Begin an episode unless one is in progress. Returns the environment's opening, which may be empty.

        Raises:
            UsageError: the environment cannot begin without a task's example.
        """
        if self.session is not None:
            self.session.num_late = 0
            return ""
        session = Session(self.stage.toolset, self.pool, self.stage.tool_seconds)
        session.begin(Example("chat", ()), seed)
        opening = session.opening()
        if session.failure:
            raise UsageError(f"environment {self.stage.toolset.name!r}: {session.failure}; {NO_TOOLS} talks without it")
        self.session = session
        return opening

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin an answer following ``prompt``."""
        assert self.session is not None, "opened"
        self._actor = Actor(self.session, prompt)

    def pass_on(self, turn: Sequence[int], finish: Finish) -> Reply:
        """Run the calls of a turn. Afterwards ``calls`` lists them, and ``failure`` says if the environment failed."""
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
        """Tokenize a user message following an answer; None if the template renders no second question."""
        template = self.stage.template
        if not template.chat:
            return None
        frame = reply_frame(self.sampler.tokenizer, template, ("user",))
        return frame.encode(self.sampler.tokenizer, template, [content], ("", ""), last)

    def reset(self) -> None:
        """End the episode; the next message begins another."""
        session = self.session
        self.session = None
        if session is not None:
            closing = session.close()
            if closing is not None:
                self.pool.wait(closing)


@contextmanager
def offered(sampler: OpenedModel, template: Component | None, tools: Sequence[Component]) -> Iterator[ToolUse | None]:
    """Offer given tools, or those of the model's run if none are given; None if there are none.

    Raises:
        UnallowedCode: the run's recipe names code that was not allowed.
        UsageError: unusable tools, or an environment that replies in place of a user.
    """
    try:
        stage = _stage_of(sampler, template, tools)
    except UnallowedCode as error:
        raise UnallowedCode(f"{error}; {NO_TOOLS} talks without it") from None
    if stage is None:
        yield None
        return
    try:
        if stage.toolset.responder is not None:
            raise UsageError(
                f"environment {stage.toolset.name!r}: it replies in your place; {NO_TOOLS} talks without it"
            )
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
    return set_stage(build_toolset(None, tools), sampler.grader.template, sampler.tokenizer, {})


def write_calls(calls: Sequence[Call]) -> str:
    """Format calls and results, one per line."""
    lines = []
    for call in calls:
        lines.append(f"-> {call.tool} {call.raw_arguments} ({call.outcome}): {call.result}")
    return "\n".join(lines)
