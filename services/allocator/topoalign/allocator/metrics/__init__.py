"""What the allocator exposes at /metrics."""
