"""The questionnaire for SageMaker jobs. They are not started from here, so it says so and asks nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate._enumerations import ComputeEnvironment, SageMakerDistributedType
from accelerate.commands.config.config_args import SageMakerConfig
from slipstream.errors import ConfigError

__all__ = ["ComputeEnvironment", "SageMakerConfig", "SageMakerDistributedType", "get_sagemaker_input"]


def _refuse() -> NoReturn:
    raise ConfigError(
        "Slipstream starts no SageMaker jobs, so there is nothing to configure for them. Submit the job with SageMaker's own tools; "
        "a script that they start finds its processes by itself."
    )


def get_sagemaker_input() -> SageMakerConfig:
    """Raise: SageMaker jobs are not started from here."""
    _refuse()


def _create_iam_role_for_sagemaker(role_name: str) -> Any:
    """Raise: SageMaker jobs are not started from here."""
    _refuse()


def _get_iam_role_arn(role_name: str) -> Any:
    """Raise: SageMaker jobs are not started from here."""
    _refuse()
