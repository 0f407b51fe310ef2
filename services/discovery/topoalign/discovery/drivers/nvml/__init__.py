"""
The hardware as NVIDIA's driver tells it through its library NVML, and as the files of /sys complete it.

`library` is the door to pynvml and speaks plain Python; `gpus` reads one GPU, `nvlinks` makes pairs of what each end of a
link says, and `driver` puts the machine together.
"""
