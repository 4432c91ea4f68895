"""The embedded sampler as a service: refusals, cancellation, failures, new weights, counters, closing."""

import asyncio

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from sampler_requests import GREEDY, LONG, PREFIXED, PROMPTS, RANDOM, SHARED, generate, seed_of

from actionopd_jax import protocols
from actionopd_jax.errors import ServiceError
from actionopd_jax.models.sampler import _SMALLEST_SUFFIX, bucket
from actionopd_jax.records import Sampling

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
        generate(sampler(), [prompt], **changes, seeds=[1])


def test_cancelled_request_leaves_the_others_fine(sampler):
    """Cancelled while it waits, and while its batch runs."""
    asked = PROMPTS[:3]
    expected = generate(sampler(), asked)

    async def run(while_it_runs):
        client = sampler(max_wait_ms=60.0)
        waiters = [asyncio.create_task(client.generate(prompt, RANDOM, 4, seed_of(prompt))) for prompt in asked]
        await asyncio.sleep(0)
        while while_it_runs and client._waiting:
            await asyncio.sleep(0)
        waiters[1].cancel()
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        later = await client.generate(asked[1], RANDOM, 4, seed_of(asked[1]))
        return [results[0], later, results[2]]

    assert asyncio.run(run(while_it_runs=False)) == expected
    assert asyncio.run(run(while_it_runs=True)) == expected


def test_all_requests_cancelled_leave_an_idle_sampler(sampler, model):
    async def run():
        client = sampler(max_wait_ms=20.0)
        waiter = asyncio.create_task(client.generate(PROMPTS[1], RANDOM, 4, 1))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await asyncio.sleep(0.1)
        client.set_weights(nnx.state(model), version=1)
        assert client.counters.batches == 0

    asyncio.run(run())


def test_failure_of_a_batch_reaches_its_waiters_and_the_sampler_goes_on(sampler, monkeypatch):
    client = sampler()
    [expected] = generate(client, PROMPTS[1:2])

    def broken(*arguments, **settings):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr("actionopd_jax.models.sampler.generate", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            generate(client, PROMPTS[:3])
    assert generate(client, PROMPTS[1:2]) == [expected]


# -- weights, counters, closing --------------------------------------------------------------------


def test_set_weights_changes_the_samples_and_the_version_and_forgets_prefixes(sampler, model):
    client = sampler(prefixes=(SHARED,))
    prompts = PREFIXED[:2]
    before = generate(client, prompts, GREEDY, n=1)
    assert {sample.policy_version for [sample] in before} == {0}
    params = nnx.state(model)
    other = jax.tree.map(lambda x: x * jnp.linspace(0.5, 1.5, x.shape[-1]), params)
    client.set_weights(other, version=7)
    changed = generate(client, prompts, GREEDY, n=1)
    assert {sample.policy_version for [sample] in changed} == {7}
    fresh = sampler(prefixes=(SHARED,))
    fresh.set_weights(other, version=7)
    assert changed == generate(fresh, prompts, GREEDY, n=1)
    assert [sample.ids for [sample] in changed] != [sample.ids for [sample] in before]
    client.set_weights(params, version=8)
    assert [sample.logprobs for [sample] in generate(client, prompts, GREEDY, n=1)] == [
        sample.logprobs for [sample] in before
    ]


def test_set_weights_while_responses_are_sampled_is_refused(sampler, model):
    async def run():
        client = sampler()
        waiter = asyncio.create_task(client.generate(PROMPTS[1], RANDOM, 4, 1))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="cannot be replaced while responses are being sampled"):
            client.set_weights(nnx.state(model), version=1)
        samples = await waiter
        assert {sample.policy_version for sample in samples} == {0}
        client.set_weights(nnx.state(model), version=1)  # at once after the last answer
        return await client.generate(PROMPTS[1], RANDOM, 4, 1)

    assert {sample.policy_version for sample in asyncio.run(run())} == {1}


def test_counters_count_real_rows_and_tokens(sampler):
    client = sampler()
    prompts = [*PROMPTS, LONG]
    answers = generate(client, prompts)
    assert client.counters.prompts == 6
    assert client.counters.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert client.counters.generated_tokens == sum(len(sample.ids) for samples in answers for sample in samples)
    assert client.counters.batches == 3  # five of one shape in batches of three, one of another
    assert client.counters.busy_s > 0


def test_close_fails_those_who_wait_and_those_who_come(sampler):
    async def run():
        client = sampler()
        waiters = [asyncio.create_task(client.generate(prompt, RANDOM, 4, 1)) for prompt in PROMPTS[:4]]
        while len(client._waiting) != 1:  # a batch of three runs
            await asyncio.sleep(0)
        client.close()
        *served, last = await asyncio.gather(*waiters, return_exceptions=True)
        assert [len(samples) for samples in served] == [4, 4, 4]
        assert isinstance(last, ServiceError)
        with pytest.raises(ServiceError, match="closed"):
            await client.generate(PROMPTS[0], RANDOM, 4, 1)
        client.close()

    asyncio.run(run())


def test_sampler_serves_one_event_loop_after_another(sampler):
    """An event loop that was shut down in mid-batch included."""
    client = sampler(max_wait_ms=5.0)
    [expected] = generate(client, PROMPTS[1:2])

    async def abandon():
        waiter = asyncio.create_task(client.generate(PROMPTS[2], RANDOM, 4, 1))
        await asyncio.sleep(0)
        assert not waiter.done()

    asyncio.run(abandon())
    assert generate(client, PROMPTS[1:2]) == [expected]


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
