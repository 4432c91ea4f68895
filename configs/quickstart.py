"""ActionOPD on the embedded service desk, on the CPU: what `make quickstart` runs.

    actionopd train --config configs/quickstart.py --workdir runs/quickstart

The warm-started student that ships with the package learns from a scripted, fallible expert; success is measured
greedily, without the expert, on held-out tasks before and after.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "steps": 16,
            "student": {
                "path": "builtin:service_desk",
                "compute_dtype": "float32",
                "remat": "none",
                "max_prompt_tokens": 1536,
                "max_response_tokens": 64,
            },
            "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 24}],
            # A student this small draws from its whole distribution: cut, its candidates would hardly differ.
            "sampler": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "slots": 16},
            "teacher": {"kind": "scripted", "settings": {"error_rate": 0.03, "invalid_rate": 0.03, "lapse_rate": 0.0}},
            "method": {
                "name": "actionopd",
                "num_candidates": 4,
                "num_teacher_samples": 3,
                "frequency_bonus": 0.5,
                "max_decisions": 12,
            },
            "update": {
                # One optimizer step a collection; most is learned in the first five, the decay keeps it.
                "learning_rate": 3e-4,
                "warmup_steps": 3,
                "schedule": "cosine",
                "decay_steps": 13,
                "weight_decay": 0.0,
                "minibatch_candidates": 256,
                "bin_tokens": 4096,
            },
            "rollout": {"concurrent_tasks": 32},
            "checkpoint": {"every_steps": 1, "keep": 2},
            "evaluation": {"environment": "service_desk", "split": "heldout", "num_tasks": 100},
        }
    )
