"""The words of the engine as code: what is kept, where it lives, and how it moves."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes live, fastest first."""

    HBM = "hbm"
    CPU = "cpu"
    NVME = "nvme"


class State(StrEnum):
    """One tensor kind of a unit."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    ACTIVATION = "activation"


class Group(StrEnum):
    """States that move together, in one shard file each: an optimizer chunk is MASTER | EXP_AVG | EXP_AVG_SQ."""

    PARAM = "param"
    GRAD = "grad"
    OPTIMIZER = "optimizer"


class Lane(StrEnum):
    """One kind of motion that can be busy at a time."""

    NVME_READ = "nvme-read"
    NVME_WRITE = "nvme-write"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    COMM = "comm"
    GPU = "gpu"
    ADAM = "adam"


OPTIMIZER_STATES = (State.MASTER, State.EXP_AVG, State.EXP_AVG_SQ)
"""What AdamW keeps of each trainable element, fp32, in the order in which a chunk stores it."""
