"""Every error the package raises on purpose, as one tree.

    ActionOPDError
    ├── UserError              something the user can mend; the CLI prints one line and exits with 2
    │   ├── ConfigError        unknown key, wrong type, value out of range, incompatible settings
    │   ├── MissingExtraError  an optional dependency is not installed; names the install command
    │   ├── StudentError       model or tokenizer files that are missing, malformed or do not fit together
    │   ├── PackingError       a training row that no bin can hold
    │   └── RunStateError      a work directory that cannot be resumed (other config, damaged records)
    ├── ServiceError           a service (teacher, matcher, sampler) failed after its retries
    │   └── ServiceBusyError   it failed in a way that may pass: worth another attempt
    ├── EnvironmentFailure     an environment crashed, hung or broke its contract; ends its own episode
    └── NumericalError         NaN or infinite values where training cannot go on

A failure of a service is never turned into a reward: callers decide by type.
"""


class ActionOPDError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(ActionOPDError):
    """The user can mend this: the message names the thing and the remedy."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class MissingExtraError(UserError):
    """An optional dependency is not installed.

    Args:
        package: what is missing.
        install: arguments of `pip install` that bring it.
    """

    def __init__(self, package: str, install: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install {install}")
        self.package = package
        self.install = install


class StudentError(UserError):
    """Model or tokenizer files are missing, malformed, or do not fit together."""


class PackingError(UserError):
    """A training row is longer than a bin; rows are never cut."""


class RunStateError(UserError):
    """A work directory cannot be continued: another config, another version, damaged records."""


class ServiceError(ActionOPDError):
    """A teacher, matcher, user simulator or sampler failed for good (after its own retries)."""


class ServiceBusyError(ServiceError):
    """A service failed in a way that may pass (busy, timed out, dropped connection)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EnvironmentFailure(ActionOPDError):
    """An environment instance crashed, hung, or broke its contract; only its episode ends."""


class NumericalError(ActionOPDError):
    """NaN or infinity reached a place where training cannot go on."""
