"""Watches objects of the API server, and writes events, requeue annotations and topology objects."""
