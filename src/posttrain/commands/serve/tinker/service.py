"""Sessions, models and samplers of a training server, and the work that each request asks for."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.commands.serve.requests import BadRequest
from posttrain.commands.serve.tinker import bodies
from posttrain.commands.serve.tinker.samplers import SampledWeights, SampleJob, Samplers, make_sampler
from posttrain.commands.serve.tinker.states import Kind, ModelNote, SavedState, StateFolder, no_model
from posttrain.commands.serve.tinker.wire import LossRequest, write_loss_result
from posttrain.commands.serve.tinker.work import BodyMark, Promise, Promises, RequestResult, Worker
from posttrain.data.render import stop_ids
from posttrain.errors import UsageError
from posttrain.models.sources import resolve_model_name
from posttrain.randomness import derive_key
from posttrain.registry import suggest
from posttrain.sampling.base import Sampling, check_prompts, check_sampling
from posttrain.sampling.models import ModelSource, open_model
from posttrain.store.durable import remove_tree
from posttrain.training.step import weights_digest
from posttrain.training.stepwise.datums import check_datum
from posttrain.training.stepwise.losses import check_sequences, choose_loss
from posttrain.training.stepwise.trainee import WHOLE, AdapterChoice, Trainee

MOST_SESSIONS = 1_000
SILENT_SECONDS = 120.0  # idle time until a session's models can be evicted
MOST_SHORT_LIVED = 16  # saved weights per model for sampling sessions


@dataclass
class ClientSession:
    """A client. ``heard``: when it last said something."""

    id: str
    heard: float = field(default_factory=time.monotonic)
    is_finished: bool = False


@dataclass
class ModelInTraining:
    """A model in training. ``trainee``: None until loaded. ``num_saved``: weights saved for sampling sessions."""

    id: str
    session: ClientSession
    note: ModelNote
    trainee: Trainee | None = None
    num_saved: int = 0


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """Weights that a client samples from."""

    id: str
    weights: SampledWeights
    base_model: str
    path: str | None


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """``max_models``: models in training at a time. ``seed``: sampling seed if the client gives none."""

    max_models: int
    seed: int


class Service:
    """A base model, with client sessions and models in training.

    Requests are validated on arrival, and processed by a single thread in order.
    """

    def __init__(self, source: ModelSource, names: Sequence[str], states: StateFolder, limits: ServiceLimits) -> None:
        self.names = names
        self.states = states
        states.remove_short_lived()  # left behind by a killed server
        self.limits = limits
        opened = open_model(source)
        self.section = source.section()
        self.tokenizer = opened.tokenizer
        self.tokenizer_path = str(resolve_model_name(source.path))
        self.ends = stop_ids(opened.tokenizer, opened.grader.template)
        self.samplers = Samplers(self.section, self.tokenizer, make_sampler(opened.model, self.tokenizer))
        self.vocabulary = self.samplers.base.engine.vocab_size
        self.context = self.samplers.context
        digest = weights_digest(list(opened.model.parameters()))
        self.base_digest = hashlib.sha256(repr(digest).encode()).hexdigest()
        self.worker = Worker(self.samplers)
        self.promises = Promises()
        self.sessions: OrderedDict[str, ClientSession] = OrderedDict()
        self.models: dict[str, ModelInTraining] = {}
        self.sampling_sessions: OrderedDict[str, SamplingSession] = OrderedDict()

    def close(self) -> None:
        """Stop all work, and delete weights saved for sampling sessions."""
        self.worker.close()
        self.states.remove_short_lived()

    def begin_session(self) -> ClientSession:
        """Return a new session; the oldest without a model goes when there are too many."""
        session = ClientSession(secrets.token_hex(8))
        self.sessions[session.id] = session
        busy = {model.session.id for model in self.models.values()}
        for known in list(self.sessions):
            if len(self.sessions) <= MOST_SESSIONS:
                break
            if known not in busy and known != session.id:
                del self.sessions[known]
        return session

    def session(self, session_id: str) -> ClientSession:
        """Look up a session and update its activity time.

        Raises:
            BadRequest: unknown or ended session.
        """
        found = self.sessions.get(session_id)
        if found is None:
            raise BadRequest("session_id: unknown session; start a new one", "session_id", "no_session", 404)
        if found.is_finished:
            raise BadRequest("session_id: this session has ended; start a new one", "session_id", "session_ended", 410)
        found.heard = time.monotonic()
        return found

    def finish_session(self, session_id: str) -> None:
        """End a session and release its models; saved states are kept."""
        session = self.session(session_id)
        session.is_finished = True
        for model in [one for one in self.models.values() if one.session is session]:
            del self.models[model.id]
        self.states.remove_short_lived(session.id)

    def model(self, model_id: str) -> ModelInTraining:
        """Look up a loaded model.

        Raises:
            BadRequest: unknown model.
        """
        found = self.models.get(model_id)
        if found is None or found.trainee is None:
            raise no_model(model_id)
        found.session.heard = time.monotonic()
        return found

    def check_base(self, name: str) -> None:
        """Check that a base model is served here.

        Raises:
            BadRequest: unknown model. The message lists valid names.
        """
        if name not in self.names:
            near = suggest(name, self.names)
            known = ", ".join(dict.fromkeys(self.names))
            message = f"base_model: {name[:200]!r} is not served.{near} Available: {known} (--model-name adds a name)"
            raise BadRequest(message, "base_model", "model_not_found", 404)

    def promise(
        self,
        owner: str,
        number: int | None,
        body: BodyMark,
        make: Callable[[], Callable[[], RequestResult] | SampleJob],
    ) -> Promise:
        """Create the promise for a request; a repeated request gets the same promise.

        Args:
            owner: model or session that numbers its requests. number: sequence number. body: mark of its body.
            make: validates the request and builds its work.

        Raises:
            BadRequest: an invalid request, or too many wait.
        """
        known = self.promises.repeated(owner, number, body.digest)
        if known is not None:
            return known
        self.worker.refuse_if_busy(body.size)  # before ``make``, which may reserve a model
        promise = Promise(secrets.token_hex(12), make(), body.size)
        self.worker.submit(promise)
        self.promises.add(promise, owner, number, body.digest)
        return promise

    def create_model(self, body: bodies.CreateModel) -> Callable[[], RequestResult]:
        """Build work that loads a model."""
        session = self.session(body.session_id)
        self.check_base(body.base_model)
        model = self._reserve(session, body.model_seq_id, body.base_model, body.choice, body.user_metadata)

        def load() -> RequestResult:
            self._load(model, None, with_optimizer=False)
            return {"model_id": model.id, "type": "create_model"}

        return load

    def _reserve(
        self,
        session: ClientSession,
        number: int,
        base_model: str,
        choice: AdapterChoice,
        metadata: dict[str, object] | None,
    ) -> ModelInTraining:
        """Reserve a slot for a model, evicting models in idle or ended sessions.

        Raises:
            BadRequest: no free slot, or the session already has this model.
        """
        model_id = f"{session.id}:train:{number}"
        if model_id in self.models:
            raise BadRequest(f"model_seq_id: this session already has model number {number}", "model_seq_id")
        now = time.monotonic()
        for old in list(self.models.values()):
            is_silent = now - old.session.heard > SILENT_SECONDS
            if len(self.models) >= self.limits.max_models and old.session is not session and is_silent:
                del self.models[old.id]
        if len(self.models) >= self.limits.max_models:
            message = f"{self.limits.max_models} models are in training (--max-models); unload one, or end its session"
            raise BadRequest(message, None, "too_many_models")
        note = ModelNote(
            model_id=model_id,
            base_model=base_model,
            base_digest=self.base_digest,
            adapter=choice,
            created=time.time(),
            user_metadata=metadata or {},
        )
        model = ModelInTraining(model_id, session, note)
        self.models[model_id] = model
        return model

    def _load(self, model: ModelInTraining, state: SavedState | None, *, with_optimizer: bool) -> None:
        """Create a model, from a saved state if given; on failure, the slot is released."""
        try:
            trainee = Trainee(self.section, model.note.adapter)
            if state is not None:
                trainee.restore(state.folder, with_optimizer=with_optimizer)
            self.states.note_model(model.note)
            model.trainee = trainee
        finally:
            if model.trainee is None:
                self.models.pop(model.id, None)

    def unload(self, body: bodies.OfModel) -> Callable[[], RequestResult]:
        """Build work that releases a model."""
        model = self.model(body.model_id)

        def unload() -> RequestResult:
            self.models.pop(model.id, None)
            return {"model_id": model.id, "type": "unload_model"}

        return unload

    def evaluate(self, request: LossRequest) -> Callable[[], RequestResult]:
        """Build work for a loss: forward, plus backward for training."""
        trainee = self._trainee(request.model_id)
        loss = choose_loss(request.loss, request.options)
        for number, datum in enumerate(request.datums):
            where = f"data.{number}"
            check_datum(datum, where, list(loss.fields), self.vocabulary, self.context)
            check_sequences(datum, where)
            if datum.targets.ndim == 2 and loss.name != "cross_entropy":
                raise BadRequest(f"{where}.target_tokens: {loss.name} takes a single target per token", "data")

        def compute() -> RequestResult:
            total, logprobs = trainee.evaluate(request.datums, loss, learns=request.learns)
            return write_loss_result(logprobs, {"loss:sum": total})

        return compute

    def step(self, body: bodies.OptimStep) -> Callable[[], RequestResult]:
        """Build work for an optimizer step."""
        trainee = self._trainee(body.model_id)

        def step() -> RequestResult:
            return {"metrics": trainee.update(body.adam_params)}

        return step

    def save(self, body: bodies.SaveWeights) -> Callable[[], RequestResult]:
        """Build work that saves weights, plus optimizer state if training should continue later."""
        model = self.model(body.model_id)
        trainee = self._trainee(body.model_id)
        is_sampler = isinstance(body, bodies.SaveForSampler)
        kind: Kind = "weights"
        if is_sampler:
            kind = "sampler_weights"
        name = body.path
        if name is not None:
            self.states.place(model.id, kind, name)

        def save() -> RequestResult:
            called = name or f"step-{trainee.step:06d}"
            folder = self.states.place(model.id, kind, called)
            if folder.exists() and not body.overwrite:
                raise UsageError(f"path: {called!r} exists; choose another name, or overwrite it")
            aside = self.states.aside(folder)
            trainee.save(aside, with_optimizer=not is_sampler, note=self._note(model, body.user_metadata))
            self.samplers.forget(folder)
            self.states.replace(folder, aside)
            return {"path": f"tinker://{model.id}/{kind}/{called}", "type": body.type}

        def begin_sampling() -> RequestResult:
            folder = self.states.short_lived(model.id, model.num_saved)
            trainee.save(folder, with_optimizer=False, note=self._note(model, None))
            model.num_saved += 1
            if model.num_saved > MOST_SHORT_LIVED:
                old = self.states.short_lived(model.id, model.num_saved - MOST_SHORT_LIVED - 1)
                self.samplers.forget(old)
                remove_tree(old)
            session = self._begin_sampling(
                SampledWeights(folder, trainee.choice, trainee.step), model.note.base_model, None
            )
            return {"sampling_session_id": session.id, "type": body.type}

        if is_sampler and name is None:
            return begin_sampling
        return save

    def _note(self, model: ModelInTraining, metadata: dict[str, object] | None) -> dict[str, object]:
        return {
            "base_model": model.note.base_model,
            "base_digest": self.base_digest,
            "adapter": model.note.adapter.model_dump(),
            "user_metadata": metadata or {},
        }

    def load(self, body: bodies.LoadWeights) -> Callable[[], RequestResult]:
        """Build work that loads a state into an existing or new model."""
        state = self.states.find(body.path)
        self._check_state(state, body)
        if body.model_id is not None:
            trainee = self._trainee(body.model_id)
            model = self.model(body.model_id)
            own = trainee.choice.model_copy(update={"seed": None})
            if own != state.note.adapter.model_copy(update={"seed": None}):
                raise BadRequest("path: this state has a different adapter; load it as a new model", "path")

            def restore() -> RequestResult:
                trainee.restore(state.folder, with_optimizer=body.optimizer)
                return {"path": body.path, "model_id": model.id, "type": "load_weights"}

            return restore
        assert body.session_id is not None
        assert body.model_seq_id is not None
        session = self.session(body.session_id)
        named = body.base_model or state.note.base_model
        new = self._reserve(session, body.model_seq_id, named, state.note.adapter, body.user_metadata)

        def create() -> RequestResult:
            self._load(new, state, with_optimizer=body.optimizer)
            return {"path": body.path, "model_id": new.id, "type": "load_weights"}

        return create

    def _check_state(self, state: SavedState, body: bodies.LoadWeights) -> None:
        if body.base_model is not None:
            self.check_base(body.base_model)
        if state.note.base_digest != self.base_digest:
            raise BadRequest(
                f"path: this state was trained from {state.note.base_model!r}, not from this server's model; serve "
                "that model",
                "path",
            )
        if body.optimizer and not state.note.has_optimizer:
            raise BadRequest("path: these sampling weights have no optimizer state; load weights only", "path")

    def sample_from(self, body: bodies.CreateSamplingSession) -> SamplingSession:
        """Start a sampling session with base or saved weights."""
        self.session(body.session_id)
        if body.model_path is None:
            if body.base_model is None:
                raise BadRequest("base_model: missing. Give base_model or model_path", "base_model")
            self.check_base(body.base_model)
            return self._begin_sampling(SampledWeights(None, WHOLE, 0), body.base_model, None)
        if body.base_model is not None:
            self.check_base(body.base_model)
        state = self.states.find(body.model_path)
        note = state.note
        if note.base_digest != self.base_digest:
            raise BadRequest(f"model_path: these weights are for {note.base_model!r}, not served here", "model_path")
        return self._begin_sampling(
            SampledWeights(state.folder, note.adapter, note.step), note.base_model, body.model_path
        )

    def _begin_sampling(self, weights: SampledWeights, base_model: str, path: str | None) -> SamplingSession:
        session = SamplingSession(secrets.token_hex(12), weights, base_model, path)
        self.sampling_sessions[session.id] = session
        while len(self.sampling_sessions) > MOST_SESSIONS:
            self.sampling_sessions.popitem(last=False)
        return session

    def sampling_session(self, session_id: str) -> SamplingSession:
        """Look up a sampling session.

        Raises:
            BadRequest: unknown session.
        """
        found = self.sampling_sessions.get(session_id)
        if found is None:
            message = "sampling_session_id: unknown sampling session; start a new one"
            raise BadRequest(message, "sampling_session_id", "no_session", 404)
        return found

    def sample(self, body: bodies.SampleRequest) -> SampleJob:
        """Build a sampling job.

        Without a client seed, randomness is derived from the server's seed, training step and request number.
        """
        session = self.sampling_session(body.sampling_session_id)
        prompt = body.prompt.ids
        params = body.sampling_params
        check_prompts([prompt], self.context, self.vocabulary)
        most = params.max_tokens or self.context - len(prompt)
        top_k = None
        if params.top_k > 0:
            top_k = params.top_k
        sampling = Sampling(most, params.temperature, top_k, params.top_p, params.stop_ids(self.ends))
        check_sampling(sampling)
        seed = params.seed
        if seed is None:
            seed = derive_key(self.limits.seed, "sample", session.weights.step, body.seq_id)
        first = 1
        last_n = body.prompt_logprobs_last_n
        if last_n is not None:
            if not body.prompt_logprobs or last_n >= len(prompt):
                message = f"prompt_logprobs_last_n: {last_n}; give 1 to {len(prompt) - 1}, with prompt_logprobs"
                raise BadRequest(message, "prompt_logprobs_last_n")
            first = len(prompt) - last_n
        return SampleJob(
            weights=session.weights,
            prompt=prompt,
            keys=tuple(derive_key(seed, "generate", number) for number in range(body.num_samples)),
            sampling=sampling,
            stop_texts=params.stop_texts,
            scores_prompt=bool(body.prompt_logprobs),
            first_scored=first,
            top_of_prompt=body.topk_prompt_logprobs,
            top_of_answer=body.topk_sample_logprobs,
        )

    def _trainee(self, model_id: str) -> Trainee:
        trainee = self.model(model_id).trainee
        assert trainee is not None, "a model that is loaded"
        return trainee
