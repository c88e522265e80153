"""The sets that truncation keeps for each draw: by hand, against float64, and on every decoding path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import make_keys, make_prompts
from torch import Tensor

from closeness import OF_TINY_RANDOM, approx, assert_close, rounding
from posttrain.errors import UsageError
from posttrain.randomness import uniforms
from posttrain.sampling.base import MOST_KEPT, Conversation, Engine, Reply, Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.sampler import DrawnSets, draw_kept, truncate
from posttrain.types import KeptSets
from refusing import refuses
from tiny_random import build_tiny_random


@pytest.fixture
def tiny_double() -> Any:
    return build_tiny_random("qwen3").double()


P = torch.tensor([[0.1, 0.4, 0.2, 0.3]])


def sets_of(probabilities: Tensor, u: float = 0.5, **options: Any) -> tuple[list[int], int, float, bool]:
    """The set, the token drawn, its probability in the set, and whether the bound cut the set."""
    sampling = Sampling(1, keeps_sets=True, **options)
    ids, probability, sets = draw_kept(probabilities.log(), torch.tensor([[u]], dtype=torch.float64), sampling)
    members = [token for token in sets[0, 1:].tolist() if token >= 0]
    return members, int(ids), float(probability), bool(sets[0, 0])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.85}, [1, 2, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # the nucleus of (4/7, 3/7)
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
        ({"min_p": 0.6}, [1, 3]),  # 0.24 and more
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.4, "top_p": 0.75}, [1, 3]),  # of (4/9, 3/9, 2/9)
    ],
)
def test_draw_kept_distribution_worked_by_hand_keeps_the_set_and_its_probabilities(options, kept):
    members, token, probability, is_cut = sets_of(P, 0.5, **options)
    assert members == kept
    assert not is_cut
    mass = sum(float(P[0, one]) for one in kept)
    assert probability == approx(float(P[0, token]) / mass, rel=1e-6)
    same = truncate(P, options.get("top_k"), options.get("top_p", 1.0), options.get("min_p", 0.0))
    assert same[0].nonzero()[:, 0].tolist() == kept, "evaluations truncate alike"


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.56, 1), (0.58, 3), (1 - 2**-53, 3)])
def test_draw_kept_uniform_number_is_stretched_over_the_set(u, token):
    assert sets_of(P, u, top_k=2)[1] == token  # 4/7 = 0.571


@pytest.mark.parametrize(
    ("options", "most", "is_cut"),
    [
        ({"top_p": 0.5}, 500, False),
        ({"top_p": 0.99}, MOST_KEPT, True),
        ({"min_p": 0.5}, MOST_KEPT, True),
        ({"min_p": 0.5, "top_p": 0.2}, 200, False),
        ({"top_k": 600}, MOST_KEPT, False),
        ({"top_k": 30, "top_p": 0.999}, 30, False),
    ],
)
def test_draw_kept_flat_distribution_is_bounded_and_says_so(options, most, is_cut):
    """A thousand tokens of nearly one probability: 0.99 of it are more than 512, unless top_k says how many."""
    flat = torch.linspace(1.0, 1.02, 1000, dtype=torch.float64)[None].float()
    members, token, _, was_cut = sets_of(flat / flat.sum(), 0.3, **options)
    assert len(members) <= most
    assert was_cut == is_cut
    assert token in members
    assert members == sorted(set(members))
    assert len(members) >= 0.98 * most


def test_draw_kept_ids_without_a_text_are_in_no_set():
    sampling = Sampling(1, top_k=3, keeps_sets=True, num_tokens=3)
    _, _, sets = draw_kept(P.log(), torch.tensor([[0.5]], dtype=torch.float64), sampling)
    assert sets[0, 1:].tolist() == [0, 1, 2]


def reference_sets(model: Any, ids: list[int], start: int, options: dict[str, Any]) -> list[tuple[set[int], Tensor]]:
    """For each id from ``start`` on the set by definition, token by token in plain Python, and log p over the set."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    found = []
    for t in range(start, len(ids)):
        table = (logits[t - 1] / options.get("temperature", 1.0)).softmax(-1)
        order = sorted(range(len(table)), key=lambda one: -float(table[one]))
        order = [one for one in order if float(table[one]) >= options.get("min_p", 0.0) * float(table[order[0]])]
        order = order[: options.get("top_k", MOST_KEPT)]
        mass, total, members = 0.0, math.fsum(float(table[one]) for one in order), set()
        for one in order:
            if members and mass / total >= options.get("top_p", 1.0):
                break
            members.add(one)
            mass += float(table[one])
        inside = torch.tensor(sorted(members))
        found.append((members, table[ids[t]].log() - table[inside].sum().log()))
    return found


CASES = [{"top_p": 0.8}, {"top_k": 7, "top_p": 0.9, "temperature": 1.4}, {"min_p": 0.2, "temperature": 0.8}]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("path", ["lean", "modules", "plain", "reread"])
def test_native_sets_and_logprobs_of_every_path_are_those_of_a_float64_reference(tiny_double, path, options):
    engine = NativeEngine(tiny_double, slots=3)
    engine._choose = lambda reach, choose=engine._choose: (path, choose(reach)[1])  # type: ignore[method-assign]
    prompts = make_prompts((5, 2))
    groups = engine.generate(prompts, make_keys(2, 2), Sampling(6, keeps_sets=True, **options))
    for prompt, group in zip(prompts, groups, strict=True):
        for answer in group:
            expected = reference_sets(tiny_double, [*prompt, *answer.ids], len(prompt), options)
            for t, (members, logprob) in enumerate(expected):
                assert set(answer.kept.at(t)) == members
                assert answer.logprobs[t] == approx(float(logprob), abs=OF_TINY_RANDOM)


def test_converse_ids_of_replies_have_no_set_and_the_others_do(tiny_double):
    class Teller:
        def hear(self, prompt: int, sample: int, turn: Any, finish: Any) -> None:
            self.turns = getattr(self, "turns", 0) + 1

        def reply(self, prompt: int, sample: int) -> Reply:
            return Reply((9, 10, 11)) if self.turns < 3 else Reply(finish="ended")

    sampling = Sampling(40, top_p=0.9, keeps_sets=True, stop_ids=frozenset(range(0, 300, 4)), max_turn_tokens=8)
    for engine in (NativeEngine(tiny_double), Generated(NativeEngine(tiny_double))):
        ((answer,),) = engine.converse([[5, 6, 7]], [[11]], sampling, Teller())
        assert answer.own is not None
        assert not all(answer.own)
        counts = answer.kept.counts
        assert [count > 0 for count in counts] == list(answer.own)
        assert all(answer.ids[t] in answer.kept.at(t) for t, own in enumerate(answer.own) if own)


class Generated(Engine):
    """An engine that knows no turns: they are generated one by one."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine

    def generate(self, prompts, keys, sampling):
        return self.engine.generate(prompts, keys, sampling)


def test_recorded_steps_give_the_sets_of_the_schedules_own(tiny_double):
    """The steps that a GPU records, called on a CPU."""
    from posttrain.sampling.base import begin
    from posttrain.sampling.native.recorded import RecordedSteps
    from posttrain.sampling.native.sampler import largest_set
    from posttrain.sampling.native.schedule import Schedule

    engine = NativeEngine(tiny_double)
    sampling = Sampling(5, top_p=0.9, keeps_sets=True)
    found = []
    for records in (False, True):
        rows = [row for group in begin([[5, 6], [7, 8, 9]], make_keys(2, 2), 5, 512) for row in group]
        with torch.no_grad():
            decoder = engine._bind("lean", None, 64)
            work = Schedule(decoder, [[5, 6], [7, 8, 9]], rows, sampling, 4)
            work.longest_burst = 3
            if records:
                most = largest_set(sampling, engine.vocab_size)
                work.recorded = RecordedSteps(decoder, 4, work.limit, 3, print, most_kept=most)
            work.run()
        found.append([(row.ids, row.kept_ids, row.kept_counts) for row in rows])
    assert found[0] == found[1]


def test_drawn_sets_are_appended_row_by_row():
    sets = torch.tensor([[[0, 4, -1], [1, 2, 3]], [[0, 5, 6], [0, 7, -1]]], dtype=torch.int32)
    rows = [Conversation(0, g, 0, 9) for g in range(2)]
    drawn = DrawnSets(sets)
    for step in range(2):
        for place, row in enumerate(rows):
            drawn.append_to(row, step, place)
    assert [(row.kept_ids, row.kept_counts, row.num_cut) for row in rows] == [
        ([4, 5, 6], [1, 2], 0),
        ([2, 3, 7], [2, 1], 1),
    ]
    kept = KeptSets.of_counts(rows[0].kept_ids, rows[0].kept_counts)
    assert kept.offsets == (0, 1, 3)
    assert kept.at(1) == (5, 6)


def test_evaluation_with_min_p_draws_what_stands_there_and_nothing_else():
    """Without sets: probabilities are those of the whole distribution, and draws those of the truncated one."""
    table = uniforms([3], 400)[0]
    from posttrain.sampling.native.sampler import draw

    drawn = {
        int(draw(P.log(), torch.tensor([[u]], dtype=torch.float64), Sampling(1, min_p=0.6))[0]) for u in table.tolist()
    }
    assert drawn == {1, 3}
    _, probability = draw(P.log(), torch.tensor([[0.1]], dtype=torch.float64), Sampling(1, min_p=0.6))
    assert_close(probability, torch.tensor([0.4]), rtol=rounding(torch.float32), atol=0.0)


@pytest.mark.parametrize("min_p", [-0.1, 1.1, math.nan])
def test_generate_min_p_out_of_range_is_refused_by_name(tiny_double, min_p):
    with refuses(UsageError, "min_p"):
        NativeEngine(tiny_double).generate([[5]], [[1]], Sampling(2, min_p=min_p))
