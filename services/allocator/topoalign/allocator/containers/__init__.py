"""What a container receives with its devices: environment, mounts and device nodes, and the limiters of shared GPUs."""
