"""The studio's first page: talk to one model, or to two side by side."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.commands.chat.conversation import Controls, Conversation, SpokenToken
from posttrain.commands.chat.studio_records import Colouring, draw_conversation, draw_reply
from posttrain.engines.models import OpenedModel
from posttrain.errors import PosttrainError
from posttrain.interpret.features.steering import Steering
from posttrain.reward_models.scoring import RewardModel
from posttrain.types import Example, Message

REFRESH_SECONDS = 0.05  # a page that is drawn anew for every token would be slower than the model
NOBODY = "(nobody)"


@dataclass(slots=True)
class Speaker:
    """One side of the page: its conversation, and the reply as it stands."""

    conversation: Conversation
    tokens: list[SpokenToken] = field(default_factory=list)
    problem: str = ""
    score: float | None = None
    history: list[Message] = field(default_factory=list)
    is_speaking: bool = False

    def draw(self, colouring: Colouring) -> str:
        """The conversation with the newest reply in colours."""
        if self.problem:
            return draw_conversation([*self.history, Message("system", self.problem)])
        opening = self.conversation.opening
        return draw_conversation(self.history, draw_reply(self.tokens, colouring, self._facts(), opening))

    def _facts(self) -> str:
        if self.is_speaking or not self.tokens:
            return ""
        mean = math.fsum(token.logprob for token in self.tokens) / len(self.tokens)
        score = "" if self.score is None else f", reward model's score {self.score:.3f}"
        return f"{len(self.tokens)} tokens, mean log-probability {mean:.2f}{score}"


@dataclass(slots=True)
class Session:
    """What one visitor has said, to whom, and with which controls."""

    names: tuple[str, ...] = ()
    speakers: list[Speaker] = field(default_factory=list)
    is_stopped: bool = False

    def __deepcopy__(self, memo: Any) -> Session:
        return Session()  # the page makes a session for each visitor by copying an empty one


class Stage:
    """Answers for all visitors, one at a time, so that a model's weights serve one generation.

    Args:
        open_model, open_judge: load by name; what they give is kept.
    """

    def __init__(self, open_model: Callable[[str], OpenedModel], open_judge: Callable[[str], RewardModel]) -> None:
        self.open_model = open_model
        self.open_judge = open_judge
        self._models: dict[str, OpenedModel] = {}
        self._judges: dict[str, RewardModel] = {}
        self._lock = threading.Lock()

    def model(self, name: str) -> OpenedModel:
        """The model of this name, loaded once."""
        if name not in self._models:
            self._models[name] = self.open_model(name)
        return self._models[name]

    def answer(
        self,
        session: Session,
        question: str,
        names: Sequence[str],
        controls: Controls,
        system: str,
        judge: str,
        colouring: Colouring,
        steer: Callable[[int, Any], Steering | None] = lambda side, model: None,
    ) -> Iterator[list[str]]:
        """The pages of all speakers, again and again while the replies grow.

        A model that cannot reply shows why in its place; the others go on. ``steer``: how the model on a side (0: the
        left one) is steered.

        Raises:
            PosttrainError: a model, the judge or the dictionary cannot be loaded.
        """
        with self._lock:
            chosen = tuple(name for name in names if name != NOBODY)
            session.is_stopped = False
            if session.names != chosen:
                session.names, session.speakers = (
                    chosen,
                    [Speaker(Conversation(self.model(name), controls)) for name in chosen],
                )
            for side, speaker in enumerate(session.speakers):
                speaker.conversation.steering = steer(side, speaker.conversation.sampler.model)
            replies = [self._begin(speaker, question, controls, system) for speaker in session.speakers]
            shown = 0.0
            while any(speaker.is_speaking for speaker in session.speakers):
                for speaker, reply in zip(session.speakers, replies, strict=True):
                    if speaker.is_speaking:
                        self._advance(speaker, reply, stop=session.is_stopped)
                if time.monotonic() - shown >= REFRESH_SECONDS:
                    yield [speaker.draw(colouring) for speaker in session.speakers]
                    shown = time.monotonic()
            if judge != NOBODY:
                self._judge(session, judge)
            yield [speaker.draw(colouring) for speaker in session.speakers]

    def _begin(self, speaker: Speaker, question: str, controls: Controls, system: str) -> Iterator[SpokenToken]:
        conversation = speaker.conversation
        conversation.controls = controls
        conversation.set_system(system)
        speaker.history = [*conversation.messages, Message("user", question)]
        speaker.tokens, speaker.problem, speaker.score, speaker.is_speaking = [], "", None, True
        return conversation.reply(question)

    def _advance(self, speaker: Speaker, reply: Any, *, stop: bool) -> None:
        try:
            if stop:
                reply.close()
                speaker.is_speaking = False
                return
            speaker.tokens.append(next(reply))
        except StopIteration:
            speaker.is_speaking = False
        except PosttrainError as error:
            speaker.problem, speaker.is_speaking = str(error), False

    def _judge(self, session: Session, judge: str) -> None:
        if judge not in self._judges:
            self._judges[judge] = self.open_judge(judge)
        for speaker in session.speakers:
            if speaker.tokens and not speaker.problem:
                opening = speaker.conversation.opening
                text = opening + "".join(token.text for token in speaker.tokens)
                asked = Example("chat", tuple(speaker.history))
                speaker.score = self._judges[judge].score([asked], [text], [speaker.tokens[-1].finish])[0]
