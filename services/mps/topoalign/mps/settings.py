"""Settings of the MPS service."""

import msgspec


class MpsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each."""

    mps_control: str = "nvidia-cuda-mps-control"
    """NVIDIA's control program, by name or path. It comes with the driver; by name it is searched in PATH."""
