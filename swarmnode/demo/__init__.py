"""A whole swarm on this machine, for seeing it work: real node processes, started and watched by one
command."""
