"""The admission webhook, which denies invalid pods when they are created."""
