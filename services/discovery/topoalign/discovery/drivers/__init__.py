"""Drivers that read hardware: NVIDIA's driver library, the files of /sys, or a description."""
