"""The warm-started student of the service desk: KD on teacher trajectories, stopped early on purpose.

    actionopd train --config configs/service_desk_base.py --workdir runs/service_desk_base

Starts from random weights in the shape of the shipped student and its tokenizer, and leaves a student
that speaks the format and succeeds on some of the held-out tasks: the base of `configs/quickstart.py`.
`launch/build_service_desk_student.sh` makes tokenizer, base and package files anew.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "steps": 240,
            "student": {
                "path": "builtin:service_desk",
                "weights": "random",
                "compute_dtype": "float32",
                "remat": "none",
                "max_prompt_tokens": 1536,
                "max_response_tokens": 96,
            },
            "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 16}],
            "method": {"name": "kd", "max_decisions": 12},
            "update": {
                "learning_rate": 3e-3,
                "warmup_steps": 20,
                "adam_b2": 0.95,
                "weight_decay": 0.1,
                "bin_tokens": 4096,
            },
            "checkpoint": {"every_steps": 20, "keep": 100},
            "evaluation": {"environment": "service_desk", "split": "heldout", "num_tasks": 50, "every_steps": 60},
        }
    )
