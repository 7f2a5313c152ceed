"""Enumerations of Accelerate that Slipstream has no use for; clients and configuration files name their members. Imports no torch."""

from slipstream.devices.table import StringEnum

__all__ = ["ComputeEnvironment", "SageMakerDistributedType"]


class ComputeEnvironment(StringEnum):
    """Where a configuration file says that a script runs.

    >>> ComputeEnvironment("LOCAL_MACHINE") == "LOCAL_MACHINE"
    True
    """

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(StringEnum):
    """How a SageMaker job is distributed; read from configuration files, and never started from here.

    >>> str(SageMakerDistributedType.DATA_PARALLEL)
    'DATA_PARALLEL'
    """

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
