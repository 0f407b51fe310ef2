"""
The hardware as NVIDIA's library NVML reports it, completed by the files of /sys.

`nvml_library` is the only module that imports pynvml. `gpu_reading` reads one GPU, and combines the two ends of each
NVLink; `driver` combines the GPUs into the machine. `nvml_events` receives events between two readings, and `use`
measures the use of the GPUs.
"""
