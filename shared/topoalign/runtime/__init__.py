"""What every service stands on: the bus, settings, logging, health, and the runner that starts services in one process."""
