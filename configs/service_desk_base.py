"""The warm-started student of the service desk: KD on teacher trajectories.

    actionopd train --config configs/service_desk_base.py --config.student.path=runs/pretrained --workdir runs/base

Starts from the student that `launch/build_service_desk_student.py pretrain` leaves (it says how) and teaches it the
whole prompt, tools included; the same script's `novice` then makes the base of `configs/quickstart.py` from it. One step
takes about three seconds on two cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "steps": 280,
            "student": {
                "path": "builtin:service_desk",
                "compute_dtype": "float32",
                "remat": "none",
                "max_prompt_tokens": 1536,
                "max_response_tokens": 96,
            },
            "sources": [{"environment": "service_desk", "split": "train", "starts_per_step": 16}],
            "method": {"name": "kd", "max_decisions": 12},
            "update": {
                "learning_rate": 2e-3,
                "warmup_steps": 10,
                "adam_b2": 0.95,
                "weight_decay": 0.1,
                "bin_tokens": 4096,
            },
            "checkpoint": {"every_steps": 20, "keep": 2},
            "evaluation": {"environment": "service_desk", "split": "heldout", "num_tasks": 50},
        }
    )
