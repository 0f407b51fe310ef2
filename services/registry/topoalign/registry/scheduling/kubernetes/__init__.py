"""The watched objects of the API server, and what is written to it: events, requeued pods and topology objects."""
