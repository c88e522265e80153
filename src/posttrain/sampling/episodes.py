"""Multi-turn rollouts with an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from posttrain.data.render import Template, decode_response, encode_prompt
from posttrain.data.render.assistant import ReplyFrame, reply_frame
from posttrain.data.render.calls import CallForm
from posttrain.data.render.chat_template import mark
from posttrain.data.render.encoding import markers_of
from posttrain.data.render.template_calls import call_form
from posttrain.errors import UsageError
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import TURN_DEFAULTS
from posttrain.registry import suggest
from posttrain.sampling.base import Engine, Episode, Reply, Sampling
from posttrain.sampling.environments.calls import Request, read_calls, split_calls
from posttrain.sampling.environments.contract import Session, Toolset, build_toolset, opened, refuse_unpaid
from posttrain.sampling.environments.pool import EnvironmentJob, Pool
from posttrain.sampling.environments.replies import HeardTurn
from posttrain.sampling.environments.tools import describe_tools
from posttrain.types import Call, Completion, Example, Finish, Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_RUN = "the episode ended before this call"
MAX_LATE = 2  # timed-out calls after which a completion ends

Place = tuple[int, int]  # (prompt index, sample index)


@dataclass(frozen=True)
class Stage:
    """Environment, tools and limits for multi-turn completions.

    ``template`` shows tools as described by ``form``; ``frame`` encodes results of calls, and ``said_frame`` what an
    environment says itself. ``tool_seconds``: timeout per call. ``retries``: retries after an environment failure.
    """

    toolset: Toolset
    template: Template
    form: CallForm
    frame: ReplyFrame
    max_turns: int
    tool_seconds: float
    retries: int
    max_turn_tokens: int | None = None
    said_frame: ReplyFrame | None = None

    def close(self) -> None:
        """End the servers of its tools."""
        self.toolset.close()


def build_stage(recipe: Recipe, template: Template, tokenizer: PreTrainedTokenizerBase) -> Stage | None:
    """Build a stage from a resolved recipe; None for single-turn recipes.

    Raises:
        UsageError: unusable environment or tool, or a chat template that rewrites history.
    """
    options = recipe.rollout
    if options is None or (recipe.environment is None and not recipe.tools):
        return None
    toolset = build_toolset(recipe.environment, recipe.tools or ())
    sees_feedback = recipe.teacher is not None and recipe.teacher.sees == "environment"
    refuse_unpaid(toolset, [component.name for component in recipe.rewards], wants_feedback=sees_feedback)
    limits: dict[str, Any] = {}
    for key in TURN_DEFAULTS:
        limits[key] = getattr(options, key)
    return set_stage(toolset, template, tokenizer, limits, options.max_turn_tokens)


def set_stage(
    toolset: Toolset,
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    limits: Mapping[str, Any],
    max_turn_tokens: int | None = None,
) -> Stage:
    """Set a stage for a toolset. ``limits``: values for ``TURN_DEFAULTS``, replacing defaults unless None.

    Raises:
        UsageError: tool descriptions contain special tokens, or a chat template that rewrites history.
    """
    form = call_form(tokenizer, template)
    chosen = dict(TURN_DEFAULTS)
    for key, value in limits.items():
        if value is not None:  # in a stored recipe that was changed since
            chosen[key] = value
    schemas = toolset.schemas
    if chosen["show_tools"] and schemas:
        marker = find_marker(schemas, form, tokenizer)
        if marker:
            toolset.close()
            raise UsageError(
                f"tools: what they say of themselves holds {marker!r}, which is more than text to the model; write it "
                "in another way, or leave that tool out"
            )
        template = show_tools(template, schemas, form)
    said_frame = None
    if toolset.responder is not None:
        said_frame = reply_frame(tokenizer, template, ("user",))
    return Stage(
        toolset,
        template,
        form,
        reply_frame(tokenizer, template),
        max_turns=int(chosen["max_turns"]),
        tool_seconds=float(chosen["tool_seconds"]),
        retries=int(chosen["retries"]),
        max_turn_tokens=max_turn_tokens,
        said_frame=said_frame,
    )


def show_tools(template: Template, schemas: Sequence[Mapping[str, object]], form: CallForm) -> Template:
    """Add tools to a template's prompts, natively through the chat template or in a system message."""
    if form.is_native:
        variables = {**template.variables, "tools": list(schemas)}

        def natively(
            messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, own: Mapping[str, object] | None = None
        ) -> Any:
            return template.prompt(messages, tokenizer, variables | dict(own or ()))

        return replace(template, prompt=natively, variables=variables)
    described = describe_tools(schemas)

    def described_first(
        messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object] | None = None
    ) -> Any:
        own = [message.content for message in messages[:1] if message.role == "system"]
        instructed = list(messages[len(own) :])
        if messages:
            instructed.insert(0, Message("system", "\n\n".join([described, *own])))
        if variables:
            return template.prompt(instructed, tokenizer, variables)
        return template.prompt(instructed, tokenizer)

    return replace(template, prompt=described_first)


def find_marker(
    schemas: Sequence[Mapping[str, object]], form: CallForm, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Return what is more than text in tools that a chat template writes: what a template writes is trusted."""
    if not form.is_native:
        return None
    written = json.dumps(schemas, ensure_ascii=False)
    for start, end, _ in markers_of(tokenizer).find(written):
        return written[start:end]
    if mark(0)[0] in written:
        return mark(0)[0]
    return None


@dataclass(slots=True)
class Actor:
    """A completion in progress with its session."""

    session: Session
    prompt: Sequence[int]  # ids before the next turn
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    last: int | None = None
    requests: list[Request] = field(default_factory=list)
    first: EnvironmentJob | Call | None = None  # job for the first request, or its result if it cannot start
    heard: HeardTurn | None = None  # the latest turn, if the environment replies to it
    response: EnvironmentJob | None = None
    finish: Finish | None = None


class EpisodeRespondent:
    """Replies to turns from many completions (``sampling.base.Respondent``)."""

    def __init__(self, stage: Stage, tokenizer: PreTrainedTokenizerBase, actors: Mapping[Place, Actor]) -> None:
        self.stage = stage
        self.tokenizer = tokenizer
        self.actors = actors

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        """Parse tool calls in a turn and start the first call."""
        actor = self.actors[prompt, sample]
        actor.text = decode_response(self.tokenizer, self.stage.template, turn, actor.prompt)
        actor.last = None
        if len(turn):
            actor.last = turn[-1]
        actor.requests = []
        actor.first = None
        actor.heard = None
        actor.finish = None
        toolset = self.stage.toolset
        body = actor.text.removeprefix(self.stage.template.opening)
        requests: list[Request] = []
        if finish == "stop" and toolset.schemas:  # a truncated turn may contain half a call
            requests = read_calls(body, self.stage.form)
        if toolset.responder is not None and (toolset.answers_calls or not requests):
            text = actor.text
            around, calls = split_calls(body, requests, toolset.schemas)
            if calls:
                text = self.stage.template.opening + around
            actor.heard = HeardTurn(text, calls, finish)
            actor.response = actor.session.respond(actor.heard)
        elif requests:
            actor.requests = requests
            actor.first = self._begin(actor, requests[0])
        else:
            actor.finish = finish
            actor.turns.append(Turn(actor.text))

    def reply(self, prompt: int, sample: int) -> Reply:
        """Wait for tool calls and encode their results."""
        actor = self.actors[prompt, sample]
        if actor.finish is not None:
            return Reply(finish=actor.finish)
        if actor.heard is not None:
            return self._pass_on(actor, actor.heard)
        calls = list[Call]()
        session = actor.session
        for number, request in enumerate(actor.requests):
            begun = actor.first
            if number:
                begun = self._begin(actor, request)
            if isinstance(begun, EnvironmentJob):
                begun = session.answer(self.stage.toolset.tools[request.tool], request.raw_arguments, begun)
            assert begun is not None, "``hear`` began the first"
            calls.append(begun)
            if session.num_late >= MAX_LATE:
                actor.finish = "tool_failed"
                break
            if session.failure or session.done:
                actor.finish = "ended"
                break
        actor.turns.append(Turn(actor.text, tuple(calls), session.turn_reward()))
        if session.failure:
            actor.finish = "environment_failed"
        elif actor.finish is None and len(actor.turns) >= self.stage.max_turns:
            actor.finish = "out_of_turns"
        if actor.finish is not None:
            return Reply(finish=actor.finish)
        frame = self.stage.frame
        template = self.stage.template
        results = [call.result for call in calls]
        tags = self.stage.form.results
        actor.prompt = tuple(frame.encode(self.tokenizer, template, results, tags, actor.last))
        return Reply(actor.prompt)

    def _pass_on(self, actor: Actor, turn: HeardTurn) -> Reply:
        """Wait for what the environment says to a turn, and encode it."""
        session = actor.session
        said = session.replied(turn, actor.response)
        calls = tuple(Call(name, arguments, NOT_RUN, "failed") for name, arguments in turn.calls)
        replies: tuple[str, ...] = ()
        if said is not None:
            calls = said.calls
            replies = said.said
        actor.turns.append(Turn(actor.text, calls, session.turn_reward(), replies))
        if session.failure:
            actor.finish = "environment_failed"
        elif turn.finish != "stop":
            actor.finish = turn.finish
        elif session.done:
            actor.finish = "ended"
        elif said is None:
            actor.finish = "stop"
        elif len(actor.turns) >= self.stage.max_turns:
            actor.finish = "out_of_turns"
        if actor.finish is not None or said is None:
            return Reply(finish=actor.finish)
        frame = self.stage.frame
        tags = self.stage.form.results
        if said.role == "user":
            assert self.stage.said_frame is not None, "it responds"
            frame = self.stage.said_frame
            tags = ("", "")
        actor.prompt = tuple(frame.encode(self.tokenizer, self.stage.template, said.contents, tags, actor.last))
        return Reply(actor.prompt)

    def _begin(self, actor: Actor, request: Request) -> EnvironmentJob | Call:
        """Start a call and return its job, or a result if it cannot start."""
        tools = self.stage.toolset.tools
        if request.wrong:
            return Call(request.tool, request.raw_arguments, request.wrong, "malformed")
        if request.tool not in tools:
            known = f"there is no tool {request.tool!r}.{suggest(request.tool, tools)} There are: {', '.join(tools)}"
            return Call(request.tool, request.raw_arguments, known, "unknown")
        try:
            arguments = tools[request.tool].read(request.arguments)
        except ValueError as error:
            return Call(request.tool, request.raw_arguments, str(error), "malformed")
        job = actor.session.call(tools[request.tool], arguments)
        return job or Call(request.tool, request.raw_arguments, actor.session.failure, "failed")


@dataclass(frozen=True)
class Episodes:
    """Runs episodes for a set of prompts. ``room``: maximum prompt tokens."""

    stage: Stage
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    room: int
    process_group: ProcessGroup = SINGLE_PROCESS

    def play(
        self, examples: Sequence[Example], keys: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[list[Episode]]:
        """Run one episode per key, grouped by prompt. ``seeds``: one per prompt, shared by its completions.

        Raises:
            UsageError: an environment opens episodes within a group differently.
        """
        episodes: dict[Place, Episode] = {}
        openings: dict[int, str] = {}
        failures: dict[Place, list[str]] = {}
        for i, row in enumerate(keys):
            for g in range(len(row)):
                failures[i, g] = []
        pending = list(failures)
        with Pool() as pool:
            for attempt in range(self.stage.retries + 1):
                if attempt and not self.process_group.agree(bool(pending), "episodes that are played again"):
                    break
                for place, episode in self._attempt(pool, pending, examples, keys, seeds, openings).items():
                    failures[place] += episode.failures
                    episodes[place] = replace(episode, failures=tuple(failures[place]))
                pending = [place for place in pending if episodes[place].completion.finish == "environment_failed"]
        played = []
        for i, row in enumerate(keys):
            played.append([episodes[i, g] for g in range(len(row))])
        return played

    def _attempt(
        self,
        pool: Pool,
        places: Sequence[Place],
        examples: Sequence[Example],
        keys: Sequence[Sequence[int]],
        seeds: Sequence[int],
        openings: dict[int, str],
    ) -> dict[Place, Episode]:
        """Run episodes at these places once, from the beginning."""
        sessions = {place: Session(self.stage.toolset, pool, self.stage.tool_seconds) for place in places}
        for (i, _), session in sessions.items():
            session.begin(examples[i], seeds[i])
        prompts = {}
        for (i, g), session in sessions.items():
            prompts[i, g] = self._open(session, examples[i], i, openings)
        of_prompt: dict[int, list[int]] = {}  # sample indices whose reset succeeded
        for i, g in places:
            if not sessions[i, g].failure:
                of_prompt.setdefault(i, []).append(g)
        actors: dict[Place, Actor] = {}
        engine_places: dict[Place, Place] = {}  # position within the engine's smaller batch
        for n, (i, samples) in enumerate(of_prompt.items()):
            for k, g in enumerate(samples):
                actors[n, k] = Actor(sessions[i, g], prompts[i, g])
                engine_places[i, g] = (n, k)
        groups = self.engine.converse(
            [prompts[i, samples[0]] for i, samples in of_prompt.items()],
            [[keys[i][g] for g in samples] for i, samples in of_prompt.items()],
            self.sampling,
            EpisodeRespondent(self.stage, self.tokenizer, actors),
        )
        nothing = Completion((), (), "environment_failed", self.engine.version, ())
        episodes = {}
        for (i, g), session in sessions.items():
            completion = nothing
            turns: tuple[Turn, ...] = ()
            if (i, g) in engine_places:
                n, k = engine_places[i, g]
                completion = groups[n][k]
                turns = tuple(actors[n, k].turns)
            reward = session.reward()
            metrics = session.metrics()
            feedback = session.feedback()
            messages = tuple(opened(examples[i], openings.get(i, "")))
            failures: tuple[str, ...] = ()
            if session.failure:
                completion = replace(completion, finish="environment_failed")
                failures = (session.failure,)
            prompt = tuple(prompts[i, g])
            episodes[i, g] = Episode(prompt, completion, turns, reward, failures, messages, feedback, metrics)
        closings = [session.close() for session in sessions.values()]
        for closing in closings:
            if closing is not None:  # wait, because later episodes may need its thread or resources
                pool.wait(closing)
        return episodes

    def _open(self, session: Session, example: Example, number: int, openings: dict[int, str]) -> list[int]:
        """Encode a prompt including the environment's opening."""
        text = session.opening()
        if session.failure:
            return encode_prompt(self.tokenizer, self.stage.template, example.messages, example.variables)
        if openings.setdefault(number, text) != text:
            raise UsageError(
                f"environment {self.stage.toolset.name!r}: reset returned different texts for the same row and seed "
                f"(example {example.id!r}), but each group needs a single prompt; derive all randomness in reset "
                "from seed"
            )
        ids = encode_prompt(self.tokenizer, self.stage.template, opened(example, text), example.variables)
        if len(ids) > self.room:
            session.failure = f"prompt and opening have {len(ids)} tokens, but only {self.room} fit"
        return ids
