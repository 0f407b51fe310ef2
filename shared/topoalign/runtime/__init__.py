"""The base of every service: the bus, settings, logging, health, and the runner that starts services in one process."""
