"""The embedded sampler: independence of company, agreement with the scorer and with PyTorch, where responses end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from sampler_requests import GREEDY, LONG, NO_END, PREFIXED, PROMPTS, RANDOM, SHARED, generate

from actionopd_jax.models.logprobs import token_logprobs
from actionopd_jax.records import Finish


def _score(model, prompt, sample, temperature):
    """The trainer's log-probabilities of a sample."""
    row = np.array(prompt + sample.ids, np.int32)
    length = len(row)
    tokens = np.zeros((1, 384), np.int32)
    tokens[0, :length] = row
    end = np.arange(1, 385)[None]
    end[0, :length] = length
    source = np.zeros((1, 16), np.int32)
    target = np.zeros((1, 16), np.int32)
    source[0, : len(sample.ids)] = np.arange(len(prompt) - 1, length - 1)
    target[0, : len(sample.ids)] = sample.ids
    return np.asarray(_trainer_logprobs(model, tokens, end, source, target, temperature))[0, : len(sample.ids)]


@jax.jit
def _trainer_logprobs(model, tokens, end, source, target, temperature):
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = model.hidden_states(tokens, positions, end)
    return token_logprobs(hidden, model.head_weight(), source, target, temperature).logprobs


# -- the same samples whatever the company ---------------------------------------------------------


@pytest.mark.parametrize("prefixes", [(), (SHARED,)], ids=["plain", "prefix"])
def test_samples_do_not_depend_on_company_order_or_place(sampler, prefixes):
    """To the bit: alone, all together (several batches, two buckets), in reverse, and with other companions."""
    prompts = [*PROMPTS[:2], *PREFIXED, LONG, *PROMPTS[2:]]
    alone = {}
    lone = sampler(prefixes=prefixes)
    for prompt in prompts:
        [alone[prompt]] = generate(lone, [prompt])
    assert lone.counters.batches == len(prompts)
    busy = sampler(prefixes=prefixes)
    for order in (prompts, prompts[::-1], prompts[3:] + prompts[:1], prompts[1:2] * 3 + prompts[4:5]):
        assert generate(busy, order) == [alone[prompt] for prompt in order]
    assert busy.counters.batches < busy.counters.prompts


def test_samples_of_one_prompt_differ_from_one_another_and_from_other_seeds(sampler):
    prompts = [PROMPTS[1]] * 3
    first, second, again = generate(sampler(), prompts, seeds=[1, 2, 1])
    assert first == again
    assert len({sample.ids for sample in [*first, *second]}) == 8


def test_noise_differs_between_prompts_candidates_and_positions(sampler, model):
    """All weights 0: every draw is uniform over the same ids, so equal noise would give equal ids."""
    client = sampler()
    client.set_weights(jax.tree.map(jnp.zeros_like, nnx.state(model)), version=1)
    answers = generate(client, [PROMPTS[1]] * 12, seeds=list(range(12)))
    ids = np.array([[sample.ids for sample in samples] for samples in answers])  # [prompts, candidates, positions]
    counts = np.bincount(ids.ravel(), minlength=19)
    # 480 draws of 19 ids (20 equally likely ones, cut at 0.95): about 25 each, standard deviation 5.
    assert counts[19:].sum() == 0
    assert counts.min() > 8
    for axis in range(3):
        first, second = np.take(ids, 0, axis), np.take(ids, 1, axis)
        assert (first == second).mean() < 0.3  # 1/19 by chance


def test_both_halves_of_a_seed_count(sampler):
    low, high, _ = generate(sampler(), [PROMPTS[1]] * 3, seeds=[1, 1 + (1 << 32), 2**63 - 1])
    assert low != high


def test_prefixed_and_plain_prompts_give_the_same_greedy_samples(sampler):
    """A registered prefix changes where its keys come from, not what follows."""
    plain = generate(sampler(), PREFIXED, GREEDY, n=1)
    prefixed_sampler = sampler(prefixes=(SHARED, SHARED[:10]))
    prefixed = generate(prefixed_sampler, PREFIXED, GREEDY, n=1)
    assert prefixed_sampler.counters.prompt_tokens == sum(len(prompt) - 64 for prompt in PREFIXED)
    for [with_prefix], [without] in zip(prefixed, plain, strict=True):
        assert with_prefix.ids == without.ids
        np.testing.assert_allclose(with_prefix.logprobs, without.logprobs, atol=1e-5)


def test_prompt_that_is_no_longer_than_a_prefix_is_not_cut(sampler):
    """The last token must be computed: a prompt equal to the prefix does not use it."""
    prompt = SHARED[:64]
    [with_prefix] = generate(sampler(prefixes=(SHARED,)), [prompt], GREEDY, n=1)
    [without] = generate(sampler(), [prompt], GREEDY, n=1)
    assert with_prefix == without


# -- agreement with the scorer and with PyTorch ----------------------------------------------------


def test_logprobs_equal_the_trainer_scores(sampler, model):
    prompts = [*PREFIXED, *PROMPTS, LONG]
    for prompt, samples in zip(prompts, generate(sampler(prefixes=(SHARED,)), prompts), strict=True):
        for sample in samples:
            scored = _score(model, prompt, sample, RANDOM.temperature)
            np.testing.assert_allclose(sample.logprobs, scored, atol=1e-5)


def test_greedy_samples_equal_pytorch_generate(sampler, sampler_checkpoint, model):
    prompts = PROMPTS + PREFIXED
    greedy = generate(sampler(), prompts, GREEDY, n=1)
    for prompt, [sample] in zip(prompts, greedy, strict=True):
        with torch.no_grad():
            output = sampler_checkpoint.torch_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=GREEDY.max_tokens,
                pad_token_id=0,
                suppress_tokens=[NO_END],
            )
        assert sample.ids == tuple(output[0, len(prompt) :].tolist())
        np.testing.assert_allclose(sample.logprobs, _score(model, prompt, sample, 1.0), atol=1e-5)


# -- where a response ends -------------------------------------------------------------------------


def test_end_token_stops_one_candidate_and_is_its_last_id(sampler):
    """The same draws as without an end token, each cut after its first one; the others go on."""
    [endless] = generate(sampler(), PROMPTS[1:2])
    assert all(sample.finish is Finish.LENGTH and len(sample.ids) == 10 for sample in endless)
    end_id = endless[0].ids[3]
    [stopped] = generate(sampler(end_id=end_id), PROMPTS[1:2])
    for whole, cut in zip(endless, stopped, strict=True):
        length = whole.ids.index(end_id) + 1 if end_id in whole.ids else 10
        assert cut.ids == whole.ids[:length]
        np.testing.assert_allclose(cut.logprobs, whole.logprobs[:length], atol=1e-5)  # another program
        assert cut.finish is (Finish.STOP if end_id in whole.ids else Finish.LENGTH)
    assert stopped[0].finish is Finish.STOP
    assert {sample.finish for sample in stopped} == {Finish.STOP, Finish.LENGTH}
