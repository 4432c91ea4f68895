import dataclasses
import json
import math

import pytest

from actionopd_jax.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    MethodConfig,
    RolloutConfig,
    RunConfig,
    SamplerConfig,
    SourceConfig,
    StudentConfig,
    TeacherConfig,
    UpdateConfig,
    build,
    to_mapping,
)
from actionopd_jax.errors import ConfigError


def _mapping(**changes):
    return {
        "steps": 3,
        "seed": 1,
        "student": {"path": "builtin:tiny"},
        "sources": [{"environment": "e", "split": "train", "starts_per_step": 2, "settings": {"a": [1]}}],
        "evaluation": {"environment": "e", "split": "test"},
        **changes,
    }


def test_build_minimal_mapping_has_the_papers_numbers():
    config = build(RunConfig, _mapping())
    method, update, sampler = config.method, config.update, config.sampler
    assert (method.num_candidates, method.num_teacher_samples, method.frequency_bonus, method.max_decisions) == (
        4,
        3,
        0.5,
        20,
    )
    assert (update.clip_eta, update.dual_clip, update.advantage_epsilon, update.minibatch_candidates) == (
        0.2,
        3.0,
        1e-8,
        256,
    )
    assert (update.learning_rate, update.adam_b1, update.adam_b2, update.weight_decay) == (1e-6, 0.9, 0.999, 0.01)
    assert (sampler.temperature, sampler.top_p, sampler.top_k, config.teacher.retries) == (0.6, 0.95, 20, 2)
    assert (config.student.max_prompt_tokens, config.student.max_response_tokens) == (24_576, 4_096)
    assert config.rollout_sampling.max_tokens == 4_096
    assert config.rollout_sampling.temperature == 0.6


def test_build_of_to_mapping_gives_the_same_config():
    config = build(RunConfig, _mapping(update={"learning_rate": 1}))
    assert type(config.update.learning_rate) is float
    assert build(RunConfig, json.loads(json.dumps(to_mapping(config)))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1}, "unknown setting lr; known here: .*update"),
        ({"update": {"lr": 1}}, r"unknown setting update\.lr; known here: .*learning_rate"),
        (
            {"sources": [{"environment": "e", "split": "s", "starts_per_step": 1, "x": 1}]},
            r"unknown setting sources\[0\]\.x",
        ),
        ({"sources": [{"environment": "e", "split": "s"}]}, r"missing setting sources\[0\]\.starts_per_step"),
        ({"sources": []}, "sources must name at least one environment"),
        ({"sources": {}}, "sources must be a list"),
        ({"student": "x"}, "student must be a group of settings"),
        ({"steps": "3"}, "steps must be int, got '3'"),
        ({"steps": 3.0}, "steps must be int"),
        ({"steps": True}, "steps must be int, got True"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"update": {"learning_rate": math.nan}}, "update.learning_rate must be a finite number"),
        ({"update": {"learning_rate": math.inf}}, "update.learning_rate must be a finite number"),
        ({"update": {"learning_rate": True}}, "update.learning_rate must be a finite number"),
        ({"update": {"learning_rate": "1"}}, "update.learning_rate must be a finite number"),
        ({"update": {"packing": "boxes"}}, "update.packing must be one of tree, rows, got 'boxes'"),
        ({"student": {"path": "x", "thinking": 1}}, "student.thinking must be bool, got 1"),
        ({"teacher": {"settings": [1]}}, "teacher.settings must be a group of settings"),
        ({"update": {"bin_tokens": 1024}}, "update.bin_tokens 1024 cannot hold the longest row: .* = 28672"),
        ({"update": {"minibatch_candidates": 3}}, "update.minibatch_candidates 3 is smaller than one group"),
    ],
)
def test_build_wrong_setting_is_named_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(RunConfig, _mapping(**changes))
    assert "\n" not in str(caught.value)


def test_build_missing_setting_is_named():
    mapping = _mapping()
    del mapping["seed"]
    with pytest.raises(ConfigError, match="missing setting seed"):
        build(RunConfig, mapping)


@pytest.mark.parametrize(
    ("cls", "good", "bad"),
    [
        (StudentConfig, {"path": "x"}, [{"path": ""}, {"max_prompt_tokens": 0}, {"max_response_tokens": 0}]),
        (
            SamplerConfig,
            {},
            [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"slots": 0}, {"max_wait_ms": -1.0}],
        ),
        (TeacherConfig, {}, [{"retries": -1}]),
        (
            MethodConfig,
            {},
            [{"num_candidates": 0}, {"num_teacher_samples": 0}, {"frequency_bonus": -0.1}, {"max_decisions": 0}],
        ),
        (
            UpdateConfig,
            {},
            [
                {"learning_rate": 0.0},
                {"warmup_steps": -1},
                {"decay_steps": -1},
                {"decay_steps": 1},
                {"final_learning_rate": 1.0},
                {"adam_b1": 1.0},
                {"adam_b2": -0.1},
                {"adam_eps": 0.0},
                {"weight_decay": -1.0},
                {"max_grad_norm": 0.0},
                {"clip_eta": 0.0},
                {"clip_eta": 1.0},
                {"dual_clip": 1.0},
                {"advantage_epsilon": 0.0},
                {"minibatch_candidates": 0},
                {"bin_tokens": 0},
                {"bin_tokens": 100},
                {"bins_per_microbatch": 0},
                {"max_bad_steps": 0},
            ],
        ),
        (
            SourceConfig,
            {"environment": "e", "split": "s", "starts_per_step": 1},
            [{"starts_per_step": 0}, {"num_tasks": -1}],
        ),
        (MeshConfig, {}, [{"replica": 0}, {"fsdp": 0}, {"tensor": 0}, {"context": -1}]),
        (RolloutConfig, {}, [{"concurrent_tasks": 0}, {"concurrent_teacher_requests": 0}, {"environment_timeout_s": 0.0}]),
        (EvaluationConfig, {"environment": "e", "split": "s"}, [{"num_tasks": -1}, {"trials": 0}, {"every_steps": -1}]),
        (CheckpointConfig, {}, [{"every_steps": 0}, {"keep": 0}]),
    ],
)
def test_config_value_out_of_range_refuses_naming_it(cls, good, bad):
    config = cls(**good)
    for change in bad:
        (name,) = change
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(config, **change)
