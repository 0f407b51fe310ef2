"""Discovery: reads the hardware of one node and publishes its topology and health."""
