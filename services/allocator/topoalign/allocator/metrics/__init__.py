"""The metrics of the allocator, and the display of gpu-manager."""
