"""The embedded environment: a small shop's service desk over SQLite, with a scripted customer, expert and judge."""

from actionopd_jax.environments.service_desk.corpus import transcripts
from actionopd_jax.environments.service_desk.environment import ServiceDesk, ServiceDeskSuite
from actionopd_jax.environments.service_desk.expert import Expert, ExpertSettings
from actionopd_jax.environments.service_desk.judge import ActJudge

__all__ = ["ActJudge", "Expert", "ExpertSettings", "ServiceDesk", "ServiceDeskSuite", "transcripts"]
