"""Settings of the MPS service."""

import msgspec


class MpsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the MPS service, each from the variable `TOPOALIGN_<FIELD>`."""

    mps_control: str = "nvidia-cuda-mps-control"
    """NVIDIA's control program, by name or path. It comes with the driver; a name is searched for in PATH."""
