"""
Creates MIG instances for containers and destroys them afterwards: the port to the driver, the log of own instances, and
the steps between them. The core decides which profile and placement a container gets.
"""
