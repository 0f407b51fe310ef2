"""Discovery: reads the hardware of one node and says what it is and how it is."""
