"""Drivers that read the hardware from NVIDIA's driver library, the files of /sys, or the description of a machine."""
