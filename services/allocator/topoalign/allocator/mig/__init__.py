"""
MIG instances that this node makes for containers, and destroys after them: the port to the driver, what is known of the
instances of ours, and the steps in between. Which profile a container gets, and where, is decided in the core.
"""
