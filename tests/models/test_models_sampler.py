"""The embedded sampler: independence of company, agreement with the scorer and with PyTorch, stops, failures."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from actionopd_jax import protocols
from actionopd_jax.errors import ServiceError
from actionopd_jax.models import weights
from actionopd_jax.models.logprobs import token_logprobs
from actionopd_jax.models.sampler import _SMALLEST_SUFFIX, EmbeddedSampler, bucket
from actionopd_jax.records import Finish, Sampling

_NO_END = 96  # beyond `num_valid_ids`: never drawn
_RANDOM = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=10)
_GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=10)
_RNG = np.random.default_rng(0)
_SHARED = tuple(int(x) for x in _RNG.integers(0, 90, 70))  # a registered prefix; 64 of them are used
_PROMPTS = [tuple(int(x) for x in _RNG.integers(0, 90, length)) for length in (1, 5, 63, 127, 128)]
_LONG = tuple(int(x) for x in _RNG.integers(0, 90, _SMALLEST_SUFFIX + 12))  # of another shape
_PREFIXED = [_SHARED + prompt for prompt in _PROMPTS[:3]]


@pytest.fixture(scope="module")
def made(checkpoint):
    return checkpoint(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(made):
    return weights.load(made.folder)


@pytest.fixture
def sampler(model):
    """Makes samplers and closes them."""
    open_samplers = []

    def make(**changes):
        settings = {"end_id": _NO_END, "num_valid_ids": 96, "slots": 3, "max_wait_ms": 20.0, **changes}
        open_samplers.append(EmbeddedSampler(model, **settings))
        return open_samplers[-1]

    yield make
    for each in open_samplers:
        each.close()


def _generate(sampler, prompts, sampling=_RANDOM, n=4, seeds=None):
    """All prompts at the same time, in this order."""

    async def run():
        asked = zip(prompts, seeds or [hash_of(prompt) for prompt in prompts], strict=True)
        return await asyncio.gather(*(sampler.generate(prompt, sampling, n, seed) for prompt, seed in asked))

    return asyncio.run(run())


def hash_of(prompt):
    """A seed of more than 32 bits that belongs to the prompt."""
    return sum((i + 1) * token for i, token in enumerate(prompt)) * 1_000_003**2


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


@pytest.mark.parametrize("prefixes", [(), (_SHARED,)], ids=["plain", "prefix"])
def test_samples_do_not_depend_on_company_order_or_place(sampler, prefixes):
    """To the bit: alone, all together (several batches, two buckets), in reverse, and with other companions."""
    prompts = [*_PROMPTS[:2], *_PREFIXED, _LONG, *_PROMPTS[2:]]
    alone = {}
    lone = sampler(prefixes=prefixes)
    for prompt in prompts:
        [alone[prompt]] = _generate(lone, [prompt])
    assert lone.counters.batches == len(prompts)
    busy = sampler(prefixes=prefixes)
    for order in (prompts, prompts[::-1], prompts[3:] + prompts[:1], prompts[1:2] * 3 + prompts[4:5]):
        assert _generate(busy, order) == [alone[prompt] for prompt in order]
    assert busy.counters.batches < busy.counters.prompts


def test_samples_of_one_prompt_differ_from_one_another_and_from_other_seeds(sampler):
    prompts = [_PROMPTS[1]] * 3
    first, second, again = _generate(sampler(), prompts, seeds=[1, 2, 1])
    assert first == again
    assert len({sample.ids for sample in [*first, *second]}) == 8


def test_noise_differs_between_prompts_candidates_and_positions(sampler, model):
    """All weights 0: every draw is uniform over the same ids, so equal noise would give equal ids."""
    client = sampler()
    client.set_weights(jax.tree.map(jnp.zeros_like, nnx.state(model)), version=1)
    answers = _generate(client, [_PROMPTS[1]] * 12, seeds=list(range(12)))
    ids = np.array([[sample.ids for sample in samples] for samples in answers])  # [prompts, candidates, positions]
    counts = np.bincount(ids.ravel(), minlength=19)
    # 480 draws of 19 ids (20 equally likely ones, cut at 0.95): about 25 each, standard deviation 5.
    assert counts[19:].sum() == 0
    assert counts.min() > 8
    for axis in range(3):
        first, second = np.take(ids, 0, axis), np.take(ids, 1, axis)
        assert (first == second).mean() < 0.3  # 1/19 by chance


def test_both_halves_of_a_seed_count(sampler):
    low, high, _ = _generate(sampler(), [_PROMPTS[1]] * 3, seeds=[1, 1 + (1 << 32), 2**63 - 1])
    assert low != high


def test_prefixed_and_plain_prompts_give_the_same_greedy_samples(sampler):
    """A registered prefix changes where its keys come from, not what follows."""
    plain = _generate(sampler(), _PREFIXED, _GREEDY, n=1)
    prefixed_sampler = sampler(prefixes=(_SHARED, _SHARED[:10]))
    prefixed = _generate(prefixed_sampler, _PREFIXED, _GREEDY, n=1)
    assert prefixed_sampler.counters.prompt_tokens == sum(len(prompt) - 64 for prompt in _PREFIXED)
    for [with_prefix], [without] in zip(prefixed, plain, strict=True):
        assert with_prefix.ids == without.ids
        np.testing.assert_allclose(with_prefix.logprobs, without.logprobs, atol=1e-5)


def test_prompt_that_is_no_longer_than_a_prefix_is_not_cut(sampler):
    """The last token must be computed: a prompt equal to the prefix does not use it."""
    prompt = _SHARED[:64]
    [with_prefix] = _generate(sampler(prefixes=(_SHARED,)), [prompt], _GREEDY, n=1)
    [without] = _generate(sampler(), [prompt], _GREEDY, n=1)
    assert with_prefix == without


# -- agreement with the scorer and with PyTorch ----------------------------------------------------


def test_logprobs_equal_the_trainer_scores(sampler, model):
    prompts = [*_PREFIXED, *_PROMPTS, _LONG]
    for prompt, samples in zip(prompts, _generate(sampler(prefixes=(_SHARED,)), prompts), strict=True):
        for sample in samples:
            scored = _score(model, prompt, sample, _RANDOM.temperature)
            np.testing.assert_allclose(sample.logprobs, scored, atol=1e-5)


def test_greedy_samples_equal_pytorch_generate(sampler, made, model):
    prompts = _PROMPTS + _PREFIXED
    greedy = _generate(sampler(), prompts, _GREEDY, n=1)
    for prompt, [sample] in zip(prompts, greedy, strict=True):
        with torch.no_grad():
            output = made.torch_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=_GREEDY.max_tokens,
                pad_token_id=0,
                suppress_tokens=[_NO_END],
            )
        assert sample.ids == tuple(output[0, len(prompt) :].tolist())
        np.testing.assert_allclose(sample.logprobs, _score(model, prompt, sample, 1.0), atol=1e-5)


# -- where a response ends -------------------------------------------------------------------------


def test_end_token_stops_one_candidate_and_is_its_last_id(sampler):
    """The same draws as without an end token, each cut after its first one; the others go on."""
    [endless] = _generate(sampler(), _PROMPTS[1:2])
    assert all(sample.finish is Finish.LENGTH and len(sample.ids) == 10 for sample in endless)
    end_id = endless[0].ids[3]
    [stopped] = _generate(sampler(end_id=end_id), _PROMPTS[1:2])
    for whole, cut in zip(endless, stopped, strict=True):
        length = whole.ids.index(end_id) + 1 if end_id in whole.ids else 10
        assert cut.ids == whole.ids[:length]
        assert cut.logprobs == whole.logprobs[:length]
        assert cut.finish is (Finish.STOP if end_id in whole.ids else Finish.LENGTH)
    assert stopped[0].finish is Finish.STOP
    assert {sample.finish for sample in stopped} == {Finish.STOP, Finish.LENGTH}


# -- requests that cannot be served ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ((), {}, "prompt of 0 tokens"),
        ((1, -1), {}, "outside the vocabulary of 97"),
        ((1, 97), {}, "outside the vocabulary of 97"),
        ((1,), {"n": 0}, "cannot sample 0 responses"),
        ((1,), {"sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=0)}, "up to 0 tokens"),
    ],
)
def test_generate_refuses_what_it_cannot_serve(sampler, prompt, changes, message):
    with pytest.raises(ServiceError, match=message):
        _generate(sampler(), [prompt], **changes, seeds=[1])


def test_cancelled_request_leaves_the_others_fine(sampler):
    """Cancelled while it waits, and while its batch runs."""
    asked = _PROMPTS[:3]
    expected = _generate(sampler(), asked)

    async def run(while_it_runs):
        client = sampler(max_wait_ms=60.0)
        waiters = [asyncio.create_task(client.generate(prompt, _RANDOM, 4, hash_of(prompt))) for prompt in asked]
        await asyncio.sleep(0)
        while while_it_runs and client._waiting:
            await asyncio.sleep(0)
        waiters[1].cancel()
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        later = await client.generate(asked[1], _RANDOM, 4, hash_of(asked[1]))
        return [results[0], later, results[2]]

    assert asyncio.run(run(while_it_runs=False)) == expected
    assert asyncio.run(run(while_it_runs=True)) == expected


def test_all_requests_cancelled_leave_an_idle_sampler(sampler, model):
    async def run():
        client = sampler(max_wait_ms=20.0)
        waiter = asyncio.create_task(client.generate(_PROMPTS[1], _RANDOM, 4, 1))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await asyncio.sleep(0.1)
        client.set_weights(nnx.state(model), version=1)
        assert client.counters.batches == 0

    asyncio.run(run())


def test_failure_of_a_batch_reaches_its_waiters_and_the_sampler_goes_on(sampler, monkeypatch):
    client = sampler()
    [expected] = _generate(client, _PROMPTS[1:2])

    def broken(*arguments, **settings):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr("actionopd_jax.models.sampler.generate", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            _generate(client, _PROMPTS[:3])
    assert _generate(client, _PROMPTS[1:2]) == [expected]


# -- weights, counters, closing --------------------------------------------------------------------


def test_set_weights_changes_the_samples_and_the_version_and_forgets_prefixes(sampler, model):
    client = sampler(prefixes=(_SHARED,))
    prompts = _PREFIXED[:2]
    before = _generate(client, prompts, _GREEDY, n=1)
    assert {sample.policy_version for [sample] in before} == {0}
    params = nnx.state(model)
    other = jax.tree.map(lambda x: x * jnp.linspace(0.5, 1.5, x.shape[-1]), params)
    client.set_weights(other, version=7)
    changed = _generate(client, prompts, _GREEDY, n=1)
    assert {sample.policy_version for [sample] in changed} == {7}
    fresh = sampler(prefixes=(_SHARED,))
    fresh.set_weights(other, version=7)
    assert changed == _generate(fresh, prompts, _GREEDY, n=1)
    assert [sample.ids for [sample] in changed] != [sample.ids for [sample] in before]
    client.set_weights(params, version=8)
    assert [sample.logprobs for [sample] in _generate(client, prompts, _GREEDY, n=1)] == [
        sample.logprobs for [sample] in before
    ]


def test_set_weights_while_responses_are_sampled_is_refused(sampler, model):
    async def run():
        client = sampler()
        waiter = asyncio.create_task(client.generate(_PROMPTS[1], _RANDOM, 4, 1))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="cannot be replaced while responses are being sampled"):
            client.set_weights(nnx.state(model), version=1)
        samples = await waiter
        assert {sample.policy_version for sample in samples} == {0}
        client.set_weights(nnx.state(model), version=1)  # at once after the last answer
        return await client.generate(_PROMPTS[1], _RANDOM, 4, 1)

    assert {sample.policy_version for sample in asyncio.run(run())} == {1}


def test_counters_count_real_rows_and_tokens(sampler):
    client = sampler()
    prompts = [*_PROMPTS, _LONG]
    answers = _generate(client, prompts)
    assert client.counters.prompts == 6
    assert client.counters.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert client.counters.generated_tokens == sum(len(sample.ids) for samples in answers for sample in samples)
    assert client.counters.batches == 3  # five of one shape in batches of three, one of another
    assert client.counters.busy_s > 0


def test_close_fails_those_who_wait_and_those_who_come(sampler):
    async def run():
        client = sampler()
        waiters = [asyncio.create_task(client.generate(prompt, _RANDOM, 4, 1)) for prompt in _PROMPTS[:4]]
        while len(client._waiting) != 1:  # a batch of three runs
            await asyncio.sleep(0)
        client.close()
        *served, last = await asyncio.gather(*waiters, return_exceptions=True)
        assert [len(samples) for samples in served] == [4, 4, 4]
        assert isinstance(last, ServiceError)
        with pytest.raises(ServiceError, match="closed"):
            await client.generate(_PROMPTS[0], _RANDOM, 4, 1)
        client.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_sampler_serves_one_event_loop_after_another(sampler):
    """An event loop that was shut down in mid-batch included."""
    client = sampler(max_wait_ms=5.0)
    [expected] = _generate(client, _PROMPTS[1:2])

    async def abandon():
        waiter = asyncio.create_task(client.generate(_PROMPTS[2], _RANDOM, 4, 1))
        await asyncio.sleep(0)
        assert not waiter.done()

    asyncio.run(abandon())
    assert _generate(client, _PROMPTS[1:2]) == [expected]


def test_embedded_sampler_is_a_sampler(sampler):
    client: protocols.Sampler = sampler()
    assert callable(client.generate)


def test_bucket_holds_every_length_and_wastes_little():
    buckets = [bucket(length) for length in range(1, 20_000)]
    assert buckets == sorted(buckets)
    assert len(set(buckets)) < 20  # each is a compiled program
    for length, padded in enumerate(buckets, start=1):
        assert padded >= length
        assert padded < max(1.5 * length, length + _SMALLEST_SUFFIX)
        assert padded % 64 == 0
