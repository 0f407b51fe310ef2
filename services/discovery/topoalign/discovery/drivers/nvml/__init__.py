"""
The hardware as NVIDIA's library NVML reports it, completed by the files of /sys.

`library` is the only module that imports pynvml; `gpus` reads one GPU, `nvlinks` makes pairs from the two ends of each
link, and `driver` combines them into the machine.
"""
